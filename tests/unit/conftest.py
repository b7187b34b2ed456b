"""The guard of unit tests: none of them starts a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator

import pytest

_STARTS = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
}
_guarded: pytest.Item | None = None
_started: list[str] = []
# Threads that earlier tests, also of tests/integration, have not ended yet.
_earlier: set[int] = set()


def _guard(event: str, arguments: tuple[object, ...]) -> None:
    """Record what a unit test starts, and fail the test."""
    if event in _STARTS and _guarded is not None and threading.get_ident() not in _earlier:
        what = f"{event}{arguments[:2]!r}"
        _started.append(what)
        pytest.fail(_message([what]))


def _message(started: list[str]) -> str:
    return (
        f"a unit test started a process: {', '.join(started)}. Give it what the process would "
        "answer, or move it to tests/integration"
    )


def pytest_configure() -> None:
    sys.addaudithook(_guard)


@pytest.hookimpl(wrapper=True)
def _without_processes(item: pytest.Item) -> Generator[None, None, None]:
    global _guarded  # noqa: PLW0603
    _earlier.clear()
    _earlier.update(thread.ident or 0 for thread in threading.enumerate())
    _earlier.discard(threading.get_ident())
    _guarded = item
    _started.clear()
    try:
        yield
    finally:
        _guarded = None
    if _started:
        # In a thread, or where the failure was caught.
        pytest.fail(_message(_started))


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _without_processes
