"""Residue of clusters on this machine, found in the system and not in clusterctl's records.

`look` takes a snapshot; additions in a later snapshot are residue. As a program (`python -m
tests.support.residue` with a Machine as JSON on stdin, run as root) it prints a snapshot.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from clusterctl.providers.local import layout
from clusterctl.providers.local.machine import running
from clusterctl.state.workspace import cache_home
from tests.support.processes import run_as_root

STATE = Path("/var/lib/clusterctl")
LABS = Path("/var/lib/clusterctl-labs")
NAMESPACES = Path("/run/netns")  # `ip netns` mounts it for all clusters together
FILES = (
    Path("/etc/hosts"),
    Path("/etc/resolv.conf"),
    Path.home() / ".ssh/config",
    Path.home() / ".ssh/known_hosts",
)
_WORKER = re.compile(r"/pytest-of-[^/]+/pytest-\d+/popen-gw\d+/")
_OURS = re.compile(r"(?:upperdir=| )(/[^ ,:=]*/clusterctl(?:-labs)?/[^ ,:]*)")
IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@dataclass(frozen=True)
class Machine:
    """Where to look. Other places than the real ones are for the tests of this module."""

    home: Path  # CLUSTERCTL_HOME of the clusters in question
    state: Path = STATE
    folders: tuple[Path, ...] = (NAMESPACES, LABS)
    files: tuple[Path, ...] = FILES
    cache: Path = field(default_factory=cache_home)
    images: Path = layout.CACHE
    images_lock: Path = layout.RUN / "cache.lock"
    looks: int = field(default_factory=os.getpid)  # the process that asks


def temporary(home: Path) -> Path:
    """Where the verbs of this home are told to put temporary files."""
    return home.with_name(f"{home.name}-tmp")


def look(machine: Machine) -> frozenset[str]:
    """Everything there is now that a cluster could have made, a line each. Needs root.

    Clusters of other homes come and go as their people please: what bears the id of one is left
    out, and what they share; so are a tree and an image that another test process is building.
    """
    hosts = _in_hosts_of_others(machine)
    # The folders where clusters keep things, the one for temporary files, and files that a cluster
    # might be tempted to edit.
    folders = (machine.state, temporary(machine.home), *machine.folders)
    files = [path for path in machine.files if path.is_file()]
    sources = (
        _processes(machine, hosts),
        _mounts(machine),
        _loops(),
        _groups(),
        _network(),
        _rules(),
        (f"file {path}" for folder in folders for path in folder.glob("*")),
        (f"line of {path}: {line}" for path in files for line in path.read_text().splitlines()),
    )
    # The labs (tests/support/lab.py) that somebody keeps right now: each is locked as long as it is
    # kept.
    others = [*_other_clusters(machine), *(lab.stem for lab in LABS.glob("*.lab") if _locked(lab))]
    others += [f"mount {NAMESPACES}:"] if others else []
    others += _trees_being_built(machine)
    if _locked(machine.images_lock):  # somebody builds a node image
        others += [f"{machine.images}/.building-", "clusterctl-bake-"]
    others += [name for name, pid in running().items() if str(pid) in hosts]
    lines = (line for source in sources for line in source)
    return frozenset(line for line in lines if not any(cluster in line for cluster in others))


def look_as_root(machine: Machine) -> frozenset[str]:
    """`look`, through sudo where we are not root."""
    if os.geteuid() == 0:
        return look(machine)
    request = json.dumps(asdict(machine), default=str)
    return frozenset(
        json.loads(run_as_root(sys.executable, "-m", "tests.support.residue", stdin=request))
    )


def left_behind(
    before: frozenset[str], take: Callable[[], frozenset[str]], *, patience_s: float = 10
) -> list[str]:
    """What is there now and was not before, once the kernel had time to finish what it was told."""
    deadline = time.monotonic() + patience_s
    while True:
        left = sorted(take() - before)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


@contextmanager
def nothing_left(home: Path) -> Iterator[None]:
    """Fails when this machine holds more afterwards than before; clusters of other homes do not
    count.
    """
    machine = Machine(home)
    before = look_as_root(machine)
    yield
    left = left_behind(before, lambda: look_as_root(machine))
    assert not left, "residue:\n" + "\n".join(left)


def _trees_being_built(machine: Machine) -> Iterator[str]:
    """Trees that hosts boot from (keeper.py, nested.py); a builder locks what it builds."""
    for folder in machine.cache.glob("test-*.building"):
        kind = re.match(r"test-[a-z]+", folder.name)
        if kind and _locked(machine.cache / f"{kind[0]}.lock"):
            yield str(folder)


def _locked(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _other_clusters(machine: Machine) -> Iterator[str]:
    # Tests that use a storage remove it; the folder is there while any has one.
    yield "storage"
    for record in machine.state.glob("*/cluster.json"):
        try:
            workspace = Path(json.loads(record.read_text())["workspace"])
        except (OSError, ValueError, KeyError):
            continue  # half made or half removed
        if not workspace.is_relative_to(machine.home):
            yield record.parent.name


def _in_hosts_of_others(machine: Machine) -> frozenset[str]:
    """The pids of hosts (tests/support/nested.py) that other test processes boot, and of all in
    them.
    """
    parents: dict[str, str] = {}
    spaces: dict[str, Path] = {}
    hosts: set[str] = set()
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[proc.name] = (proc / "stat").read_text().rpartition(")")[2].split()[1]
            spaces[proc.name] = (proc / "ns" / "pid").readlink()
            if b"--machine=host-" in (proc / "cmdline").read_bytes():
                hosts.add(proc.name)

    def line(pid: str) -> Iterator[str]:
        while pid in parents:
            yield pid
            pid = parents[pid]

    foreign = {host for host in hosts if str(machine.looks) not in line(host)}
    below = {pid for pid in spaces if not foreign.isdisjoint(line(pid))}
    within = {spaces[pid] for pid in below} - {Path("/proc/self/ns/pid").readlink()}
    return frozenset(below | {pid for pid, space in spaces.items() if space in within})


def _processes(machine: Machine, others: frozenset[str]) -> Iterator[str]:
    """Our containers, all that runs in one, and all that carries our home in its arguments or
    environment.
    """
    own_namespace = Path("/proc/self/ns/pid").readlink()
    roots_in: dict[Path, list[str]] = {}  # by mount namespace: a container's processes have one
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            argv = (proc / "cmdline").read_bytes().split(b"\0")
            environ = (proc / "environ").read_bytes()
            roots: list[str] = []
            if (proc / "ns" / "pid").readlink() != own_namespace:
                space = (proc / "ns" / "mnt").readlink()
                if space not in roots_in:
                    roots_in[space] = _roots((proc / "mountinfo").read_text())
                roots = roots_in[space]
        except OSError:
            continue  # it ended while we looked
        if proc.name == str(os.getpid()) or proc.name in others:
            continue
        command = b" ".join(argv).decode(errors="replace").strip()
        container = Path(argv[0].decode(errors="replace")).name == "systemd-nspawn"
        reported = str(
            machine.home
        ) in command or f"CLUSTERCTL_HOME={machine.home}".encode() in environ.split(b"\0")
        if roots or container or reported:
            yield f"process {proc.name}: {command}" + (f" (in {roots[-1]})" if roots else "")


def _roots(mounts: str) -> list[str]:
    """The folders of ours that a container's root comes from, which tell whose it is.

    Until it is mounted, the last mount does: a mount namespace starts as a copy of this machine's.
    """
    at_root = "\n".join(line for line in mounts.splitlines() if line.split()[4] == "/")
    return _OURS.findall(at_root) or _OURS.findall(mounts)


def _mounts(machine: Machine) -> Iterator[str]:
    """All mounts, but for those in the folders of pytest-xdist's other workers."""
    mine = _WORKER.search(str(machine.home))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind, source, options = fields[fields.index("-") + 1 :][:3]
        worker = _WORKER.search(fields[4])
        if worker and (not mine or mine[0] != worker[0]):
            continue
        yield f"mount {fields[4]}: {kind} {source} {options if kind == 'overlay' else ''}".rstrip()


