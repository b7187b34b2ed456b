# ruff: noqa: UP032 - hosts may have Python 3.6
"""Reports facts and checksums of a host. Runs on the host as root: standard library only, Python
3.6.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are JSON objects; ``clusterctl.hosts.probe`` has the types.
The program changes nothing. A checksum is a short text that changes if an item, such as a file,
changes. Python 3.6 lets even a host that is too old for a cluster report its release.
"""

import glob
import grp
import hashlib
import json
import os
import platform
import pwd
import re
import socket
import stat
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from clusterctl.hosts.remote_run import ASK_S, read, run
from clusterctl.util.remote_rights import acting_as
from clusterctl.util.remote_wanted import content_mark, mark_of_file, read_wanted

PCI_DEVICES = "/sys/bus/pci/devices"
# A PCI bridge of NVIDIA is an NVSwitch.
PCI_DISPLAY = 0x03
PCI_BRIDGE = 0x06
PCI_NVIDIA = "0x10de"
MANAGER = re.compile(r"Fabric Manager version is\s*:\s*(\S+)")
# A card's name and its driver's version.
SHOWN = re.compile(r", \d{3}\.\d+[\d.]*$")
ADAPTERS = "/sys/class/infiniband"
# Programs use adapters by these files, which a local node lacks.
VERBS = "/dev/infiniband"
ACTIVE = "4: ACTIVE"
ROCE_V2 = "RoCE v2"
IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"
# Loaded modules that let InfiniBand adapters read the memory of GPUs.
PEER_MEMORY = ("/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem")
NVIDIA_VERSION = "/proc/driver/nvidia/version"
EFI_VARIABLES = "/sys/firmware/efi/efivars"
# For versions 2 and 1 of control groups.
CGROUPS = ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/freezer/cgroup.procs")
# Prints a credential, or the error.
MUNGE = ["sh", "-c", "munge --no-input 2>/dev/null || munge --no-input 2>&1"]
CGROUPS_V2 = "/sys/fs/cgroup/cgroup.controllers"
SLURMD = "/usr/sbin/slurmd"
HEALTH = "/opt/clusterctl/health"
# Its checks have less time together.
HEALTH_S = 45
FOLDER_S = 10
SLURM_PLUGINS = ("/usr/lib64/slurm", "/usr/lib/*/slurm*")  # EL, Debian
DATABASES = "/var/lib/mysql"
SLURM_STATE = "/var/lib/slurm/slurmctld"
OWN_DATABASES = {"mysql", "performance_schema", "sys", "test", "lost+found"}
DPKG_STATUS = Path("/var/lib/dpkg/status")
# A half-installed package, as an interrupted dpkg leaves it, counts as installed.
INSTALLED = re.compile(
    rb"\nPackage: (\S+)\n(?:(?:Essential|Protected): \S+\n)*"
    rb"Status: \S+ \S+ (?!not-installed|config-files)\S+\n"
)
RPM = 'command -v rpm && { rpm --query --whatprovides --queryformat= "$@"; true; }'
# These are Open MPI's files on Debian, and its package on EL. NVIDIA's package for EL has the same
# name, but another prefix.
OPENMPI_LIST = "/var/lib/dpkg/info/openmpi-bin.list"
OPENMPI_RPM = ["rpm", "--query", "--list", "openmpi"]
OPENMPI_PARAMS = "/openmpi-mca-params.conf"
# Mount points of file systems that did not answer.
SILENT = set()  # type: Set[str]
# Fields of /etc/passwd up to the uid.
ROW = 3
MISSING = "missing"
UNKNOWN = "no answer"
TEXT = 4096
SELINUX = "/sys/fs/selinux/enforce"
OS_RELEASE = "/etc/os-release"
BOOT_S = 20
OWNER_ALL = stat.S_IRWXU
OTHERS_WRITE_OWNER_ALL = stat.S_IRWXU | stat.S_IWGRP | stat.S_IWOTH
# The second time changes if a daemon re-executes itself, as slurmctld 23.11 at `scontrol
# reconfigure`.
STARTED = ("InactiveExitTimestampMonotonic", "ExecMainStartTimestampMonotonic")
PROPERTIES = ",".join(("Id", "LoadState", "ActiveState", "UnitFileState", *STARTED))


