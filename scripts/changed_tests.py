"""Choose the tests for a change, about a minute of them: `make test-changed`
(scripts/run_tests.py).

The change consists of the branch and of uncommitted files. Chosen are the unit tests in the folder
of the changed subpackage, other unit tests that import or name a changed file, and an end-to-end
test on a real cluster. Tests with the name of a changed file, or that import it, come first; tests
that would make the run too long are left out.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

UNIT = "tests/unit/"
E2E = "tests/e2e/"
# Start of a path, as a pattern -> the folders of its unit tests. The first match counts.
FOLDERS = {
    "clusterctl/providers/gcp/terraform": ("terraform",),
    r"clusterctl/providers/\w+\.py": ("local", "onprem", "gcp"),
    r"clusterctl/api\.py": ("cli",),
    r"clusterctl/errors\.py": ("util",),
    "ansible/library/host_snapshot": ("host_snapshot",),
    "ansible/module_utils/ledger": ("host_snapshot",),
    "ansible/": ("roles", "configure"),
    "templates/": ("scheduler", "jobs"),
    "terraform/": ("gcp", "terraform"),
    "payload/": ("payload",),
    "scripts/": ("harness", "project"),
    r"\.ci/": ("harness",),
    r"tests/conftest\.py": ("harness",),
    "tests/support/": ("harness",),
}
MIRRORED = re.compile(r"(?:clusterctl/providers|clusterctl|tests/unit)/(\w+)/")
# Tests that create a local cluster, run a job or a training on it, collect the output, and remove
# the cluster.
STORY = "tests/e2e/test_jobs.py::test_a_shell_script_runs_in_its_allocation"
TRAINING = "tests/e2e/test_main_job.py::test_two_nodes_train_together"
STORIES = {
    "clusterctl/providers/gcp/": "",
    "clusterctl/providers/onprem/": "",
    "clusterctl/": STORY,
    "ansible/": STORY,
    "templates/": STORY,
    "tests/e2e/conftest.py": STORY,
    "payload/": TRAINING,
}
# The longest run, and the assumed duration of a module without a record, in percent of all unit
# tests.
LIMIT = 8.0
UNRECORDED = 0.3


@dataclass
class Choice:
    """The chosen tests, as arguments of pytest, and the test modules that would take too long."""

    units: list[str] = field(default_factory=list)
    stories: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def changed_files(root: Path) -> list[str]:
    """Return the files that differ from the merge base with the main branch, or from HEAD on the
    main branch.

    Raises:
        subprocess.CalledProcessError: git fails, for example outside a checkout.
    """

    def git(*argv: str) -> list[str]:
        output = subprocess.check_output(
            ["git", *argv], cwd=root, text=True, stderr=subprocess.DEVNULL
        )
        return [word for word in output.strip("\n").split("\0") if word]

    base = "HEAD"
    for main in ("main", "origin/main"):
        try:
            (base,) = git("merge-base", "HEAD", main)
        except subprocess.CalledProcessError:
            # The clone lacks this branch or its history.
            continue
    compared = git("diff", "--name-only", "--no-renames", "-z", base)
    return sorted({*compared, *git("ls-files", "--others", "--exclude-standard", "-z")})


def modules_of(root: Path) -> dict[str, str]:
    """Read all test modules: path -> text."""
    paths = sorted((root / "tests").rglob("test_*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def choose(
    changed: Iterable[str], modules: Mapping[str, str], shares: Mapping[str, float]
) -> Choice:
    """Choose tests for changed files.

    modules: path -> text of all test modules.
    shares: path -> duration, in percent of all unit tests.
    """
    choice = Choice()
    ranks = dict[str, int]()
    for path in changed:
        if path in modules and path.startswith(E2E):
            choice.stories.append(path)
        elif path in modules:
            ranks[path] = 0
        # Deleted test modules are skipped.
        elif not re.fullmatch(r"tests/(\w+/)*test_\w+\.py", path):
            for module, rank in _ranked(path, modules):
                ranks[module] = min(rank, ranks.get(module, rank))
            choice.stories += [story for start, story in STORIES.items() if path.startswith(start)][
                :1
            ]
    choice.stories = sorted({*choice.stories} - {""})
    total = 0.0
    for module in sorted(ranks, key=lambda module: (ranks[module], shares.get(module, UNRECORDED))):
        total += shares.get(module, UNRECORDED)
        fits = total <= LIMIT or ranks[module] == 0
        (choice.units if fits else choice.left_out).append(module)
    return choice


def _ranked(path: str, modules: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the modules that test a file, with their rank.

    0: in the file's folder, with its name; 1: in its folder and using it, or elsewhere with its
        name; 2: in its folder; 3: elsewhere and using it.
    """
    role = re.match(r"ansible/roles/(\w+)/", path)
    file = PurePath(path)
    name = (
        role[1]
        if role
        else file.parent.name
        if file.stem == "__init__"
        else file.name.partition(".")[0]
    )
    named = re.compile(rf"test_(\w+_)?{re.escape(name)}(_\w+)?")
    mirrored = MIRRORED.match(path)
    listed = (folders for start, folders in FOLDERS.items() if re.match(start, path))
    folders = next(listed, (mirrored[1],) if mirrored else ("project",))
    uses = _use(file)
    for module in (module for module in modules if module.startswith(UNIT)):
        is_near = PurePath(module).parts[2] in folders
        is_used = uses.search(modules[module])
        is_named = named.fullmatch(PurePath(module).stem)
        if is_near:
            yield module, 0 if is_named else 1 if is_used else 2
        elif is_named or is_used:
            yield module, 1 if is_named else 3


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
