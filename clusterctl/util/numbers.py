"""Numbers in messages, and numbers in JSON that a job has written: they may be of any type, NaN,
infinite or too large.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeGuard

# Integers below it fit a float.
LARGEST: Final = 1 << 1023


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number (also NaN or infinity) that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < LARGEST


def finite(value: Any) -> float | None:
    """Return the value if it is a finite number, otherwise None."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    return float(value) if is_number(value) and math.isfinite(value) else None


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: ``1 file``, ``2,000 files``. plural: default: with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