def system() -> Dict[str, Any]:
    pairs = (line.partition("=") for line in read(OS_RELEASE).splitlines() if "=" in line)
    release = {key: value.strip().strip("\"'") for key, _, value in pairs}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "id": release.get("ID", "linux"),
        "version": release.get("VERSION_ID", ""),
        "name": release.get("PRETTY_NAME", ""),
        "machine": platform.machine(),
        "python": list(sys.version_info[:2]),
        "systemd": Path("/run/systemd/system").is_dir(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": pages >> 20,
        "hostname": socket.gethostname(),
    }


def links() -> Dict[str, Tuple[str, int]]:
    """Return address with prefix length -> name and MTU of its interface, for all IPv4
    addresses.
    """
    output = run(["ip", "-json", "-4", "address", "show"])
    return {
        f"{address['local']}/{address['prefixlen']}": link.get("ifname", "")
        for link in (json.loads(output) if output else [])
        for address in link.get("addr_info", [])
        if address.get("local")
    }


def answers(path: str, program: str = "stat", timeout_s: float = FOLDER_S) -> bool:
    """Return whether a path, which need not exist, can be looked at in time: its file server may
    not answer.

    The process that then waits for the server can't always be killed, so its end is not awaited.
    A file system that did not answer is not asked again.
    """
    mount = mount_point(path)
    if mount in SILENT:
        return False
    null = subprocess.DEVNULL
    process = subprocess.Popen([program, path], stdin=null, stdout=null, stderr=null)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        if mount != "/":
            SILENT.add(mount)
        return False
    return True


