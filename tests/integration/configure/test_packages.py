"""The role packages and the repositories: check mode, mirrors, and package locks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterctl.util.assets import data_folder, install_inputs
from tests.support.forks import ansible
from tests.support.plays import program, run_play, run_tasks

ROLES = data_folder("ansible") / "roles"


def check(tmp_path: Path, role: str, facts: dict[str, Any], **variables: Any) -> str:
    """Run the install part of a role in check mode with these facts. Return the output."""
    done = checked(tmp_path, role, facts, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checked(
    tmp_path: Path, role: str, facts: dict[str, Any], **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Run the same check, which may fail. Programs in tmp_path/bin come first."""
    play = {
        "hosts": "localhost",
        "vars": {"ansible_python_interpreter": sys.executable},
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.set_fact": {"ansible_facts": facts}},
            {
                "ansible.builtin.include_role": {"name": role, "tasks_from": "install"},
                "vars": variables,
            },
        ],
    }
    playbook = tmp_path / "play.yml"
    playbook.write_text(yaml.safe_dump([play]))
    argv = ["--check", "-i", "localhost,", "-c", "local", playbook]
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return ansible("ansible-playbook", argv, cwd=tmp_path, environ={"PATH": path})


ROCKY = {
    "os_family": "RedHat",
    "distribution": "Rocky",
    "distribution_major_version": "9",
    "architecture": "x86_64",
}


@pytest.mark.parametrize(
    ("role", "there", "variables", "missing"),
    [
        ("packages", {"munge": []}, {"packages_names": ["munge", "slurm"]}, ["slurm"]),
        ("packages", {"munge": []}, {"packages_names": ["munge"]}, []),
        ("repositories", {}, {}, ["dnf-plugins-core", "epel-release"]),
        (
            "repositories",
            {},
            {"packages_bundle": "file:///b"},
            [],
        ),
    ],
)
def test_check_names_missing_packages_without_a_repository(
    tmp_path: Path, role: str, there: dict[str, Any], variables: dict[str, Any], missing: list[str]
) -> None:
    said = check(tmp_path, role, ROCKY | {"packages": there}, **variables)
    assert re.findall(r"would install ([\w-]+)", said) == missing
    assert ("changed=0" in said) == (not missing)


_PARTS = ["ucx-cma", "ucx-ib", "ucx-rdmacm"]


@pytest.mark.platform("stand-in", "infiniband")
@pytest.mark.parametrize(
    ("adapters", "fabric", "release", "missing"),
    [
        (["mlx5_0"], True, "1.el9", _PARTS),
        (["hfi1_0", "hfi1_1"], True, "2.el10_0", _PARTS),
        ([], True, "1.el9", []),
        # Local nodes show the adapters of their host.
        (["mlx5_0"], False, "1.el9", []),
        # DOCA 2.10's, as a site lists its packages: its parts are in NVIDIA's repository.
        (["mlx5_0"], True, "1.2410068", []),
    ],
)
def test_parts_of_ucx_are_installed_for_adapters_and_only_beside_the_distributions_ucx(
    tmp_path: Path, adapters: list[str], fabric: bool, release: str, missing: list[str]
) -> None:
    """EL's packages: ucx-ib requires ucx of its own version and release, openmpi only ucx."""
    program(tmp_path, "rpm", f"printf %s {release}")
    root = tmp_path / "infiniband"
    for name in adapters:
        (tmp_path / "devices" / name).mkdir(parents=True)
        root.mkdir(exist_ok=True)
        (root / name).symlink_to(f"../devices/{name}")
    variables = {"openmpi_adapters": str(root), "openmpi_fabric": fabric}
    installed = {"packages": {"openmpi": [], "environment-modules": []}}
    said = check(tmp_path, "openmpi", ROCKY | installed, **variables)
    words = re.findall(r"would install ([\w -]+)", said)
    assert sorted(" ".join(words).split()) == missing


def test_missing_packages_are_reported_in_check_mode_only(tmp_path: Path) -> None:
    """Else `up` would report a change of each host."""
    facts = {"os_family": "Of no distribution", "packages": {}}
    done = run_tasks(tmp_path, "packages", "install", facts=facts, packages_names=["munge"])
    # The tasks of the family are next.
    assert "Of no distribution.yml" in done.stdout
    assert "would install" not in done.stdout


def test_mirror_replaces_epel_and_openhpc(tmp_path: Path) -> None:
    mirrors = {
        "epel": {"url": "http://here/epel"},
        "openhpc": {"url": "http://here/ohpc", "key": "http://k"},
    }
    folder = tmp_path / "repos"
    folder.mkdir()
    facts = ROCKY | {"packages": {"dnf": []}}
    slurm = {"url": "http://here/slurm", "key": "http://here/key"}
    variables = {
        "repositories_mirrors": mirrors,
        "repositories_openhpc": True,
        "repositories_slurm": slurm,
    }
    said = check(tmp_path, "repositories", facts, **variables, repositories_folder=str(folder))
    assert "would install epel-release" not in said
    for name in ("epel", "OpenHPC", "OpenHPC-updates", "clusterctl-slurm"):
        assert f"repository {name}]" in said


