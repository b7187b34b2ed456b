"""What a bundle says of itself: its format, what it was made for, and every file with its size and hash."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from clusterctl.errors import BundleError

FORMAT: Final = 1  # of the file and of its manifest; raised when an older clusterctl would misread it
MANIFEST: Final = "manifest.json"
DIGEST: Final = "manifest.sha256"
PAYLOAD: Final = "payload.tar"
LOCK: Final = "lock.json"  # of all versions, for people and other programs
WHEELS: Final = "wheels"
SYSTEMS: Final = "systems"
MOST_FILES: Final = 50_000
MOST_BYTES: Final = 200 << 30
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9._+~%=@^-]*"  # never `..`, hidden, or an option
PATH: Final = re.compile(rf"{_PART}(/{_PART}){{0,5}}")

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Stored(BaseModel):
    """What is written once and read by later versions: they may know more."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Entry(_Stored):
    """One file of a bundle."""

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
        """As it stands in the bundle."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, raw: bytes, where: str) -> Manifest:
        """The manifest of a bundle whose digest was right.

        Raises:
            BundleError: its format is not ours, or it can't be a manifest of clusterctl's.
        """
        try:
            said = _Head.model_validate_json(raw)
            if said.format != FORMAT:
                raise _of_another_format(said, where)
            return cls.model_validate_json(raw)
        except ValidationError as exc:
            first = exc.errors()[0]
            place = ".".join(map(str, first["loc"]))
            why = f"{MANIFEST}: {place + ': ' if place else ''}{first['msg']}"
            raise BundleError("this is no bundle that clusterctl made", where=where, why=why) from exc


class _Head(_Stored):
    format: int
    clusterctl: str = "an unknown version"


def _of_another_format(said: _Head, where: str) -> BundleError:
    return BundleError(
        f"the bundle has format {said.format}, this clusterctl reads format {FORMAT}",
        where=where,
        why=f"it was made by clusterctl {said.clusterctl}",
        fix="use that version here, or make the bundle anew with this one",
    )
