"""From the user's requirements to a lock, by pip: the same versions as long as the files are the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from clusterctl.errors import UsageError
from clusterctl.packages.wheels.lock import Lock, Wheel, pins
from clusterctl.packages.wheels.node import DEFAULT_NODE, Node, Said, pip_download
from clusterctl.packages.wheels.requirements import question
from clusterctl.packages.wheels.wheelhouse import unwritable
from clusterctl.state.journal import digest
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.lifetime import temporary_folder
from clusterctl.util.progress import LineReporter

_REASON_BEGINS: Final = re.compile(r"^(ERROR:|error:|The conflict is caused by:)", re.MULTILINE)
_NOISE: Final = re.compile(r"^\s*(WARNING:|\[notice\]|Looking in |ResolutionImpossible)")
_DOWNLOADED: Final = re.compile(r"^Successfully downloaded (.*)$", re.MULTILINE)
_CONFLICT: Final = "The conflict is caused by:"
_PARTY: Final = re.compile(
    r"^ +(?:The user requested \(constraint\) ([\w.-]+)|([\w.-]+)(?:\[\S*\])? \S+ depends on )", re.MULTILINE
)
_LONGEST_REASON: Final = 2000


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of pip.

    ``base`` is the lock of the job environment; ``held``, normalized name -> version, is to be kept if it can
    be, as the versions that the cluster's own requirements came to.
    """

    files: tuple[Path, ...]
    base: Path
    held: Mapping[str, str] = field(default_factory=dict)
    node: Node = DEFAULT_NODE


def resolve(asked: Question, *, report: LineReporter, heard: LineReporter = lambda _line: None) -> Lock:
    """The lock of requirements files, for the nodes; its wheels lie in the cache (see ``wheel_path``).

    The versions of the job environment are kept, unless the requirements rule them out: such a package is
    then in the lock, and comes first in the environment. ``heard`` gets pip's own lines.

    Raises:
        UsageError: a file can't be read, there is no such set of wheels, or no index answers; pip's reason.
        MachineError: the cache of downloads can't be written.
    """
    base = pins(asked.base)
    kept = {**base, **asked.held}
    home, answer = cache_home() / "python", _answer(asked, kept)
    try:
        if (known := _read(answer, base, asked.node)) is not None:
            return known
        report(f"resolving {', '.join(str(file) for file in asked.files)}")
        answer.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as folder:
            wheels = _download(asked, kept, folder, heard)
            others = tuple(w for w in map(_kept, wheels) if base.get(w.name) != w.version)
            lock = Lock(others, base, asked.node)
        write_atomic(answer, lock.text)
    except OSError as exc:
        raise unwritable(home, exc) from exc
    return lock


def resolved(asked: Question) -> Lock | None:
    """What ``resolve`` would say without asking pip, if it can.

    Raises:
        UsageError: a file can't be read.
        MachineError: the cache of downloads can't be read.
    """
    base = pins(asked.base)
    try:
        return _read(_answer(asked, {**base, **asked.held}), base, asked.node)
    except OSError as exc:
        raise unwritable(cache_home() / "python", exc) from exc


def plant(asked: Question, text: str, fill: Callable[[Wheel, Path], None]) -> None:
    """Have ``resolve`` say this without asking pip. ``fill`` brings each wheel that is not in the cache.

    Raises:
        MachineError: the cache of downloads can't be written; and what ``fill`` raises.
        UsageError: a requirements file can't be read.
    """
    base, home = pins(asked.base), cache_home() / "python"
    answer = _answer(asked, {**base, **asked.held})
    try:
        answer.parent.mkdir(parents=True, exist_ok=True)
        for wheel in Lock.read(text, base).wheels:
            place = wheel_path(wheel)
            if not place.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                with temporary_folder(home) as folder:
                    fill(wheel, folder / wheel.file)
                    (folder / wheel.file).replace(place)
        write_atomic(answer, text)
    except OSError as exc:
        raise unwritable(home, exc) from exc


