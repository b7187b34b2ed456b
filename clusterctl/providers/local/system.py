"""The operating system under local nodes: its tools, processes, mounts, settings and networks.

A cluster's bridge lives in a network namespace of its own, with one cable from this machine into it: no
firewall of this machine (Docker's FORWARD DROP with br_netfilter, firewalld) ever sees traffic between nodes.
This machine has the first address of the subnet; nodes have no route out. They send this machine nothing but
answers to what it asks them: what leaves their namespace by the cable is sorted in there, by a qdisc.
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
from typing import Any

from clusterctl.errors import MachineError, ProvisionError
from clusterctl.providers.local.layout import bridge_name, netns_name
from clusterctl.state.workspace import write_atomic

# sudo's secure_path, or a user's PATH, may lack the places where ip, sshd and mount live.
TOOL_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}

_running: set[subprocess.Popen[str]] = set()


def run(argv: Sequence[str], *, what: str, stdin: str | None = None, where: str = "", fix: str = "") -> str:
    """Run a tool to its end and return its stdout. ``where`` and ``fix`` are for the error."""
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
        said = (stderr or stdout).strip()[-1500:]
        if os.strerror(errno.ENOSPC) in said:
            fix = "make room on this machine: `df -h` and `df -i` show which disk is full"
        raise ProvisionError(
            f"{what} failed",
            code="machine-command-failed",
            where=where or " ".join(argv[:3]),
            why=said or f"exit {process.returncode}",
            fix=fix,
        )
    return stdout


def end_children() -> None:
    """End the tools that still run, with everything they started: the caller is gone."""
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def progress(message: str) -> None:
    answer({"progress": message})


def waiting(message: str) -> None:
    answer({"waiting": message})


def answer(message: dict[str, Any]) -> None:
    """Send the caller a message: a line of JSON."""
    print(json.dumps(message), flush=True)  # noqa: T201 - the protocol


def read_processes(name: str) -> Iterator[tuple[Path, str]]:
    """The folder below /proc of each process, with the text of a file in it.

    A process that ends meanwhile, or that we may not look into, is passed over.
    """
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                yield folder, (folder / name).read_bytes().decode(errors="replace")


_DOOMED = ".removed-"
CHECK = ".check"  # a folder to try a mount in


def mounted_under(folder: Path) -> tuple[Path, ...]:
    """Mount points at or below a folder, deepest first."""
    prefix = str(folder)
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == prefix or point.startswith(prefix + "/"):
            points.append(Path(point))
    return tuple(sorted(points, key=lambda p: len(p.parts), reverse=True))


def mount_disk(folder: Path, size_mib: int) -> Path:
    """Mount ``folder/disk``, a file system of that size in a sparse file, made if it is not there yet.

    Only the blocks that are in use take room on this machine.
    """
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir(parents=True, exist_ok=True)
    if not image.exists():
        unfinished = image.with_suffix(".new")
        with unfinished.open("wb") as file:
            file.truncate(size_mib << 20)
        run(["mkfs.ext4", "-q", "-F", "-m", "0", str(unfinished)], what="making a node's disk")
        unfinished.rename(image)
    if not mounted_under(point):
        run(["mount", "-o", "loop,discard", str(image), str(point)], what="mounting a node's disk")
    return point


def disk_mib(folder: Path) -> int | None:
    """The size of the disk that ``mount_disk`` made there; None if there is none."""
    image = folder / "disk.img"
    return image.stat().st_size >> 20 if image.exists() else None


def loops_under(folder: Path) -> tuple[str, ...]:
    """Loop devices whose file lies below a folder, removed already or not."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it was just given back
            if backing.read_text().startswith(f"{folder}/"):
                found.append(backing.parts[3])
    return tuple(found)


def mount_overlay(lower: tuple[Path, ...], folder: Path, changes: Path | None = None) -> Path:
    """Mount ``folder/root`` over the lower layers, topmost first; `upper` in ``changes`` takes the changes.

    ``changes`` is ``folder`` itself unless it is given.
    """
    changes = changes or folder
    root, upper, work = folder / "root", changes / "upper", changes / "work"
    if mounted_under(root):
        return root
    for part in (root, upper, work):
        part.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={':'.join(map(str, lower))},upperdir={upper},workdir={work}"
    run(["mount", "-t", "overlay", "clusterctl", "-o", options, str(root)], what="mounting the overlay")
    return root


