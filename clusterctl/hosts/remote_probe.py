"""Runs on a host, as root: tells what the host is and has. The one probe: standard library only.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are one JSON object each; ``clusterctl.hosts.probe`` has the types.
It changes nothing. A checksum is a short text that stays the same as long as nothing has changed.
Also for Python 3.6: a host that is refused for its age must still be able to say how old it is.
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
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from clusterctl.hosts.remote_run import ASK_S, read, run
from clusterctl.util.remote_rights import acting

PCI_DEVICES = "/sys/bus/pci/devices"
PCI_DISPLAY, PCI_BRIDGE, PCI_NVIDIA = 0x03, 0x06, "0x10de"  # a bridge of NVIDIA's is an NVSwitch
# Known to `--query-gpu` from driver 535 on; older ones answer nothing of it. Rows have a switch of their own.
STATES = "fabric.state,fabric.status,mig.mode.current,mig.mode.pending,retired_pages.pending"
ROWS = "remapped_rows.pending,remapped_rows.failure"
MANAGER = re.compile(r"Fabric Manager version is\s*:\s*(\S+)")
SHOWN = re.compile(r", \d{3}\.\d+[\d.]*$")  # a card's name and its driver's version
EFI_VARIABLES = "/sys/firmware/efi/efivars"
CGROUPS = ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/freezer/cgroup.procs")  # of versions 2 and 1
CGROUPS_V2 = "/sys/fs/cgroup/cgroup.controllers"
SLURMD = "/usr/sbin/slurmd"
SLURM_PLUGINS = ("/usr/lib64/slurm", "/usr/lib/*/slurm*")  # of EL, of Debian
DATABASES = "/var/lib/mysql"
SLURM_STATE = "/var/lib/slurm/slurmctld"
OWN_DATABASES = {"mysql", "performance_schema", "sys", "test", "lost+found"}
DPKG_STATUS = Path("/var/lib/dpkg/status")
# Also one that is half installed, as a dpkg that was cut off leaves it: it was not removed.
INSTALLED = re.compile(
    rb"\nPackage: (\S+)\n(?:(?:Essential|Protected): \S+\n)*"
    rb"Status: \S+ \S+ (?!not-installed|config-files)\S+\n"
)
RPM = 'command -v rpm && { rpm --query --whatprovides --queryformat= "$@"; true; }'
ROW = 3  # fields of /etc/passwd up to the number
MISSING = "missing"
UNKNOWN = "no answer"
SELINUX = "/sys/fs/selinux/enforce"
OS_RELEASE = "/etc/os-release"
BOOT_S = 20
OWNER_ALL = stat.S_IRWXU
OTHERS_WRITE_OWNER_ALL = stat.S_IRWXU | stat.S_IWGRP | stat.S_IWOTH
TEXT = 4096
# A daemon that executes itself anew moves the second: slurmctld since 23.11, at `scontrol reconfigure`.
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
        "machine_id": hashlib.sha256(read("/etc/machine-id").strip().encode()).hexdigest()[:16],
    }


def links() -> Dict[str, int]:
    """The IPv4 addresses of all interfaces with their prefix lengths -> the MTU of the interface."""
    said = run(["ip", "-json", "-4", "address", "show"])
    return {
        f"{address['local']}/{address['prefixlen']}": link.get("mtu", 0)
        for link in (json.loads(said) if said else [])
        for address in link.get("addr_info", [])
        if address.get("local")
    }


def resolved(name: str) -> List[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def space(paths: Sequence[str]) -> List[Dict[str, Any]]:
    """Room in bytes of the file systems that these paths are, or would be, on."""
    found = {}  # type: Dict[int, Dict[str, Any]]
    for path in paths:
        place = Path(path)
        try:
            while not place.is_dir():
                place = place.parent
            device, room = place.stat().st_dev, os.statvfs(str(place))
        except OSError:  # its server does not answer
            continue
        if device in found:
            found[device]["paths"].append(path)
            continue
        free, inodes = room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None
        found[device] = {
            "paths": [path],
            "free": free,
            "size": room.f_blocks * room.f_frsize,
            "inodes": inodes,
            "read_only": bool(room.f_flag & os.ST_RDONLY),
            "noexec": bool(room.f_flag & os.ST_NOEXEC),
        }
    return list(found.values())


def listeners(ports: Set[int]) -> Dict[str, str]:
    """Port -> the program that listens on it."""
    found = {}
    for port in ports:  # one by one: what ss prints of a program's name may hold lines like its own
        shown = run(["ss", "-Hltnp", "sport = :{}".format(port)])
        if shown:
            user = re.search(r'users:\(\("(.*?)"', shown, re.DOTALL)
            found[str(port)] = user.group(1) if user else "?"
    return found


def nvidia_devices() -> List[Tuple[int, int]]:
    """The PCI classes of NVIDIA's devices and their numbers, whether a driver knows them or not."""
    found = []
    for path in Path(PCI_DEVICES).glob("*"):
        kind = read(f"{path}/class").strip()
        if read(f"{path}/vendor").strip() == PCI_NVIDIA and kind:
            found.append((int(kind, 16) >> 16, int(read(f"{path}/device").strip() or "0", 16)))
    return found


