"""Patterns written as in a .gitignore file, on paths. Runs on the cluster: standard library only, Python 3.9.

A job can write patterns and names alike, so matching takes time in proportion to their lengths, whatever they
are: a pattern's parts between slashes are matched with a path's parts, each by `fnmatch`, whose expressions
never go back over what they have matched.
"""

from __future__ import annotations

import fnmatch
import os
import re
from re import Pattern
from typing import Optional

MOST, LONGEST = 1000, 4096  # patterns, and characters of one
ANY_DEPTH = None  # the part `**`
Part = Optional["Pattern[str]"]
ESCAPED = re.compile(r"\\(.)")
NEGATED = re.compile(r"\[\^")


class Globs:
    """Patterns in order, of which the last that matches counts; raises ValueError where they are too many."""

    def __init__(self, patterns: list[str]) -> None:
        if len(patterns) > MOST or any(len(pattern) > LONGEST for pattern in patterns):
            raise ValueError("too many patterns, or too long ones")
        self.globs = [glob for glob in map(Glob, patterns) if glob.parts]

    def take(self, path: bytes, *, is_folder: bool = False) -> bool:
        """Whether the last pattern that matches the path, or a folder above it, is not a negated one."""
        names = os.fsdecode(path).split("/")
        for glob in reversed(self.globs):
            if glob.matches(names, is_folder=is_folder):
                return glob.takes
        return False


class Glob:
    """One pattern; with no ``parts`` it matches nothing."""

    def __init__(self, pattern: str) -> None:
        pattern = without_end(pattern)
        self.takes = not pattern.startswith("!")
        self.parts: list[Part] = []
        self.folders_only = pattern.endswith("/")
        if pattern.startswith("#"):
            return
        pattern = pattern if self.takes else pattern[1:]
        names = [name for name in pattern.split("/") if name]
        if not names:
            return
        if "/" not in pattern.rstrip("/"):
            names.insert(0, "**")
        if names[-1] == "**" and len(names) > 1 and not self.folders_only:
            names.append("*")  # what lies below, not the folder itself
        try:
            self.parts = [ANY_DEPTH if name == "**" else re.compile(expression(name)) for name in names]
        except re.error:
            self.parts = []

    def matches(self, names: list[str], *, is_folder: bool) -> bool:
        """Whether it matches the path with these names, or a folder above it."""
        places = self.passing({0}) - {len(self.parts)}
        for number, name in enumerate(names, 1):
            here = {at for at in places if self.parts[at] is ANY_DEPTH}
            for at in places:
                part = self.parts[at]
                if part is not None and part.match(name):
                    here.add(at + 1)
            places = self.passing(here)
            if len(self.parts) in places:
                if number < len(names) or is_folder or not self.folders_only:
                    return True
                places.discard(len(self.parts))
        return False

    def passing(self, places: set[int]) -> set[int]:
        """The same, and behind each `**` among them, which may stand for nothing."""
        for at, part in enumerate(self.parts):
            if at in places and part is ANY_DEPTH:
                places.add(at + 1)
        return places


def without_end(pattern: str) -> str:
    """A pattern without the blanks at its end, but for one that is escaped."""
    bare = pattern.rstrip()
    escapes = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if escapes % 2 and len(bare) < len(pattern) else bare


def expression(name: str) -> str:
    """One part of a pattern as fnmatch's expression; an escaped character stands for itself."""
    literal = ESCAPED.sub(lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], name)
    return fnmatch.translate(NEGATED.sub("[!", literal))