def check_overlay(place: Path) -> None:
    """Refuse a folder in which no overlay can be mounted."""
    folder = place / CHECK
    lower = folder / "lower"
    try:
        lower.mkdir(parents=True, exist_ok=True)
        mount_overlay((lower,), folder)
    except (OSError, ProvisionError) as exc:
        raise MachineError(
            "overlay filesystems can't be mounted here",
            code="no-overlayfs",
            where=str(place),
            why=exc.why if isinstance(exc, ProvisionError) else str(exc),
            fix=f"use a kernel with overlayfs, and a {place.parent} that is not itself an overlay "
            "(in a container, mount a volume there)",
        ) from exc
    finally:
        erase(folder)


def erase(folder: Path) -> None:
    """Unmount and delete a node's or a cluster's folder. Never walks into something still mounted.

    Whatever ends this midway leaves the folder whole or gone: a node that lacks some files would start.
    """
    for point in mounted_under(folder):
        run(["umount", str(point)], what=f"unmounting {point}")
    gone = doomed(folder)
    if gone.exists():
        delete(gone)
    if folder.exists():
        delete(folder.rename(gone))


def doomed(folder: Path) -> Path:
    """What a folder is called while it is deleted. One that is hidden is never taken for whole."""
    return folder if folder.name.startswith(".") else folder.with_name(f"{_DOOMED}{folder.name}")


def erase_doomed(place: Path) -> None:
    """Delete what an ``erase`` that was ended midway has left in there."""
    for folder in place.glob(f"{_DOOMED}*"):
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a folder with `rm`: a job can nest folders deeper than Python's recursion, or a path, may go."""
    run(["rm", "-rf", "--one-file-system", "--", str(folder)], what=f"deleting {folder}")


def rooted_under(folder: Path) -> tuple[int, ...]:
    """Processes whose root is an overlay with its changes below the folder, still mounted here or not."""
    own = f"upperdir={folder}/"
    return tuple(
        int(process.name)
        for process, mounts in read_processes("mountinfo")
        if any(line.split()[4] == "/" and own in line for line in mounts.splitlines())
    )


def in_network(namespace: Path) -> tuple[int, ...]:
    """Processes in a network namespace."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and (process / "ns/net").samefile(namespace):
                found.append(int(process.name))
    return tuple(found)


NODES_IN_DEFAULT_LIMITS = 16
# About 25 systemds fit in the default of 128 inotify instances. The neighbours of all machines, n times n of
# them, share one table of 1,024: from 32 nodes on, MPI's connections fail.
_KERNEL_LIMITS = {
    "fs/inotify/max_user_instances": 8192,
    "fs/inotify/max_user_watches": 524288,
    "net/ipv4/neigh/default/gc_thresh2": 32768,
    "net/ipv4/neigh/default/gc_thresh3": 65536,
}
# Linux 6.18 gives a session (autogroup) all of a CPU for minutes while its threads wake each other there:
# nodes neither boot nor answer. Where systemd has booted the machine, nodes are in control groups instead.
_AUTOGROUP = "kernel/sched_autogroup_enabled"
_SYS = Path("/proc/sys")
_SETTINGS_RECORD = Path("/run/clusterctl-limits.json")  # a reboot forgets it, and the limits too


def raise_kernel_limits(nodes: int) -> tuple[str, ...]:
    """Raise what is too low for so many nodes; returns what was changed, in words."""
    if nodes <= NODES_IN_DEFAULT_LIMITS:
        return ()
    said = []
    for name, wanted in _KERNEL_LIMITS.items():
        now = int((_SYS / name).read_text())
        if now < wanted:
            _set(name, now, wanted)
            said.append(
                f"raised {name.replace('/', '.')} from {now} to {wanted} until the last cluster is down"
            )
    return tuple(said)


def disable_autogroup() -> tuple[str, ...]:
    """Have processes share the CPUs, not sessions, where that can be chosen; returns what was changed."""
    with suppress(OSError):  # not in every kernel, nor for a container to write: nodes run all the same
        if now := int((_SYS / _AUTOGROUP).read_text()):
            _set(_AUTOGROUP, now, 0)
            return (f"set {_AUTOGROUP.replace('/', '.')} from {now} to 0 until the last cluster is down",)
    return ()


def _set(name: str, now: int, wanted: int) -> None:
    original = json.loads(_SETTINGS_RECORD.read_text()) if _SETTINGS_RECORD.exists() else {}
    write_atomic(_SETTINGS_RECORD, json.dumps({name: now} | original))
    (_SYS / name).write_text(str(wanted))


def restore_kernel_settings() -> None:
    if _SETTINGS_RECORD.exists():
        for name, value in json.loads(_SETTINGS_RECORD.read_text()).items():
            with suppress(OSError):  # not ours to write after all
                (_SYS / name).write_text(str(value))
        _SETTINGS_RECORD.unlink()


def has_dnf() -> bool:
    """Whether packages of this machine are dnf's, whatever image it can make."""
    return shutil.which("dnf") is not None and shutil.which("apt-get") is None


