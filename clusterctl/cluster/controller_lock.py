"""The locks that `up` and `down` hold: on this machine, and on the controller against clusterctl on other
machines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from clusterctl.errors import CommandError, LockedError, TransportError, printable
from clusterctl.hosts.remote_lock import HELD
from clusterctl.state.inventory import inventory_if_known
from clusterctl.state.workspace import Workspace, this_person
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.transport.ssh import Connections
from clusterctl.util import formatting

_PAUSE_S: Final = 1.0


@contextmanager
def lock_cluster(
    workspace: Workspace, verb: str, *, wait_s: float, waiting: Callable[[str], None]
) -> Iterator[None]:
    """Hold the locks of a cluster during the `with` block. waiting: called with a message about the
    process that holds a lock.

    Raises LockedError if another process holds a lock for ``wait_s`` seconds, MachineError if the lock
    here can't be created.
    """
    with workspace.lock(verb, wait_s=wait_s, waiting=waiting):
        inventory = inventory_if_known(workspace)
        # Nobody else's machine reaches local nodes.
        if inventory is None or inventory.traits.shares_kernel:
            yield
            return
        with Connections(workspace.ssh_config) as connections:
            controller = connections.to(inventory.controller.name)
            with hold_controller(controller, verb, wait_s=wait_s, waiting=waiting):
                yield


@contextmanager
def hold_controller(
    controller: Transport, verb: str, *, wait_s: float, waiting: Callable[[str], None]
) -> Iterator[None]:
    """Hold the lock on a controller during the `with` block. A controller that does not answer has no
    lock: later steps name the cause.

    verb: this clusterctl command, named to others. waiting: called once with who holds the lock.
    Raises LockedError if another process holds the lock for ``wait_s`` seconds.
    """
    since = formatting.moment(time.time())
    name = f"`clusterctl {verb}` of {this_person()} (pid {os.getpid()}), since {since}"
    program = ("sudo", "-n", *remote_argv("clusterctl.hosts.remote_lock", name))
    deadline = time.monotonic() + wait_s
    is_reported = False
    while True:
        output = controller.stream(program)
        try:
            holder = _first_line(output)
            if holder in {HELD, ""}:
                yield
                return
        finally:
            with suppress(CommandError, TransportError):
                output.close()
        if time.monotonic() >= deadline:
            raise LockedError(
                "another clusterctl works on this cluster",
                why=holder,
                fix="wait until that command is done, or end its process there",
                host=controller.host,
            )
        if not is_reported:
            waiting(f"{holder}, works on this cluster; waiting for at most {wait_s / 60:g} minutes")
            is_reported = True
        time.sleep(_PAUSE_S)


def _first_line(output: Generator[bytes, None, None]) -> str:
    """Return the first line that a program prints. "": the host does not answer."""
    text = b""
    with suppress(CommandError, TransportError):
        for piece in output:
            text += piece
            if b"\n" in text:
                break
    return printable(text.decode(errors="replace").partition("\n")[0])
