"""Sizes and durations as people write them: ``50GiB``, ``1h30m``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_BINARY_EXPONENT = {"K": -1, "M": 0, "G": 1, "T": 2}


def parse_size_mib(value: object) -> int:
    """MiB of a size such as ``512MiB``, ``50GiB``, ``1.5T``. ``K``, ``M``, ``G``, ``T`` mean binary units.

    Raises:
        ValueError: not a size, or less than one MiB.
    """
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number, unit, _ = match.groups()
        mib = int(float(number) * 1024 ** _BINARY_EXPONENT[unit.upper()])
        if mib >= 1:
            return mib
        raise ValueError(f"{value!r} is less than 1MiB")
    raise ValueError(f"{value!r} is not a size; write a number with a unit, such as 512MiB or 50GiB")


def parse_duration_s(value: object) -> int:
    """Seconds of a duration such as ``45s``, ``1h30m``, ``2d``.

    Raises:
        ValueError: not a duration, or zero.
    """
    if isinstance(value, str) and value.strip() and (match := _DURATION.fullmatch(value.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        if total >= 1:
            return total
        raise ValueError(f"{value!r} is no time at all")
    raise ValueError(f"{value!r} is not a duration; write it as 45s, 30m, 1h30m or 2d")


def format_size(mib: int) -> str:
    """The shortest exact spelling of a size in MiB: ``51200`` is ``50GiB``."""
    for unit, factor in (("TiB", 1024**2), ("GiB", 1024)):
        if mib % factor == 0:
            return f"{mib // factor}{unit}"
    return f"{mib}MiB"


def format_duration(seconds: int) -> str:
    """The shortest exact spelling of a duration in seconds: ``5400`` is ``1h30m``."""
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


SizeMib = Annotated[
    int,
    BeforeValidator(parse_size_mib),
    PlainSerializer(format_size, return_type=str),
    WithJsonSchema(
        {"type": "string", "pattern": r"^\d+(\.\d+)?\s*[KMGTkmgt]i?[Bb]?$", "examples": ["50GiB"]}
    ),
]
DurationS = Annotated[
    int,
    BeforeValidator(parse_duration_s),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(\d+d)?(\d+h)?(\d+m)?(\d+s)?$", "examples": ["1h30m"]}),
]