NETNS_DIR = Path("/run/netns")
_CANDIDATES = (IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))
_TRIES = 4096
_CABLE = "up0"  # its end in the cluster's network
_OPEN = "nodes reach services of this machine that listen on all addresses"


def used_networks() -> tuple[IPv4Network, ...]:
    """Every IPv4 network that this machine routes or holds an address in, but for default routes.

    VPNs split the default route in two (0.0.0.0/1 and 128.0.0.0/1): anything wider than /8 counts as default.
    """
    routes = json.loads(_ip("-j", "-4", "route", "show", "table", "all", what="reading routes") or "[]")
    links = json.loads(_ip("-j", "-4", "addr", "show", what="reading addresses") or "[]")
    destinations = [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    addresses = [info for link in links for info in link.get("addr_info", ())]
    found = [IPv4Network(destination, strict=False) for destination in destinations]
    found += [IPv4Interface(f"{info['local']}/{info['prefixlen']}").network for info in addresses]
    return tuple(network for network in found if network.prefixlen >= 8)  # noqa: PLR2004


def choose_subnet(
    cluster_id: str, used: Iterable[IPv4Network], wanted: IPv4Network | None = None
) -> IPv4Network:
    """A private /24 that nothing uses. The id decides where the search starts: clusters spread out."""
    taken = tuple(used)
    if wanted is not None:
        if clash := next((network for network in taken if network.overlaps(wanted)), None):
            what = f"subnet {wanted} is in use on this machine"
            why = f"it overlaps {clash}"
            fix = "choose another private /24, or leave provider.subnet out"
            raise MachineError(what, code="subnet-in-use", where="provider.subnet", why=why, fix=fix)
        return wanted
    seed = zlib.crc32(cluster_id.encode())
    for block in _CANDIDATES:
        count, base = 2 ** (24 - block.prefixlen), int(block.network_address)
        for i in range(min(count, _TRIES)):
            candidate = IPv4Network((base + ((seed + i) % count << 8), 24))
            if not any(candidate.overlaps(network) for network in taken):
                return candidate
    why = "this machine's routes cover all private address ranges"
    fix = "name a private /24 that may be used as provider.subnet"
    raise MachineError("no free subnet for the nodes", code="no-free-subnet", why=why, fix=fix)


def create_network(cluster_id: str, subnet: IPv4Network) -> None:
    """Make the namespace, the bridge and the cable, or whatever of them is missing."""
    netns, bridge = netns_name(cluster_id), bridge_name(cluster_id)
    link, inside = netns, ("-n", netns)
    if not (NETNS_DIR / netns).exists():
        _ip("netns", "add", netns, what="making the network namespace")
    if not _has_link(bridge, *inside):
        _ip(*inside, *"link set lo up".split(), what="starting loopback")
        _ip(*inside, *f"link add {bridge} type bridge forward_delay 0".split(), what="making the bridge")
        _ip(*inside, *f"link set {bridge} up".split(), what="starting the bridge")
    if not _has_link(link):
        cable = f"link add {link} type veth peer name {_CABLE} netns {netns}"
        _ip(*cable.split(), what="laying the cable into the cluster's network")
    _ip(*inside, *f"link set {_CABLE} master {bridge} up".split(), what="plugging the cable in")
    _ip(*f"addr replace {subnet[1]}/{subnet.prefixlen} dev {link}".split(), what="addressing the cable")
    _ip("link", "set", link, "up", what="starting the cable")


def close_network(cluster_id: str, subnet: IPv4Network) -> tuple[str, ...]:
    """Let nothing but answers through the cable to this machine; says so where that can't be done."""
    if shutil.which("tc", path=TOOL_ENV["PATH"]) is None:
        return (f"{_OPEN}: there is no `tc`, of the package {'iproute-tc' if has_dnf() else 'iproute2'}",)
    tc, lines = ["tc", "-n", netns_name(cluster_id)], sorting(subnet)
    made = sum(line.startswith("filter ") for line in lines)
    if run([*tc, "filter", "show", "dev", _CABLE], what="reading filters").count("flowid 1:") == made:
        return ()
    remove_half_made = [*tc, "qdisc", "delete", "dev", _CABLE, "root"]
    with suppress(ProvisionError):  # there is none, as a rule
        run(remove_half_made, what="removing filters")
    try:
        run([*tc, "-batch", "-"], stdin="\n".join(lines) + "\n", what="sorting what nodes send here")
    except ProvisionError as exc:
        with suppress(ProvisionError):
            run(remove_half_made, what="removing filters")
        return (f"{_OPEN}: {exc.why}",)
    return ()


def sorting(subnet: IPv4Network) -> tuple[str, ...]:
    """The lines for ``tc -batch`` that sort what leaves the cluster's network by the cable.

    An answer goes HTB's direct way, 1:0; all else into the class whose qdisc drops it. No classifier's action
    is used, which some kernels lack. TCP is an answer with ACK or RST set: nothing connects by these.
    """
    # IPv4 without options, no fragment, from a node to this machine's address in the subnet.
    ours = (
        f"match u8 0x45 0xff at 0 match u16 0 0x3fff at 6 match ip src {subnet} match ip dst {subnet[1]}/32"
    )
    answers = [f"match ip protocol 6 0xff match u8 {bit} {bit} at 33" for bit in ("0x10", "0x04")]
    # Echo reply, destination unreachable, echo request, time exceeded; no redirect.
    answers += [f"match ip protocol 1 0xff match u8 {kind} 0xff at 20" for kind in (0, 3, 8, 11)]
    to = f"add dev {_CABLE} parent 1:"
    return (
        f"qdisc add dev {_CABLE} root handle 1: htb default 2",
        f"class {to} classid 1:2 htb rate 8bit quantum 1514",
        f"qdisc add dev {_CABLE} parent 1:2 handle 2: blackhole",
        f"filter {to} protocol arp pref 1 u32 match u32 0 0 flowid 1:0",
        *(f"filter {to} protocol ip pref 2 u32 {ours} {answer} flowid 1:0" for answer in answers),
    )


def remove_network(cluster_id: str) -> None:
    """Take the network away; the namespace takes its links along."""
    name = netns_name(cluster_id)
    if _has_link(name):
        _ip("link", "delete", name, what="removing the cable")
    if (NETNS_DIR / name).exists():
        _ip("netns", "delete", name, what="removing the network namespace")


def remove_netns_folder() -> None:
    """`ip netns` mounts its folder at first use and leaves it; take it away once it is empty."""
    if not NETNS_DIR.is_dir() or any(NETNS_DIR.iterdir()):
        return
    with suppress(ProvisionError, OSError):  # somebody makes one right now, so it is theirs
        for point in mounted_under(NETNS_DIR):
            run(["umount", str(point)], what="unmounting the folder of network namespaces")
        NETNS_DIR.rmdir()


def _has_link(name: str, *inside: str) -> bool:
    shown = json.loads(_ip(*inside, "-j", "link", "show", what="reading links") or "[]")
    return any(link.get("ifname") == name for link in shown)


def _ip(*words: str, what: str) -> str:
    return run(["ip", *words], what=what)
