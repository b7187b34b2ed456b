"""A node: an overlay on the image, booted by systemd-nspawn in its own control group.

The process table shows whether a node runs. No file records it, because a file would be wrong after
crashes, reboots and manual changes.

`systemd-nspawn --keep-unit` puts a machine below the control group of the process that starts it.
Machines started from the same shell would share a group, and their systemds would write into the
same `system.slice`. So each machine gets its own group, unless this machine's systemd creates a
unit for it.
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
from clusterctl.hosts.remote_host_files import with_block
from clusterctl.providers.local import layout, system
from clusterctl.providers.local.system import TOOL_ENV, mount_overlay, rooted_under, run
from clusterctl.spec.names import ADMIN_ID, key_mark
from clusterctl.state.workspace import has_content

# Nodes get long to stop, because this machine may be busy.
STOP_TIMEOUT_S = 45.0
_EARLY_S = 0.1
# The role `common` replaces the text between these lines.
HOSTS_BLOCK = (
    "# BEGIN hosts of this cluster (clusterctl)",
    "# END hosts of this cluster (clusterctl)",
)
# Every account of this machine can connect to a node's sshd.
_SSHD = (
    "PasswordAuthentication no\n"
    "KbdInteractiveAuthentication no\n"
    "PermitRootLogin prohibit-password\n"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """A node as a systemd-nspawn machine."""

    cluster_id: str
    node: layout.NspawnNode
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


def first_hosts_file(name: str, address: str) -> str:
    """Return /etc/hosts of a node before its configuration.

    The node's own line is in the block of all hosts, because with a second line outside the block,
    `hostname --ip-address` would print the address twice.
    """
    return with_block("127.0.0.1 localhost\n", f"{address} {name}\n", *HOSTS_BLOCK)


def booted_with_systemd() -> bool:
    """Return whether systemd has booted this machine (sd_booted(3)). Then each node gets its own
    unit.
    """
    return Path("/run/systemd/system").is_dir()


def running() -> Mapping[str, int]:
    """Return machine name -> pid, for all systemd-nspawn processes on this machine.

    A command that ends with systemd-nspawn becomes it: see ``launch``. Processes inside containers
    are left
    out: an image built in a container may have the same name.
    """
    own_namespace = Path("/proc/self/ns/pid").readlink()
    option = "--machine="
    pids = {}
    for process, line in system.read_processes("cmdline"):
        words = line.split("\0")
        names = [word.removeprefix(option) for word in words if word.startswith(option)]
        programs = [Path(word).name for word in words]
        if names and "systemd-nspawn" in programs and programs[0] != "systemd-run":
            with suppress(OSError):
                is_own = (process / "ns/pid").readlink() == own_namespace
                if is_own and (programs[0] == "systemd-nspawn" or names[-1] not in pids):
                    pids[names[-1]] = int(process.name)
    return pids


def alive() -> Mapping[str, tuple[int, ...]]:
    """Return machine name -> pids, systemd-nspawn's first. Include machines that outlive
    systemd-nspawn.
    """
    pids_by_name: dict[str, list[int]] = {name: [pid] for name, pid in running().items()}
    for pid, name in cgroup_members():
        if pid not in pids_by_name.setdefault(name, []):
            pids_by_name[name].append(pid)
    return {name: tuple(pids) for name, pids in pids_by_name.items()}


def prepare(
    machine: Machine,
    lower: tuple[Path, ...],
    subnet: IPv4Network,
    admin_key: str,
    files: Sequence[layout.PlacedFile] = (),
) -> None:
    """Mount the root folder of a node that is not running, and write ``files`` and the node's own
    settings.

    Symbolic links are not followed, because root in the node may have created them.
    """
    root = mount_overlay(lower, machine.folder)
    name = machine.node.name
    address = layout.address(subnet, machine.number)
    _place(root, "etc/hostname", f"{name}\n")
    # The number must be lower than that of systemd's 80-container-host0.network, which uses DHCP.
    network_file = (
        "[Match]\n"
        "Name=host0\n"
        "\n"
        "[Network]\n"
        f"Address={address}/{subnet.prefixlen}\n"
        "LinkLocalAddressing=no\n"
    )
    _place(root, "etc/systemd/network/10-host0.network", network_file)
    if not (machine.folder / "upper/etc/hosts").is_file():
        _place(root, "etc/hosts", first_hosts_file(name, str(address)))
    for file in files:
        path = file.path.lstrip("/")
        data = b64decode(file.data)
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
    """Create an SSH host key with this comment. Return the public key."""
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file)]
    run(keygen, action="making a host key")
    return public_key(file)


def public_key(file: Path) -> str:
    return " ".join(file.with_suffix(".pub").read_text().split()[:2])


def make_homes(request: layout.ClusterRequest, shared: Path, lower: Sequence[Path]) -> None:
    """Create the users' homes on a new cluster's empty shared folder. A rename adds all homes at
    once.
    """
    top = layout.cluster_dir(request.id) / "homes"
    # An interrupted `up` leaves this folder.
    if top.exists():
        system.erase(top)
    (top / f".clusterctl-{request.id}").mkdir(parents=True)
    mark = key_mark(request.name)
    for user in request.homes:
        home = top / user.name
        for layer in reversed(lower):
            if (layer / "etc/skel").is_dir():
                shutil.copytree(layer / "etc/skel", home, symlinks=True, dirs_exist_ok=True)
        lines = (f"# BEGIN{mark}", *user.keys, f"# END{mark}")
        _place(home, ".ssh/authorized_keys", "".join(f"{line}\n" for line in lines), mode=0o600)
        for folder in (home / ".ssh", home):
            folder.chmod(0o700)
        for path in (home, *home.rglob("*")):
            os.lchown(path, user.uid, user.uid)
    top.rename(shared / "home")


def _place(root: Path, name: str, text: str | bytes, *, mode: int = 0o644) -> Path:
    path = root / name
    for folder in reversed(path.relative_to(root).parents):
        if (root / folder).is_symlink():
            message = "a folder of the node was replaced by a symbolic link"
            fix = "remove the link"
            raise ProvisionError(
                message, code="host-unfit", about="folder-link", where=str(root / folder), fix=fix
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    # An unchanged file is not written again, so that a node can start even if the disk is full.
    if not has_content(path, data, mode):
        # Removing the file first replaces a link instead of following it.
        path.unlink(missing_ok=True)
        path.touch(mode=mode)
        path.write_bytes(data)
    return path


def pin(machine: Machine, pids: Collection[int]) -> None:
    """Move all threads of a running node to its CPU cores, which change with the number of
    nodes.
    """
    for pid in pids:
        # The process may have ended.
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), machine.node.cores)


def start(
    machine: Machine, shared: Path, words: Sequence[str] = (), environment: Sequence[str] = ()
) -> None:
    """Boot a node and return at once. The node keeps running when this process ends.

    words: options for the node's systemd.
    environment: command prefix that sets the environment of systemd-nspawn.
    """
    nspawn = ["systemd-nspawn", "--quiet", "--boot", "--keep-unit", f"--directory={machine.root}"]
    nspawn += [
        f"--machine={machine.name}",
        f"--hostname={machine.node.name}",
        f"--bind={shared}:{layout.SHARED}",
    ]
    nspawn += [f"--network-bridge={layout.bridge_name(machine.cluster_id)}"]
    nspawn += ["--resolv-conf=off", "--timezone=off", "--link-journal=no"]
    inside = ["nsenter", f"--net={system.NETNS_DIR / layout.netns_name(machine.cluster_id)}"]
    inside += environment
    if machine.node.cores:
        inside += ["taskset", "--cpu-list", ",".join(map(str, machine.node.cores))]
    launch(machine.name, inside, nspawn, machine.folder / "console.log", words)


def launch(
    name: str,
    inside: Sequence[str],
    nspawn: Sequence[str],
    console: Path,
    words: Sequence[str] = (),
) -> None:
    """Start systemd-nspawn in its own unit or control group, and return at once.

    inside: command prefix for systemd-nspawn. words: the command to run, or options of the node's
        systemd.
    """
    if booted_with_systemd():
        # At a shutdown systemd stops units before it unmounts file systems. In a control group of
        # our own, nodes would outlive sessions too, but would run until the last kill, and
        # /var/lib/clusterctl could not be unmounted.
        # systemd's own systemd-nspawn@.service has the same settings. Exit status 1 is normal,
        # because `stop` kills machines.
        settings = ("KillMode=mixed", "Delegate=yes", "TasksMax=16384", "SuccessExitStatus=1 133")
        unit = [
            "systemd-run",
            "--quiet",
            "--collect",
            f"--unit=clusterctl-{name}",
            "--slice=machine.slice",
        ]
        unit += ["--service-type=exec", *(f"--property={setting}" for setting in settings), "--"]
        run([*unit, *inside, *nspawn, *words], action=f"starting {name}")
        return
    with console.open("ab") as output:
        spawn([*enter_cgroup(name), *inside, *nspawn, "--register=no", *words], output)


def spawn(argv: Sequence[str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program without a terminal, in its own session, so that it outlives its caller."""
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
    """Raise a ProvisionError, with a node's console output, if nodes ended right after their
    start.
    """
    time.sleep(_EARLY_S)
    running_names = alive()
    if dead := [machine for machine in machines if machine.name not in running_names]:
        console = dead[0].folder / "console.log"
        output = console.read_text(errors="replace").strip()[-1000:] if console.exists() else ""
        raise ProvisionError(
            f"nodes did not start: {', '.join(machine.node.name for machine in dead)}",
            code="not-ready",
            about="start",
            why=output,
            fix=f"see `journalctl -u clusterctl-{dead[0].name}` on this machine",
        )


