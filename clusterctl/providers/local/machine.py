"""One node: an overlay on the image, booted by systemd-nspawn in a control group of its own.

Whether a node runs is always read from the process table, never from a file of ours, so that the truth
survives crashes, reboots and hand-made changes.

`systemd-nspawn --keep-unit` puts a machine below the control group that it was started in. Started from one
shell, all machines would share one: their systemds would then write into each other's `system.slice`. So each
gets a group of its own where no systemd of the host gives it one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from base64 import b64decode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import IO

from clusterctl.errors import ProvisionError
from clusterctl.hosts.remote_own_files import with_block
from clusterctl.providers.local import layout, system
from clusterctl.providers.local.system import TOOL_ENV, mount_disk, mount_overlay, rooted_under, run
from clusterctl.spec.common import ADMIN_ID
from clusterctl.state.workspace import has_content

STOP_TIMEOUT_S = 45.0  # of a machine with much else to do
_EARLY_S = 0.1
# All accounts of the host reach a node's sshd.
_SSHD = "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"


@dataclass(frozen=True, slots=True)
class Machine:
    """A node's place on this machine."""

    cluster_id: str
    node: layout.Node
    number: int

    @property
    def name(self) -> str:
        return layout.machine_name(self.cluster_id, self.number)

    @property
    def folder(self) -> Path:
        return layout.cluster_dir(self.cluster_id) / "nodes" / self.node.name

    @property
    def root(self) -> Path:
        return self.folder / "root"


def booted_with_systemd() -> bool:
    """As sd_booted(3) tells: then nodes are registered with machined and live in units of their own."""
    return Path("/run/systemd/system").is_dir()


def running() -> Mapping[str, int]:
    """Machine name -> pid of the systemd-nspawn process, of all nspawn machines here.

    Not of those that a container here runs, whose image may be baked in one of the same name.
    """
    here, option, found = Path("/proc/self/ns/pid").readlink(), "--machine=", {}
    for process, line in system.read_processes("cmdline"):
        program, *words = line.split("\0")
        names = [word.removeprefix(option) for word in words if word.startswith(option)]
        if names and Path(program).name == "systemd-nspawn":
            with suppress(OSError):
                if (process / "ns/pid").readlink() == here:
                    found[names[-1]] = int(process.name)
    return found


def alive() -> Mapping[str, tuple[int, ...]]:
    """Machine name -> pids, its nspawn process first. A machine outlives an nspawn that was killed."""
    found: dict[str, list[int]] = {name: [pid] for name, pid in running().items()}
    for pid, name in cgroup_members():
        if pid not in found.setdefault(name, []):
            found[name].append(pid)
    return {name: tuple(pids) for name, pids in found.items()}


def prepare(
    machine: Machine,
    lower: tuple[Path, ...],
    subnet: IPv4Network,
    admin_key: str,
    files: Sequence[layout.PlacedFile] = (),
) -> None:
    """Lay out the own files of a node that does not run, ``files`` among them.

    What root in the node left there is not followed.
    """
    size_mib = machine.node.disk_mib
    changes = mount_disk(machine.folder, size_mib) if size_mib else machine.folder
    root = mount_overlay(lower, machine.folder, changes)
    name, own = machine.node.name, layout.address(subnet, machine.number)
    _place(root, "etc/hostname", f"{name}\n")
    # Numbered below systemd's own 80-container-host0.network, which would ask for DHCP.
    network_file = (
        f"[Match]\nName=host0\n\n[Network]\nAddress={own}/{subnet.prefixlen}\nLinkLocalAddressing=no\n"
    )
    _place(root, "etc/systemd/network/10-host0.network", network_file)
    if not (changes / "upper/etc/hosts").is_file():
        _place(root, "etc/hosts", f"127.0.0.1 localhost\n{own} {name}\n")
    for file in files:
        path, data = file.path.lstrip("/"), b64decode(file.data)
        if file.edges:
            data = with_block((root / path).read_text(), data.decode(), *file.edges).encode()
        os.chown(_place(root, path, data, mode=file.mode), file.owner, file.owner)
    authorized = _place(root, "home/clusterctl/.ssh/authorized_keys", f"{admin_key}\n", mode=0o600)
    os.chown(authorized, ADMIN_ID, ADMIN_ID)
    host_key = machine.folder / "host_key"
    if not host_key.exists():
        make_host_key(host_key, name)
    _place(root, "etc/ssh/sshd_config.d/00-clusterctl.conf", _SSHD)
    _place(root, "etc/ssh/ssh_host_ed25519_key", host_key.read_text(), mode=0o600)