def mount_point(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Return where the file system is mounted that holds a path without links."""
    points = {line.split(" ")[1].replace("\\040", " ") for line in read(mounts).splitlines()}
    return next((p for p in [path, *map(str, Path(path).parents)] if p in points), "/")


@lru_cache(maxsize=None)
def answers_once(path: str) -> bool:
    return answers(path)


def home_answers(home: str) -> bool:
    """Return whether a home can be looked at in time, without a process for each home."""
    mount = mount_point(home)
    return answers_once(mount if mount != "/" else str(Path(home).parent))


def space(paths: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the disk space in bytes of the file systems that contain, or would contain, these
    paths.
    """
    file_systems = {}  # type: Dict[int, Dict[str, Any]]
    for path in paths:
        folder = Path(path)
        if not answers(path):
            continue
        try:
            while not folder.is_dir():
                folder = folder.parent
            device = folder.stat().st_dev
            room = os.statvfs(str(folder))
        except OSError:
            continue
        if device in file_systems:
            file_systems[device]["paths"].append(path)
            continue
        free = room.f_bavail * room.f_frsize
        inodes = room.f_favail if room.f_files else None
        file_systems[device] = {
            "paths": [path],
            "free": free,
            "size": room.f_blocks * room.f_frsize,
            "inodes": inodes,
        }
    return list(file_systems.values())


def nvidia_devices() -> List[Tuple[int, int]]:
    """Return (PCI class, PCI device ID) of all NVIDIA devices, with or without a driver."""
    devices = []
    for path in Path(PCI_DEVICES).glob("*"):
        kind = read(f"{path}/class").strip()
        if read(f"{path}/vendor").strip() == PCI_NVIDIA and kind:
            devices.append((int(kind, 16) >> 16, int(read(f"{path}/device").strip() or "0", 16)))
    return devices


def gpus() -> Dict[str, Any]:
    devices = nvidia_devices()
    kinds = [kind for kind, _ in devices]
    lines = nvidia_smi().splitlines()
    shown = [line.rsplit(", ", 1) for line in lines if SHOWN.search(line)]
    manager = MANAGER.search(
        run(["sh", "-c", "exec nv-fabricmanager --version 2>&1"], any_exit=True) or ""
    )
    secure = Path(EFI_VARIABLES).glob("SecureBoot-*")
    return {
        "cards": kinds.count(PCI_DISPLAY),
        "switches": kinds.count(PCI_BRIDGE),
        "shown": [name for name, _ in shown],
        "driver": shown[0][1] if shown else None,
        "fault": next((line for line in lines if line.strip() and not SHOWN.search(line)), ""),
        "manager": manager.group(1) if manager else "",
        "oldest": min(
            (number for kind, number in devices if kind == PCI_DISPLAY and number), default=None
        ),
        "installed": driver_on_disk(),
        "nouveau": Path("/sys/module/nouveau").is_dir(),
        "secure_boot": any(path.read_bytes()[-1:] == b"\1" for path in secure),
    }


def fabric_ports() -> List[Dict[str, Any]]:
    """Return the ports of InfiniBand and RoCE that are up. The kernel shows the adapters of all
    vendors.
    """
    folders = sorted(glob.glob(ADAPTERS + "/*/ports/*"))
    return [fabric_port(folder) for folder in folders if read(folder + "/state").strip() == ACTIVE]


def fabric_port(folder: str) -> Dict[str, Any]:
    parts = folder.split("/")
    rate = read(folder + "/rate").split()
    attribute = folder + "/gid_attrs/{}/{}"
    interface_of = {
        int(os.path.basename(path)): read(path).strip()
        for path in glob.glob(attribute.format("ndevs", "*"))
    }
    # The first index of an interface counts.
    gids = {
        name: index
        for index, name in sorted(interface_of.items(), reverse=True)
        if read(attribute.format("types", index)).strip() == ROCE_V2
        and read("{}/gids/{}".format(folder, index)).startswith(IPV4_MAPPED)
    }
    return {
        "name": "{}:{}".format(parts[-3], parts[-1]),
        "layer": read(folder + "/link_layer").strip(),
        "rate": float(rate[0]) if rate else 0.0,
        "interfaces": sorted(set(interface_of.values()) - {""}),
        "gids": gids,
    }


def gpudirect() -> str:
    """Return the kernel's way between GPUs and adapters; "" if data goes through host memory."""
    if any(Path(path).is_dir() for path in PEER_MEMORY):
        return "nvidia_peermem"
    return "dma-buf" if "Open Kernel Module" in read(NVIDIA_VERSION) else ""


def nvidia_smi() -> str:
    """Return name and driver version of each card as nvidia-smi shows them, or its error; "" if it
    is not installed.
    """
    query = "exec nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1"
    return run(["sh", "-c", "command -v nvidia-smi >/dev/null && " + query], any_exit=True) or ""


def driver_on_disk() -> str:
    """Return the version of NVIDIA's kernel module on disk, for any kernel; "" without a module."""
    kernels = [platform.release(), *sorted(path.name for path in Path("/lib/modules").glob("*"))]
    versions = (run(["modinfo", "-F", "version", "-k", kernel, "nvidia"]) for kernel in kernels)
    return next((text.strip() for text in versions if text and text.strip()), "")


def cgroup_plugin() -> Optional[bool]:
    """Return whether Slurm has the plugin for this kernel's cgroups version; None without Slurm."""
    if not Path(SLURMD).exists():
        return None
    name = "cgroup_v{}.so".format(2 if Path(CGROUPS_V2).exists() else 1)
    return any(glob.glob("{}/{}".format(folder, name)) for folder in SLURM_PLUGINS)


def unmet_needs() -> Optional[List[Dict[str, str]]]:
    """Return the unmet needs of the host: code, what, why, fix.

    None: it has no health check, as before it joins a cluster, or its health check does not answer.
    """
    try:
        unmet = json.loads(run([HEALTH, "report"], HEALTH_S) or "")
    except ValueError:
        return None
    return [{key: str(value) for key, value in need.items()} for need in unmet]


def firewall() -> Dict[str, Any]:
    if run(["systemctl", "is-active", "--quiet", "firewalld"]) is not None:
        return {
            "name": "firewalld",
            "zone": (run(["firewall-cmd", "--get-default-zone"]) or "").strip(),
        }
    # Without the name of a table, the iptables commands load no kernel modules.
    queries = (
        ("ufw", ["ufw", "status"], r"^Status: active"),
        ("iptables", ["iptables-legacy-save"], r"^-A |^:\S+ DROP"),
        ("iptables", ["iptables-save"], r"^-A |^:\S+ DROP"),
        ("nftables", ["nft", "list", "ruleset"], r"\S"),
    )
    active = (
        name for name, argv, rules in queries if re.search(rules, run(argv) or "", re.MULTILINE)
    )
    return {"name": next(active, "none")}


def packages(names: Sequence[str]) -> List[str]:
    missing = lacking(names)
    return [] if missing is None else sorted(set(names) - set(missing))


def lacking(names: Sequence[str]) -> Optional[List[str]]:
    """Return the packages that are not installed; None if unknown. Read dpkg's file: dpkg-query is
    slow.
    """
    if not names:
        return []
    try:
        installed = {name.decode() for name in INSTALLED.findall(b"\n" + DPKG_STATUS.read_bytes())}
    except OSError:
        installed = set()
    if not installed:
        output = run(["sh", "-c", RPM, "sh", *names])
        if output is None:
            return None
        installed = set(names) - {line.rpartition(" ")[2] for line in output.splitlines()}
    return sorted(set(names) - installed)


def package_marks(names: Sequence[str]) -> Dict[str, str]:
    missing = lacking(names)
    if missing is None:
        return dict.fromkeys(names, UNKNOWN)
    return {name: "not installed" if name in missing else "installed" for name in names}


def openmpi_folder() -> str:
    """Return the folder of Open MPI's parameters, as the package database lists it; "" without Open
    MPI.
    """
    lines = (read(OPENMPI_LIST) or run(OPENMPI_RPM) or "").splitlines()
    return next(
        (line[: -len(OPENMPI_PARAMS)] for line in lines if line.endswith(OPENMPI_PARAMS)), ""
    )


def databases() -> List[str]:
    output = run(["my_print_defaults", "mysqld", "server", "mariadb", "mariadbd"]) or ""
    configured = [
        line[len("--datadir=") :] for line in output.splitlines() if line.startswith("--datadir=")
    ]
    folder = Path(configured[-1] if configured else DATABASES)
    names = {path.name for path in folder.glob("*") if path.is_dir()} - OWN_DATABASES
    return sorted(name for name in names if not name.startswith(("#", ".")))


def accounts(names: Sequence[str], uids: Set[int], table: str = "passwd") -> Dict[str, int]:
    """Return name -> number of the accounts or groups that have one of these names or numbers."""
    listed = pwd.getpwall() if table == "passwd" else grp.getgrall()  # type: List[Any]
    rows = [[str(cell) for cell in row[:ROW]] for row in listed]
    keys = {*names, *map(str, uids)}
    if not keys <= {cell for row in rows for cell in (row[0], row[2])}:
        # A directory service may know more accounts than it lists.
        output = run(["getent", table, *sorted(keys)], any_exit=True) or ""
        rows += [line.split(":") for line in output.splitlines()]
    numbers = {row[0]: int(row[2]) for row in rows if len(row) >= ROW and row[2].isdigit()}
    return {name: uid for name, uid in numbers.items() if name in names or uid in uids}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def file_mark(path: str) -> str:
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return "no file"
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return MISSING
    with os.fdopen(fd, "rb") as file:
        content = content_mark(file.read())
    mode = stat.S_IMODE(status.st_mode)
    return mark_of_file(content, mode, status.st_uid, status.st_gid)


def path_mark(path: str) -> str:
    if not answers(path):
        return UNKNOWN
    return "there" if Path(path).exists() else MISSING


def block_mark(path: str, begin: str, end: str) -> str:
    _, start, rest = read(path).partition(f"{begin}\n")
    inside, stop, _ = rest.partition(f"{end}\n")
    return content_mark(inside.encode()) if start and stop else MISSING


def readable_mark(pattern: str) -> str:
    """Return `there` if all users may use the files and folders that match ``pattern``, else their
    modes.
    """
    paths = [path for path in glob.glob(pattern) if os.path.exists(path)]
    modes = {stat.S_IMODE(os.stat(path).st_mode) for path in paths}
    unreadable = ["{:o}".format(mode) for mode in sorted(modes) if not opens_to_all(mode)]
    return "unreadable " + " ".join(unreadable) if unreadable else "there" if modes else MISSING


def opens_to_all(mode: int) -> bool:
    wanted = stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR else 0)
    return mode & wanted == wanted


