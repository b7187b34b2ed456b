"""The arguments of an agent's call: checked against their declarations and the user's limits, and
made into words of the command line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.agent.limits import LimitError
from clusterctl.cli.agent_tools import TOOLS, Argument, arguments_of, locals_of
from clusterctl.errors import UsageError
from clusterctl.spec.agent import AgentLimits
from clusterctl.spec.job_options import OPTIONS
from clusterctl.spec.names import Local, did_you_mean, obeyed_name
from clusterctl.spec.units import shown

# The most that all arguments of a call take, as JSON.
_MOST: Final = 64 << 10  # bytes
_TYPES: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def checked(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call. Numbers in place of text become text.

    Raises UsageError: an argument is unknown, missing, too long, or of another type.
    """
    try:
        size = len(json.dumps(dict(given)))
    except (TypeError, ValueError, RecursionError) as exc:
        raise _wrong(verb, "the arguments", str(exc)) from exc
    if size > _MOST:
        raise _wrong(verb, "the arguments", f"they take {size:,} bytes, and at most {_MOST:,}")
    known = arguments_of(verb)
    for name in given:
        if name not in known:
            names = ", ".join(known) or "none"
            raise UsageError(
                f"`{verb}` has no argument {shown(name)} for agents",
                code="agent-argument",
                fix=did_you_mean(name, known) or f"its arguments: {names}",
            )
    for name, argument in known.items():
        if argument.required and given.get(name) in (None, "", []):
            raise _wrong(verb, name, "it is missing")
    return {
        name: _value(verb, known[name], value) for name, value in given.items() if value is not None
    }


def _value(verb: str, argument: Argument, value: Any) -> Any:
    if not argument.is_list:
        return _one(verb, argument, value)
    if not isinstance(value, list):
        raise _wrong(verb, argument.name, f"it must be a list, not {shown(value)}")
    return [_one(verb, argument, each) for each in value]


