"""A fault between the fields of a spec, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Loc = tuple[str | int, ...]

INCONSISTENT: Final = "inconsistent"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: at ``loc``, on its key rather than on its value where ``at_key``."""

    loc: Loc
    message: str
    hint: str = ""
    at_key: bool = False

    @property
    def key(self) -> str:
        """``loc`` as a dotted path."""
        return dotted(self.loc)


def dotted(loc: Loc) -> str:
    """``("partitions", 1, "nodes")`` is ``partitions[1].nodes``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")
