"""A bundle: everything that a cluster is installed from, in one plain tar of plain files, manifest first.

The same content gives the same bytes. The packages in it are compressed already. Nothing is unpacked by what
a header says: a file's place follows from the manifest, whose own digest is checked first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from clusterctl.errors import BundleError, MachineError, UsageError, printable
from clusterctl.util.assets import asset, file_sha256, payload_hash, tree_files
from clusterctl.util.disk import reason

FORMAT: Final = 1  # of the file and of its manifest; raised when an older clusterctl would misread it
MANIFEST: Final = "manifest.json"
DIGEST: Final = "manifest.sha256"
PAYLOAD: Final = "payload.tar"
LOCK: Final = "lock.json"  # of all versions, for people and other programs
WHEELS: Final = "wheels"
WHEELS_LOCK: Final = f"{WHEELS}/{{}}.lock"  # of what the spec's requirements come to, by release
REPOSITORY: Final = "systems/{}"  # by release
MOST_FILES: Final = 50_000
MOST_BYTES: Final = 200 << 30
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9._+~%=@^-]*"  # never `..`, hidden, or an option
PATH: Final = re.compile(rf"{_PART}(/{_PART}){{0,5}}")

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Stored(BaseModel):
    """What is written once and read by later versions: they may know more."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Entry(_Stored):
    path: Annotated[str, StringConstraints(max_length=250)]
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256

    @model_validator(mode="after")
    def _stays_inside(self) -> Entry:
        if not PATH.fullmatch(self.path):
            raise ValueError(f"{self.path!r} is no path of a bundle")
        return self


class System(_Stored):
    """What there is for one distribution.

    ``asked``: the packages that the roles ask for; ``packages``: how many that comes to with all they need.
    ``base``, ``gpu_base`` and ``requirements`` are hashes of the job environment's lock, of what nodes with
    GPUs have beside it, and of the spec's requirements files; ``wheels``, ``gpu`` and ``more`` the names of
    what they come to.
    """

    family: str
    asked: tuple[str, ...]
    packages: int
    python: str
    base: str
    gpu_base: str | None = None
    requirements: str | None = None
    wheels: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


class Manifest(_Stored):
    """The first file of a bundle. ``systems`` is by distribution, as `debian-12`."""

    format: int
    clusterctl: str
    cluster: str
    architecture: str
    payload: str
    systems: Mapping[str, System]
    files: Annotated[tuple[Entry, ...], Field(max_length=MOST_FILES)]

    @model_validator(mode="after")
    def _sane(self) -> Manifest:
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths) or {MANIFEST, DIGEST} & set(paths):
            raise ValueError("a file is named twice")
        if sum(entry.size for entry in self.files) > MOST_BYTES:
            raise ValueError(f"it claims to hold more than {MOST_BYTES >> 30} GiB")
        return self

    @property
    def text(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, raw: bytes, where: str) -> Manifest:
        """The manifest of a bundle whose digest was right."""
        try:
            said = _Head.model_validate_json(raw)
            if said.format != FORMAT:
                raise BundleError(
                    f"the bundle has format {said.format}, this clusterctl reads format {FORMAT}",
                    where=where,
                    why=f"it was made by clusterctl {said.clusterctl}",
                    fix="use that version here, or make the bundle anew with this one",
                )
            return cls.model_validate_json(raw)
        except ValidationError as exc:
            first = exc.errors()[0]
            place = ".".join(map(str, first["loc"]))
            why = f"{MANIFEST}: {place + ': ' if place else ''}{first['msg']}"
            raise _no_bundle(where, why) from exc


def _no_bundle(where: str, why: str) -> BundleError:
    fix = "copy the bundle here again, or create it again with `clusterctl bundle create`"
    return BundleError("this is not a bundle of clusterctl's", where=where, why=why, fix=fix)


class _Head(_Stored):
    format: int
    clusterctl: str = "an unknown version"