FACTS = Path(__file__).parents[2] / "unit/packages/facts/el.toml"
CODEREADY = tomllib.loads(FACTS.read_text())["codeready"]
# The format of `dnf repolist --all`.
LISTED = "{id:<70} Red Hat Enterprise Linux disabled"
# The output of `subscription-manager repos`, in part.
UNSUBSCRIBED = "This system has no repositories available through subscriptions"
SUBSCRIBED = "Repo ID:   codeready-builder-for-rhel-{}-x86_64-rpms"


def listing(row: dict[str, Any]) -> list[str]:
    return [LISTED.format(id=name) for name in row["listed"].split()]


@pytest.mark.parametrize("release", ["9", "10"])
def test_codeready_builder_has_the_name_of_each_distribution(tmp_path: Path, release: str) -> None:
    rows = [row for row in CODEREADY if row["release"] == release]
    facts = ROCKY | {"distribution": "RedHat", "distribution_major_version": release}
    tasks = [
        {"ansible.builtin.set_fact": {"ansible_facts": facts}},
        {"ansible.builtin.include_vars": str(ROLES / "repositories/vars/RedHat.yml")},
        {
            "ansible.builtin.debug": {"msg": "enabled: {{ repositories_codeready | join(' ') }}."},
            "loop": [["", "repo id repo name status", *listing(row)] for row in rows],
            "vars": {"repositories_listed": {"stdout_lines": "{{ item }}"}},
        },
    ]
    done = run_play(
        tmp_path,
        {"hosts": "compute", "gather_facts": False, "tasks": tasks},
        ("ctl", "node"),
        known={},
    )
    assert done.returncode == 0, done.stdout
    assert re.findall(r"enabled: (.*)\.\"", done.stdout) == [row["enabled"] for row in rows]


def a_rhel(tmp_path: Path, row: dict[str, Any], subscription: str) -> dict[str, Any]:
    """Create stand-ins of a RHEL host, which record what subscription-manager is called with. Return
    its facts.
    """
    lines = "\n".join(listing(row))
    program(tmp_path, "dnf", f"cat <<'END'\n{lines}\nEND")
    program(
        tmp_path, "subscription-manager", f'echo "$@" >>{tmp_path}/calls; echo "{subscription}"'
    )
    return ROCKY | {
        "distribution": "RedHat",
        "distribution_major_version": row["release"],
        "packages": {"dnf-plugins-core": []},
    }


@pytest.mark.parametrize("subscription", [UNSUBSCRIBED, SUBSCRIBED])
@pytest.mark.parametrize("row", [CODEREADY[0], CODEREADY[-1]], ids=["listed", "unlisted"])
def test_subscription_manager_is_asked_only_if_nothing_is_listed(
    tmp_path: Path, row: dict[str, Any], subscription: str
) -> None:
    facts = a_rhel(tmp_path, row, subscription.format(row["release"]))
    done = checked(tmp_path, "repositories", facts)
    is_listed = bool(row["enabled"])
    assert (UNSUBSCRIBED in done.stdout) == (not is_listed and subscription == UNSUBSCRIBED)
    assert (done.returncode == 0) == (is_listed or subscription == SUBSCRIBED), done.stdout
    assert (tmp_path / "calls").exists() != is_listed
    assert is_listed or (tmp_path / "calls").read_text() == "repos --list\n"


def test_codeready_builder_is_enabled_through_subscription_manager(tmp_path: Path) -> None:
    facts = a_rhel(tmp_path, CODEREADY[-1], "enabled")
    tasks = [
        {"ansible.builtin.set_fact": {"ansible_facts": facts}},
        {"ansible.builtin.include_vars": str(ROLES / "repositories/vars/RedHat.yml")},
        {"ansible.builtin.include_role": {"name": "repositories", "tasks_from": "codeready"}},
    ]
    play = {"hosts": "compute", "gather_facts": False, "tasks": tasks}
    done = run_play(tmp_path, play, ("ctl", "node"), known={})
    assert done.returncode == 0, done.stdout
    assert " changed=1 " in done.stdout
    name = SUBSCRIBED.format(CODEREADY[-1]["release"]).split()[-1]
    assert (tmp_path / "calls").read_text() == f"repos --enable={name}\n"


def test_gcsfuse_on_rocky_linux_is_from_googles_repository(tmp_path: Path) -> None:
    folder = tmp_path / "repos"
    folder.mkdir()
    facts = ROCKY | {"packages": {}}
    said = check(
        tmp_path, "bucket", facts, bucket_name="my-data", bucket_repositories_folder=str(folder)
    )
    assert "Add the repository]" in said
    assert all(name in said.partition("would install ")[2] for name in ("fuse", "gcsfuse"))