def gpus() -> Dict[str, Any]:
    devices = nvidia_devices()
    kinds = [kind for kind, _ in devices]
    lines = (nvidia_smi("name,driver_version") or "").splitlines()
    shown = [line.rsplit(", ", 1) for line in lines if SHOWN.search(line)]
    manager = MANAGER.search(run(["sh", "-c", "exec nv-fabricmanager --version 2>&1"], any_exit=True) or "")
    secure = Path(EFI_VARIABLES).glob("SecureBoot-*")
    return {
        "cards": kinds.count(PCI_DISPLAY),
        "switches": kinds.count(PCI_BRIDGE),
        "shown": [name for name, _ in shown],
        "driver": shown[0][1] if shown else None,
        "fault": next((line for line in lines if line.strip() and not SHOWN.search(line)), ""),
        "states": states() if shown else [],
        "manager": manager.group(1) if manager else "",
        "oldest": min((number for kind, number in devices if kind == PCI_DISPLAY and number), default=None),
        "installed": driver_on_disk(),
        "nouveau": Path("/sys/module/nouveau").is_dir(),
        "secure_boot": any(path.read_bytes()[-1:] == b"\1" for path in secure),
    }


def states() -> List[Dict[str, str]]:
    """Of each card the fields that tell of its links, its memory and its parts, as far as they are known."""
    none = {}  # type: Dict[str, str]
    told = zip_longest(cells(STATES), cells(ROWS, "remapped-rows"), fillvalue=none)
    return [dict(own, **rows) for own, rows in told]


def cells(fields: str, switch: str = "gpu") -> List[Dict[str, str]]:
    names = fields.split(",")
    rows = [line.split(", ") for line in (nvidia_smi(fields, switch) or "").splitlines()]
    return [dict(zip(names, row)) for row in rows if len(row) == len(names)]  # noqa: B905 - 3.6 has no strict


def nvidia_smi(fields: str, switch: str = "gpu") -> Optional[str]:
    """What it says of these fields of each card, or in their place."""
    asked = "exec nvidia-smi --query-{}={} --format=csv,noheader 2>&1".format(switch, fields)
    return run(["sh", "-c", "command -v nvidia-smi >/dev/null && " + asked], any_exit=True)


def driver_on_disk() -> str:
    """The version of NVIDIA's kernel module, for this kernel or another one; "" if there is none."""
    kernels = [platform.release(), *sorted(path.name for path in Path("/lib/modules").glob("*"))]
    said = (run(["modinfo", "-F", "version", "-k", kernel, "nvidia"]) for kernel in kernels)
    return next((text.strip() for text in said if text and text.strip()), "")


def cgroup_plugin() -> Optional[bool]:
    """Whether Slurm has its plugin for this kernel's control groups; None: there is no Slurm."""
    if not Path(SLURMD).exists():
        return None
    name = "cgroup_v{}.so".format(2 if Path(CGROUPS_V2).exists() else 1)
    return any(glob.glob("{}/{}".format(folder, name)) for folder in SLURM_PLUGINS)  # noqa: PTH207


def firewall() -> Dict[str, Any]:
    """The firewall that is active, or has any rules."""
    if run(["systemctl", "is-active", "--quiet", "firewalld"]) is not None:
        return {"name": "firewalld", "zone": (run(["firewall-cmd", "--get-default-zone"]) or "").strip()}
    # Without a table to name, the two of iptables load no module of the kernel's.
    asked = (
        ("ufw", ["ufw", "status"], r"^Status: active"),
        ("iptables", ["iptables-legacy-save"], r"^-A |^:\S+ DROP"),
        ("iptables", ["iptables-save"], r"^-A |^:\S+ DROP"),
        ("nftables", ["nft", "list", "ruleset"], r"\S"),
    )
    active = (name for name, argv, rules in asked if re.search(rules, run(argv) or "", re.MULTILINE))
    return {"name": next(active, "none")}


def packages(names: Sequence[str]) -> List[str]:
    lacks = lacking(names)
    return [] if lacks is None else sorted(set(names) - set(lacks))


