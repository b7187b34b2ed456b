"""The operating system on which local nodes run: its tools, processes, mounts, settings and
networks.

A cluster's bridge is in its own network namespace, connected to this machine by a veth pair. So no
firewall of this machine (Docker's FORWARD DROP with br_netfilter, firewalld) sees traffic between
nodes. This machine has the first address of the subnet. Nodes have no route to other networks, and
can only answer this machine: a qdisc at the namespace's end of the pair drops everything else.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any, NamedTuple

from clusterctl.errors import MachineError, ProvisionError
from clusterctl.providers.local.layout import bridge_name, netns_name
from clusterctl.state.workspace import write_atomic

# sudo's secure_path, or a user's PATH, may lack the folders of ip, sshd and mount.
TOOL_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}

_running: set[subprocess.Popen[str]] = set()


def run(
    argv: Sequence[str], *, action: str, stdin: str | None = None, where: str = "", fix: str = ""
) -> str:
    """Run a tool and return its stdout. If the tool fails, raise a ProvisionError: "ACTION failed:
    ...".
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=TOOL_ENV,
        start_new_session=True,
    )
    _running.add(process)
    try:
        stdout, stderr = process.communicate(stdin)
    finally:
        _running.discard(process)
    if process.returncode != 0:
        output = (stderr or stdout).strip()[-1500:]
        if os.strerror(errno.ENOSPC) in output:
            fix = "free disk space on this machine: `df -h` and `df -i` show the full disk"
        raise ProvisionError(
            f"{action} failed",
            about="machine",
            where=where or " ".join(argv[:3]),
            why=output or f"exit {process.returncode}",
            fix=fix,
        )
    return stdout


def end_children() -> None:
    """Kill all running tools and their child processes, after the helper's caller has ended."""
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def progress(message: str) -> None:
    answer({"progress": message})


def waiting(message: str) -> None:
    answer({"waiting": message})


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201 - the protocol


def read_processes(name: str) -> Iterator[tuple[Path, str]]:
    """Yield each process's folder in /proc, and the text of its file ``name``. Skip unreadable
    files.
    """
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                yield folder, (folder / name).read_bytes().decode(errors="replace")


_DOOMED = ".removed-"
# Folder for trial mounts.
CHECK = ".check"


def mounted_under(folder: Path) -> tuple[Path, ...]:
    """Return the mount points at or below a folder, deepest first."""
    prefix = str(folder)
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == prefix or point.startswith(prefix + "/"):
            points.append(Path(point))
    return tuple(sorted(points, key=lambda p: len(p.parts), reverse=True))


def mount_overlay(lower: tuple[Path, ...], folder: Path) -> Path:
    """Mount layers (topmost first) at ``folder/root``. Changes go to ``folder/upper``."""
    root = folder / "root"
    upper = folder / "upper"
    work = folder / "work"
    if mounted_under(root):
        return root
    for part in (root, upper, work):
        part.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={':'.join(map(str, lower))},upperdir={upper},workdir={work}"
    run(
        ["mount", "-t", "overlay", "clusterctl", "-o", options, str(root)],
        action="mounting the overlay",
    )
    return root


def check_overlay(place: Path) -> None:
    """Raise a MachineError if no overlay can be mounted in a folder."""
    folder = place / CHECK
    lower = folder / "lower"
    try:
        lower.mkdir(parents=True, exist_ok=True)
        mount_overlay((lower,), folder)
    except (OSError, ProvisionError) as exc:
        raise MachineError(
            "overlay file systems can't be mounted on this machine",
            code="host-unfit",
            about="overlayfs",
            where=str(place),
            why=exc.why if isinstance(exc, ProvisionError) else str(exc),
            fix=f"use a kernel with overlayfs, and a {place.parent} that is not itself an overlay "
            "(in a container, mount a volume on it)",
        ) from exc
    finally:
        erase(folder)


def erase(folder: Path) -> None:
    """Unmount and delete the folder of a node or a cluster. Never delete anything in a mounted file
    system.

    An interrupted call leaves the folder complete or renamed, so that no node starts with missing
    files.
    """
    for point in mounted_under(folder):
        run(["umount", str(point)], action=f"unmounting {point}")
    gone = doomed(folder)
    if gone.exists():
        delete(gone)
    if folder.exists():
        delete(folder.rename(gone))