def alone_mark(path: str) -> str:
    """Return the paths of the other *.conf files in the folder of ``path``, or `none`."""
    others = sorted(
        str(file) for file in Path(path).parent.glob("*.conf") if file.name != Path(path).name
    )
    return ", ".join(others) or "none"


def rivals_mark(path: str, pattern: str) -> str:
    """Return the *.conf files after ``path`` in its folder with a line matching ``pattern``, or
    `none`.
    """
    files = (
        file
        for file in sorted(Path(path).parent.glob("*.conf"))
        if file.is_file() and not file.is_symlink()
    )
    line = re.compile(pattern)
    rivals = [
        str(file)
        for file in files
        if file.name > Path(path).name
        and any(line.match(text) for text in read(str(file)).splitlines())
    ]
    return ", ".join(rivals) or "none"


def unit_marks(units: Dict[str, List[str]], systemctl: str = "systemctl") -> Dict[str, str]:
    """Return unit -> state, with `outdated` if a file that the unit reads changed after the unit's
    start.
    """
    names = [name if "." in name else f"{name}.service" for name in units]
    output = run([systemctl, "show", f"--property={PROPERTIES}", *names], ASK_S)
    marks = dict.fromkeys(units, UNKNOWN)
    for text in (output or "").split("\n\n"):
        unit = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        name = unit.get("Id", "")
        name = name[: -len(".service")] if name.endswith(".service") else name
        if name in units:
            marks[name] = _unit_mark(unit, units[name])
    return marks


