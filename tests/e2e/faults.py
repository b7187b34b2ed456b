"""Faults that only root can cause, what of clusterctl is at work, and verbs that are ended before
their time.

As a program: `python -m tests.e2e.faults FAULT [ARGUMENT...]`.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from clusterctl.providers.local import layout, machine
from clusterctl.providers.local.system import mounted_under
from tests.support.processes import eventually, run_as_root
from tests.support.verbs import Clusterctl, CommandResult

STATE = Path("/var/lib/clusterctl")
_PATIENCE_S = 20.0
_ENDS_S = 60.0
_SIGNALS = {"int": signal.SIGINT, "hup": signal.SIGHUP, "term": signal.SIGTERM}


def cause(fault: str, *arguments: str | Path) -> str:
    """Have root cause one of the faults below. Return the output."""
    return run_as_root(sys.executable, "-m", "tests.e2e.faults", fault, *arguments)


def at_work(home: Path) -> list[str]:
    """List the processes of clusterctl with this home, a line each that begins with the pid,
    without those of nodes.
    """
    return cause("show", home).splitlines()


def at_work_on_nodes(cluster_id: str) -> list[str]:
    """List the processes on the nodes of a cluster that Ansible started, a line each."""
    return cause("show-on-nodes", cluster_id).splitlines()


def eventually_none(home: Path, look: Callable[[], list[str]] | None = None) -> list[str]:
    """Return the running processes (or the result of ``look``) after they had time to end."""
    look = look or functools.partial(at_work, home)
    deadline = time.monotonic() + _PATIENCE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _found(home: str) -> dict[int, str]:
    """Find processes by environment or arguments; those of nodes have neither."""
    needle = os.fsencode(home)
    found = {}
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            argv = (proc / "cmdline").read_bytes()
            environ = (proc / "environ").read_bytes().split(b"\0")
            ours = needle in argv or b"CLUSTERCTL_HOME=" + needle in environ
            if (
                ours
                and int(proc.name) not in {os.getpid(), os.getppid()}
                and __name__.encode() not in argv
            ):
                found[int(proc.name)] = argv.replace(bytes(1), b" ").decode(errors="replace")
    # The connection that verbs share outlives them.
    others = (
        "tests.e2e.faults",
        "ControlPersist=",
        "[mux]",
    )
    return {pid: line for pid, line in found.items() if not any(words in line for words in others)}


def show(home: str) -> None:
    sys.stdout.writelines(f"{pid}: {line}\n" for pid, line in _found(home).items())


def show_on_nodes(cluster_id: str) -> None:
    for pid, name in machine.cgroup_members():
        with suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
            if name.startswith(f"c{cluster_id}-") and (
                b"mitogen" in argv or b"ansible" in argv.lower()
            ):
                sys.stdout.write(
                    f"{pid}: {argv.replace(bytes(1), b' ').decode(errors='replace')}\n"
                )


def kill_all(home: str) -> None:
    """Kill all processes at once, as the kernel does when memory runs out or a session ends."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):  # none may react to the end of another
        deadline = time.monotonic() + _PATIENCE_S
        seen: set[int] = set()
        while (pids := _found(home).keys()) - seen or (sign is signal.SIGKILL and pids):
            _signal(pids, sign)
            seen |= pids
            assert time.monotonic() < deadline, _found(home)


def stop(*machines: str) -> None:
    machine.stop(machines)


def kill_supervisor(name: str) -> None:
    os.kill(machine.running()[name], signal.SIGKILL)


def reboot(home: str, cluster_id: str) -> None:
    """Leave only the files of a cluster, as a reboot of this machine does."""
    kill_all(home)
    machine.stop([name for name in machine.alive() if name.startswith(f"c{cluster_id}-")])
    for point in mounted_under(STATE / cluster_id):
        subprocess.run(["umount", point], check=True)
    for thing in ("link", "netns"):
        subprocess.run(["ip", thing, "delete", f"cc{cluster_id}"], check=False, capture_output=True)


def die(machine_name: str) -> None:
    """Kill a node: Slurm first hears that the jobs' scripts were killed, and then nothing."""
    programs = {
        pid: Path(f"/proc/{pid}/cmdline")
        for pid, name in machine.cgroup_members()
        if name == machine_name
    }
    for pid, cmdline in programs.items():
        with suppress(OSError):  # it has ended
            if b"job.py\0run" in cmdline.read_bytes():
                os.kill(pid, signal.SIGKILL)
    # The test passes also if Slurm has not heard of it by then.
    time.sleep(0.3)
    network = layout.netns_name(machine_name[1:].partition("-")[0])
    subprocess.run(["ip", "-n", network, "link", "set", f"vb-{machine_name}", "down"], check=True)


def _signal(pids: Collection[int], sign: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


class Victim:
    """A verb that runs in its own process session, as on a terminal."""

    def __init__(self, clusterctl: Clusterctl, *argv: str | Path) -> None:
        self._argv = tuple(map(str, argv))
        self._home = clusterctl.home
        self._process = clusterctl.start(*argv)
        self._start = time.monotonic()
        self._out: list[str] = []
        self._said: list[str] = []
        self._readers = [
            _reader(self._process.stdout, self._out),
            _reader(self._process.stderr, self._said),
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_phase(self, phase: str) -> None:
        """Wait until it says that it begins a phase.

        Raises:
            AssertionError: it ended first.
        """
        self.until_said(f"s] {phase.replace('_', ' ')}")

    def until_said(self, words: str) -> None:
        """Wait for a line that ends with these words.

        Raises:
            AssertionError: it ended first.
        """

        def said() -> bool:
            return any(line.endswith(f"{words}\n") for line in list(self._said))

        # A phase may take less than the longest of the growing pauses.
        eventually(lambda: said() or not self._readers[1].is_alive(), 300, pause_s=0.05)
        assert said(), f"it never said {words!r}:\n{''.join(self._said)}"

    def until(self, seconds: float) -> None:
        """Wait until so much time has passed since the start, or until the process has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._start + seconds - time.monotonic()))

    def hit(self, how: str, cluster_id: str = "") -> CommandResult:
        """End the process: `kill` (it alone), `kill-all` (with all child processes), `int`, `hup`,
        `term` or `reboot`.
        """
        if how == "kill":
            self._signal(signal.SIGKILL, alone=True)
        elif how in {"kill-all", "reboot"}:
            cause(how, self._home, *([cluster_id] if how == "reboot" else []))
        else:
            self._signal(_SIGNALS[how], alone=False)
        return self.end()

    def end(self, *, patience_s: float = _ENDS_S) -> CommandResult:
        """Wait for the end of the process. It is a failure if the process does not end."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL, alone=False)
            raise AssertionError(f"no end within {patience_s} s:\n{''.join(self._said)}") from None
        for reader in self._readers:
            reader.join(_ENDS_S)
        return CommandResult(self._argv, code, "".join(self._out), "".join(self._said))

    def _signal(self, sign: signal.Signals, *, alone: bool) -> None:
        with suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self._process.pid, sign)


def _reader(pipe: Iterable[str] | None, lines: list[str]) -> threading.Thread:
    """Start a thread that appends the output to the lines."""

    def read() -> None:
        for line in pipe or ():
            lines.append(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    faults = (show, show_on_nodes, kill_all, stop, kill_supervisor, reboot, die)
    fault: Callable[..., None] = {one.__name__: one for one in faults}[
        sys.argv[1].replace("-", "_")
    ]
    fault(*sys.argv[2:])