def stop(names: Collection[str]) -> None:
    """Kill machines and wait for their end. Until then, their names and network links can't be
    reused.
    """
    supervisors = {pid for name, pid in running().items() if name in names}
    _kill(supervisors, signal.SIGTERM)

    until = time.monotonic() + STOP_TIMEOUT_S
    while remaining := {name: pids for name, pids in alive().items() if name in names}:
        # A supervisor ends after its machine. Killing the supervisor would leave its links behind.
        _kill({pid for pids in remaining.values() for pid in pids} - supervisors, signal.SIGKILL)
        _pause(
            until, "nodes could not be stopped", remaining, fix="see `ps -ef | grep systemd-nspawn`"
        )
    for name in names:
        remove_cgroups(name)


def end_rooted(folder: Path) -> None:
    """Kill all processes that use the root folder of a node, below ``folder``, as their root
    directory.
    """

    until = time.monotonic() + STOP_TIMEOUT_S
    while remaining := rooted_under(folder):
        _kill(remaining, signal.SIGKILL)
        _pause(until, "processes of nodes could not be ended", remaining)


def _pause(until: float, summary: str, remaining: Iterable[object], *, fix: str = "") -> None:
    """Wait 20 ms. After the time ``until``, raise a ProvisionError that lists the ``remaining``
    items.
    """
    if time.monotonic() > until:
        raise ProvisionError(
            summary, code="leftovers", about="nodes", why=", ".join(map(str, remaining)), fix=fix
        )
    time.sleep(0.02)