def _unit_mark(unit: Dict[str, str], config: List[str]) -> str:
    if unit["LoadState"] in ("masked", "not-found"):
        return unit["LoadState"]
    states = {"active": "running", "reloading": "running", "failed": "failed"}
    words = [states.get(unit["ActiveState"], "stopped")]
    if unit["UnitFileState"] != "enabled":
        words.append("disabled")
    started = time.time() - time.monotonic() + max(int(unit.get(key) or 0) for key in STARTED) / 1e6
    if words[0] == "running" and any(ctime(path) > started for path in config):
        words.append("outdated")
    return " ".join(words)


def ctime(path: str) -> float:
    try:
        return Path(path).stat().st_ctime
    except OSError:
        return 0.0


def user_mark(name: str) -> str:
    try:
        return str(pwd.getpwnam(name).pw_uid)
    except KeyError:
        return MISSING


def home_mark(user: str, home: str) -> str:
    """Return `fit` if sshd accepts the home folder: no other user owns it or may write to it."""
    if not home_answers(home):
        return UNKNOWN
    try:
        status = Path(home).stat()
        uid = pwd.getpwnam(user).pw_uid
    except (OSError, KeyError):
        return MISSING
    fit = status.st_uid == uid and status.st_mode & OTHERS_WRITE_OWNER_ALL == OWNER_ALL
    return "fit" if fit else f"unfit {stat.S_IMODE(status.st_mode):o}"