def make_host_key(file: Path, comment: str) -> str:
    """Make an SSH host key; its public half."""
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file)]
    run(keygen, what="making a host key")
    return public_key(file)


def public_key(file: Path) -> str:
    """The public half of a host key, without its comment."""
    return " ".join(file.with_suffix(".pub").read_text().split()[:2])


def make_homes(wanted: layout.ClusterRequest, shared: Path, lower: Sequence[Path]) -> None:
    """Make the homes of a new cluster's users on its empty shared folder: all appear there at once."""
    top = shared.with_name("homes")
    if top.exists():  # an `up` was ended
        system.erase(top)
    (top / f".clusterctl-{wanted.id}").mkdir(parents=True)
    for one in wanted.homes:
        home = top / one.name
        for layer in reversed(lower):
            if (layer / "etc/skel").is_dir():
                shutil.copytree(layer / "etc/skel", home, symlinks=True, dirs_exist_ok=True)
        _place(home, ".ssh/authorized_keys", "".join(f"{key}\n" for key in one.keys), mode=0o600)
        for folder in (home / ".ssh", home):
            folder.chmod(0o700)
        for path in (home, *home.rglob("*")):
            os.lchown(path, one.uid, one.uid)
    top.rename(shared / "home")


def _place(root: Path, name: str, text: str | bytes, *, mode: int = 0o644) -> Path:
    path = root / name
    for folder in reversed(path.relative_to(root).parents):
        if (root / folder).is_symlink():
            raise ProvisionError(
                "a node's folder was replaced by a link", code="folder-is-a-link", where=str(root / folder)
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    # What is right is not written again, so that a node whose disk is full can be started.
    if not has_content(path, data, mode):
        path.unlink(missing_ok=True)  # a link is replaced, not followed
        path.touch(mode=mode)
        path.write_bytes(data)
    return path


def pin(machine: Machine, pids: Collection[int]) -> None:
    """Move all threads of a node that runs to its cores; they change when the cluster grows or shrinks."""
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), machine.node.cores)


def start(machine: Machine, shared: Path, words: Sequence[str] = (), environment: Sequence[str] = ()) -> None:
    """Boot a node and return at once; it lives on when the helper is gone.

    ``words`` are for its systemd, ``environment`` is the command that gives systemd-nspawn its own.
    """
    nspawn = ["systemd-nspawn", "--quiet", "--boot", "--keep-unit", f"--directory={machine.root}"]
    nspawn += [f"--machine={machine.name}", f"--hostname={machine.node.name}", f"--bind={shared}:/shared"]
    nspawn += [f"--network-bridge={layout.bridge_name(machine.cluster_id)}"]
    nspawn += ["--resolv-conf=off", "--timezone=off", "--link-journal=no"]
    inside = ["nsenter", f"--net={system.NETNS_DIR / layout.netns_name(machine.cluster_id)}"]
    inside += environment
    if machine.node.cores:
        inside += ["taskset", "--cpu-list", ",".join(map(str, machine.node.cores))]
    launch(machine.name, inside, nspawn, machine.folder / "console.log", words)


def launch(
    name: str, inside: Sequence[str], nspawn: Sequence[str], console: Path, words: Sequence[str] = ()
) -> None:
    """Start systemd-nspawn through ``inside``, in a unit or control group of its own, and return at once.

    ``words`` are what it starts, or is said to the systemd that it boots.
    """
    if booted_with_systemd():
        # As systemd's own systemd-nspawn@.service. Exit status 1: `stop` ended it.
        settings = ("KillMode=mixed", "Delegate=yes", "TasksMax=16384", "SuccessExitStatus=1 133")
        unit = ["systemd-run", "--quiet", "--collect", f"--unit=clusterctl-{name}", "--slice=machine.slice"]
        unit += ["--service-type=exec", *(f"--property={setting}" for setting in settings), "--"]
        run([*unit, *inside, *nspawn, *words], what=f"starting {name}")
        return
    with console.open("ab") as output:
        spawn([*enter_cgroup(name), *inside, *nspawn, "--register=no", *words], output)


