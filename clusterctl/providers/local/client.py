"""The way to the helper: requests to a process that runs as root, and what it answers."""

from __future__ import annotations

import atexit
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from clusterctl.errors import DiskError, LockedError, MachineError, ProvisionError
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.progress import SILENT, ProgressReporter, Waiting

_MODULE = "clusterctl.providers.local.helper"
_NO_RIGHT, _HERE = "no right to start nodes", "this machine"
_ERRORS = {kind.__name__: kind for kind in (DiskError, LockedError, MachineError)}

_idle: list[subprocess.Popen[str]] = []  # these wait for a request


@dataclass(slots=True)
class Exchange:
    """A request that the helper works on. ``goes_on``: whether the helper takes another request."""

    process: subprocess.Popen[str]
    report: ProgressReporter
    goes_on: bool = False
    _result: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any] | None:
        """Return what the helper is ready for and waits for a reply to; None once it has a result.

        It is ready while an image that is baked answers SSH, and when new nodes have addresses.
        """
        assert self.process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
        for line in self.process.stdout:
            message = json.loads(line)
            if "progress" in message:
                self.report(message["progress"])
            elif "waiting" in message:
                self.report(Waiting(message["waiting"]))
            elif "ready" in message:
                return dict(message["ready"])
            elif "error" in message:
                error = message["error"]
                raise _ERRORS.get(error.pop("kind"), ProvisionError)(**error)
            elif "result" in message:
                self._result, self.goes_on = dict(message["result"]), message["goes_on"]
                return None
        raise _died(self.process)

    def send(self, said: object) -> None:
        """Send a request, or the reply to what the helper is ready for."""
        assert self.process.stdin is not None  # noqa: S101
        try:
            self.process.stdin.write(json.dumps(said) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise _died(self.process) from None

    def result(self) -> dict[str, Any]:
        while self._result is None:
            self.ready()
        return self._result


@dataclass(frozen=True, slots=True)
class Helper:
    """The process that works as root, started with ``sudo -n`` if we are not root.

    A helper that has answered serves the next request, too: starting one takes 0.15 s. It ends when we do.
    """

    report: ProgressReporter = SILENT.progress

    def call(self, verb: str, request: Mapping[str, Any]) -> dict[str, Any]:
        with self.asking(verb, request) as exchange:
            return exchange.result()

    @contextmanager
    def asking(self, verb: str, request: Mapping[str, Any]) -> Iterator[Exchange]:
        """A request while the helper works on it. If the body raises, it stops and cleans up."""
        exchange: Exchange | None = None
        # In a thread: Ctrl-C reaches the main one, and must not come between the fork and our knowing of it.
        with ThreadPoolExecutor(max_workers=1) as pool:
            taking = pool.submit(_take)
            try:
                exchange = Exchange(taking.result(), self.report)
                exchange.send({"verb": verb, "request": request})
                yield exchange
            finally:
                process = taking.result()
                if exchange and exchange.goes_on:
                    _idle.append(process)
                else:
                    _end(process)


def start_ahead() -> None:
    """Start a helper for the first call."""
    with suppress(MachineError, OSError):  # the call will say so
        _idle.append(_take())


@atexit.register
def end_idle() -> None:
    while _idle:
        _end(_idle.pop())


def _take() -> subprocess.Popen[str]:
    while _idle:
        if (process := _idle.pop()).poll() is None:
            return process
        _end(process)
    return subprocess.Popen(
        # -B: bytecode that root wrote into a user's own installation is what they could not remove
        [*elevation(sys.platform), sys.executable, "-I", "-B", "-m", _MODULE, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        process_group=0,  # Ctrl-C is ours; but the session stays, so that sudo finds its ticket
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Closing stdin tells a helper that is still at work to stop and clean up."""
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait()


def refuse_other_machines(system: str) -> None:
    """Refuse a machine that can't carry local nodes; ``system`` is its ``sys.platform``."""
    if system != "linux":
        what, here = "the local provider needs Linux", f"this machine runs {system}"
        raise MachineError(what, code="needs-linux", where=here, fix="run clusterctl on a Linux machine")
    if platform.machine() != ARCHITECTURE:
        what = f"local nodes are built for {ARCHITECTURE}"
        fix = f"run clusterctl on an {ARCHITECTURE} machine"
        raise MachineError(what, code="architecture", where=f"this machine is {platform.machine()}", fix=fix)


def elevation(system: str) -> list[str]:
    """What starts a command as root here; nothing when we are."""
    refuse_other_machines(system)
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        why = "you are not root, and there is no sudo"
        fix = "run clusterctl as root, or install sudo and allow yourself to use it"
        raise MachineError(_NO_RIGHT, code="no-right-to-start-nodes", where=_HERE, why=why, fix=fix)
    return ["sudo", "-n", "--"]


def _died(process: subprocess.Popen[str]) -> MachineError | ProvisionError:
    said = process.stderr.read().strip() if process.stderr else ""
    lines = said.splitlines()
    # sudo may warn first, of a host name that does not resolve for one, and then goes on.
    if lines and all(line.startswith("sudo:") for line in lines):
        fix = "run `sudo -v` first, or run clusterctl as root, or allow sudo without a password"
        return MachineError(_NO_RIGHT, code="no-right-to-start-nodes", where=_HERE, why=lines[-1], fix=fix)
    return ProvisionError(
        "the machine helper ended without an answer", code="ended-without-answer", why=said[-1500:]
    )
