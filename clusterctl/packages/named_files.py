"""The files of this machine that a list of packages names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from clusterctl.packages.project_files import content_of, file_of, is_of_pip
from clusterctl.packages.requirement_files import included_by, read_requirements
from clusterctl.util.confine import confinement, may_read, reject_read

_FILE_URL: Final = re.compile(r"file:(?://)?(?P<path>[^\s;#\"']+)")
# Keys whose values are paths, in pyproject.toml, uv.lock and pylock.toml.
_PATHS: Final = frozenset("path directory editable virtual registry file find-links".split())


def reject_named(choice: Path) -> None:
    """Raise LimitError if this command may not read a list of packages, or a file that the list
    names, which pip and uv read.

    Raises UsageError: a file can't be read.
    """
    if confinement() is None:
        # Reading the lists twice takes time.
        return
    for named in _named_in(choice):
        reject_read(named)


def reject_named_by_spec(choice: Path) -> None:
    """Do as ``reject_named`` for the list that a spec names. A list outside of an agent's folders
    is accepted, because ``spec_of`` accepts it only if the user has applied it.
    """
    if may_read(choice):
        reject_named(choice)


def _named_in(choice: Path) -> Iterator[Path]:
    """Yield the files and folders that a list of packages names, itself first, each before it is
    read.
    """
    file = file_of(choice)
    yield file
    if is_of_pip(file):
        yield from _in_requirements(file, frozenset())
        return
    yield from _in_values(content_of(file), file.parent)
    project = file.with_name("pyproject.toml")
    if file.name == "uv.lock" and project.is_file():
        yield from _named_in(project)


def _in_requirements(file: Path, parents: frozenset[Path]) -> Iterator[Path]:
    for line in read_requirements(file):
        yield from _in_line(line, file.parent)
        name = included_by(line)
        if name is not None and "://" not in name and file not in parents:
            yield file.parent / name
            yield from _in_requirements(file.parent / name, parents | {file})


def _in_line(line: str, folder: Path) -> Iterator[Path]:
    """Yield the paths in a line of a list of packages: URLs, existing files, and words like paths."""
    for url in _FILE_URL.finditer(line):
        yield folder / unquote(url["path"].removeprefix("localhost"))
    for word in re.split(r"[\s=]+", line):
        name = word.strip("\"'").split("[")[0].split(";")[0]
        if name and "://" not in name and ("/" in name or os.path.lexists(folder / name)):
            yield folder / name


def _in_values(values: Any, folder: Path) -> Iterator[Path]:
    """Yield the paths in parsed TOML or YAML."""
    if isinstance(values, str):
        yield from _in_line(values, folder)
    elif isinstance(values, list):
        for each in values:
            yield from _in_values(each, folder)
    elif isinstance(values, Mapping):
        for key, each in values.items():
            for text in each if isinstance(each, list) else [each]:
                if key in _PATHS and isinstance(text, str) and "://" not in text:
                    yield folder / text
            yield from _in_values(each, folder)
