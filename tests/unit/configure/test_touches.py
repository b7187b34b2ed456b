"""A role's meta/touches.yml names every path and unit that the role changes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from clusterctl.hosts.roles import spec_variables
from clusterctl.spec.load import default_spec
from clusterctl.util.assets import data_folder

ANSIBLE = data_folder("ansible")
ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
KEYS = {
    *("files", "blocks", "folders", "trees", "spared", "mounts", "units", "reloads"),
    *("databases", "keys", "key_mark", "homes"),
    *("hosts", "when", "variables", "packages", "ports", "drift", "needs", "hint"),
}
# Module -> the argument that names what it writes.
WRITERS = {
    "ansible.builtin.copy": "dest",
    "ansible.builtin.template": "dest",
    "ansible.builtin.file": "path",
    "ansible.builtin.lineinfile": "path",
    "ansible.builtin.blockinfile": "path",
    "ansible.builtin.unarchive": "dest",
    "ansible.builtin.get_url": "dest",
}
UNITS = ("ansible.builtin.systemd_service", "service_current")
# Owner and mode of what belongs to a daemon; all else is root's.
OF_DAEMONS = {
    "/etc/munge": ("munge", "0700"),
    "/etc/munge/munge.key": ("munge", "0400"),
    "/etc/slurm/slurmdbd.conf": ("slurm", "0600"),
    "/var/lib/slurm/slurmctld": ("slurm", "0755"),
    "/var/log/slurm": ("slurm", "0755"),
}
# Files that modules without such an argument write or remove, and those that have their path from
# the host or the spec.
NOT_IN_TASKS = {
    "/etc/apt/sources.list.d/gcsfuse.sources",
    "/etc/apt/keyrings/gcsfuse.gpg",
    "/etc/yum.repos.d/*.repo",
    "/etc/dnf/modules.d/nvidia-driver.module",
    "/etc/firewalld/ipsets/clusterctl.xml",
    "/etc/firewalld/policies/clusterctl.xml",
    "/etc/my.cnf.d/60-clusterctl.cnf",
    "/etc/openmpi-x86_64/*-mca-params.conf",
    "/usr/mpi/gcc/openmpi-*/etc/*-mca-params.conf",
    "/etc/slurm/slurm.conf",
    "/opt/clusterctl/apptainer_*_amd64.deb",
    "/opt/clusterctl/installed-*",
    "/opt/clusterctl/wanted.json",
    "/shared/home/*/.ssh/clusterctl_mpi",
    "/shared/home/*/.ssh/clusterctl_mpi.pub",
    "firewalld.service",
}
# What the inventory gives every role.
GIVEN = {
    "shared_storage_path": "/shared",
    "shared_storage_cluster_id": "abc",
    "users_home_root": "/shared/home",
    "users_accounts": [{"name": "ada"}],
}


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.exists() else None


def rendered(value: Any, variables: Mapping[str, Any]) -> Any:
    """Return a value with its templates filled. `*` stands for values that only a host knows."""
    if not isinstance(value, str) or "{{" not in value:
        return value
    environment = jinja2.Environment(undefined=jinja2.ChainableUndefined, finalize=_star)  # noqa: S701
    environment.filters["dirname"] = lambda text: text.rpartition("/")[0]
    try:
        text = environment.from_string(value).render(variables)
    except jinja2.TemplateError:
        return "*"
    return rendered(text, variables) if text != value else text


def _star(value: Any) -> Any:
    return "*" if isinstance(value, jinja2.Undefined) else value


def variables_of(role: Path) -> list[dict[str, Any]]:
    """Return the variables of a role, for each distribution."""
    common = {
        **(document(role / "defaults/main.yml") or {}),
        **(document(role / "vars/main.yml") or {}),
        **GIVEN,
    }
    special = [path for path in sorted(role.glob("vars/*.yml")) if path.name != "main.yml"]
    return [{**common, **document(path)} for path in special] or [common]


def tasks_of(role: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(role.glob("tasks/*.yml")) + sorted(role.glob("handlers/*.yml")):
        yield from _flat(document(path) or [])


def _flat(tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        for part in ("block", "rescue", "always"):
            yield from _flat(task.get(part, []))
        yield task


def written(task: dict[str, Any], variables: dict[str, Any]) -> Iterator[str]:
    """Return the paths that a task writes on a host."""
    if task.get("delegate_to") == "localhost":
        return
    if mount := task.get("vars", {}).get("shared_storage_mount"):
        yield rendered(mount["path"], variables)
    for module, key in WRITERS.items():
        arguments = task.get(module)
        if isinstance(arguments, dict) and arguments.get("state") != "absent" and key in arguments:
            items = rendered(task.get("loop"), variables)
            for item in items if isinstance(items, list) else ["*"]:
                filled = {**variables, "item": rendered(item, variables)}
                yield rendered(arguments[key], filled)


def touches(role: str) -> dict[str, Any]:
    """Return the touches.yml of a role, with its templates filled."""
    found = document(ANSIBLE / f"roles/{role}/meta/touches.yml")
    named: dict[str, Any] = found[f"{role}_touches"]
    return {
        key: [rendered(value, GIVEN) for value in values] if isinstance(values, list) else [values]
        for key, values in named.items()
    }


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_a_touches_file(role: str) -> None:
    path = ANSIBLE / f"roles/{role}/meta/touches.yml"
    assert list(document(path)) == [f"{role}_touches"]
    assert set(document(path)[f"{role}_touches"]) <= KEYS


def test_needs_of_nodes_are_those_that_the_health_check_knows() -> None:
    """A check without a need never runs, and a need without a check would stop the program."""
    program = (ANSIBLE / "roles/health/files/health.py").read_text()
    known = set(re.findall(r'^    "(\w+)": Check\(', program, re.MULTILINE))
    roles = (document(ANSIBLE / f"roles/{role}/meta/touches.yml") for role in ROLES)
    needs = [
        need for role in roles for touches in role.values() for need in touches.get("needs", ())
    ]
    assert {need["check"] for need in needs} == known
    assert all({"code", "what", "fix"} <= set(need) for need in needs)


def test_files_that_the_health_check_creates_go_with_the_cluster() -> None:
    program = (ANSIBLE / "roles/health/files/health.py").read_text()
    created = re.findall(r'^[A-Z_]+ = Path\("(/run/[^"]+)"\)$', program, re.MULTILINE)
    document_of_role = document(ANSIBLE / "roles/health/meta/touches.yml")
    assert len(created) == 3
    assert {*document_of_role["health_touches"]["trees"]} == {*created}


@pytest.mark.parametrize("role", ROLES)
def test_trees_are_slurms_or_clusterctls(role: str) -> None:
    """`down` removes their content, also that of folders which were empty before: a daemon that its owner
    uses later, such as chrony, may write there.
    """
    trees = touches(role).get("trees", [])
    assert [path for path in trees if "slurm" not in path and "clusterctl" not in path] == []


def test_pid_files_of_slurms_daemons_go_with_the_cluster() -> None:
    """Not all units have a PIDFile, so that systemd removes it."""
    templates = ("slurm.conf.j2", "slurmdbd.conf.j2")
    texts = [(data_folder("templates") / name).read_text() for name in templates]
    files = {path for text in texts for path in re.findall(r"PidFile=(\S+)", text)}
    assert len(files) == 3
    trees = [touches(role)["trees"] for role in ("slurmctld", "slurmd", "slurmdbd")]
    assert files <= {path for listed in trees for path in listed}


@pytest.mark.parametrize("role", ROLES)
def test_touches_variables_belong_to_the_role(role: str) -> None:
    named = document(ANSIBLE / f"roles/{role}/meta/touches.yml")[f"{role}_touches"].get(
        "variables", {}
    )
    specs = document(ANSIBLE / f"roles/{role}/meta/argument_specs.yml")["argument_specs"].values()
    assert named.keys() <= {name for spec in specs for name in spec.get("options", {})}
    assert all(name.startswith(f"{role}_") for name in named)
    assert spec_variables(default_spec(), [role]).keys() <= named.keys()


@pytest.mark.parametrize("role", ROLES)
def test_touches_drift_paths_belong_to_the_role(role: str) -> None:
    named = touches(role)
    given = named.get("drift", [])
    known = [
        *named.get("files", []),
        *named.get("blocks", []),
        *named.get("folders", []),
        *named.get("trees", []),
        "/etc/passwd",
    ]
    paths = [
        path
        for entry in given
        for key in ("files", "blocks", "paths")
        for path in entry.get(key, ())
    ]
    paths += [
        path for entry in given for files in entry.get("units", {}).values() for path in files
    ]
    assert [path for path in paths if "{" not in path and path not in known] == []
    units = {unit for entry in given for unit in entry.get("units", {})}
    assert {unit if "." in unit else f"{unit}.service" for unit in units} <= set(
        named.get("units", [])
    )


@pytest.mark.parametrize("role", ROLES)
def test_tasks_set_the_owner_of_files_checked_for_drift(role: str) -> None:
    """Without an owner, an Ansible module keeps the present owner of the file."""
    folder = ANSIBLE / "roles" / role
    checked = [path for one in touches(role).get("drift", []) for path in one.get("files", ())]
    lacking = [
        path
        for variables in variables_of(folder)
        for task in tasks_of(folder)
        for path in written(task, variables)
        if path in checked
        for module in WRITERS
        if "owner" not in task.get(module, {"owner": ""})
    ]
    assert lacking == []


def modes_of(folder: Path, task: dict[str, Any], variables: dict[str, Any]) -> set[str]:
    """The modes that fit what a task writes: folders and programs are for all to enter and to run,
    other files for all to read. Where the role's sources are not known here, both.
    """
    if written_by(task).get("state") == "directory":
        return {"0755"}
    items = rendered(task.get("loop"), variables)
    names = {
        rendered(written_by(task).get("src", "-"), {**variables, "item": item})
        for item in (items if isinstance(items, list) else ["*"])
    }
    if names == {"*"}:
        return {"0644", "0755"}
    sources = [path for name in names for path in folder.glob(f"*/{name}") if path.is_file()]
    runs = any(path.read_bytes().startswith(b"#!") for path in sources)
    return {"0755" if runs else "0644"}


def written_by(task: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module that writes; {} if the task has none."""
    return next((task[module] for module in WRITERS if module in task), {})