def _loops() -> Iterator[str]:
    """Loop devices, whether what they lie on is mounted or not."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield f"loop device {backing.parts[3]}: {backing.read_text().strip()}"
        except OSError:
            continue  # given back while we looked


def _groups() -> Iterator[str]:
    """Control groups of our name, in every hierarchy."""
    for folder, inner, _ in os.walk("/sys/fs/cgroup"):
        # Of a systemd-nspawn machine, whose own systemd divides it.
        if Path(folder).name == "payload":
            inner.clear()
        yield from (f"control group {folder}/{name}" for name in inner if "clusterctl-" in name)


def _network() -> Iterator[str]:
    for link in _ip_json("link"):
        yield f"link {link['ifname']}"
    for link in _ip_json("address"):
        for address in link["addr_info"]:
            yield f"address {address['local']} on {link['ifname']}"
    for route in _ip_json("route"):
        yield f"route {route['dst']} on {route.get('dev', 'none')}"
    yield f"ip_forward is {IP_FORWARD.read_text().strip()}"


def _ip_json(thing: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["ip", "-json", thing, "show"], capture_output=True, check=True, timeout=30
    )
    return list(json.loads(done.stdout or "[]"))


def _rules() -> Iterator[str]:
    """Packet filter rules, without their counters, by whichever tools are here."""
    for argv in (["nft", "--stateless", "list", "ruleset"], ["iptables-save"], ["ip6tables-save"]):
        if not shutil.which(argv[0]):
            continue
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
        table = ""
        for raw in done.stdout.splitlines():
            line = re.sub(r"\[\d+:\d+\]", "", raw).strip()
            if line.startswith(("table", "chain", "*")):
                table = line
            elif line and not line.startswith("#"):
                yield f"{argv[0]} rule, {table}: {line}"


if __name__ == "__main__":
    json.dump(sorted(look(TypeAdapter(Machine).validate_json(sys.stdin.read()))), sys.stdout)