def lacking(names: Sequence[str]) -> Optional[List[str]]:
    """Those of these packages that are not installed; None: no package manager says so.

    dpkg's table is read here: dpkg-query takes longer to do the same.
    """
    if not names:
        return []
    try:
        found = {name.decode() for name in INSTALLED.findall(b"\n" + DPKG_STATUS.read_bytes())}
    except OSError:
        found = set()
    if not found:
        said = run(["sh", "-c", RPM, "sh", *names])
        if said is None:
            return None
        found = set(names) - {line.rpartition(" ")[2] for line in said.splitlines()}
    return sorted(set(names) - found)


def package_marks(names: Sequence[str]) -> Dict[str, str]:
    lacks = lacking(names)
    if lacks is None:
        return dict.fromkeys(names, UNKNOWN)
    return {name: "not installed" if name in lacks else "installed" for name in names}


def databases() -> List[str]:
    said = run(["my_print_defaults", "mysqld", "server", "mariadb", "mariadbd"]) or ""
    own = [line[len("--datadir=") :] for line in said.splitlines() if line.startswith("--datadir=")]
    folder = Path(own[-1] if own else DATABASES)
    names = {path.name for path in folder.glob("*") if path.is_dir()} - OWN_DATABASES
    return sorted(name for name in names if not name.startswith(("#", ".")))


def accounts(names: Sequence[str], uids: Set[int], table: str = "passwd") -> Dict[str, int]:
    """Account -> its number, or group, of those that have one of the names or one of the numbers."""
    listed = pwd.getpwall() if table == "passwd" else grp.getgrall()  # type: List[Any]
    rows = [[str(one) for one in row[:ROW]] for row in listed]
    keys = {*names, *map(str, uids)}
    if not keys <= {one for row in rows for one in (row[0], row[2])}:
        # A directory service may know more than it lists.
        told = run(["getent", table, *sorted(keys)], any_exit=True) or ""
        rows += [line.split(":") for line in told.splitlines()]
    known = {row[0]: int(row[2]) for row in rows if len(row) >= ROW and row[2].isdigit()}
    return {name: uid for name, uid in known.items() if name in names or uid in uids}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def file_mark(path: str) -> str:
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return "no file"
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return MISSING
    with os.fdopen(fd, "rb") as file:
        return f"{digest(file.read())} {stat.S_IMODE(found.st_mode):o} {found.st_uid}:{found.st_gid}"


def block_mark(path: str, begin: str, end: str) -> str:
    """The lines between two marks; what others wrote around them does not count."""
    _, found, rest = read(path).partition(f"{begin}\n")
    inside, closed, _ = rest.partition(f"{end}\n")
    return digest(inside.encode()) if found and closed else MISSING


def alone_mark(path: str) -> str:
    """The settings of others in the folder of this file."""
    others = sorted(str(one) for one in Path(path).parent.glob("*.conf") if one.name != Path(path).name)
    return ", ".join(others) or "none"


def rivals_mark(path: str, pattern: str) -> str:
    """The files of the same folder that are read after this one and have a line that the pattern matches."""
    files = (
        one for one in sorted(Path(path).parent.glob("*.conf")) if one.is_file() and not one.is_symlink()
    )
    line = re.compile(pattern)
    found = [
        str(one)
        for one in files
        if one.name > Path(path).name and any(line.match(text) for text in read(str(one)).splitlines())
    ]
    return ", ".join(found) or "none"


def unit_marks(units: Dict[str, List[str]], systemctl: str = "systemctl") -> Dict[str, str]:
    """`running`, or what is wrong, with `outdated` for a unit whose configuration changed after its start."""
    names = [name if "." in name else f"{name}.service" for name in units]
    said = run([systemctl, "show", f"--property={PROPERTIES}", *names], ASK_S)
    marks = dict.fromkeys(units, UNKNOWN)
    for text in (said or "").split("\n\n"):
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
        user = pwd.getpwnam(name)
        group = grp.getgrgid(user.pw_gid).gr_name
        return f"{user.pw_uid}:{user.pw_gid} {group} {user.pw_dir} {user.pw_shell}"
    except KeyError:
        return MISSING


def home_mark(user: str, home: str) -> str:
    """Whether sshd lets its owner in: nobody else may write there."""
    try:
        found, uid = Path(home).stat(), pwd.getpwnam(user).pw_uid
    except (OSError, KeyError):
        return MISSING
    fit = found.st_uid == uid and found.st_mode & OTHERS_WRITE_OWNER_ALL == OWNER_ALL
    return "fit" if fit else f"unfit {stat.S_IMODE(found.st_mode):o}"


def has_home(user: str, home: str) -> bool:
    """Whether that is the home of an account here; one that is missing has none of its own."""
    try:
        return pwd.getpwnam(user).pw_dir == home
    except KeyError:
        return True


