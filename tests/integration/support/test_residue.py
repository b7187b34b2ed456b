"""The look for residue sees what it is there to see: each test makes one thing, and finds it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.processes import as_root, run_as_root
from tests.support.remains import marked
from tests.support.residue import Machine, left_behind, look, look_as_root

TMPFS = "tmpfs none"
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    home = tmp_path / "home"
    state = tmp_path / "state"
    home.mkdir()
    state.mkdir()
    return Machine(home, state)


@pytest.fixture
def name() -> str:
    return f"zz{secrets.token_hex(4)}"


@contextmanager
def running(*argv: str | Path, **environ: str) -> Iterator[int]:
    """A process that says when it is up; its pid."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, **environ}) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def new(machine: Machine, before: frozenset[str]) -> list[str]:
    """What is there now and was not before; other tests may be making things of their own."""
    return left_behind(before, lambda: look_as_root(machine), patience_s=0)


def test_what_a_cluster_makes_is_seen_until_it_is_gone(
    machine: Machine, name: str, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    watching = dataclasses.replace(machine, files=(hosts,))
    group = next(Path("/sys/fs/cgroup").rglob("cgroup.procs")).parent / f"clusterctl-{name}"
    home = str(machine.home)
    before = look_as_root(watching)
    with ExitStack() as stack:
        run_as_root("ip", "netns", "add", name)
        stack.callback(run_as_root, "ip", "netns", "delete", name)
        run_as_root("ip", "link", "add", name, "type", "bridge")
        stack.callback(run_as_root, "ip", "link", "delete", name)
        run_as_root("ip", "address", "add", "198.51.100.1/30", "dev", name)
        run_as_root("ip", "link", "set", name, "up")
        group.mkdir()
        stack.callback(group.rmdir)
        hosts.write_text("127.0.0.1 localhost\n10.0.0.1 t-ctl\n")
        by_environment = stack.enter_context(
            running(sys.executable, "-c", SLEEP, CLUSTERCTL_HOME=home)
        )
        by_argument = stack.enter_context(
            running(sys.executable, "-c", SLEEP, f"-F{home}/t/ssh_config")
        )
        found = new(watching, before)
    lines = {
        f"file /run/netns/{name}",
        f"link {name}",
        f"address 198.51.100.1 on {name}",
        f"route 198.51.100.0/30 on {name}",
        f"control group {group}",
        f"line of {hosts}: 10.0.0.1 t-ctl",
    }
    assert lines <= set(found)
    starts = (
        f"mount /run/netns/{name}: nsfs",
        f"process {by_environment}:",
        f"process {by_argument}:",
    )
    assert [any(line.startswith(start) for line in found) for start in starts] == [True] * 3
    assert not [line for line in new(machine, before) if name in line]


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder that lies in no worker's."""
    with tempfile.TemporaryDirectory(prefix=marked("workers-")) as folder:
        yield Path(folder)


def test_a_mount_of_another_worker_is_not_this_ones(elsewhere: Path) -> None:
    """A session that ends meanwhile, or one with a home elsewhere, must not take it for its own."""
    workers = [elsewhere / "pytest-of-me" / "pytest-1" / f"popen-gw{number}" for number in (0, 1)]
    machines = [Machine(worker / "home", worker / "state") for worker in workers]
    for worker in workers:
        (worker / "home").mkdir(parents=True)
        (worker / "state").mkdir()
    machines.append(Machine(elsewhere / "home", elsewhere))
    before = [look_as_root(machine) for machine in machines]
    run_as_root("mount", "-t", "tmpfs", "none", str(machines[0].state))
    try:
        found = [new(machine, seen) for machine, seen in zip(machines, before, strict=True)]
    finally:
        run_as_root("umount", str(machines[0].state))
    line = f"mount {machines[0].state}: tmpfs none"
    assert [line in lines for lines in found] == [True, False, False]


@pytest.mark.parametrize(
    ("building", "lock"),
    [("test-el-0123.building", "test-el.lock"), (".building-image-0123", "cache.lock")],
)
def test_residue_ignores_trees_of_other_test_processes(
    machine: Machine, tmp_path: Path, building: str, lock: str
) -> None:
    """Each is built once in a run, on a machine that has it not yet, while other modules end."""
    place = tmp_path / building
    lock_file = tmp_path / lock
    watching = dataclasses.replace(machine, cache=tmp_path, images=tmp_path, images_lock=lock_file)
    place.mkdir()
    before = look_as_root(watching)
    run_as_root("mount", "-t", "tmpfs", "none", str(place))
    try:
        with lock_file.open("w") as builder:
            fcntl.flock(builder, fcntl.LOCK_EX)
            assert not [line for line in new(watching, before) if str(place) in line]
        # Its builder was killed.
        assert f"mount {place}: {TMPFS}" in new(watching, before)
    finally:
        run_as_root("umount", str(place))


def test_the_host_of_another_test_process_is_none_of_ours(machine: Machine, tmp_path: Path) -> None:
    nspawn = tmp_path / "systemd-nspawn"
    nspawn.symlink_to("/usr/bin/tail")
    other = dataclasses.replace(machine, looks=1 << 30)
    before = {one: look_as_root(one) for one in (machine, other)}
    with running(nspawn, "-f", "-c+0", "/etc/hostname", "--", "--machine=host-0abcde") as pid:
        found = {one: new(one, before[one]) for one in (machine, other)}
    ours, theirs = ([f"process {pid}:" in line for line in found[one]] for one in (machine, other))
    assert any(ours)
    assert not any(theirs)


def test_a_process_whose_container_is_gone(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "clusterctl" / "0abcde"
    folder.mkdir(parents=True)
    script = f'mount -t tmpfs none {folder} && exec {sys.executable} -c "{SLEEP}"'
    before = look_as_root(machine)
    argv = [*as_root(), "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
    with running(*argv):
        found = new(machine, before)
    assert any(f"(in {folder}" in line for line in found)


@pytest.mark.parametrize("tool", ["nft", "iptables-save", "ip6tables-save"])
def test_a_packet_filter_rule(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    """Played by an executable that prints rules: the packets counted by one that stays are no
    residue.
    """
    rules = tmp_path / "rules"
    rules.write_text("*filter\n# at 12:00\n:INPUT ACCEPT [1:2]\nCOMMIT\n")
    (tmp_path / tool).write_text(f"#!/bin/sh\ncat {rules}\n")
    (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = look(machine)
    rules.write_text(
        "*filter\n# at 12:01\n:INPUT ACCEPT [3:4]\n-A INPUT -i cc0abcde -j ACCEPT\nCOMMIT\n"
    )
    found = [line for line in look(machine) - before if line.startswith(tool)]
    assert found == [f"{tool} rule, *filter: -A INPUT -i cc0abcde -j ACCEPT"]


def test_a_cluster_of_another_home_is_left_out(machine: Machine, tmp_path: Path) -> None:
    before = look_as_root(machine)
    for cluster, home in (("0aaaaa", machine.home), ("0bbbbb", tmp_path / "elsewhere")):
        (machine.state / cluster).mkdir()
        (machine.state / cluster / "cluster.json").write_text(f'{{"workspace": "{home}/t"}}')
    found = [line for line in new(machine, before) if str(machine.state) in line]
    assert found == [f"file {machine.state / '0aaaaa'}"]


def test_what_goes_in_its_own_time_is_not_residue() -> None:
    end = time.monotonic() + 0.2
    assert (
        left_behind(frozenset(), lambda: frozenset({"link x"} if time.monotonic() < end else ()))
        == []
    )
