"""Values of settings, read from text. Each function raises ``argparse.ArgumentTypeError`` if it can't."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Read = Callable[[str], Any]

DTYPES = ("bfloat16", "float16", "float32", "float64")


def whole(least: int, most: int | None = None) -> Read:
    """A whole number of ``least`` or more."""
    wanted = f"of {least} or more" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return read


def _number(wanted: str, fits: Callable[[float], bool]) -> Read:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not fits(value):
            raise ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return read


count = whole(1)
positive = _number("above 0", lambda value: value > 0)
share = _number("above 0 and at most 1", lambda value: 0 < value <= 1)
non_negative = _number("of 0 or more", lambda value: value >= 0)
fraction = _number("in [0, 1)", lambda value: 0 <= value < 1)


def one_of(*words: str) -> Read:
    """One of a few words."""

    def read(text: str) -> str:
        if text not in words:
            raise ArgumentTypeError(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


def yes_or_no(text: str) -> bool:
    """As TOML writes it."""
    return bool(one_of("true", "false")(text) == "true")


def by_commas(read: Read) -> Read:
    """Values by commas."""
    return lambda text: tuple(read(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Names by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def some_of(*words: str) -> Read:
    """Some of a few words, by commas."""
    return lambda text: tuple(map(one_of(*words), names(text)))


def memory(text: str) -> int:
    """Bytes, such as 4096, 4KiB or 256MiB."""
    digits = text.rstrip("KMGiB")
    units = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    unit = text[len(digits) :]
    if not digits.isdecimal() or unit not in units or int(digits) == 0:
        raise ArgumentTypeError(f"{text!r} is not a size such as 4096, 4KiB or 256MiB")
    return int(digits) * units[unit]


@dataclass(frozen=True, slots=True)
class GemmSize:
    """Of each rank's product: (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


def gemm_size(text: str) -> GemmSize:
    """MxKxN, or N for a cube."""
    numbers = [count(number) for number in text.split("x")]
    if len(numbers) not in (1, 3):
        raise ArgumentTypeError(f"{text!r} is not of the form N or MxKxN")
    return GemmSize(*(numbers * 3)[:3])


def path(text: str) -> Path:
    """A file or folder; ``~/`` is the home of the user that runs this."""
    return Path(word_or_path(text))


def word_or_path(text: str) -> str:
    """A word such as ``auto``, or what ``path`` reads."""
    return os.path.expanduser(text)  # noqa: PTH111  # it never raises


def data_name(text: str) -> str:
    """A data set by its kind and, for some, where it is."""
    kind, _, where = text.partition(":")
    if kind not in ("digits", "idx", "text", "synthetic") or (kind in ("idx", "text")) != bool(where):
        raise ArgumentTypeError(f"{text!r} is none of digits, idx:DIR, text:FILE, synthetic")
    return f"{kind}:{path(where)}" if where else text


def tokenizer_name(text: str) -> str:
    """``bytes``, ``bpe:N`` with more tokens than there are bytes, or ``gpt2:DIR``."""
    kind, _, where = text.partition(":")
    enough = kind == "bpe" and where.isdecimal() and int(where) > 256  # noqa: PLR2004
    if text != "bytes" and not enough and not (kind == "gpt2" and where):
        raise ArgumentTypeError(f"{text!r} is none of bytes, bpe:N with N above 256, gpt2:DIR")
    return f"{kind}:{path(where)}" if kind == "gpt2" else text