def key_mark(user: str, home: str, key: str) -> str:
    """Whether the cluster's key may log in. Other keys there are the user's own affair.

    An account that was there before us has a home of its own. A job can make anything of the file.
    """
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return MISSING
    kind_and_key = " ".join(key.split()[:2])
    with acting(account):
        texts = [read(f"{place}/.ssh/authorized_keys") for place in {home, account.pw_dir} - {""}]
    lines = (line for text in texts for line in text.splitlines())
    return "there" if any(line.startswith(kind_and_key) for line in lines) else MISSING


def accounting_mark(queries: List[List[str]]) -> str:
    answers = [run(["sacctmgr", "--noheader", "--parsable2", "show", *words], ASK_S) for words in queries]
    if None in answers:
        return UNKNOWN
    return digest("\n\n".join("\n".join(sorted(text.splitlines())) for text in answers if text).encode())


def checksums(asked: Dict[str, Any]) -> Dict[str, str]:
    found = {"file " + path: file_mark(path) for path in asked["files"]}
    found.update({"block " + path: block_mark(path, *edges) for path, edges in asked["blocks"].items()})
    found.update({"path " + path: "there" if Path(path).exists() else MISSING for path in asked["paths"]})
    found.update({"absent " + p: "there" if os.path.lexists(p) else "absent" for p in asked["absent"]})
    found.update({"alone " + path: alone_mark(path) for path in asked["alone"]})
    found.update({"rivals " + path: rivals_mark(path, line) for path, line in asked["rivals"].items()})
    found.update({"user " + name: user_mark(name) for name in asked["users"]})
    found.update({"home " + name: home_mark(name, home) for name, home in asked["homes"].items()})
    far = {name for name, home in asked["far_homes"].items() if has_home(name, home)}
    keys = {name: key for name, key in asked["keys"].items() if name not in far}
    found.update({"key " + n: key_mark(n, asked["homes"].get(n, ""), key) for n, key in keys.items()})
    found.update({"unit " + name: mark for name, mark in unit_marks(asked["units"]).items()})
    found.update({"package " + name: mark for name, mark in package_marks(asked["packages"]).items()})
    if asked["accounting"]:
        running = found.get("unit slurmdbd", "").startswith("running")
        found["accounting all"] = accounting_mark(asked["accounting"]) if running else UNKNOWN
    return found


def host_facts(asked: Dict[str, Any]) -> Dict[str, Any]:
    """What decides whether the host can be part of a cluster."""
    units = {name: [] for name in asked["units"]}  # type: Dict[str, List[str]]
    mtus = links()
    return {
        "time": time.time(),
        "uid": os.geteuid(),
        "system": system(),
        "addresses": list(mtus),
        "mtus": mtus,
        "resolved": {name: resolved(name) for name in asked["names"]},
        "space": space(asked["paths"]),
        "listeners": listeners(set(asked["ports"])),
        "selinux": {"1": "enforcing", "0": "permissive"}.get(read(SELINUX).strip(), "disabled"),
        "firewall": firewall(),
        "units": [n for n, mark in unit_marks(units).items() if mark.startswith("running")],
        "gpus": gpus(),
        "cgroups": any(os.access(path, os.W_OK) for path in CGROUPS),
        "cgroup_plugin": cgroup_plugin(),
        "databases": databases(),
        "slurm_state": sorted(path.name for path in Path(SLURM_STATE).glob("*"))[:16],
        "files": sorted(path for pattern in asked["files"] for path in glob.glob(pattern)),  # noqa: PTH207
        "packages": packages(asked["packages"]) if asked["packages"] else [],
        "texts": {path: read(path)[:TEXT] for path in asked["texts"]},
        "accounts": accounts(asked["accounts"], set(asked["uids"])),
        "groups": accounts(asked["accounts"], set(asked["uids"]), "group"),
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    answer = {"state": ""}  # type: Dict[str, Any]
    if asked["node"]:  # once it has booted
        argv = ["systemctl", "is-system-running", "--wait"]
        answer["state"] = (run(argv, BOOT_S, any_exit=True) or "unknown").strip()
    if answer["state"] != "stopping":
        if asked["host"] is not None:
            answer["host"] = host_facts(asked["host"])
        if asked["node"]:
            answer["node"] = {
                "system": system(),
                "cards": [kind for kind, _ in nvidia_devices()].count(PCI_DISPLAY),
                "said": run(asked["node_argv"], 3 * ASK_S) or "",
                "cgroup_plugin": cgroup_plugin(),
                "checksums": checksums(asked),
                "space": space(asked["space"]),
                "accounts": accounts([*asked["numbers"]], set(asked["numbers"].values())),
                "groups": accounts([*asked["numbers"]], set(asked["numbers"].values()), "group"),
            }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
