"""Runs on a host, as root: what decides whether it can be part of a cluster. Standard library only.

    python3 -I -S - REQUEST <THIS_FILE

REQUEST and the answer are one JSON object each; ``clusterctl.hosts.facts`` has the types. It only looks.
Also for Python 3.6: a host that is refused for its age must still be able to say how old it is.
"""

import fcntl
import glob
import hashlib
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set

ASK_S = 10
LISTENS = "0A"  # the state's number in /proc/net/tcp
LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/rpm/.rpm.lock",
    "/usr/lib/sysimage/rpm/.rpm.lock",
)
LOCK_NOTES = ("var/cache/dnf/*_lock.pid", "var/lib/dnf/*_lock.pid", "run/dnf*.pid", "run/yum.pid")  # below /
FLOCK = "hhqqi"  # struct flock of 64-bit Linux
PCI_DISPLAY, PCI_BRIDGE, PCI_NVIDIA = 0x03, 0x06, "0x10de"  # a bridge of NVIDIA's is an NVSwitch
CLAIM = "/etc/clusterctl/cluster.json"
FIREWALLD_POLICY = "/etc/firewalld/policies/clusterctl.xml"  # of the role firewall
CGROUPS = ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/freezer/cgroup.procs")  # of versions 2 and 1
EFI_VARIABLES = "/sys/firmware/efi/efivars"
DATABASES = "/var/lib/mysql"
SLURM_STATE = "/var/lib/slurm/slurmctld"
OWN_DATABASES = {"mysql", "performance_schema", "sys", "test", "lost+found"}
# Both fail where one of the packages is not there.
INSTALLED = r"""
dpkg-query --show --showformat='${db:Status-Status} ${Package}\n' "$@"
rpm --query --queryformat='installed %{NAME}\n' "$@"
true
"""
ROW = 3  # fields of /etc/passwd up to the number


def run(argv: Sequence[str]) -> Optional[str]:
    """What a command says; None if it fails, takes too long, or is not there."""
    try:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def os_release() -> Dict[str, str]:
    pairs = (line.partition("=") for line in read("/etc/os-release").splitlines() if "=" in line)
    return {key: value.strip().strip("\"'") for key, _, value in pairs}


def system() -> Dict[str, Any]:
    release = os_release()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "id": release.get("ID", ""),
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


def interfaces() -> Dict[str, List[str]]:
    """The IPv4 addresses of this host with their prefix lengths, by interface."""
    said = run(["ip", "-json", "-4", "address", "show"])
    return {
        link["ifname"]: [
            f"{one['local']}/{one['prefixlen']}" for one in link["addr_info"] if one.get("local")
        ]
        for link in (json.loads(said) if said else [])
        if link.get("addr_info")
    }


def resolved(name: str) -> List[str]:
    """The IPv4 addresses that a name has here."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def space(paths: Sequence[str]) -> List[Dict[str, Any]]:
    """Room of the file systems that these paths are, or would be, on; sizes in MiB."""
    found = {}  # type: Dict[int, Dict[str, Any]]
    for path in paths:
        place = Path(path)
        while not place.is_dir():
            place = place.parent
        device = place.stat().st_dev
        if device in found:
            found[device]["paths"].append(path)
            continue
        room = os.statvfs(str(place))
        found[device] = {
            "paths": [path],
            "free_mib": room.f_bavail * room.f_frsize >> 20,
            "inodes": room.f_favail if room.f_files else None,
            "read_only": bool(room.f_flag & os.ST_RDONLY),
        }
    return list(found.values())


def listeners(ports: Set[int]) -> Dict[str, str]:
    """Port -> the program that listens on it."""
    sockets = {}  # type: Dict[str, int]
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read(table).splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == LISTENS and port in ports:
                sockets[fields[9]] = port
    found = {str(port): "?" for port in sockets.values()}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        for port in {sockets[inode] for inode in inodes(process) & set(sockets)}:
            found[str(port)] = read(f"{process}/comm").strip()
    return found


def inodes(process: Path) -> Set[str]:
    """Those of the sockets that a process has open."""
    found = set()
    try:
        for descriptor in (process / "fd").iterdir():
            link = os.readlink(str(descriptor))  # noqa: PTH115 - Path has it from Python 3.9 on
            if link.startswith("socket:["):
                found.add(link[len("socket:[") : -1])
    except OSError:  # it has ended
        pass
    return found


def lock_holders() -> List[Dict[str, Any]]:
    """Who installs packages right now: pid and program."""
    pids = set()  # type: Set[int]
    for path in LOCKS:
        try:
            with Path(path).open("r+b") as file:
                asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        except OSError:
            continue
        if kind != fcntl.F_UNLCK and pid > 0:
            pids.add(pid)
    for pattern in LOCK_NOTES:
        noted = (read(str(path)).strip() for path in Path("/").glob(pattern))
        pids |= {int(text) for text in noted if text.isdigit()}
    alive = ((pid, read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()) for pid in sorted(pids))
    return [{"pid": pid, "command": command[:200]} for pid, command in alive if command]


def clock_alone() -> bool:
    """Whether nobody sets this clock; a container's is its host's."""
    if run(["systemd-detect-virt", "--quiet", "--container"]) is not None:
        return False
    tracking = run(["chronyc", "-c", "tracking"])
    if tracking is not None:
        return "Not synchronised" in tracking
    return (run(["timedatectl", "show", "--property=NTPSynchronized", "--value"]) or "").strip() == "no"


def selinux() -> str:
    """`enforcing`, `permissive` or `disabled`."""
    said = read("/sys/fs/selinux/enforce").strip()
    return {"1": "enforcing", "0": "permissive"}.get(said, "disabled")


def firewall() -> Dict[str, Any]:
    """firewalld's default zone where it runs; else what the other firewalls' own commands say."""
    if units(["firewalld"]):
        return {"zone": (run(["firewall-cmd", "--get-default-zone"]) or "").strip(), "firewalld": "running"}
    waits = run(["systemctl", "is-enabled", "--quiet", "firewalld"]) is not None
    return {
        "firewalld": "stopped" if waits and not Path(FIREWALLD_POLICY).exists() else "",
        "ufw": run(["env", "LC_ALL=C", "ufw", "status", "verbose"]) or "",
        # Without a table to name these load no module of the kernel's.
        "iptables": run(["iptables-legacy-save"]) or run(["iptables-save"]) or "",
        "nft": run(["nft", "-j", "list", "ruleset"]) or "",
    }


def units(names: Sequence[str]) -> List[str]:
    """Those of the units that are active."""
    return [name for name in names if run(["systemctl", "is-active", "--quiet", name]) is not None]


def gpus() -> Dict[str, Any]:
    """What the PCI bus, the kernel and the driver say of NVIDIA's devices."""
    kinds = []
    for path in Path("/sys/bus/pci/devices").glob("*"):
        kind = read(f"{path}/class").strip()
        if read(f"{path}/vendor").strip() == PCI_NVIDIA and kind:
            kinds.append(int(kind, 16) >> 16)
    said = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    shown = [line.split(", ") for line in (said or "").splitlines() if ", " in line]
    secure = Path(EFI_VARIABLES).glob("SecureBoot-*")
    return {
        "cards": kinds.count(PCI_DISPLAY),
        "switches": kinds.count(PCI_BRIDGE),
        "shown": [name for name, _ in shown],
        "driver": shown[0][1] if shown else None,
        "installed": driver_on_disk(),
        "nouveau": Path("/sys/module/nouveau").is_dir(),
        "secure_boot": any(path.read_bytes()[-1:] == b"\1" for path in secure),
    }