def _answer(asked: Question, kept: Mapping[str, str]) -> Path:
    """Where the answer to a question lies, once there is one."""
    key = digest(str(asked.node), _constraints(kept), question(asked.files))
    return cache_home() / "python" / "locks" / f"{key}.txt"


def _read(answer: Path, base: Mapping[str, str], node: Node) -> Lock | None:
    """The lock of an answer, if its wheels are still there."""
    if not answer.is_file():
        return None
    lock = Lock.read(answer.read_text(), base, node)
    return lock if all(wheel_path(wheel).is_file() for wheel in lock.wheels) else None


def wheel_path(wheel: Wheel) -> Path:
    """Where a wheel of a lock lies in the cache."""
    return cache_home() / "python" / "wheels" / wheel.sha256 / wheel.file


def _download(asked: Question, kept: Mapping[str, str], folder: Path, heard: LineReporter) -> list[Path]:
    """The wheels that pip chose: with the ``kept`` versions, but for those that the requirements rule out."""
    files, node = asked.files, asked.node
    limits = folder / "constraints.txt"
    arguments = [word for file in files for word in ("--requirement", str(file.absolute()))]
    arguments += ["--constraint", str(limits)]
    while True:
        limits.write_text(_constraints(kept))
        target = folder / f"wheels-{len(kept)}"
        folder_of_last = files[-1].absolute().parent
        said = pip_download([*arguments, "--dest", str(target)], node, cwd=folder_of_last, heard=heard)
        if said.rc == 0:
            break
        if not kept or _CONFLICT not in said.text:
            raise _unresolvable(asked, said)
        kept = _without_conflict(kept, said)
    found = sorted(target.glob("*.whl"))
    _refuse_sources(files, said, {Wheel.of(path.name, "").name for path in found})
    return found


def _constraints(kept: Mapping[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(kept.items()))


def _without_conflict(kept: Mapping[str, str], said: Said) -> dict[str, str]:
    """Those that pip does not name as part of the conflict; none, if it names none of them."""
    text = said.text.partition(_CONFLICT)[2]
    parties = {canonicalize_name(name or other) for name, other in _PARTY.findall(text)}
    return {name: kept[name] for name in kept if name not in parties} if parties & kept.keys() else {}


def _refuse_sources(files: Sequence[Path], said: Said, wheels: set[str]) -> None:
    """pip downloads sources too, where a line names a folder, an archive or a repository."""
    names = " ".join(_DOWNLOADED.findall(said.text)).split()
    if missing := [name for name in names if canonicalize_name(name) not in wheels]:
        raise UsageError(
            f"no wheel: {', '.join(missing)}",
            where=_shown(files),
            why="nodes get wheels only; this comes from sources: a folder, an archive or a repository",
            fix="make a wheel of it (pip wheel --no-deps ...) and name that file in its place; the folder of "
            "your script needs no requirement, it travels with the job",
        )


def _kept(path: Path) -> Wheel:
    """Move a downloaded wheel to its place in the cache."""
    with path.open("rb") as file:
        wheel = Wheel.of(path.name, hashlib.file_digest(file, "sha256").hexdigest())
    place = wheel_path(wheel)
    place.parent.mkdir(parents=True, exist_ok=True)
    path.replace(place)
    return wheel


def _unresolvable(asked: Question, said: Said) -> UsageError:
    begin = _REASON_BEGINS.search(said.text)
    text = said.text[begin.start() :] if begin else said.text[-_LONGEST_REASON:]
    lines = [line.removeprefix("ERROR: ") for line in text.partition("\nTo fix this")[0].splitlines()]
    reason = "\n".join(line for line in lines if line.strip() and not _NOISE.match(line))
    more = " ..." if len(reason) > _LONGEST_REASON else ""
    return UsageError(
        "the requirements can't be met",
        where=_shown(asked.files),
        why=f"pip says: {reason[:_LONGEST_REASON]}{more}",
        fix=f"the nodes take wheels for {asked.node}: "
        "ask for versions that have such wheels and fit together",
    )


def _shown(files: Sequence[Path]) -> str:
    return ", ".join(str(file) for file in files)