@pytest.mark.parametrize("role", ROLES)
def test_files_of_a_role_are_roots_with_the_mode_of_their_kind(role: str) -> None:
    """A program without its mode would not start, and a setting that only root reads would not
    reach the daemon or the job.
    """
    folder = ANSIBLE / "roles" / role
    wrong = set()
    for variables in variables_of(folder):
        for task in tasks_of(folder):
            # What a task writes as an account belongs to it.
            arguments = {} if "become_user" in task else written_by(task)
            for path in written(task, variables) if arguments.get("mode", "a+r") != "a+r" else ():
                owner, mode = OF_DAEMONS.get(path, ("root", ""))
                modes = {mode} if mode else modes_of(folder, task, variables)
                found = {arguments.get(key, owner) for key in ("owner", "group")}
                if found != {owner} or arguments["mode"] not in modes:
                    wrong.add((path, *found, arguments["mode"]))
    # A home belongs to its account.
    assert {one for one in wrong if not one[0].startswith("/shared/home/*")} == set()


@pytest.mark.parametrize("role", ROLES)
def test_file_of_the_owner_that_gets_lines_keeps_its_mode(role: str) -> None:
    """A mode in digits would replace the owner's. `down` takes `a+r` back; an account's keys lose the
    rights with which sshd would refuse them.
    """
    lines = ("ansible.builtin.blockinfile", "ansible.builtin.lineinfile")
    modes = [
        task[module].get("mode", "")
        for task in tasks_of(ANSIBLE / "roles" / role)
        for module in lines
        if module in task and "state" not in task[module]
    ]
    assert [mode for mode in modes if mode not in ("", "a+r") and "go-w" not in mode] == []


