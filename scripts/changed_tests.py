"""Choose the tests for a change: `make test-changed` (scripts/run_tests.py).

The change consists of the branch and of uncommitted files. Chosen are all unit tests, the
integration tests that have the name of a changed file, import it or name it, and an end-to-end test
on a real cluster, which takes a minute or two. If a provider or a role has changed, the end-to-end
tests of its platform are chosen instead. Roles, templates and Terraform are imported by no test: of
these, the integration tests of the area are chosen.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath

UNIT = "tests/unit"
INTEGRATION = "tests/integration/"
E2E = "tests/e2e/"
# Start of a path of files that are not imported -> the folders of their integration tests. The
# first match counts.
FOLDERS = {
    "ansible/": ("roles", "configure"),
    "templates/": ("scheduler", "jobs"),
    "terraform/": ("gcp", "terraform"),
}
# Tests that create a local cluster, run a job or a training on it, collect the output, and remove
# the cluster.
STORY = "tests/e2e/test_jobs.py::test_shell_script_runs_in_its_allocation"
TRAINING = "tests/e2e/test_main_job.py::test_training_on_two_nodes_ends_with_equal_parameters"
EL = "tests/e2e/test_onprem_el.py"
STORAGE = "tests/e2e/test_storage.py"
GCP = "tests/e2e/test_gcp.py"
# Start of a path -> end-to-end tests. The first match counts.
STORIES = {
    "clusterctl/providers/gcp/": (GCP,),
    "terraform/": (GCP,),
    "clusterctl/providers/onprem/": ("tests/e2e/test_onprem.py",),
    "clusterctl/providers/existing/": ("tests/e2e/test_attach.py",),
    "clusterctl/providers/local/": (
        "tests/e2e/test_systemd_host.py",
        "tests/e2e/test_ordinary_user.py",
    ),
    "clusterctl/": (STORY,),
    "ansible/roles/apptainer/": ("tests/e2e/test_containers.py",),
    "ansible/roles/auto_down/": (GCP,),
    "ansible/roles/bucket/": (GCP,),
    "ansible/roles/cuda/": ("tests/e2e/test_gpus.py",),
    "ansible/roles/firewall/": (EL,),
    "ansible/roles/health/": ("tests/e2e/test_needs.py",),
    "ansible/roles/login/": ("tests/e2e/test_onprem.py",),
    "ansible/roles/mpi_ssh/": ("tests/e2e/test_no_scheduler.py",),
    "ansible/roles/repositories/": (EL,),
    "ansible/roles/selinux/": (EL,),
    "ansible/roles/shared_storage/": (STORAGE,),
    "ansible/roles/users/": (STORAGE,),
    "ansible/": (STORY, EL),
    "templates/": (STORY,),
    "tests/e2e/conftest.py": (STORY,),
    "payload/": (TRAINING,),
}
# The mode of a symbolic link in git.
_LINK = "120000 "


def base_of(root: Path) -> str | None:
    """Return the commit at which the branch leaves the main branch: HEAD on the main branch itself.

    None: this clone lacks the main branch or its history, or ``root`` is not a checkout.
    """
    base = None
    for main in ("main", "origin/main"):
        with suppress(OSError, subprocess.CalledProcessError):
            (base,) = _git(root, "merge-base", "HEAD", main)
    return base


def changed_files(root: Path, base: str) -> list[str]:
    """Return the files that differ from a commit, with new files, and the links to all of these.

    Raises:
        subprocess.CalledProcessError: git fails, for example outside a checkout.
    """
    compared = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return with_links(root, {*compared, *new}, _git(root, "ls-files", "--stage", "-z"))


def with_links(root: Path, changed: Collection[str], tracked: Iterable[str]) -> list[str]:
    """Return changed files, and the links to them. tracked: entries of `git ls-files --stage`."""
    targets = {(root / path).resolve() for path in changed}
    links = (entry.partition("\t")[2] for entry in tracked if entry.startswith(_LINK))
    return sorted({*changed, *(link for link in links if (root / link).resolve() in targets)})


def _git(root: Path, *argv: str) -> list[str]:
    output = subprocess.check_output(["git", *argv], cwd=root, text=True, stderr=subprocess.DEVNULL)
    return [word for word in output.strip("\n").split("\0") if word]


def modules_of(root: Path) -> dict[str, str]:
    """Read all test modules: path -> text."""
    paths = sorted((root / "tests").rglob("test_*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def choose(changed: Iterable[str], modules: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the chosen unit and integration tests, and the end-to-end tests, as arguments of
    pytest.

    modules: path -> text of all test modules.
    """
    units: set[str] = set()
    stories: set[str] = set()
    for path in changed:
        if path in modules:
            (stories if path.startswith(E2E) else units).add(path)
        # Deleted test modules are skipped.
        elif not re.fullmatch(r"tests/(\w+/)*test_\w+\.py", path):
            units.update(_tests_of(path, modules))
            matching = (chosen for start, chosen in STORIES.items() if path.startswith(start))
            stories.update(next(matching, ()))
    integration = sorted(one for one in units if one.startswith(INTEGRATION))
    return [UNIT, *integration], sorted(stories)


def _tests_of(path: str, modules: Mapping[str, str]) -> set[str]:
    """Return the integration tests of a changed file."""
    file = PurePath(path)
    role = re.match(r"ansible/roles/(\w+)/", path)
    package = file.stem == "__init__"
    name = role[1] if role else file.parent.name if package else file.name.partition(".")[0]
    of_this_name = re.compile(rf"test_(\w+_)?{re.escape(name)}(_\w+)?")
    integration = [module for module in modules if module.startswith(INTEGRATION)]
    named = {module for module in integration if of_this_name.fullmatch(PurePath(module).stem)}
    if role and named:
        return named
    uses = _use(file)
    using = {module for module in integration if uses.search(modules[module])}
    folders = next((folders for start, folders in FOLDERS.items() if path.startswith(start)), ())
    return named | using | {one for one in integration if PurePath(one).parts[2] in folders}


def _use(file: PurePath) -> re.Pattern[str]:
    """Return the pattern with which a test imports a module, or names another file."""
    if file.suffix != ".py" or file.parts[0] == "ansible":
        # A name without a suffix, such as `run`, is too common a word, so the whole path must
        # match.
        return re.compile(rf"(?<!\w){re.escape(file.name if file.suffix else str(file))}(?!\w)")
    *package, name = file.with_suffix("").parts if file.stem != "__init__" else file.parent.parts
    module = re.escape(".".join([*package, name]))
    of_package = rf"from {re.escape('.'.join(package))} import .*\b{name}\b|" if package else ""
    return re.compile(rf"^\s*({of_package}from {module} import|import {module}\b)", re.MULTILINE)
