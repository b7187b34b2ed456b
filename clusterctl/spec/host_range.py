"""Ranges of names, as Slurm writes them: ``gpu[01-03,07]`` is gpu01, gpu02, gpu03 and gpu07."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

MOST = 1000  # names of one range

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """Every name of a range, of several separated by commas, or of none.

    Raises:
        ValueError: it is no range; the message says what is wrong with it.
    """
    names = tuple(name for part in _split(text) for name in _names(part))
    if len(names) > MOST:
        raise ValueError(f"{text!r} has more than {MOST} names")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{text!r} has {twice!r} twice")
    return names


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand outside of brackets."""
    for part in re.split(r",(?![^\[]*\])", text):
        if not part.strip():
            raise ValueError(f"{text!r} has an empty name")
        yield part.strip()


def _names(part: str) -> Iterator[str]:
    *pairs, tail = _RANGE.split(part)
    if any(bracket in plain for plain in (*pairs[::2], tail) for bracket in "[]"):
        raise ValueError(f"{part!r} has a bracket without its other")
    heads, choices = pairs[::2], [list(_numbers(inner, part)) for inner in pairs[1::2]]
    for chosen in product(*choices):
        yield "".join(head + number for head, number in zip(heads, chosen, strict=True)) + tail


def _numbers(inner: str, part: str) -> Iterator[str]:
    for piece in inner.split(","):
        found = _PART.fullmatch(piece.strip())
        if found is None:
            raise ValueError(f"{part!r}: {piece!r} is neither a number nor a range such as 01-08")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise ValueError(f"{part!r}: {piece!r} is no range of at most {MOST} numbers, the smaller first")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