def has_home(user: str, home: str) -> bool:
    try:
        return pwd.getpwnam(user).pw_dir == home
    except KeyError:
        return True


def key_marks(user: str, home: str, key: str, end: str) -> Dict[str, str]:
    """Return the marks of authorized_keys in ``home`` and in the account's actual home folder."""
    account = pwd.getpwnam(user)
    folders = {home, account.pw_dir} - {""}
    if not all(map(home_answers, folders)):
        return {"key " + user: UNKNOWN, "keys " + user: UNKNOWN}
    # As the account, because its jobs may write anything to the file.
    with acting_as(account.pw_uid, account.pw_gid):
        texts = [read(f"{folder}/.ssh/authorized_keys") for folder in folders]
    lines = sorted(line for text in texts for line in text.splitlines())
    has_key = any(line.startswith(" ".join(key.split()[:2])) for line in lines)
    # Comments around the block of the cluster's lines end so, too.
    of_spec = [line for line in lines if line.endswith(end) and not line.startswith("#")]
    listed = digest("\n".join(of_spec).encode())
    return {"key " + user: "there" if has_key else MISSING, "keys " + user: listed}


def accounting_mark(queries: List[List[str]]) -> str:
    answers = [
        run(["sacctmgr", "--noheader", "--parsable2", "show", *words], ASK_S) for words in queries
    ]
    if None in answers:
        return UNKNOWN
    return digest(
        "\n\n".join("\n".join(sorted(text.splitlines())) for text in answers if text).encode()
    )


def checksums(request: Dict[str, Any], openmpi: str) -> Dict[str, str]:
    files = [*request["files"], *("{}/{}".format(openmpi, name) for name in request["openmpi"])]
    marks = {"file " + path: file_mark(path) for path in files}
    marks.update(
        {"block " + path: block_mark(path, *edges) for path, edges in request["blocks"].items()}
    )
    marks.update({"path " + path: path_mark(path) for path in request["paths"]})
    marks.update({"readable " + path: readable_mark(path) for path in request["readable"]})
    marks.update(
        {"absent " + p: "there" if os.path.lexists(p) else "absent" for p in request["absent"]}
    )
    marks.update({"alone " + path: alone_mark(path) for path in request["alone"]})
    marks.update(
        {"rivals " + path: rivals_mark(path, line) for path, line in request["rivals"].items()}
    )
    marks.update({"user " + name: user_mark(name) for name in request["users"]})
    marks.update({"home " + name: home_mark(name, home) for name, home in request["homes"].items()})
    far = {name for name, home in request["far_homes"].items() if has_home(name, home)}
    far |= {name for name in request["users"] if marks["user " + name] == MISSING}
    for name, key in ((name, key) for name, key in request["keys"].items() if name not in far):
        marks.update(key_marks(name, request["homes"].get(name, ""), key, request["key_end"]))
    marks.update({"unit " + name: mark for name, mark in unit_marks(request["units"]).items()})
    marks.update(
        {"package " + name: mark for name, mark in package_marks(request["packages"]).items()}
    )
    if request["accounting"]:
        running = marks.get("unit slurmdbd", "").startswith("running")
        marks["accounting all"] = accounting_mark(request["accounting"]) if running else UNKNOWN
    return marks


