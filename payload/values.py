"""Readers of settings: each makes a value of a text, or raises ``argparse.ArgumentTypeError``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

Read = Callable[[str], Any]


def whole(least: int) -> Read:
    """A whole number of ``least`` or more."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
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


def positive(text: str) -> float:
    """Above 0."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def fraction(text: str) -> float:
    """In [0, 1)."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return value


def widths(text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more, by commas."""
    return tuple(count(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Names by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


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