def _one(verb: str, argument: Argument, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if argument.kind is str and is_number:
        value = f"{value}"
    is_right = isinstance(value, argument.kind) and (
        argument.kind is bool or not isinstance(value, bool)
    )
    if argument.kind is float and is_number:
        is_right = True
    if not is_right:
        words = _TYPES[argument.kind]
        raise _wrong(verb, argument.name, f"it must be {words}, not {shown(value)}")
    if isinstance(value, str):
        try:
            is_text = "\0" not in value and bool(value.encode())
        except UnicodeEncodeError:
            is_text = False
        if not is_text:
            fault = "it is empty" if not value else "it has a null byte, or is not UTF-8"
            raise _wrong(verb, argument.name, fault)
        if argument.choices and value not in argument.choices:
            raise _wrong(verb, argument.name, f"it must be one of {', '.join(argument.choices)}")
    return value


def _wrong(verb: str, name: str, why: str) -> UsageError:
    return UsageError(
        f"`{verb}`: {name} can't be used",
        code="agent-argument",
        why=why,
        fix="correct the argument; the tool's schema describes it",
    )


def words_of(verb: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line for checked arguments. No value can become an option."""
    known = arguments_of(verb)
    options: list[str] = []
    places: list[str] = []
    for name, argument in known.items():
        if name not in arguments:
            continue
        value = arguments[name]
        values = value if argument.is_list else [value]
        if not argument.option:
            places += [str(each) for each in values]
        elif argument.kind is bool:
            options += [argument.option] if value else [argument.off] if argument.off else []
        else:
            # A single letter has its value in the next word, or joined to it.
            joint = "=" if argument.option.startswith("--") else ""
            options += [f"{argument.option}{joint}{each}" for each in values]
    # `submit JOB -- ARGUMENTS`: only the program's arguments may follow the dashes.
    if verb == "submit" and "target" in arguments:
        job, *places = places
        if job.startswith("-"):
            raise _wrong(verb, "target", f"{shown(job)} is an option")
        options.append(job)
    return [*verb.split(), *TOOLS[verb].fixed, *options, *(["--", *places] if places else [])]


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders that agents may use: the project's, and those that the user has added.

    project: resolved. kept: folders of clusterctl's own that agents never read or write.
    """

    project: Path
    more: tuple[Path, ...]
    kept: tuple[Path, ...]

    @classmethod
    def of(cls, project: Path, limits: AgentLimits, kept: Sequence[Path]) -> Folders:
        more = (Path(os.path.expanduser(text)).resolve() for text in limits.folders)
        return cls(project.resolve(), (*more,), tuple(path.resolve() for path in kept))

    def require(self, text: str, base: Path | None = None) -> None:
        """Raise LimitError unless a path, with all links resolved, lies in one of the folders.

        base: the folder that a relative path starts at. Default: the project's.
        """
        try:
            # `~` and `~nobody` are outside, wherever they lead.
            path = (base or self.project) / os.path.expanduser(text)
            end = path.resolve()
        except (OSError, ValueError, RuntimeError) as exc:
            raise self._outside(text, str(exc)) from exc
        if any(end.is_relative_to(own) or own.is_relative_to(end) for own in self.kept):
            raise self._outside(text, "clusterctl keeps its own files there")
        inside = [end.relative_to(one) for one in (self.project, *self.more) if one in _above(end)]
        if not inside:
            raise self._outside(text, f"it leads to {end}")
        if any(".git" in path.parts for path in inside):
            raise self._outside(text, "git runs programs that lie in .git")

    def require_written(self, text: str) -> None:
        """Raise LimitError if a path in the project is one that programs of the user's obey."""
        path = self.project / os.path.expanduser(text)
        # A link may lead to one.
        for end in (os.path.normpath(path), os.path.realpath(path)):
            if name := obeyed_name(os.path.relpath(end, self.project)):
                raise self._outside(text, f"the user's programs obey {name}")

    def _outside(self, text: str, why: str) -> LimitError:
        return LimitError(
            f"agents may not use the path {shown(text)}",
            code="agent-path",
            why=why,
            fix=f"use a path in {self.project}; the user may add folders to `agent.folders`",
            limit={"name": "folders", "value": [str(self.project), *map(str, self.more)]},
        )


def _above(path: Path) -> tuple[Path, ...]:
    """Return a path and the folders that it lies in."""
    return (path, *path.parents)


def require_folders(
    verb: str, arguments: Mapping[str, Any], folders: Folders, limits: AgentLimits
) -> None:
    """Raise LimitError if an argument is a path outside of the folders, or passes a value of the
    user's that agents may not pass.
    """
    parts = {**locals_of(verb), "file": Local.PATH}
    for name, part in parts.items():
        if name not in arguments:
            continue
        value = arguments[name]
        values = value if isinstance(value, list) else [value]
        if part is Local.HERE_FIRST:
            values = values[:-1] or values
        elif part is Local.HERE_LAST:
            values = values[1:][-1:] or ["."]
        if part in {Local.WRITTEN, Local.HERE_LAST}:
            folders.require_written(str(values[0]))
        for each in values:
            require_value(str(each), part, folders, limits)


def require_value(
    text: str, part: Local, folders: Folders, limits: AgentLimits, base: Path | None = None
) -> None:
    """Raise LimitError if a value is a path outside of the folders, or a value of the user's."""
    name, equals, rest = text.partition("=")
    if part in {Local.VARIABLE, Local.SECRET} and not (equals and rest):
        # `K=` is empty, and passes nothing.
        if not (equals and part is Local.VARIABLE):
            require_variable(name, limits)
        return
    if (
        part is Local.VARIABLE
        or (part is Local.TABLE and equals)
        or (part is Local.IMAGE and "://" in text)
    ):
        return
    path = (
        rest if part is Local.SECRET else text.partition("[")[0] if part is Local.PACKAGES else text
    )
    folders.require(path, base)


def require_variable(name: str, limits: AgentLimits) -> None:
    if name not in limits.secrets:
        raise LimitError(
            f"agents may not pass your value of {shown(name)} to jobs",
            code="agent-secret",
            why="only the variables in `agent.secrets` may be passed",
            fix="write NAME=VALUE, or ask the user, who may add the variable",
            limit={"name": "secrets", "value": [*limits.secrets]},
        )


# Key of a job file -> what of its value is a path, or a value of the user's. A sweep is no text.
_IN_JOB_FILES: Final = {
    "job": Local.NAME,
    **{
        name: option.local
        for name, option in OPTIONS.items()
        if option.local is not None and option.local is not Local.TABLE
    },
}


def require_folders_of_job_file(
    values: Any, base: Path, folders: Folders, limits: AgentLimits
) -> None:
    """Do for a job file what ``require_folders`` does for arguments. values: its content."""
    if not isinstance(values, Mapping):
        return
    variants = values.get("variants")
    layers = [values, *(variants.values() if isinstance(variants, Mapping) else ())]
    for layer in layers:
        for text, part in _values_of(layer):
            require_value(text, part, folders, limits, base)
        sweep = layer.get("sweep") if isinstance(layer, Mapping) else None
        if isinstance(sweep, Mapping) and isinstance(sweep.get("list"), str):
            folders.require(sweep["list"], base)


def _values_of(layer: Any) -> Iterator[tuple[str, Local]]:
    for key, part in _IN_JOB_FILES.items():
        value = layer.get(key) if isinstance(layer, Mapping) else None
        if isinstance(value, Mapping):
            for name, each in value.items():
                yield (str(name) if each is None else f"{name}={each}"), part
        elif isinstance(value, list | tuple):
            yield from ((str(each), part) for each in value)
        elif isinstance(value, str):
            yield value.removeprefix("-m ").strip() if key == "job" else value, part
