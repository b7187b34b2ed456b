"""What a command that an agent calls may do: within the limits of its user. ``check`` decides.

Code that reads, sends or writes a file named by an argument, a job or a spec first calls
``reject_read`` or ``reject_written``; code that sends a file calls ``reject_opened`` for what it has
opened.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import UsageError, printable
from clusterctl.util import formatting

# The variable with a confinement. The server for agents sets it for each command.
VARIABLE: Final = "CLUSTERCTL_CONFINED"
# Files and folders that programs of this machine obey: they run what these name, or take limits,
# hosts and accounts from them. File systems may ignore the case of names.
_OBEYED: Final = frozenset(
    ".git .envrc .mcp.json .claude .cursor .vscode .idea .devcontainer cluster.yaml".split()
)
_MOST_SHOWN: Final = 200


class LimitError(UsageError, code="agent-limit"):
    """A limit of the user forbids an agent's call. The answer has the ``limit``."""

    def __init__(self, *args: Any, limit: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.answer = {"limit": dict(limit)}


@dataclass(frozen=True, slots=True)
class Confinement:
    """The limits of an agent's command. None: no limit.

    folders: resolved paths of the folders with the files; the first is the project's. kept:
        clusterctl's own folders, whose files an agent may not choose.
    made: beginnings of the paths of files that clusterctl itself makes, to send them.
    node_hours, nodes, time_s, verbs_off: as in AgentLimits. file: the user's configuration with
        them. call: the id of the call in the journal.
    """

    folders: tuple[str, ...]
    kept: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    node_hours: float | None = None
    nodes: int | None = None
    time_s: int | None = None
    verbs_off: tuple[str, ...] = ()
    file: str = ""
    call: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """The variable that confines a command."""
        return {VARIABLE: json.dumps(asdict(self))}

    def refusal(
        self, name: str, message: str, why: str, *, value: Any, fix: str = "", **more: Any
    ) -> LimitError:
        """Return the error for what the limit with this name forbids. more: further keys of the
        answer's ``limit``.
        """
        change = f"only the user may change `agent.{name}` in {self.file}"
        return LimitError(
            message,
            why=why,
            fix=f"{fix}; {change}" if fix else change,
            limit={"name": name, "value": value, **more},
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """What an agent asks for. None: unknown, so that it may be any amount.

    paths: of files and folders to read, send or write.
    nodes: of a job, of each task of an array, or of a cluster. time_s: how long a job can run.
    node_hours: of all jobs together. used: those of the agents' jobs of the last 24 hours.
    """

    verb: str = ""
    paths: tuple[str | Path, ...] = ()
    nodes: int | None = 0
    time_s: float | None = 0.0
    node_hours: float | None = 0.0
    used: float = 0.0


def check(limits: Confinement, asked: Asked) -> None:
    """Raise LimitError if a limit forbids what an agent asks for."""
    if asked.verb in limits.verbs_off:
        raise limits.refusal(
            "verbs_off",
            f"agents may not use `{asked.verb}`",
            "it is in the user's list of commands that are off",
            value=[*limits.verbs_off],
            asked=asked.verb,
        )
    for path in asked.paths:
        if why := _outside(limits, os.fspath(path)):
            raise path_refusal(limits, os.fspath(path), why)
    for name, limit, used, more in (
        ("nodes", limits.nodes, 0, asked.nodes),
        ("time", limits.time_s, 0, asked.time_s),
        ("node_hours", limits.node_hours, asked.used, asked.node_hours),
    ):
        if limit is None or more == 0 or (more is not None and used + more <= limit):
            continue
        shown = formatting.duration if name == "time" else formatting.number
        before = f", and earlier jobs can use {shown(used)}" if used else ""
        could = f"could use {shown(more)}" if more is not None else "may use any amount"
        if more is not None:
            fix = "ask for less"
        else:
            # A cluster has no time limit that an agent could give.
            fix = "give the job --nodes and --time, and no --requeue" if asked.time_s != 0 else ""
        raise limits.refusal(
            name,
            f"the call exceeds the limit `agent.{name}` of the user",
            f"it {could}; the limit is {shown(limit)}{before}",
            value=limit,
            used=round(used, 3),
            asked=more,
            fix=fix,
        )


def path_refusal(limits: Confinement, path: str, why: str) -> LimitError:
    """Return the error for a path that an agent may not use."""
    return limits.refusal(
        "folders",
        f"agents may not use the path {printable(path[:_MOST_SHOWN])!r}",
        why,
        value=[*limits.folders],
        asked=printable(path[:_MOST_SHOWN]),
        fix=f"use a path in {limits.folders[0]}",
    )


def _outside(limits: Confinement, text: str) -> str:
    """Return why an agent may not use a path. "": it may, because with all links resolved it is a
    file or folder in one of the folders, or nothing has this name.
    """
    try:
        # `~` and `~nobody` are outside, whatever they expand to.
        end = Path(limits.folders[0], os.path.expanduser(text)).resolve()
        is_plain = _is_plain(end)
    except (OSError, ValueError, RuntimeError) as exc:
        return getattr(exc, "strerror", None) or str(exc)
    if any(end.is_relative_to(own) or Path(own).is_relative_to(end) for own in limits.kept):
        return "clusterctl keeps its own files there"
    inside = [end.relative_to(top) for top in limits.folders if end.is_relative_to(top)]
    if not inside:
        return f"it leads to {end}"
    if any(".git" in below.parts for below in inside):
        return "git runs programs that lie in .git"
    return "" if is_plain else "it is neither a file nor a folder"


def confinement() -> Confinement | None:
    """Return the confinement of this process. None: a user, not an agent, has started it, and may
    use everything.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    values = json.loads(text)
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Confinement(**{**values, **lists})


def reject_read(*paths: str | Path) -> None:
    """Raise LimitError if this command may not read or send a file."""
    if (limits := confinement()) is not None:
        check(limits, Asked(paths=paths))


def reject_opened(fd: int, path: Path) -> None:
    """Raise LimitError if this command may not send the file that it has opened.

    path: the path by which the file was opened. Its links may have changed since ``reject_read``.
    """
    if (limits := confinement()) is not None:
        # The file that was opened is the one at this path, or the path leads elsewhere by now.
        real = os.path.realpath(path)
        try:
            is_same = os.path.samestat(os.fstat(fd), os.stat(real))
        except OSError:
            is_same = False
        why = "" if is_same else "it was replaced while it was opened"
        if why or (not real.startswith(limits.made) and (why := _outside(limits, real))):
            raise path_refusal(limits, str(path), why)


def may_read(path: str | Path) -> bool:
    """Return whether this command may read or send a file."""
    try:
        reject_read(path)
    except LimitError:
        return False
    return True


def reject_written(folder: str | Path, names: Iterable[str] = ()) -> None:
    """Raise LimitError if this command may not write files with these names, or the folder itself.

    names: paths below the folder.
    """
    limits = confinement()
    if limits is None:
        return
    check(limits, Asked(paths=(folder,)))
    top = limits.folders[0]
    path = os.path.join(top, os.path.expanduser(folder))
    # A link may lead to a file that programs obey.
    ends = [os.path.relpath(end, top) for end in (os.path.normpath(path), os.path.realpath(path))]
    for name in (*ends, *names):
        if obeyed := _obeyed_name(name):
            raise path_refusal(limits, name, f"the user's programs obey {obeyed}")


def refused_name(path: str) -> str:
    """Return the part of a path because of which this command may not write it: programs of this
    machine obey a file of that name. "": the command may write it.
    """
    return _obeyed_name(path) if confinement() is not None else ""


def _obeyed_name(path: str) -> str:
    """Return the part of a path that names a file which programs of this machine obey. "": no part."""
    return next((part for part in path.split("/") if part.casefold() in _OBEYED), "")


def _is_plain(path: Path) -> bool:
    """Return whether a path is a file or a folder, or does not exist. Reading a pipe or a device may
    never end.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
