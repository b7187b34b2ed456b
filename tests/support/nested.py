"""A host with systemd as PID 1, and clusterctl installed from a wheel.

It is a systemd-nspawn machine with every capability, so overlays, bridges, namespaces and further
machines work inside. It has no network to this machine, and sees the cache of node images read-only;
its changes are removed with it. Its root file system is kept in the user's cache; as a program
(`python -m tests.support.nested FOLDER WHEELS`) this module creates one, which needs root.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.wheelhouse import wheelhouse
from clusterctl.providers.local import image, machine
from clusterctl.spec.distributions import distribution_of
from clusterctl.state.workspace import cache_home
from tests.support.install import build_wheel, lock_of_wheels
from tests.support.processes import ROOT, as_root
from tests.support.verbs import CommandResult

UV = Path(sys.executable).with_name("uv")
PLACE = "/usr/local/lib/clusterctl"  # where clusterctl is installed
CLUSTERCTL = f"{PLACE}/bin/clusterctl"
DISTRIBUTION = "debian-12"
PLATFORM = NodePlatform.of(distribution_of(DISTRIBUTION))
# What docs/local.md asks of a host, and two firewalls' tools.
PACKAGES = (
    *(
        "ca-certificates",
        "dbus",
        "iproute2",
        "iptables",
        "mmdebstrap",
        "mount",
        "nftables",
        "openssh-client",
    ),
    *("procps", "python3", "sudo", "systemd", "systemd-container", "systemd-sysv"),
)
# What a cluster could change on a host, and how to see it. The limits of inotify are the kernel's:
# clusters
# beside this host change them, too: tests/unit/local/test_kernel_settings.py looks at them.
_LOOKS = {
    "machines": "machinectl list --no-legend",
    "units": "systemctl list-units --all --no-legend 'clusterctl*' 'machine-*'",
    # But for commands of the test itself: their units are released a moment after they ended.
    "failed": "systemctl --failed --no-legend | grep -v ' run-u[0-9]*[.]service '",
    "processes": "ps -eo comm | grep -E 'nspawn|mmdebstrap|slurm|munge'",
    "mounts": "cut -d' ' -f5 /proc/self/mountinfo | sort",
    "network": "ip -brief link; ip -brief address; ip route; ip netns",
    "rules": "nft --stateless list ruleset",
    "sysctl": "sysctl -a 2>/dev/null | grep -E '^(net[.]ipv4[.]ip_forward|net[.]bridge)'",
    # What nodes of a class have in common stays in the cache, as their image does.
    "files": (
        "ls -A /run/netns /var/lib/clusterctl /var/cache/clusterctl 2>&1 | grep -v "
        "'[.]lock$\\|^class-'"
    ),
}
# An overlay's upper folder can't lie on an overlay, which its root is.
_NSPAWN = (
    "--quiet --boot --register=no --keep-unit --volatile=overlay --private-network "
    "--capability=all --system-call-filter=@known --resolv-conf=off --timezone=off "
    "--link-journal=no --tmpfs=/var/lib/clusterctl:mode=755 "
    "--tmpfs=/var/cache/clusterctl:mode=755"
)
_BOOT_TIMEOUT_S = 120
_END_TIMEOUT_S = 30


@dataclass(frozen=True)
class Host:
    """A running host: `host("machinectl", "list")` runs a command in it."""

    name: str
    leader: int  # its PID 1, seen from here

    def __call__(
        self, *argv: str | Path, user: str = "root", rc: int | None = 0, timeout_s: float = 120
    ) -> CommandResult:
        """Run a command at the user's home, in a unit of its own; `rc=None` takes any exit code.

        Raises:
            AssertionError: another exit code.
            subprocess.TimeoutExpired: no end within `timeout_s`.
        """
        unit = ["systemd-run", "--wait", "--pipe", "--collect", "--quiet", f"--uid={user}"]
        unit += [
            "--property=WorkingDirectory=~",
            "--setenv=LC_ALL=C.UTF-8",
            "--setenv=COLUMNS=200",
            "--",
        ]
        ran = self.enter(*unit, *argv, timeout_s=timeout_s)
        assert rc is None or ran.rc == rc, f"no exit {rc}\n{ran}"
        return ran

    def enter(self, *argv: str | Path, timeout_s: float = 30) -> CommandResult:
        """Run a command in its namespaces, but in no unit of its systemd."""
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        words = tuple(
            map(str, (*as_root(), "nsenter", f"--target={self.leader}", *namespaces, "--", *argv))
        )
        nothing = subprocess.DEVNULL
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=nothing
        )
        return CommandResult(words, done.returncode, done.stdout, done.stderr)

    def sh(
        self, script: str, *, user: str = "root", rc: int | None = 0, timeout_s: float = 120
    ) -> str:
        """Run a shell script that ends at its first failure; its stdout."""
        return self("sh", "-ec", script, user=user, rc=rc, timeout_s=timeout_s).stdout

    def look(self) -> dict[str, str]:
        """Everything that a cluster could change on this host, its user's home apart."""
        return {what: self("sh", "-c", script, rc=None).stdout for what, script in _LOOKS.items()}