def spawn(argv: Sequence[str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program without a terminal, in a session of its own; it outlives its caller."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=TOOL_ENV,
        cwd="/",
        start_new_session=True,
    )


def check_started(machines: Collection[Machine]) -> None:
    """Find machines that did not live to boot, while their reason is at hand."""
    time.sleep(_EARLY_S)
    there = alive()
    if dead := [machine for machine in machines if machine.name not in there]:
        console = dead[0].folder / "console.log"
        said = console.read_text(errors="replace").strip()[-1000:] if console.exists() else ""
        raise ProvisionError(
            f"nodes did not start: {', '.join(machine.node.name for machine in dead)}",
            code="nodes-did-not-start",
            why=said or f"see `journalctl -u clusterctl-{dead[0].name}`",
        )


def stop(names: Collection[str]) -> None:
    """End machines at once and wait until they are gone: one that is still going keeps its link's name."""
    supervisors = {pid for name, pid in running().items() if name in names}
    _kill(supervisors, signal.SIGTERM)

    until = time.monotonic() + STOP_TIMEOUT_S
    while left := {name: pids for name, pids in alive().items() if name in names}:
        # A supervisor ends by itself once its machine has: killed, it would leave its links for later.
        _kill({pid for pids in left.values() for pid in pids} - supervisors, signal.SIGKILL)
        _pause(until, "nodes could not be stopped", left, fix="look at `ps` for systemd-nspawn")
    for name in names:
        remove_cgroups(name)


def end_rooted(folder: Path) -> None:
    """End whatever lives on the file systems of nodes below a folder and belongs to no machine we know."""

    until = time.monotonic() + STOP_TIMEOUT_S
    while left := rooted_under(folder):
        _kill(left, signal.SIGKILL)
        _pause(until, "processes of nodes could not be ended", left)


def _pause(until: float, what: str, left: Iterable[object], *, fix: str = "") -> None:
    """Wait a moment for what is still there; raise if the time is up."""
    if time.monotonic() > until:
        raise ProvisionError(what, code="nodes-not-removed", why=", ".join(map(str, left)), fix=fix)
    time.sleep(0.02)


def _kill(pids: Collection[int], sign: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


_CGROUP_PREFIX = "clusterctl-"
_IN_CGROUP = re.compile(rf"/{_CGROUP_PREFIX}(c[0-9a-f]{{6}}-\d{{3}})\b")


def enter_cgroup(machine: str) -> list[str]:
    """Make the machine's groups; returns the start of a command line that enters them and goes on."""
    cgroups = [root / f"{_CGROUP_PREFIX}{machine}" for root in _hierarchies()]
    try:
        for group in cgroups:
            group.mkdir(exist_ok=True)
    except OSError as exc:
        raise ProvisionError(
            "control groups can't be made here",
            code="no-control-groups",
            where=str(exc.filename),
            why=exc.strerror or str(exc),
            fix="in a container, run it with a writable /sys/fs/cgroup",
        ) from exc
    script = 'until [ "$1" = -- ]; do echo $$ >"$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'
    return ["sh", "-c", script, "sh", *map(str, cgroups), "--"]


def remove_cgroups(machine: str) -> None:
    """Remove the groups of a machine that has ended, deepest first; the kernel may need a moment."""
    until = time.monotonic() + STOP_TIMEOUT_S
    left = cgroups(machine)
    while left:
        for group in left:
            with suppress(ProvisionError):
                run(["find", str(group), "-depth", "-type", "d", "-delete"], what=f"removing {group}")
        if left := cgroups(machine):
            _pause(until, "control groups could not be removed", left)


def cgroups(machines: str) -> tuple[Path, ...]:
    """The groups there are of machines whose name begins so."""
    return tuple(
        group for root in _hierarchies() for group in sorted(root.glob(f"{_CGROUP_PREFIX}{machines}*"))
    )


def cgroup_members() -> Iterator[tuple[int, str]]:
    """The processes of all machines here, as (pid, machine), by our groups or systemd's units for them."""

    for process, groups in system.read_processes("cgroup"):
        # A zombie has no command line, and is gone for us.
        with suppress(OSError):
            if (found := _IN_CGROUP.search(groups)) and (process / "cmdline").read_bytes():
                yield int(process.name), found[1]


def _hierarchies() -> Iterator[Path]:
    """Where systemd keeps its tree: the unified hierarchy, and version 1's named one where it is used."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            yield Path(fields[4])