@pytest.mark.parametrize("role", ROLES)
def test_touches_names_every_written_path(role: str) -> None:
    folder = ANSIBLE / "roles" / role
    named = touches(role)
    single = [
        *named.get("files", []),
        *named.get("blocks", []),
        *named.get("folders", []),
        *named.get("mounts", []),
    ]
    trees = named.get("trees", [])
    missing = set()
    for variables in variables_of(folder):
        for task in tasks_of(folder):
            for path in written(task, variables):
                inside = any(path == tree or path.startswith(f"{tree}/") for tree in trees)
                if not inside and not any(_same(path, one) for one in single):
                    missing.add(path)
    # A person's home is theirs: it is never taken back.
    missing = {path for path in missing if not path.startswith(("/shared/home/", "~"))}
    assert missing == set()


@pytest.mark.parametrize("role", ROLES)
def test_touches_names_only_written_paths_and_started_units(role: str) -> None:
    """Otherwise, a task was lost, or hosts are checked for files that no role creates."""
    folder = ANSIBLE / "roles" / role
    made = set()
    for variables in variables_of(folder):
        for task in tasks_of(folder):
            made.update(written(task, variables))
            # A link has its path in another argument than a file.
            made.add(rendered(written_by(task).get("dest", ""), variables))
            # An image has the units of all hosts disabled.
            running = [
                task[unit] for unit in UNITS if unit in task and task[unit].get("enabled", True)
            ]
            units = [rendered(each["name"], variables) for each in running if "name" in each]
            made.update(unit if "." in unit else f"{unit}.service" for unit in units)
    named = {*touches(role).get("files", ()), *touches(role).get("units", ())}
    lost = {
        one for one in named if not any(_same(one, each) for each in (made | NOT_IN_TASKS) - {"*"})
    }
    # A list that only Ansible can fill.
    assert {one for one in lost if "{{" not in one} == set()


@pytest.mark.parametrize("role", ROLES)
def test_handlers_of_a_role_are_notified(role: str) -> None:
    folder = ANSIBLE / "roles" / role
    handlers = {task["name"] for task in document(folder / "handlers/main.yml") or []}
    assert handlers == {task["notify"] for task in tasks_of(folder) if "notify" in task}


@pytest.mark.parametrize("role", ROLES)
def test_touches_names_every_started_unit(role: str) -> None:
    folder = ANSIBLE / "roles" / role
    used = {
        rendered(task[module]["name"], variables)
        for variables in variables_of(folder)
        for task in tasks_of(folder)
        for module in UNITS
        if module in task and "name" in task[module]
    }
    named = touches(role).get("units", [])
    full = {unit if "." in unit else f"{unit}.service" for unit in used}
    assert full <= set(named)


def _same(path: str, pattern: str) -> bool:
    """Return whether two patterns can match the same path."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(pattern, path)


def test_system_accounts_get_no_home() -> None:
    """Debian gives the home /nonexistent to many accounts: none of them may have one."""
    accounts = [
        task["ansible.builtin.user"]
        for role in ROLES
        for task in tasks_of(ANSIBLE / "roles" / role)
        if task.get("ansible.builtin.user", {}).get("system")
    ]
    assert [account["create_home"] for account in accounts] == [False]
