"""Values as text: the only place that rounds a value or chooses its unit.

``given`` shows a user's value to the last digit; ``exact_size`` and ``duration`` show a size or
duration that is read back. All other values are measurements, which every view shows alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from clusterctl.util.numbers import finite

NONE: Final = "-"
_DIGITS: Final = 6
# Means of runs outside of these are shown with an exponent.
_LARGE: Final = 1e15
_SMALL: Final = 1e-6
# Values that are equal differ by this share of their mean, or less, when they are added up.
_ROUNDING: Final = 1e-14
_SIZES: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
# Units of metrics, by the ends of their names. A share has no unit: some programs write an `mfu` in
# percent, and an efficiency may be above 1.
_UNITS: Final = {
    "s": "s",
    "sec": "s",
    "seconds": "s",
    "ms": "ms",
    "bytes": "B",
    "bytes_sent": "B",
    "mib": "MiB",
    "gib": "GiB",
    "gb": "GB",
    "gflops": "GFLOP/s",
    "percent": "%",
}
_UNIT: Final = re.compile(rf"(?:^|[_/.])({'|'.join(_UNITS)})$")
_RATE: Final = re.compile(r"([^_/.]+)(?:_per_|/)s(?:ec(?:ond)?)?$")
_LARGER_UNITS: Final[Mapping[str, Sequence[tuple[str, float]]]] = {
    "B": _SIZES,
    "B/s": [(f"{name}/s", size) for name, size in _SIZES],
    "s": (("hours", 3600), ("minutes", 60)),
}
# A larger unit is used from this many of it.
_ENOUGH: Final = 2


def given(value: object) -> str:
    """Return a value that the user gave as text, to the last digit."""
    if value is None or value == "":
        return NONE
    return str(value).lower() if isinstance(value, bool) else str(value)


def number(value: float | None, digits: int = _DIGITS) -> str:
    """Return a measured number with this many digits, and all before the decimal point."""
    if value is None:
        return NONE
    text = f"{shortened(value, digits):,.15g}"
    # The digits of a number below 1e-307 can't be rounded to fewer.
    return f"{value:.{digits}g}" if "e" in text else text


def shortened(value: float, digits: int) -> float:
    """Round a number to this many digits, but keep all before the decimal point."""
    return float(f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}")


def size(count: float) -> str:
    """Return a number of bytes as text: ``3.2 MiB``."""
    unit, length = next(
        (each for each in _SIZES if round(abs(count) / each[1] * 1024, 1) >= 1024),  # noqa: PLR2004
        ("B", 1),
    )
    return f"{count / length:,.1f}".removesuffix(".0") + f" {unit}"


def exact_size(mib: int) -> str:
    """Return a size in MiB as a spec and an option have it, in full: ``51200`` is ``50GiB``."""
    for unit, factor in (("TiB", 1024**2), ("GiB", 1024)):
        if mib and mib % factor == 0:
            return f"{mib // factor}{unit}"
    return f"{mib}MiB"


def duration(seconds: float | None) -> str:
    """Return a duration in whole seconds, as a spec and an option have it: ``5400`` is
    ``1h30m``. A measured one of less than a second has two digits: ``0.42s``.
    """
    if seconds is None:
        return NONE
    if 0 < seconds < 1:
        return f"{_plain(seconds, 2)}s"
    parts = []
    rest = max(round(seconds), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def about(seconds: float) -> str:
    """Return a duration in its largest two units, for a time that is not known to the second."""
    whole = max(round(seconds), 0)
    step = next((step for unit, step in ((86400, 3600), (3600, 60)) if whole >= unit), 1)
    return duration(whole - whole % step)


def percent(value: float | None, unit: str = " %") -> str:
    """Return a number of percent with a decimal place: ``98.9 %``. A smaller one than that place
    shows has a digit: ``0.02 %``.
    """
    if value is None:
        return NONE
    is_small = 0 < abs(value) < 0.05  # noqa: PLR2004 - half of the last digit
    return (_plain(value, 1) if is_small else f"{value:.1f}".removesuffix(".0")) + unit


def hours(value: float | None) -> str:
    """Return node hours, or hours of a processor or GPU."""
    return number(value, 3)


def cost(usd: float | None, unit: str = " USD") -> str:
    """Return a price: ``12.35 USD``. A small price has three significant digits."""
    if usd is None:
        return NONE
    is_small = 0 < abs(usd) < 0.1  # noqa: PLR2004 - a tenth
    return (_plain(usd, 3) if is_small else f"{usd:,.2f}") + unit


def shown(value: object, kind: str) -> str:
    """Return a value of a kind: ``duration`` (seconds), ``hours``, ``cost`` (USD), ``size`` (bytes),
    ``moment`` (Unix seconds), or a unit such as ``J``. "": as it was given.
    """
    if not kind or not isinstance(value, int | float):
        return given(value)
    return _KINDS[kind](value) if kind in _KINDS else quantity(float(value), kind)


@dataclass(frozen=True, slots=True)
class Fact:
    """A value with its name. kind: see ``shown``."""

    label: str
    value: str | int | float | None
    kind: str = ""

    @property
    def text(self) -> str:
        return shown(self.value, self.kind)

    @property
    def is_known(self) -> bool:
        return self.text != NONE


def moment(at: float | None, *, utc: bool = False) -> str:
    """Return a time in Unix seconds: in the local time zone, or in UTC, as a run's files have
    it.
    """
    if at is None:
        return NONE
    # The time in a damaged record may be out of range.
    with suppress(OverflowError, ValueError, OSError):
        when = datetime.fromtimestamp(at, UTC)
        return f"{when:%Y-%m-%d %H:%M:%S} UTC" if utc else f"{when.astimezone():%Y-%m-%d %H:%M:%S}"
    return str(at)


def quantity(value: float, unit: str) -> str:
    """Return a measured value with a unit that fits it, such as ``1.5 GiB``."""
    if unit in {"B", "B/s"}:
        return size(value) + unit.removeprefix("B")
    name, length = fitting_unit(unit, [value])
    return f"{number(value / length)} {name}".strip()


def metric(value: object, name: str = "") -> str:
    """Return a measured value. Its name may tell its unit. A rate such as ``samples_per_s`` has its
    unit in its name alone.
    """
    if not isinstance(value, float):
        return given(value)
    unit = unit_of(name)
    is_known = not {unit, unit.removesuffix("/s")}.isdisjoint(_UNITS.values())
    return quantity(value, unit if is_known else "")


def spread(mean: float, deviation: float, digits: int = 4) -> str:
    """Return a text such as ``290 ± 17``: the deviation with two digits, the mean to the same
    place.

    digits: of a mean without a deviation, or whose deviation is only that of rounding.
    """
    largest = max(abs(mean), deviation)
    has_exponent = largest and not _SMALL <= largest < _LARGE
    if deviation <= abs(mean) * _ROUNDING:
        if has_exponent:
            return f"{mean:.{digits}g}"
        places = _places(mean, digits)
        text = f"{mean:,.{places}f}"
        return text.rstrip("0").rstrip(".") if places else text
    if not math.isfinite(largest):
        return f"{mean:g} ± {deviation:g}"
    rounded = Decimal(f"{deviation:.1e}")
    last = rounded.adjusted() - 1
    ended = Decimal(mean).quantize(Decimal(1).scaleb(last))
    if not has_exponent:
        return f"{ended:,f} ± {rounded:,f}"
    digits = max(0, ended.adjusted() - last)
    return f"{float(ended):.{digits}e} ± {deviation:.1e}" if ended else f"0 ± {deviation:.1e}"


def unit_of(name: str) -> str:
    """Return the unit of a metric, or of its ``.min`` or ``.max``, as its name tells: s, ms, B,
    MiB, samples/s, %. Otherwise "".
    """
    name = name.removesuffix(".min").removesuffix(".max")
    if rate := _RATE.search(name):
        return f"{_UNITS.get(rate[1], rate[1])}/s"
    match = _UNIT.search(name)
    return _UNITS[match[1]] if match else ""


def fitting_unit(unit: str, values: Iterable[object]) -> tuple[str, float]:
    """Return the largest unit that the largest value has enough of, and its size in ``unit``."""
    largest = max((abs(each) for value in values if (each := finite(value)) is not None), default=0)
    larger = _LARGER_UNITS.get(unit, ())
    return next(((name, size) for name, size in larger if largest >= _ENOUGH * size), (unit, 1))


def _plain(value: float, digits: int) -> str:
    """Return a number below 1 with this many significant digits, never as ``1e-05``."""
    return f"{value:.{_places(value, digits)}f}".rstrip("0").removesuffix(".")


def _places(value: float, digits: int) -> int:
    """Return the decimal places that show a number with this many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


_KINDS: Final[Mapping[str, Callable[[float], str]]] = {
    "duration": duration,
    "hours": hours,
    "cost": cost,
    "size": size,
    "moment": moment,
}
