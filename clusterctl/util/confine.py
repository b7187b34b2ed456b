"""The files that a command may open, the variables of the user that it may pass on, and the cluster that
it may be about: all, or, in a command that an agent calls, those that the user's limits allow.

Code that reads, sends or writes a file named by an argument, a job or a spec first calls
``reject_read`` or ``reject_written``. This is the only place that decides.
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
    """The files and variables that an agent's command may use.

    folders: resolved paths of the folders with the files; the first is the project's. kept:
        clusterctl's own folders, whose files an agent may not choose. variables: for jobs.
    cluster: the name of the cluster for which the limits were checked. Empty: any.
    """

    folders: tuple[str, ...]
    kept: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    cluster: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """The variable that confines a command."""
        return {VARIABLE: json.dumps(asdict(self))}

    def reject_read(self, path: str | Path) -> None:
        """Raise LimitError unless a path, with all links resolved, is a file or folder in one of the
        folders, or is free.
        """
        text = os.fspath(path)
        try:
            # `~` and `~nobody` are outside, whatever they expand to.
            end = Path(self.folders[0], os.path.expanduser(text)).resolve()
            is_plain = _is_plain(end)
        except (OSError, ValueError, RuntimeError) as exc:
            raise self._outside(text, getattr(exc, "strerror", None) or str(exc)) from exc
        if any(end.is_relative_to(own) or Path(own).is_relative_to(end) for own in self.kept):
            raise self._outside(text, "clusterctl keeps its own files there")
        inside = [end.relative_to(top) for top in self.folders if end.is_relative_to(top)]
        if not inside:
            raise self._outside(text, f"it leads to {end}")
        if any(".git" in below.parts for below in inside):
            raise self._outside(text, "git runs programs that lie in .git")
        if not is_plain:
            raise self._outside(text, "it is neither a file nor a folder")

    def reject_written(self, folder: str | Path, names: Iterable[str] = ()) -> None:
        """Raise LimitError unless files with these names, or the folder itself, may be written.

        names: paths below the folder.
        """
        self.reject_read(folder)
        top = self.folders[0]
        path = os.path.join(top, os.path.expanduser(folder))
        # A link may lead to a file that programs obey.
        ends = [
            os.path.relpath(end, top) for end in (os.path.normpath(path), os.path.realpath(path))
        ]
        for name in (*ends, *names):
            if obeyed := _obeyed_name(name):
                raise self._outside(name, f"the user's programs obey {obeyed}")

    def reject_variable(self, name: str) -> None:
        """Raise LimitError if jobs may not get the user's value of a variable."""
        if name not in self.variables:
            raise LimitError(
                f"agents may not pass your value of {_shown(name)} to jobs",
                code="agent-secret",
                why="only the variables in `agent.secrets` may be passed",
                fix="write NAME=VALUE, or ask the user, who may add the variable",
                limit={"name": "secrets", "value": [*self.variables]},
            )

    def _outside(self, text: str, why: str) -> LimitError:
        return LimitError(
            f"agents may not use the path {_shown(text)}",
            code="agent-path",
            why=why,
            fix=f"use a path in {self.folders[0]}; the user may add folders to `agent.folders`",
            limit={"name": "folders", "value": [*self.folders]},
        )


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
    if (confined := confinement()) is not None:
        for path in paths:
            confined.reject_read(path)


def may_read(path: str | Path) -> bool:
    """Return whether this command may read or send a file."""
    try:
        reject_read(path)
    except LimitError:
        return False
    return True


def reject_written(folder: str | Path, names: Iterable[str] = ()) -> None:
    """Raise LimitError if this command may not write files. names: their paths below the folder."""
    if (confined := confinement()) is not None:
        confined.reject_written(folder, names)


def reject_cluster(name: str) -> None:
    """Raise UsageError if this command may not be about a cluster: an agent has replaced the spec after
    the limits were checked for the cluster in it.
    """
    if (confined := confinement()) is not None and confined.cluster not in {"", name}:
        raise cluster_changed("checked", confined.cluster, name)


def cluster_changed(when: str, was: str, now: str) -> UsageError:
    """Return the error for a call that is no longer about the cluster that was ``when``."""
    return UsageError(
        f"the cluster is no longer the one that was {when}",
        code="agent-cluster-changed",
        why=f"it was {was}, and is {now}",
        fix="call the command again, without a token, and read what would happen now",
    )


def reject_variable(name: str) -> None:
    """Raise LimitError if this command may not pass the user's value of a variable to a job."""
    if (confined := confinement()) is not None:
        confined.reject_variable(name)


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


def _shown(text: str) -> str:
    return repr(printable(text[:_MOST_SHOWN]))
