"""The way to the helper: requests to a process that runs as root, and what it answers."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from clusterctl.errors import DiskError, LockedError, MachineError, ProvisionError
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.progress import ProgressReporter, Waiting

_MODULE = "clusterctl.providers.local.helper"
_NO_RIGHT, _HERE = "no right to start nodes", "this machine"
_ERRORS = {kind.__name__: kind for kind in (DiskError, LockedError, MachineError)}

_keeping: list[None] = []  # as many as want helpers to be kept
_idle: list[subprocess.Popen[str]] = []  # these wait for a request


def call(
    verb: str,
    request: dict[str, Any],
    *,
    report: ProgressReporter = lambda _: None,
    ready: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """One request to the helper, started with ``sudo -n`` when we are not root, to its result.

    ``ready`` is called while an image that is baked answers SSH, or when new nodes have addresses: what it
    returns is sent back.
    """
    with _helper() as helper:
        answer = converse(helper.process, {"verb": verb, "request": request}, report, ready=ready)
        helper.goes_on = answer["goes_on"]
    result: dict[str, Any] = answer["result"]
    return result


@contextmanager
def keeping_helper() -> Iterator[None]:
    """Meanwhile a helper that has answered serves the next call, too: to start one takes 0.15 s."""
    _keeping.append(None)
    try:
        yield
    finally:
        _keeping.pop()
        while _idle and not _keeping:
            _end(_idle.pop())


def start_ahead() -> None:
    """Start a helper for the first call. Without one it ends when we do, as its stdin is closed."""
    with suppress(MachineError, OSError):  # the call will say so
        _idle.append(_take())


@dataclass
class _Helper:
    process: subprocess.Popen[str]
    goes_on: bool = False


@contextmanager
def _helper() -> Iterator[_Helper]:
    # In a thread: Ctrl-C reaches the main one, and must not come between the fork and our knowing of it.
    with ThreadPoolExecutor(max_workers=1) as pool:
        taking = pool.submit(_take)
        try:
            yield (helper := _Helper(taking.result()))
        finally:
            process = taking.result()
            if _keeping and helper.goes_on:
                _idle.append(process)
            else:
                _end(process)


def _take() -> subprocess.Popen[str]:
    with suppress(IndexError):
        return _idle.pop()
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


def converse(
    process: subprocess.Popen[str],
    request: dict[str, Any],
    report: ProgressReporter,
    *,
    ready: Callable[[dict[str, Any]], object] | None,
) -> dict[str, Any]:
    """Send the helper a request, tell what it says meanwhile, and return its answer or raise its error."""
    _send(process, json.dumps(request))
    assert process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
    for line in process.stdout:
        message = json.loads(line)
        if "progress" in message:
            report(message["progress"])
        elif "waiting" in message:
            report(Waiting(message["waiting"]))
        elif "ready" in message and ready is not None:
            reply = ready(message["ready"])
            _send(process, "done" if reply is None else json.dumps(reply))
        elif "error" in message:
            error = message["error"]
            raise _ERRORS.get(error.pop("kind"), ProvisionError)(**error)
        elif "result" in message:
            return dict(message)
    raise _died(process)


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None  # noqa: S101
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise _died(process) from None


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
