"""Requirements files resolved to a lock by pip: the same versions as long as the files are the same.

What a line means is pip's concern; here it only matters whether an earlier answer of pip's still holds.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from clusterctl.errors import UsageError
from clusterctl.packages.wheelhouse import (
    DEFAULT_PLATFORM,
    Lock,
    NodePlatform,
    PipResult,
    Wheel,
    pins,
    pip_download,
    unwritable_cache,
    wheel_path,
)
from clusterctl.state.journal import digest
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.lifetime import temporary_folder
from clusterctl.util.progress import LineReporter

_MAX_BYTES: Final = 4 << 20
_INCLUDE: Final = re.compile(r"^(?:-r|--requirement|-c|--constraint)(?:\s+|\s*=\s*|(?<=-[rc]))(.+)$")
_COMMENT: Final = re.compile(r"(^|\s+)#.*$")


def request_hash(files: Sequence[Path]) -> str:
    """A hash of all that decides what pip makes of these files, but for what its indexes hold.

    That is the files, those that they include, the wheels on this machine that they name, and the PIP_*
    variables.

    Raises:
        UsageError: one of the files can't be read.
    """
    settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("PIP_")]
    contents = [part for file in files for pair in _contents(file, frozenset()) for part in pair]
    return digest(*settings, "", *contents)


def content_hash(files: Sequence[Path]) -> str:
    """A hash of what these files and those that they include say, wherever they lie.

    Raises:
        UsageError: one of the files can't be read.
    """
    return digest(*(said for file in files for _, said in _contents(file, frozenset())))


def _contents(file: Path, seen: frozenset[Path], named_in: str = "") -> Iterator[tuple[bytes, bytes]]:
    """What is in a file and in those that it includes, each with the folder that its relative paths mean."""
    file = file.absolute()
    if file in seen:
        return
    raw = _read(file, named_in)
    yield str(file.parent).encode(errors="surrogateescape"), raw
    for number, line in _lines(raw.decode(errors="replace")):
        if found := _INCLUDE.match(line):
            name = found[1].strip("\"'")
            if "://" not in name:
                yield from _contents(file.parent / name, seen | {file}, f"{file}:{number}")
        elif (wheel := _local_wheel(line, file.parent)) is not None:
            yield b"", _hash_of(wheel, f"{file}:{number}")


def _read(file: Path, named_in: str) -> bytes:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a null byte
        raise UsageError(
            f"the requirements file {file} can't be read",
            where=named_in,
            why=getattr(exc, "strerror", None) or str(exc),
            fix="name a file in pip's requirements format",
        ) from exc
    if len(raw) > _MAX_BYTES:
        raise UsageError(
            f"the requirements file {file} is larger than {_MAX_BYTES >> 20} MiB",
            where=named_in,
            fix="name a file in pip's requirements format",
        )
    return raw


def _hash_of(wheel: Path, named_in: str) -> bytes:
    try:
        with wheel.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError as exc:
        raise UsageError(
            f"the wheel {wheel} can't be read",
            where=named_in,
            why=exc.strerror or str(exc),
            fix="make it readable, or leave the line out",
        ) from exc


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines without comments, each with the number of its first line."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start if joined else number
        joined += _COMMENT.sub("", line)
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if joined.strip():
            yield start, joined.strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()


def _local_wheel(line: str, folder: Path) -> Path | None:
    """The wheel on this machine that a line names, if it names one: it may change under its name."""
    name = re.split(r"\s*;|\s+--|\s+$", line.rpartition(" @ ")[2].strip())[0].removeprefix("file://")
    path = folder / name
    return path if name.endswith(".whl") and "://" not in name and os.path.isfile(path) else None  # noqa: PTH113


_REASON_BEGINS: Final = re.compile(r"^(ERROR:|error:|The conflict is caused by:)", re.MULTILINE)
_NOISE: Final = re.compile(r"^\s*(WARNING:|\[notice\]|Looking in |ResolutionImpossible)")
_DOWNLOADED: Final = re.compile(r"^Successfully downloaded (.*)$", re.MULTILINE)
_CONFLICT: Final = "The conflict is caused by:"
_PARTY: Final = re.compile(
    r"^ +(?:The user requested \(constraint\) ([\w.-]+)|([\w.-]+)(?:\[\S*\])? \S+ depends on )", re.MULTILINE
)
_LONGEST_REASON: Final = 2000


@dataclass(frozen=True, slots=True)
class Requirements:
    """What is asked of pip.

    ``base`` is the lock of the job environment; ``held``, normalized name -> version, is to be kept if it can
    be, as the versions that the cluster's own requirements came to.
    """

    files: tuple[Path, ...]
    base: Path
    held: Mapping[str, str] = field(default_factory=dict)
    node: NodePlatform = DEFAULT_PLATFORM


def resolve(asked: Requirements, *, report: LineReporter, heard: LineReporter = lambda _line: None) -> Lock:
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
        if (known := _load_lock(answer, base, asked.node)) is not None:
            return known
        report(f"resolving {', '.join(str(file) for file in asked.files)}")
        answer.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as folder:
            wheels = _download(asked, kept, folder, heard)
            others = tuple(w for w in map(_kept, wheels) if base.get(w.name) != w.version)
            lock = Lock(others, base, asked.node)
        write_atomic(answer, lock.text)
    except OSError as exc:
        raise unwritable_cache(home, exc) from exc
    return lock


def cached_lock(asked: Requirements) -> Lock | None:
    """What ``resolve`` would say without asking pip, if it can.

    Raises:
        UsageError: a file can't be read.
        MachineError: the cache of downloads can't be read.
    """
    base = pins(asked.base)
    try:
        return _load_lock(_answer(asked, {**base, **asked.held}), base, asked.node)
    except OSError as exc:
        raise unwritable_cache(cache_home() / "python", exc) from exc


def store_lock(asked: Requirements, text: str, fill: Callable[[Wheel, Path], None]) -> None:
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
        raise unwritable_cache(home, exc) from exc


def _answer(asked: Requirements, kept: Mapping[str, str]) -> Path:
    """Where the answer to a question lies, once there is one."""
    key = digest(str(asked.node), _constraints(kept), request_hash(asked.files))
    return cache_home() / "python" / "locks" / f"{key}.txt"


def _load_lock(answer: Path, base: Mapping[str, str], node: NodePlatform) -> Lock | None:
    """The lock of an answer, if its wheels are still there."""
    if not answer.is_file():
        return None
    lock = Lock.read(answer.read_text(), base, node)
    return lock if all(wheel_path(wheel).is_file() for wheel in lock.wheels) else None


def _download(asked: Requirements, kept: Mapping[str, str], folder: Path, heard: LineReporter) -> list[Path]:
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


def _without_conflict(kept: Mapping[str, str], said: PipResult) -> dict[str, str]:
    """Those that pip does not name as part of the conflict; none, if it names none of them."""
    text = said.text.partition(_CONFLICT)[2]
    parties = {canonicalize_name(name or other) for name, other in _PARTY.findall(text)}
    return {name: kept[name] for name in kept if name not in parties} if parties & kept.keys() else {}


def _refuse_sources(files: Sequence[Path], said: PipResult, wheels: set[str]) -> None:
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


def _unresolvable(asked: Requirements, said: PipResult) -> UsageError:
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