@pytest.mark.parametrize(
    ("major", "keys"),
    [("9", ["yum-key.gpg", "rpm-package-key.gpg"]), ("10", ["rpm-package-key-v10.gpg"])],
)
def test_gcsfuse_has_a_key_that_the_release_takes(
    tmp_path: Path, major: str, keys: list[str]
) -> None:
    folder = tmp_path / "repos"
    folder.mkdir()
    names = str(ROLES / "bucket" / "vars" / "RedHat.yml")
    tasks = [
        {
            "ansible.builtin.set_fact": {
                "ansible_facts": ROCKY | {"distribution_major_version": major}
            }
        },
        {"ansible.builtin.include_vars": {"file": names}},
        {"ansible.builtin.include_role": {"name": "bucket", "tasks_from": "RedHat"}},
    ]
    play = {"hosts": "compute", "gather_facts": False, "tasks": tasks}
    done = run_play(
        tmp_path, play, ("ctl", "node"), known={"bucket_repositories_folder": str(folder)}
    )
    assert done.returncode == 0, done.stdout
    assert re.findall(r"/yum/doc/(\S+)", (folder / "gcsfuse.repo").read_text()) == keys


def modules(tasks: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (module, arguments) of each task, also in blocks."""
    for task in tasks:
        yield from modules(task.get("block", []))
        yield from ((name, said) for name, said in task.items() if "." in name)


def test_every_dnf_task_leaves_other_repositories_out() -> None:
    """dnf and Ansible ignore globs that match no repository."""
    uses = [
        (module, arguments)
        for path in sorted(ROLES.glob("*/tasks/*.yml"))
        for module, arguments in modules(yaml.safe_load(path.read_text()) or [])
        if module == "ansible.builtin.dnf"
        or (
            (isinstance(arguments, dict) and "dnf" in (argv := arguments.get("argv", ())))
            # These read no repository, only its configuration.
            and not {"repolist", "config-manager"} & {*argv}
        )
    ]
    left_out = {"ansible.builtin.dnf": "{{ packages_left_out }}"}
    assert len(uses) == 2
    for module, arguments in uses:
        if module in left_out:
            assert arguments["disablerepo"] == left_out[module]
        else:
            assert "--disablerepo={{ packages_left_out | join(',') }}" in arguments["argv"]


def waits(task: tuple[str, Any], before: tuple[str, Any] | None) -> bool:
    """Return whether a task that takes the lock of apt or dnf waits for another process that holds
    it.
    """
    module, said = task
    words = str(said.get("cmd") or said.get("argv")) if isinstance(said, dict) else str(said)
    by_dnf = module.endswith((".dnf", ".yum", ".package"))
    if by_dnf or (module.endswith(".command") and "dnf" in words):
        name, its = before or ("", {})
        return name.startswith("ansible.builtin.include_") and "wait" in str(its)
    return (
        module != "ansible.builtin.apt"
        or said.get("lock_timeout") == "{{ packages_lock_timeout_s }}"
    )


def test_every_apt_or_dnf_task_waits_for_the_package_lock() -> None:
    """Before a task of dnf, another task waits: Ansible's lock_timeout has no effect on dnf."""
    seen = Counter[str]()
    for path in sorted(ROLES.glob("*/tasks/*.yml")):
        tasks = list(modules(yaml.safe_load(path.read_text()) or []))
        seen.update(name for name, _ in tasks)
        for number, task in enumerate(tasks):
            assert waits(task, tasks[number - 1] if number else None), f"{path}: {task[0]}"
            module = task[0].rpartition(".")[2]
            assert module not in {"apt", "dnf", "package", "yum"} or path.parts[-3] == "packages", (
                path
            )
    assert (seen["ansible.builtin.apt"], seen["ansible.builtin.dnf"]) == (3, 1)


def test_commands_without_lock_wait_are_retried() -> None:
    words = ("dpkg --configure", "apt-get, clean")
    tasks = [
        task
        for name in ("refresh", "clean")
        for task in yaml.safe_load((ROLES / f"packages/tasks/{name}.yml").read_text())
    ]
    commands = [task for task in tasks if "ansible.builtin.command" in task]
    assert len(commands) == len(words)
    assert all(
        "packages_lock_timeout_s" in task["retries"] and "lock" in task["until"]
        for task in commands
    )


def test_role_without_configure_part_counts_as_install() -> None:
    tasks = (ROLES / "packages/tasks/RedHat.yml").read_bytes()
    assert tasks in install_inputs()


def test_compiled_programs_are_no_install_inputs() -> None:
    """Tests import programs of roles, and must not change the key of the node image."""
    assert not any(part.endswith(b".pyc") for part in install_inputs()[::2])