def _kill(pids: Collection[int], sign: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


_CGROUP_PREFIX = "clusterctl-"
_IN_CGROUP = re.compile(rf"/{_CGROUP_PREFIX}(c[0-9a-f]{{6}}-\d{{3}})\b")


def enter_cgroup(machine: str) -> list[str]:
    """Create the control groups of a machine. Return the prefix that makes a command run in the
    groups.
    """
    cgroups = [root / f"{_CGROUP_PREFIX}{machine}" for root in _hierarchies()]
    try:
        for group in cgroups:
            group.mkdir(exist_ok=True)
    except OSError as exc:
        raise ProvisionError(
            "control groups can't be created on this machine",
            code="host-unfit",
            about="control-groups",
            where=str(exc.filename),
            why=exc.strerror or str(exc),
            fix="in a container, mount /sys/fs/cgroup writable",
        ) from exc
    script = (
        'until [ "$1" = -- ]; do echo $$ >"$1/cgroup.procs" || exit 1; shift; done; shift; exec '
        '"$@"'
    )
    return ["sh", "-c", script, "sh", *map(str, cgroups), "--"]


def remove_cgroups(machine: str) -> None:
    """Remove the control groups of machines that have ended. Retry until the kernel allows the
    removal.
    """
    until = time.monotonic() + STOP_TIMEOUT_S
    remaining = cgroups(machine)
    while remaining:
        for group in remaining:
            with suppress(ProvisionError):
                run(
                    ["find", str(group), "-depth", "-type", "d", "-delete"],
                    action=f"removing {group}",
                )
        if remaining := cgroups(machine):
            _pause(until, "control groups could not be removed", remaining)


def cgroups(machines: str) -> tuple[Path, ...]:
    """Return the control groups of all machines with names that start with ``machines``."""
    return tuple(
        group
        for root in _hierarchies()
        for group in sorted(root.glob(f"{_CGROUP_PREFIX}{machines}*"))
    )


def cgroup_members() -> Iterator[tuple[int, str]]:
    """Yield (pid, machine name) of each process in the control group or systemd unit of a
    machine.
    """

    for process, groups in system.read_processes("cgroup"):
        # A zombie has no command line and counts as ended.
        with suppress(OSError):
            if (match := _IN_CGROUP.search(groups)) and (process / "cmdline").read_bytes():
                yield int(process.name), match[1]


def limits_memory() -> bool:
    """Return whether the kernel limits the memory of groups of processes in a node.

    Only version 1 of control groups was tried. There a unit of systemd has no group of its own for
    the memory.
    """
    has_group = any((root / "memory.limit_in_bytes").exists() for root in _hierarchies())
    return has_group and not booted_with_systemd()


def _hierarchies() -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        folder = Path(fields[4])
        controllers = set(options.split(",")) if kind == "cgroup" else set()
        # In a container, the memory's may be read-only.
        has_memory = "memory" in controllers and os.access(folder, os.W_OK)
        if kind == "cgroup2" or "name=systemd" in controllers or has_memory:
            yield folder