BLOCK: Final = tarfile.BLOCKSIZE
CHUNK: Final = 1 << 20
_LONGEST_MANIFEST: Final = 32 << 20
END: Final = bytes(2 * BLOCK)  # of a tar


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the bundle the header of a file begins; its content follows."""

    entry: Entry
    offset: int

    @property
    def content(self) -> int:
        return self.offset + BLOCK

    @property
    def end(self) -> int:
        return self.content + padded(self.entry.size)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose manifest is whole. Its other files are as they are: see ``damages``."""

    file: Path
    manifest: Manifest
    digest: str  # of the manifest, and so of all that is in the bundle
    begin: int  # of what the manifest names

    @property
    def places(self) -> Mapping[str, Place]:
        """Path -> where it is, in the order of the file."""
        found, offset = {}, self.begin
        for entry in self.manifest.files:
            found[entry.path] = place = Place(entry, offset)
            offset = place.end
        return found

    def stream(self, folder: str, *, as_folder: str, after: Mapping[str, bytes]) -> Iterator[bytes]:
        """A tar of files, and of what lies below a folder, as another one; that was checked before."""
        with self.file.open("rb") as file:
            below = (
                (as_folder + path.removeprefix(folder), place.entry.size, content(file, place))
                for path, place in self.places.items()
                if path.startswith(f"{folder}/")
            )
            yield from tar(chain(in_memory(after), below))

    def copy(self, path: str, to: Path) -> None:
        """Put a file of the bundle somewhere, checked.

        Raises:
            BundleError: it is not what the manifest says.
        """
        place = self.places[path]
        damaged = BundleError(
            f"{path} in the bundle is damaged", where=str(self.file), fix="copy the bundle here again"
        )
        try:
            with self.file.open("rb") as file, to.open("wb") as out:
                out.writelines(_checked(content(file, place), place.entry, damaged))
        except BundleError:
            to.unlink()
            raise


def padded(size: int) -> int:
    return size + -size % BLOCK


def content(file: IO[bytes], place: Place) -> Iterator[bytes]:
    """The bytes of a file of the bundle; fewer where the bundle ends."""
    file.seek(place.content)
    left = place.entry.size
    while left and (chunk := file.read(min(CHUNK, left))):
        left -= len(chunk)
        yield chunk


def open_bundle(file: Path) -> Bundle:
    """Read the manifest of a bundle.

    Raises:
        BundleError: there is no such file, it is no bundle, or not of a format that we know.
    """
    where = str(file)
    try:
        with file.open("rb") as opened:
            raw = _first(opened, MANIFEST, _LONGEST_MANIFEST, file)
            digest = hashlib.sha256(raw).hexdigest()
            if _first(opened, DIGEST, BLOCK, file) != _digest_line(digest):
                raise BundleError(
                    f"{MANIFEST} in the bundle is damaged",
                    where=where,
                    why=f"it is not what {DIGEST} says",
                    fix="copy the bundle here again, or create it again",
                )
            begin = opened.tell()
    except OSError as exc:
        raise BundleError(
            "the bundle can't be read",
            where=where,
            why=exc.strerror or str(exc),
            fix="name a file that `clusterctl bundle create` made",
        ) from exc
    return Bundle(file.absolute(), Manifest.read(raw, where), digest, begin)


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect of a bundle; ``what`` is the file concerned, or what does not match."""

    kind: Literal["corrupted", "missing", "extra", "truncated", "mismatch"]
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: {self.why}"


def damages(bundle: Bundle) -> tuple[Defect, ...]:
    """The defects of the bundle's content against its manifest; the whole file is read."""
    size = bundle.file.stat().st_size
    places = tuple(bundle.places.values())
    with bundle.file.open("rb") as file:
        return tuple(_walk(file, places, size, bundle.begin))


def _walk(file: IO[bytes], places: Sequence[Place], size: int, begin: int) -> Iterator[Defect]:
    """Look at each file where it belongs. Where another one lies there, find out which ones there are."""
    for number, place in enumerate(places):
        path = place.entry.path
        file.seek(place.offset)
        head = file.read(BLOCK)
        info = _parsed(head)
        is_end = info is None and len(head) == BLOCK and not any(head)
        if is_end or (info is not None and info.name != path):
            yield from _rearranged(file, places[number:], place.offset, path)
            return
        if place.content + place.entry.size > size:
            left = f" and {len(places) - number - 1} files after it" if number + 1 < len(places) else ""
            yield Defect("truncated", path, f"the bundle ends after {size} bytes, before the end of it{left}")
            return
        if head != header(path, place.entry.size):
            yield Defect("corrupted", path, "its header is damaged")
        elif not _is_whole(file, place):
            yield Defect("corrupted", path, "its content is not what the manifest says")
    end = places[-1].end if places else begin
    file.seek(end)
    if file.read(len(END) + 1) != END:
        yield from _rearranged(file, (), end, "the end of the bundle")


def _parsed(raw: bytes) -> tarfile.TarInfo | None:
    try:
        return tarfile.TarInfo.frombuf(raw, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError):
        return None


def _is_whole(file: IO[bytes], place: Place) -> bool:
    sha = hashlib.sha256()
    for chunk in content(file, place):
        sha.update(chunk)
    return sha.hexdigest() == place.entry.sha256 and not any(
        file.read(padded(place.entry.size) - place.entry.size)
    )


