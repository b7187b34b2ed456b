"""Kinds of settings: how to read a value from text, and its placeholder in the help."""

from __future__ import annotations

import math
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float16", "float32", "float64")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class ValueType:
    """A type of values on the command line. ``read`` parses text, or raises
    ``ArgumentTypeError``.
    """

    read: Callable[[str], Any]
    metavar: str


def _number(kind: type[int | float], description: str, fits: Callable[[Any], bool]) -> ValueType:
    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (-math.inf < value < math.inf and fits(value)):
            raise ArgumentTypeError(f"{text!r} is not {description}")
        return value

    return ValueType(read, "N" if kind is int else "X")


count = _number(int, "a whole number of 1 or more", lambda value: value >= 1)
whole = _number(int, "a whole number of 0 or more", lambda value: value >= 0)
depth = _number(int, "a whole number from 1 to 10000", lambda value: 1 <= value <= 10_000)  # noqa: PLR2004
stage = _number(int, "a whole number from 0 to 3", lambda value: 0 <= value <= 3)  # noqa: PLR2004
positive = _number(float, "a number above 0", lambda value: value > 0)
share = _number(float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)
non_negative = _number(float, "a number of 0 or more", lambda value: value >= 0)
fraction = _number(float, "a number in [0, 1)", lambda value: 0 <= value < 1)
folder = ValueType(Path, "DIR")
# Unlike Path.expanduser, this never raises.
path = ValueType(lambda text: Path(os.path.expanduser(text)), "DIR")
"""A file or folder. ``~/`` is the home folder of the user who runs the program."""


def _input_path(text: str) -> Path:
    in_home = path.read("~") / text
    # Files from `clusterctl put` are in the home folder, and a job starts in a folder of its own.
    # os.path.exists: pathlib's method raises if another user's folder can't be searched.
    is_in_home = os.path.exists(in_home) and not os.path.exists(path.read(text))
    return in_home if is_in_home else path.read(text)


input_path = ValueType(_input_path, "DIR")
"""A file or folder to read. If it does not exist, but exists below the home folder, it is that one.
"""
word_or_path = ValueType(
    lambda text: text if text in ("auto", "never") else str(_input_path(text)), "auto|DIR"
)


def one_of(*words: str) -> ValueType:
    def read(text: str) -> str:
        if text not in words:
            raise ArgumentTypeError(
                f"{text!r} is not valid; use {', '.join(words[:-1])} or {words[-1]}"
            )
        return text

    return ValueType(read, "|".join(words))


yes_or_no = ValueType(lambda text: one_of("true", "false").read(text) == "true", "")
"""A boolean as written in TOML."""


def by_commas(kind: ValueType) -> ValueType:
    """Return the kind of a comma-separated list. ``kind`` is the kind of its items; the value is a
    tuple.
    """
    metavar = f"{kind.metavar}[,{kind.metavar}...]"
    return ValueType(lambda text: tuple(kind.read(part) for part in text.split(",")), metavar)


def some_of(*words: str) -> ValueType:
    """Return the kind of a comma-separated list of ``words``, read as a tuple. No ``words``: any
    words.
    """
    allowed = one_of(*words).read if words else str

    def read(text: str) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(allowed(word.strip()) for word in text.split(",") if word.strip())
        )

    return ValueType(read, "A[,B...]")


def _memory(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(|B|KiB|MiB|GiB)", text, re.ASCII)
    if not match:
        raise ArgumentTypeError(f"{text!r} is not a size such as 4096, 4KiB or 256MiB")
    return int(match[1]) * _UNITS[match[2] or "B"]


memory = ValueType(_memory, "SIZE")
"""A size in bytes, such as 4096, 4KiB or 256MiB."""


@dataclass(frozen=True, slots=True)
class GemmSize:
    """Sizes of the matrix product on each rank: (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


def _gemm_size(text: str) -> GemmSize:
    numbers = [count.read(number) for number in text.split("x")]
    if len(numbers) not in (1, 3):
        raise ArgumentTypeError(f"{text!r} does not have the form N or MxKxN")
    return GemmSize(*(numbers * 3)[:3])


gemm_size = ValueType(_gemm_size, "MxKxN")
"""MxKxN, or N for NxNxN."""


def _data_name(text: str) -> str:
    kind, _, location = text.partition(":")
    if kind not in ("digits", "idx", "text", "synthetic") or (kind in ("idx", "text")) != bool(
        location
    ):
        raise ArgumentTypeError(
            f"{text!r} is not valid; use digits, idx:DIR, text:FILE or synthetic"
        )
    return f"{kind}:{input_path.read(location)}" if location else text


data_name = ValueType(_data_name, "digits|idx:DIR|text:FILE|synthetic")


def _tokenizer_name(text: str) -> str:
    kind, _, argument = text.partition(":")
    is_bpe = kind == "bpe" and argument.isdecimal() and int(argument) > 256  # noqa: PLR2004
    if text != "bytes" and not is_bpe and not (kind == "gpt2" and argument):
        raise ArgumentTypeError(
            f"{text!r} is not valid; use bytes, bpe:N with N above 256, or gpt2:DIR"
        )
    return f"{kind}:{input_path.read(argument)}" if kind == "gpt2" else text


tokenizer_name = ValueType(_tokenizer_name, "bytes|bpe:N|gpt2:DIR")
