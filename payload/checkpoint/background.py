"""This rank's end of its writer process: the memory that they share, requests, and answers."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from payload.errors import PayloadError

_QUIET = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


class Writer:
    """Does one request at a time, about what was put into ``memory``.

    The memory has no name: no end of this process, however sudden, leaves any of it behind.
    """

    def __init__(self, size: int, *, keeps: Sequence[int] = ()) -> None:
        """
        Args:
            size: bytes of the memory.
            keeps: file descriptors that are open in the process, too, as long as it lives.
        """
        descriptor = os.memfd_create("checkpoint")
        os.ftruncate(descriptor, size)
        # Its pages are there from the start, not only when the first copy touches them.
        mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        program, parent = str(Path(__file__).with_name("writer.py")), str(os.getpid())
        # Signals that ask the job to end are for ranks. Blocked here, they are in the writer from its start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _QUIET)
        try:
            # It is started by vfork, which unlike fork does no harm after MPI_Init.
            self._process = subprocess.Popen(
                [sys.executable, "-I", program, str(descriptor), parent],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor, *keeps],
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(descriptor)
        self._requests, self._answers = _stream(self._process.stdin), _stream(self._process.stdout)
        self.busy = False

    def ask(self, **request: Any) -> None:
        """Begin with something; see ``writer`` for what."""
        self.busy = True
        with suppress(BrokenPipeError):  # the writer is gone, which its answer will tell
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()

    def ready(self) -> bool:
        """Whether the answer is there."""
        poll = select.poll()  # unlike select, for any file descriptor
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(0))

    def answer(self) -> dict[str, Any]:
        """What came of the request; waits for it.

        Raises:
            PayloadError: it could not be done.
        """
        line = self._answers.readline()
        self.busy = False
        if not line:
            raise PayloadError(f"the process that writes checkpoints ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PayloadError(f"a checkpoint cannot be written: {answer['error']}")
        return answer

    def close(self, *, kill: bool = False) -> None:
        """End it after what it was asked for, or at once."""
        if kill:
            self._process.kill()
        with suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        self._process.wait()


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # noqa: S101  # they are pipes
    return stream
