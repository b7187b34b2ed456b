"""Whether Ansible waits for a process that is dead.

Mitogen reaches all hosts through one process of its own, which Ansible starts before its workers and looks at
again only in the end. When it dies (out of memory, a bug), the playbook would wait for ever. A worker's
death Ansible sees by itself.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 5.0  # while Ansible says nothing
_PROC = Path("/proc")


@dataclass(slots=True)
class Watchdog:
    """Told of each silence of Ansible. It must be dead twice in a row: at the end it is for a moment."""

    _suspect: int | None = None

    def hopeless(self, ansible: int | None) -> bool:
        """Whether the playbook of that process can't go on."""
        before, self._suspect = self._suspect, _dead_eldest(ansible) if ansible is not None else None
        return self._suspect is not None and self._suspect == before


def _dead_eldest(parent: int) -> int | None:
    """The first process that this one has started and not yet buried, if it is dead."""
    born: dict[int, tuple[int, str]] = {}
    with suppress(OSError):  # it has ended; or there is no /proc here
        for task in (_PROC / str(parent) / "task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):
                    # proc(5): after the name come the state and, 19 fields on, the time of birth
                    fields = (_PROC / child / "stat").read_text().rpartition(")")[2].split()
                    born[int(child)] = int(fields[19]), fields[0]
    eldest = min(born, key=lambda pid: born[pid], default=None)
    return eldest if eldest is not None and born[eldest][1] == "Z" else None