def driver_on_disk() -> str:
    """The version of NVIDIA's kernel module, for this kernel or another one; "" if there is none."""
    kernels = [platform.release(), *sorted(path.name for path in Path("/lib/modules").glob("*"))]
    said = (run(["modinfo", "-F", "version", "-k", kernel, "nvidia"]) for kernel in kernels)
    return next((text.strip() for text in said if text and text.strip()), "")


def packages(names: Sequence[str]) -> List[str]:
    """Those of these that are installed."""
    said = run(["sh", "-c", INSTALLED, "sh", *names]) or ""
    found = {line[len("installed ") :] for line in said.splitlines() if line.startswith("installed ")}
    return sorted(found.intersection(names))


def databases() -> List[str]:
    """Those that somebody keeps in the host's MariaDB or MySQL."""
    said = run(["my_print_defaults", "mysqld", "server", "mariadb", "mariadbd"]) or ""
    own = [line[len("--datadir=") :] for line in said.splitlines() if line.startswith("--datadir=")]
    folder = Path(own[-1] if own else DATABASES)
    names = {path.name for path in folder.glob("*") if path.is_dir()} - OWN_DATABASES
    return sorted(name for name in names if not name.startswith(("#", ".")))


def slurm_state() -> List[str]:
    """What a slurmctld of somebody's has kept for its next start."""
    return sorted(path.name for path in Path(SLURM_STATE).glob("*"))[:16]


def accounts(names: Sequence[str], uids: Set[int]) -> Dict[str, int]:
    """Account -> its number, of those that have one of the names or one of the numbers."""
    rows = (line.split(":") for line in (run(["getent", "passwd"]) or read("/etc/passwd")).splitlines())
    known = {row[0]: int(row[2]) for row in rows if len(row) >= ROW and row[2].isdigit()}
    for key in [*names, *map(str, sorted(uids))]:  # a directory service may know more than it lists
        said = (run(["getent", "passwd", key]) or "").split(":")
        if len(said) >= ROW:
            known[said[0]] = int(said[2])
    return {name: uid for name, uid in known.items() if name in names or uid in uids}


def main() -> None:
    asked = json.loads(sys.argv[1])
    found = interfaces()
    answer = {
        "time": time.time(),
        "uid": os.geteuid(),
        "system": system(),
        "addresses": [address for some in found.values() for address in some],
        "interfaces": found,
        "resolved": {name: resolved(name) for name in asked["names"]},
        "space": space(asked["paths"]),
        "listeners": listeners(set(asked["ports"])),
        "lock_holders": lock_holders(),
        "clock_alone": clock_alone(),
        "selinux": selinux(),
        "firewall": firewall(),
        "units": units(asked["units"]),
        "gpus": gpus(),
        "cgroups": any(os.access(path, os.W_OK) for path in CGROUPS),
        "databases": databases(),
        "slurm_state": slurm_state(),
        "files": sorted(path for pattern in asked["files"] for path in glob.glob(pattern)),  # noqa: PTH207
        "packages": packages(asked["packages"]) if asked["packages"] else [],
        "claim": read(CLAIM)[:4096],
        "accounts": accounts(asked["accounts"], set(asked["uids"])),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