def doomed(folder: Path) -> Path:
    """Return the path to which ``erase`` renames a folder before deleting it: the same name, but
    hidden.
    """
    return folder if folder.name.startswith(".") else folder.with_name(f"{_DOOMED}{folder.name}")


def erase_doomed(place: Path) -> None:
    """Delete the remains of interrupted ``erase`` calls in a folder."""
    for folder in place.glob(f"{_DOOMED}*"):
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a folder with `rm`, because jobs can nest folders deeper than Python can delete
    them.
    """
    run(["rm", "-rf", "--one-file-system", "--", str(folder)], action=f"deleting {folder}")


def rooted_under(folder: Path) -> tuple[int, ...]:
    """Return pids of processes with a root directory on an overlay below ``folder``, even if
    unmounted.
    """
    option = f"upperdir={folder}/"
    return tuple(
        int(process.name)
        for process, mounts in read_processes("mountinfo")
        if any(line.split()[4] == "/" and option in line for line in mounts.splitlines())
    )


def in_network(namespace: Path) -> tuple[int, ...]:
    pids = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and (process / "ns/net").samefile(namespace):
                pids.append(int(process.name))
    return tuple(pids)


NODES_IN_DEFAULT_LIMITS = 16
# The default of 128 inotify instances suffices for about 25 systemds. All machines share a
# neighbour table of 1,024 entries, with n² entries for n machines: from 32 nodes on, MPI's
# connections fail.
_KERNEL_LIMITS = {
    "fs/inotify/max_user_instances": 8192,
    "fs/inotify/max_user_watches": 524288,
    "net/ipv4/neigh/default/gc_thresh2": 32768,
    "net/ipv4/neigh/default/gc_thresh3": 65536,
}
# With autogroup, Linux 6.18 may give a session all of a CPU for minutes while its threads wake each
# other, so that nodes neither boot nor answer. If systemd booted this machine, nodes are in control
# groups instead.
_AUTOGROUP = "kernel/sched_autogroup_enabled"


class KernelFiles(NamedTuple):
    """The folder of the kernel's settings, and the record of their values before clusterctl."""

    settings: Path = Path("/proc/sys")
    # In /run, because a reboot resets the limits too.
    record: Path = Path("/run/clusterctl-limits.json")


KERNEL = KernelFiles()


def raise_kernel_limits(nodes: int, kernel: KernelFiles = KERNEL) -> tuple[str, ...]:
    """Raise kernel limits that are too low for this number of nodes. Return notes about the
    changes.
    """
    if nodes <= NODES_IN_DEFAULT_LIMITS:
        return ()
    notes = []
    for name, target in _KERNEL_LIMITS.items():
        current = int((kernel.settings / name).read_text())
        if current < target:
            _set(kernel, name, current, target)
            notes.append(
                f"raised {name.replace('/', '.')} from {current} to {target} until the last "
                "cluster is down"
            )
    return tuple(notes)


def disable_autogroup(kernel: KernelFiles = KERNEL) -> tuple[str, ...]:
    """Turn off autogroup, which divides CPU time by sessions. Return a note if autogroup was on."""
    # Some kernels lack the setting, and containers can't write it. Nodes can run with autogroup
    # too.
    with suppress(OSError):
        if current := int((kernel.settings / _AUTOGROUP).read_text()):
            _set(kernel, _AUTOGROUP, current, 0)
            return (
                (
                    f"set {_AUTOGROUP.replace('/', '.')} from {current} to 0 until the last "
                    "cluster is down"
                ),
            )
    return ()


def _set(kernel: KernelFiles, name: str, current: int, target: int) -> None:
    original = json.loads(kernel.record.read_text()) if kernel.record.exists() else {}
    write_atomic(kernel.record, json.dumps({name: current} | original))
    (kernel.settings / name).write_text(str(target))


def restore_kernel_settings(kernel: KernelFiles = KERNEL) -> None:
    if kernel.record.exists():
        for name, value in json.loads(kernel.record.read_text()).items():
            # A container may be unable to write the setting.
            with suppress(OSError):
                (kernel.settings / name).write_text(str(value))
        kernel.record.unlink()


