"""The client of the root helper: starts the helper, sends requests to it, reads its answers."""

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
from clusterctl.util.process import run
from clusterctl.util.progress import SILENT, LockMessage, ProgressReporter

_MODULE = "clusterctl.providers.local.helper"
_NO_RIGHT = "local nodes need root access to this machine"
_ERRORS = {kind.__name__: kind for kind in (DiskError, LockedError, MachineError)}

# Helpers that wait for a request.
_idle: list[subprocess.Popen[str]] = []


@dataclass(slots=True)
class HelperExchange:
    """Messages about a request to the root helper. ``goes_on``: whether it then accepts another
    request.
    """

    process: subprocess.Popen[str]
    report: ProgressReporter
    goes_on: bool = False
    _result: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any] | None:
        """Return the helper's next question, to answer with ``send``. None: the helper has sent the
        result.

        A question asks the caller to configure a new image over SSH, or for the files of new nodes.
        """
        assert self.process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
        for line in self.process.stdout:
            message = json.loads(line)
            if "progress" in message:
                self.report(message["progress"])
            elif "waiting" in message:
                self.report(LockMessage(message["waiting"]))
            elif "ready" in message:
                return dict(message["ready"])
            elif "error" in message:
                error = message["error"]
                raise _ERRORS.get(error.pop("kind"), ProvisionError)(**error)
            elif "result" in message:
                self._result = dict(message["result"])
                self.goes_on = message["goes_on"]
                return None
        raise _died(self.process)

    def send(self, message: object) -> None:
        assert self.process.stdin is not None  # noqa: S101
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise _died(self.process) from None

    def result(self) -> dict[str, Any]:
        while self._result is None:
            self.ready()
        return self._result


@dataclass(frozen=True, slots=True)
class Helper:
    """A connection to a root helper process, reused for several requests, since a start takes 0.15
    s.
    """

    report: ProgressReporter = SILENT.progress

    def call(self, verb: str, request: Mapping[str, Any]) -> dict[str, Any]:
        with self.asking(verb, request) as exchange:
            return exchange.result()

    @contextmanager
    def asking(self, verb: str, request: Mapping[str, Any]) -> Iterator[HelperExchange]:
        """Send a request and yield its ``HelperExchange``. If the body raises, the helper cleans up and
        ends.
        """
        exchange: HelperExchange | None = None
        # The process is started in a thread, because Ctrl-C in the main thread could lose a process
        # that was just started.
        with ThreadPoolExecutor(max_workers=1) as pool:
            future = pool.submit(_take)
            try:
                exchange = HelperExchange(future.result(), self.report)
                exchange.send({"verb": verb, "request": request})
                yield exchange
            finally:
                process = future.result()
                if exchange and exchange.goes_on:
                    _idle.append(process)
                else:
                    _end(process)


def start_ahead() -> None:
    """Start a root helper, so that the first request need not wait. Errors appear only in that
    request.
    """
    # The first call reports the error.
    with suppress(MachineError, OSError):
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
        # -B: root must not write bytecode into a user's installation, because the user could not
        # delete it.
        [*elevation(sys.platform), sys.executable, "-I", "-B", "-m", _MODULE, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        # Ctrl-C must not reach the helper. The session stays the same, so that sudo finds its
        # credentials.
        process_group=0,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Close the helper's stdin, which makes the helper clean up, and wait until the helper has
    ended.
    """
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait()


def refuse_other_machines(system: str) -> None:
    """Raise a MachineError if local nodes can't run on ``system``, the ``sys.platform`` of this
    machine.
    """
    if system != "linux":
        summary = "the local provider needs Linux"
        here = f"this machine runs {system}"
        raise MachineError(
            summary,
            code="unsupported",
            about="linux",
            where=here,
            fix="run clusterctl on a Linux machine",
        )
    if platform.machine() != ARCHITECTURE:
        summary = f"local nodes need an {ARCHITECTURE} machine"
        fix = f"run clusterctl on an {ARCHITECTURE} machine"
        here = f"this machine is {platform.machine()}"
        raise MachineError(summary, code="host-unfit", about="architecture", where=here, fix=fix)


def elevation(system: str) -> list[str]:
    """Return the words that make a command run as root, or [] for root. ``system``:
    ``sys.platform``.
    """
    refuse_other_machines(system)
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        reason = "you are not root, and sudo is not installed"
        fix = "run clusterctl as root, or install sudo and allow yourself to use it"
        raise MachineError(_NO_RIGHT, code="sudo", about="nodes", why=reason, fix=fix)
    return ["sudo", "-n", "--"]


def require_root(system: str) -> None:
    """Raise a MachineError if this user can't become root without a question, as `up` must.

    system: ``sys.platform``.
    """
    if not (words := elevation(system)):
        return
    result = run([*words, "true"])
    if result.rc:
        raise _no_right(result.reason.splitlines()[-1])


def _no_right(reason: str) -> MachineError:
    fix = "run `sudo -v` first, or run clusterctl as root, or allow sudo without a password"
    return MachineError(_NO_RIGHT, code="sudo", about="nodes", why=reason, fix=fix)


def _died(process: subprocess.Popen[str]) -> MachineError | ProvisionError:
    stderr = process.stderr.read().strip() if process.stderr else ""
    lines = stderr.splitlines()
    # sudo may print a warning and continue, for example about a host name that does not resolve.
    if lines and all(line.startswith("sudo:") for line in lines):
        return _no_right(lines[-1])
    return ProvisionError(
        "clusterctl's root helper ended without an answer",
        code="internal",
        about="answer-missing",
        why=stderr[-1500:],
    )
