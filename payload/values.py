"""Readers of settings: each makes a value of a text, or raises ``argparse.ArgumentTypeError``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Read = Callable[[str], Any]


def whole(least: int, most: int | None = None) -> Read:
    """A whole number of ``least`` or more."""
    wanted = f"of {least} or more" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return read


count = whole(1)


def number(text: str) -> float:
    """Any finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _number_that(fits: Callable[[float], bool], complaint: str) -> Read:
    def read(text: str) -> float:
        value = number(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is {complaint}")
        return value

    return read


positive = _number_that(lambda value: value > 0, "not a number above 0")
share = _number_that(lambda value: 0 < value <= 1, "not above 0 and at most 1")
non_negative = _number_that(lambda value: value >= 0, "below 0")
fraction = _number_that(lambda value: 0 <= value < 1, "not in [0, 1)")


def memory(text: str) -> int:
    """Bytes, such as 4096, 4KiB or 256MiB."""
    digits = text.rstrip("KMGiB")
    units = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    unit = text[len(digits) :]
    if not digits.isdecimal() or unit not in units or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 4KiB or 256MiB")
    return int(digits) * units[unit]


def widths(text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more, by commas."""
    return tuple(count(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Names by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def some_of(*words: str) -> Read:
    """Some of a few words, by commas."""

    def read(text: str) -> tuple[str, ...]:
        return tuple(one_of(*words)(name) for name in names(text))

    return read


def data_name(text: str) -> str:
    """A data set by its kind and, for some, where it is."""
    kind, _, where = text.partition(":")
    if kind not in ("digits", "idx", "text", "synthetic") or (kind in ("idx", "text")) != bool(where):
        raise argparse.ArgumentTypeError(f"{text!r} is none of digits, idx:DIR, text:FILE, synthetic")
    return text


def tokenizer_name(text: str) -> str:
    """``bytes``, or ``bpe:N`` with more tokens than there are bytes."""
    kind, _, size = text.partition(":")
    if text != "bytes" and not (kind == "bpe" and size.isdecimal() and int(size) > 256):  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"{text!r} is neither bytes nor bpe:N with N above 256")
    return text


def yes_or_no(text: str) -> bool:
    """As TOML writes it."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def one_of(*words: str) -> Read:
    """One of a few words."""

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class GemmSize:
    """Of each rank's product: (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


def sizes(text: str) -> tuple[GemmSize, ...]:
    """Shapes of products, by commas."""
    found = [[count(number) for number in part.split("x")] for part in text.split(",")]
    if any(len(numbers) not in (1, 3) for numbers in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form N or MxKxN")
    return tuple(GemmSize(*(numbers * 3)[:3]) for numbers in found)


def dtypes(text: str) -> tuple[str, ...]:
    """Formats of numbers, by commas."""
    return tuple(one_of(*DTYPES)(name) for name in text.split(","))