def has_dnf() -> bool:
    """Return whether this machine installs its packages with dnf, not apt-get."""
    return shutil.which("dnf") is not None and shutil.which("apt-get") is None


NETNS_DIR = Path("/run/netns")
_CANDIDATES = (
    IPv4Network("10.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
)
_TRIES = 4096
_CABLE = "up0"  # inner veth end
_NODE_LINK = "vb-"  # the start of the names that systemd-nspawn gives to nodes' veth ends
_OPEN = "nodes can reach services of this machine that listen on all addresses"


def used_networks() -> tuple[IPv4Network, ...]:
    """Return all IPv4 networks to which this machine has a route or an address, except default
    routes.

    Networks wider than /8 count as default routes: VPNs split these into 0.0.0.0/1 and 128.0.0.0/1.
    """
    routes = json.loads(
        _ip("-j", "-4", "route", "show", "table", "all", action="reading routes") or "[]"
    )
    links = json.loads(_ip("-j", "-4", "addr", "show", action="reading addresses") or "[]")
    destinations = [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    addresses = [info for link in links for info in link.get("addr_info", ())]
    networks = [IPv4Network(destination, strict=False) for destination in destinations]
    networks += [
        IPv4Interface(f"{info['local']}/{info['prefixlen']}").network for info in addresses
    ]
    return tuple(network for network in networks if network.prefixlen >= 8)  # noqa: PLR2004


def choose_subnet(
    cluster_id: str, used: Iterable[IPv4Network], requested: IPv4Network | None = None
) -> IPv4Network:
    """Return ``requested``, or by default a free /24 network. A MachineError rejects a network in
    use.
    """
    taken = tuple(used)
    if requested is not None:
        if clash := next((network for network in taken if network.overlaps(requested)), None):
            summary = f"subnet {requested} is in use on this machine"
            reason = f"it overlaps {clash}"
            fix = "choose another private /24, or remove provider.subnet from the spec"
            raise MachineError(
                summary,
                code="in-use",
                about="subnet",
                where="provider.subnet",
                why=reason,
                fix=fix,
            )
        return requested
    seed = zlib.crc32(cluster_id.encode())
    for block in _CANDIDATES:
        count = 2 ** (24 - block.prefixlen)
        base = int(block.network_address)
        for i in range(min(count, _TRIES)):
            candidate = IPv4Network((base + ((seed + i) % count << 8), 24))
            if not any(candidate.overlaps(network) for network in taken):
                return candidate
    reason = "this machine's routes cover all private address ranges"
    fix = "set provider.subnet to a private /24 that may be used"
    raise MachineError(
        "no free subnet for the nodes",
        code="in-use",
        about="all-subnets",
        why=reason,
        fix=fix,
    )


def create_network(cluster_id: str, subnet: IPv4Network) -> None:
    """Create the missing parts of a cluster's network: namespace, bridge and veth pair. Attach the
    running nodes, which may have been cut off.
    """
    netns = netns_name(cluster_id)
    bridge = bridge_name(cluster_id)
    link = netns
    inside = ("-n", netns)
    if not (NETNS_DIR / netns).exists():
        _ip("netns", "add", netns, action="creating the network namespace")
    if bridge not in _links(*inside):
        _ip(*inside, *"link set lo up".split(), action="starting loopback")
        _ip(
            *inside,
            *f"link add {bridge} type bridge forward_delay 0".split(),
            action="creating the bridge",
        )
        _ip(*inside, *f"link set {bridge} up".split(), action="starting the bridge")
    if link not in _links():
        cable = f"link add {link} type veth peer name {_CABLE} netns {netns}"
        _ip(*cable.split(), action="creating the veth pair")
    _ip(*inside, *f"link set {_CABLE} master {bridge} up".split(), action="attaching the veth pair")
    _ip(
        *f"addr replace {subnet[1]}/{subnet.prefixlen} dev {link}".split(),
        action="addressing the veth pair",
    )
    _ip("link", "set", link, "up", action="starting the veth pair")
    for name, facts in _links(*inside).items():
        is_attached = facts.get("master") == bridge and "UP" in facts["flags"]
        if name.startswith(_NODE_LINK) and not is_attached:
            words = f"link set {name} master {bridge} up"
            _ip(*inside, *words.split(), action="attaching a node")


def close_network(cluster_id: str, subnet: IPv4Network) -> tuple[str, ...]:
    """Drop packets from nodes to this machine, except answers. Return a note if the filters can't
    be set.
    """
    if shutil.which("tc", path=TOOL_ENV["PATH"]) is None:
        return (f"{_OPEN}: `tc` is missing; install {'iproute-tc' if has_dnf() else 'iproute2'}",)
    tc = ["tc", "-n", netns_name(cluster_id)]
    lines = sorting(subnet)
    filters = sum(line.startswith("filter ") for line in lines)
    if (
        run([*tc, "filter", "show", "dev", _CABLE], action="reading filters").count("flowid 1:")
        == filters
    ):
        return ()
    remove_half_made = [*tc, "qdisc", "delete", "dev", _CABLE, "root"]
    # Usually there is no qdisc to remove.
    with suppress(ProvisionError):
        run(remove_half_made, action="removing filters")
    try:
        run(
            [*tc, "-batch", "-"],
            stdin="\n".join(lines) + "\n",
            action="creating the filters for nodes' packets",
        )
    except ProvisionError as exc:
        with suppress(ProvisionError):
            run(remove_half_made, action="removing filters")
        return (f"{_OPEN}: {exc.why}",)
    return ()


def sorting(subnet: IPv4Network) -> tuple[str, ...]:
    """Return the ``tc -batch`` lines that filter the packets from nodes to this machine.

    Answers take HTB's direct class 1:0; all other packets go to a class with a qdisc that drops
    them. No classifier actions are used, because some kernels lack them. A TCP packet with ACK or
    RST counts as an answer, because such packets open no connection.
    """
    # IPv4 without options or fragments, from a node to this machine's address in the subnet.
    from_nodes = (
        f"match u8 0x45 0xff at 0 match u16 0 0x3fff at 6 match ip src {subnet} match ip dst "
        f"{subnet[1]}/32"
    )
    answers = [f"match ip protocol 6 0xff match u8 {bit} {bit} at 33" for bit in ("0x10", "0x04")]
    # Echo reply, destination unreachable, echo request and time exceeded, but no redirect.
    answers += [f"match ip protocol 1 0xff match u8 {kind} 0xff at 20" for kind in (0, 3, 8, 11)]
    parent = f"add dev {_CABLE} parent 1:"
    return (
        f"qdisc add dev {_CABLE} root handle 1: htb default 2",
        f"class {parent} classid 1:2 htb rate 8bit quantum 1514",
        f"qdisc add dev {_CABLE} parent 1:2 handle 2: blackhole",
        f"filter {parent} protocol arp pref 1 u32 match u32 0 0 flowid 1:0",
        *(
            f"filter {parent} protocol ip pref 2 u32 {from_nodes} {answer} flowid 1:0"
            for answer in answers
        ),
    )


def remove_network(cluster_id: str) -> None:
    """Remove a cluster's network. Deleting the namespace also removes the links in it."""
    name = netns_name(cluster_id)
    if name in _links():
        _ip("link", "delete", name, action="removing the veth pair")
    if (NETNS_DIR / name).exists():
        _ip("netns", "delete", name, action="removing the network namespace")


def remove_netns_folder() -> None:
    """Unmount and remove the folder /run/netns, which `ip netns` has created, if the folder is
    empty.
    """
    if not NETNS_DIR.is_dir() or any(NETNS_DIR.iterdir()):
        return
    # If another process is just creating a namespace, the folder stays.
    with suppress(ProvisionError, OSError):
        for point in mounted_under(NETNS_DIR):
            run(["umount", str(point)], action="unmounting the folder of network namespaces")
        NETNS_DIR.rmdir()


def _links(*inside: str) -> dict[str, dict[str, Any]]:
    """Return network interface -> its properties, as `ip` shows them."""
    shown = json.loads(_ip(*inside, "-j", "link", "show", action="reading links") or "[]")
    return {link["ifname"]: link for link in shown if "ifname" in link}


def _ip(*words: str, action: str) -> str:
    return run(["ip", *words], action=action)