@contextmanager
def booted(folder: Path, images: Iterable[Path]) -> Iterator[Host]:
    """A host with this checkout's clusterctl in it, and these folders of the image cache lent to
    it.
    """
    # which takes a minute where it is not there yet
    wheel = build_wheel(folder)
    root = tree()
    name = f"host-{secrets.token_hex(3)}"
    console = folder / "console.log"
    # In a control group of its own: where an earlier host left groups, its systemd may remove those
    # that its services are just starting in.
    if machine.booted_with_systemd():
        own_group = "systemd-run --scope --quiet --collect --property=Delegate=yes --".split()
    else:
        own_group = machine.enter_cgroup(name)
    argv = [*as_root(), *own_group, *"setpriv --pdeathsig KILL -- systemd-nspawn".split()]
    argv += [f"--directory={root}", f"--machine={name}", f"--hostname={name}", *_NSPAWN.split()]
    argv += [f"--bind-ro={path}" for path in (*images, wheel)]
    with console.open("wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        host = _wait_for(name, process, console)
        host(f"{PLACE}/bin/python", *"-m pip install --quiet --no-index --no-deps".split(), wheel)
        yield host
    finally:
        _end(name, process)


def _wait_for(name: str, process: subprocess.Popen[bytes], console: Path) -> Host:
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if pid := leader(name):
            host = Host(name, pid)
            # Until its bus is there, the question itself fails.
            answer = host.enter(
                "systemctl", "is-system-running", "--wait", timeout_s=_BOOT_TIMEOUT_S
            )
            if answer.stdout.strip() == "running":
                return host
        time.sleep(0.2)
    raise AssertionError(
        f"the host did not come up:\n{console.read_text(errors='replace')[-5000:]}"
    )


def leader(name: str) -> int | None:
    """The first process of a machine: the child of its systemd-nspawn."""
    pid = machine.running().get(name)
    if pid is None:
        return None
    children: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _end(name: str, process: subprocess.Popen[bytes]) -> None:
    """With its first process the kernel ends all of the machine's, and those of the machines in
    it.
    """
    while process.poll() is None:
        pids = (leader(name), machine.running().get(name))
        subprocess.run(
            [*as_root(), "kill", "-KILL", *(str(pid) for pid in pids if pid)], check=False
        )
        process.wait(timeout=_END_TIMEOUT_S)
    machine.remove_cgroups(name)


def tree() -> Path:
    """The tree that hosts boot from, made if it is not there (about half a minute)."""
    locked = lock_of_wheels()
    inputs = (" ".join(PACKAGES), inspect.getsource(make), locked)
    key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]
    tree = cache_home() / f"test-host-{key}"
    cache_home().mkdir(parents=True, exist_ok=True)
    with (cache_home() / "test-host.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait until it is there
        if not tree.is_dir():
            _build(tree, locked)
    return tree


def _build(tree: Path, locked: str) -> None:
    """Make a tree with the wheels that ``locked`` names, and remove those of before."""
    old = [str(path) for path in cache_home().glob("test-host-*")]
    subprocess.run([*as_root(), "rm", "-rf", "--one-file-system", "--", *old], check=True)
    building = tree.with_name(f"{tree.name}.building")
    with tempfile.TemporaryDirectory() as temporary:
        lock = Path(temporary) / "wheels.lock"
        lock.write_text(locked)
        paths = map(str, (building, wheelhouse(lock, PLATFORM), lock))
        program = [sys.executable, "-m", "tests.support.nested", *paths]
        subprocess.run([*as_root(), *program], check=True, timeout=600, cwd=ROOT)
    building.rename(tree)


def make(folder: Path, wheels: Path, lock: Path) -> None:
    """A Debian with what clusterctl needs of a host, and what it needs of Python, but not
    itself.
    """
    image.debootstrap(folder, image.DEFAULT_MIRROR, PACKAGES, image.DEBIAN.suites[DISTRIBUTION])
    (folder / "etc/machine-id").write_text("")
    lent = {UV: "/run/lent/uv", wheels: "/run/lent/wheels", lock: "/run/lent/wheels.lock"}
    argv = [
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--as-pid2",
        "--private-network",
    ]
    argv += [f"--directory={folder}", f"--machine=make-{secrets.token_hex(3)}", "--timezone=off"]
    argv += [f"--bind-ro={path}:{place}" for path, place in lent.items()]
    uv = "/run/lent/uv --quiet --no-cache --offline"
    install = (
        "pip install --no-index --find-links /run/lent/wheels --require-hashes --no-deps "
        "--link-mode copy"
    )
    script = (
        f"{uv} venv --python /usr/bin/python3 {PLACE}\n"
        f"{uv} {install} --compile-bytecode --python {PLACE}/bin/python -r /run/lent/wheels.lock\n"
    )
    subprocess.run([*argv, "--", "/bin/sh", "-ec", script], check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        make(place, *map(Path, sys.argv[2:]))
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