def _rearranged(file: IO[bytes], expected: Sequence[Place], offset: int, here: str) -> Iterator[Defect]:
    """Files were taken out, put in, renamed or moved: follow the headers, and compare the names."""
    found: Counter[str] = Counter()
    file.seek(offset)
    while (info := _parsed(file.read(BLOCK))) is not None:
        found[printable(info.name)] += 1
        file.seek(padded(min(max(0, info.size), MOST_BYTES)), os.SEEK_CUR)
    wanted = Counter(place.entry.path for place in expected)
    for name in found - wanted:
        yield Defect("extra", name, "the manifest does not name it")
    for path in wanted - found:
        yield Defect("missing", path, "the manifest names it, and it is not there")
    if found == wanted:
        yield Defect("corrupted", here, "something else lies where it belongs")


def check_target(target: Path) -> None:
    """That a bundle can be written there, as far as can be told ahead.

    Raises:
        UsageError: it can't.
    """
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as exc:
        raise UsageError(
            "the bundle can't be written",
            where=str(target),
            why=exc.strerror or str(exc),
            fix="name another file with --out, in a folder that is there and can be written",
        ) from exc


def write_bundle(target: Path, manifest: Manifest, sources: Mapping[str, Path | bytes]) -> None:
    """Write a bundle in one stream; it appears under its name when it is whole.

    Raises:
        MachineError: it can't be written there.
        BundleError: a source is not what the manifest says any more.
    """
    raw = manifest.text.encode()
    first = {MANIFEST: raw, DIGEST: _digest_line(hashlib.sha256(raw).hexdigest())}
    entries = ((one.path, one.size, _read(one, sources[one.path])) for one in manifest.files)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            partial = Path(file.name)
            try:
                file.writelines(tar(chain(in_memory(first), entries)))
                file.flush()
                partial.chmod(0o644)
                partial.replace(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as exc:
        raise MachineError(
            "the bundle can't be written",
            where=str(target),
            why=reason(exc, target),
            fix="name another file with --out, where there is room",
        ) from exc


def entries_of(sources: Mapping[str, Path | bytes]) -> tuple[Entry, ...]:
    """The entries of a manifest: sorted, so that folders lie together."""
    return tuple(_entry(path, sources[path]) for path in sorted(sources))


def tar(files: Iterable[tuple[str, int, Iterable[bytes]]]) -> Iterator[bytes]:
    """A tar of plain files, each a name, a size and its content: the same bytes for the same files."""
    for name, size, chunks in files:
        yield header(name, size)
        yield from chunks
        yield bytes(-size % BLOCK)
    yield END


def in_memory(files: Mapping[str, bytes]) -> Iterator[tuple[str, int, Iterable[bytes]]]:
    return ((name, len(raw), [raw]) for name, raw in files.items())


def header(name: str, size: int) -> bytes:
    """The header of a plain file, the same wherever and whenever it is made."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _entry(path: str, source: Path | bytes) -> Entry:
    if isinstance(source, bytes):
        return Entry(path=path, size=len(source), sha256=hashlib.sha256(source).hexdigest())
    return Entry(path=path, size=source.stat().st_size, sha256=file_sha256(source))


def _digest_line(digest: str) -> bytes:
    return f"{digest}  {MANIFEST}\n".encode()


def _read(entry: Entry, source: Path | bytes) -> Iterator[bytes]:
    """The content of a source, which must be what it was when the manifest was made."""
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as file:
        changed = BundleError(f"{source} changed while it was packed", fix="run it again")
        yield from _checked(iter(partial(file.read, CHUNK), b""), entry, changed)


def _checked(chunks: Iterable[bytes], entry: Entry, error: BundleError) -> Iterator[bytes]:
    """Pass them on; raise the error at the end if they are not what the manifest says."""
    sha = hashlib.sha256()
    for chunk in chunks:
        sha.update(chunk)
        yield chunk
    if sha.hexdigest() != entry.sha256:
        raise error


def _first(file: IO[bytes], name: str, longest: int, path: Path) -> bytes:
    """The next member, which must be a plain file of that name."""
    head = file.read(BLOCK)
    info = _parsed(head)
    if info is not None and 0 <= info.size <= longest and head == header(name, info.size):
        raw = file.read(padded(info.size))
        if len(raw) == padded(info.size) and not any(raw[info.size :]):
            return raw[: info.size]
    raise _no_bundle(str(path), f"{name} is not whole where it belongs")


def named(paths: Sequence[str], most: int = 5) -> str:
    """Some paths for a message."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more


def payload_tar() -> bytes:
    """The payload for the nodes to unpack: `HASH/payload/...` and, last, `HASH/.complete`.

    Where that one lies, everything before it does.
    """
    root, version = asset("payload"), payload_hash()
    files = {f"payload/{path.relative_to(root).as_posix()}": path.read_bytes() for path in tree_files(root)}
    files[".complete"] = b""
    return b"".join(tar(in_memory({f"{version}/{name}": raw for name, raw in files.items()})))