class OwnFacts:
    """The facts of a host in simple types. ``clusterctl.hosts.probe.HostFacts`` has the others, and
    checks the types.

    time: the host's clock (Unix time). credential: one of munge (MUNGE:...), or munge's error.
    interfaces: address/prefix length -> name of the interface.
    cgroups: root can create control groups. cgroup_plugin: Slurm, if installed, has the plugin for
        them.
    refused: account -> the list of sshd that refuses its login.
    refuses_ed25519: sshd refuses keys of this type.
    left: processes of ended jobs ("PID COMMAND"). unmet: the unmet needs of a node. None: its
        health check does not answer. databases: MariaDB's, except system databases.
    verbs: programs can use adapters of InfiniBand and RoCE. ucx_fabric: UCX, if installed, can use
        them. gpudirect: the kernel's way between them and GPUs.
    unmounted: folders that are mounted at a boot, but not now.
    files, packages: requested items that exist. texts: requested file -> start of its text.
    """

    time: float
    uid: int
    addresses: Tuple[str, ...]
    selinux: str
    units: FrozenSet[str]
    accounts: Mapping[str, int]
    groups: Mapping[str, int] = {}
    credential: str = ""
    interfaces: Mapping[str, str] = {}
    cgroups: bool = True
    cgroup_plugin: Optional[bool] = None
    verbs: bool = False
    gpudirect: str = ""
    unmet: Optional[Tuple[Mapping[str, str], ...]] = ()
    databases: Tuple[str, ...] = ()
    slurm_state: Tuple[str, ...] = ()
    files: Tuple[str, ...] = ()
    packages: FrozenSet[str] = frozenset()
    texts: Mapping[str, str] = {}


def host_facts(request: Dict[str, Any]) -> Dict[str, Any]:
    units = {name: [] for name in request["units"]}  # type: Dict[str, List[str]]
    addresses = links()
    return {
        "time": time.time(),
        "credential": (run(MUNGE, any_exit=True) or "").strip(),
        "uid": os.geteuid(),
        "system": system(),
        "addresses": list(addresses),
        "interfaces": addresses,
        "space": space(request["paths"]),
        "selinux": {"1": "enforcing", "0": "permissive"}.get(read(SELINUX).strip(), "disabled"),
        "firewall": firewall(),
        "units": [n for n, mark in unit_marks(units).items() if mark.startswith("running")],
        "gpus": gpus(),
        "cgroups": any(os.access(path, os.W_OK) for path in CGROUPS),
        "cgroup_plugin": cgroup_plugin(),
        "verbs": os.path.isdir(VERBS),
        "fabric_ports": fabric_ports(),
        "gpudirect": gpudirect(),
        "unmet": unmet_needs(),
        "databases": databases(),
        "slurm_state": sorted(path.name for path in Path(SLURM_STATE).glob("*"))[:16],
        "files": sorted(path for pattern in request["files"] for path in glob.glob(pattern)),
        "packages": packages(request["packages"]) if request["packages"] else [],
        "texts": {path: read(path)[:TEXT] for path in request["texts"]},
        "accounts": accounts(request["accounts"], set(request["uids"])),
        "groups": accounts(request["accounts"], set(request["uids"]), "group"),
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    answer = {"state": ""}  # type: Dict[str, Any]
    if request["node"]:
        # Wait until the host has booted.
        state = run(["systemctl", "is-system-running", "--wait"], BOOT_S, any_exit=True)
        answer["state"] = (state or "unknown").strip()
    if answer["state"] != "stopping":
        if request["host"] is not None:
            answer["host"] = host_facts(request["host"])
        if request["node"]:
            openmpi = openmpi_folder() if request["openmpi"] else ""
            argv = request["node_argv"]
            answer["node"] = {
                "system": system(),
                "cards": [kind for kind, _ in nvidia_devices()].count(PCI_DISPLAY),
                "said": (run(argv, 3 * ASK_S) or "") if argv else None,
                "cgroup_plugin": cgroup_plugin(),
                "openmpi": openmpi,
                "checksums": checksums(request, openmpi),
                "wanted": read_wanted(),
                "space": space(request["space"]),
                "accounts": accounts([*request["numbers"]], set(request["numbers"].values())),
                "groups": accounts(
                    [*request["numbers"]], set(request["numbers"].values()), "group"
                ),
            }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
