"""Parse and format sizes and durations: ``50GiB``, ``1h30m``, and the formats of Slurm's flags.

Digits must be ASCII, numbers in a spec need a unit, and values over 1024TiB or ten years are
rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from clusterctl.errors import BadValueError
from clusterctl.util import formatting

SIZE_PATTERN: Final = r"^(?=.*[1-9])[0-9]{1,12}(\.[0-9]{1,6})?[KMGTkmgt]i?[Bb]?$"
DURATION_PATTERN: Final = r"^(?=.*[1-9])([0-9]{1,9}d)?([0-9]{1,9}h)?([0-9]{1,9}m)?([0-9]{1,9}s)?$"
MIB: Final = 1 << 20  # bytes
GIB_MIB: Final = 1024
MAX_SIZE_MIB: Final = 1024**2 * GIB_MIB
MAX_DURATION_S: Final = 3650 * 86400

_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([KMGTkmgt])i?[Bb]?")
_DURATION = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")
_KIB_EXPONENT = {"K": 0, "M": 1, "G": 2, "T": 3}

_SLURM_DAYS = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_SLURM_CLOCK = re.compile(r"(?:([0-9]{1,9}):)?([0-9]{1,9})(?::([0-9]{1,9}))")
# Words of sbatch for no time limit.
_UNLIMITED: Final = frozenset({"unlimited", "infinite"})
_DIGITS = re.compile(r"[0-9]{1,12}")

_SHOWN_LENGTH: Final = 60


def shown(value: object) -> str:
    """Format a value for a message: short, on a single line, in YAML's notation instead of
    Python's.
    """
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = value if isinstance(value, str) else str(value)
    if len(text) > _SHOWN_LENGTH:
        text = text[: _SHOWN_LENGTH - 3] + "..."
    return repr(text) if isinstance(value, str) else text


def parse_size_mib(value: object) -> int:
    """Parse a size such as ``512MiB``, ``50GiB``, ``1.5T``. Return MiB, rounded down.

    ``K``, ``M``, ``G``, ``T`` are binary units, as in Slurm.

    Raises:
        ValueError: not a size, less than 1 MiB, or more than ``MAX_SIZE_MIB``.
    """
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        whole, _, part = number.partition(".")
        kib = int(whole + part) * 1024 ** _KIB_EXPONENT[unit.upper()] // 10 ** len(part)
        return _size_in_range(value, kib // 1024)
    raise BadValueError(
        "not-a-size",
        f"{shown(value)} is not a size; write a number with a unit, such as 512MiB or 50GiB",
    )


def parse_duration_s(value: object) -> int:
    """Parse a duration such as ``45s``, ``1h30m``, ``2d``. Return seconds.

    Raises:
        ValueError: not a duration, zero, or longer than ``MAX_DURATION_S``.
    """
    if isinstance(value, str) and value and (match := _DURATION.fullmatch(value)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return _duration_in_range(value, days, hours, minutes, seconds)
    raise BadValueError(
        "not-a-duration", f"{shown(value)} is not a duration like 45s, 30m, 1h30m or 2d"
    )


def parse_slurm_time_s(value: object) -> int:
    """Parse a time: a duration such as ``1h30m``, or any of Slurm's formats. Return seconds.

    Slurm's formats are minutes, ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM`` and ``D-HH:MM:SS``.

    Raises:
        ValueError: not a time, zero, or longer than ``MAX_DURATION_S``.
    """
    text = _spelled(value)
    if _DIGITS.fullmatch(text):
        return _duration_in_range(text, 0, 0, int(text), 0)
    if match := _SLURM_DAYS.fullmatch(text) or _SLURM_CLOCK.fullmatch(text):
        parts = [int(part or 0) for part in match.groups()]
        days, hours, minutes, seconds = parts if len(parts) == 4 else [0, *parts]  # noqa: PLR2004
        return _duration_in_range(text, days, hours, minutes, seconds)
    if text and _DURATION.fullmatch(text):
        return parse_duration_s(text)
    raise BadValueError(
        "not-a-time",
        f"{shown(value)} is not a time; write it as 30 (minutes), 1h30m, 01:30:00 or 1-12:00",
    )


def parse_time_limit_s(value: object) -> int:
    """Parse a job's time limit, as ``parse_slurm_time_s`` does. Return seconds.

    Raises:
        ValueError: not a time, longer than ``MAX_DURATION_S``, or what means no limit to sbatch:
            zero, `UNLIMITED` and `INFINITE`.
    """
    text = _spelled(value)
    try:
        return parse_slurm_time_s(value)
    except BadValueError as exc:
        is_zero = exc.code == "duration-zero" and not _DURATION.fullmatch(text)
        if is_zero or text.lower() in _UNLIMITED:
            raise BadValueError(
                "no-time-limit",
                f"{shown(value)} means no time limit to sbatch; leave it out for the partition's "
                "time limit, or write a long time, such as 30d",
            ) from exc
        raise


def parse_slurm_memory_mib(value: object) -> int:
    """Parse a job's memory: a size such as ``4G`` or ``4GiB``, or Slurm's bare number of MB. Return
    MiB.

    Raises:
        ValueError: not a size, zero, or more than ``MAX_SIZE_MIB``.
    """
    text = _spelled(value)
    if _DIGITS.fullmatch(text):
        return _size_in_range(text, int(text))
    if _SIZE.fullmatch(text):
        return parse_size_mib(text)
    raise BadValueError(
        "not-a-memory-size",
        f"{shown(value)} is not an amount of memory; write it as 4G, 4GiB or 4096 (MB)",
    )


def _spelled(value: object) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _size_in_range(text: str, mib: int) -> int:
    if mib < 1:
        raise BadValueError("size-too-small", f"{shown(text)} is less than the minimum, 1MiB")
    if mib > MAX_SIZE_MIB:
        raise BadValueError(
            "size-too-large", f"{shown(text)} is more than {formatting.exact_size(MAX_SIZE_MIB)}"
        )
    return mib


def _duration_in_range(text: str, days: int, hours: int, minutes: int, seconds: int) -> int:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise BadValueError("duration-zero", f"{shown(text)} is zero; it must be at least 1s")
    if total > MAX_DURATION_S:
        most = formatting.duration(MAX_DURATION_S)
        raise BadValueError(
            "duration-too-long", f"{shown(text)} is longer than the maximum, {most}"
        )
    return total
