"""What the compute nodes of a class have in common: a layer over their image, baked once and cached.

It holds what `class.yml` configures, and so nothing of any cluster's: names, addresses and secrets are files
that each node gets for itself. Its record has a digest of its files, by which damage is noticed.
"""

from __future__ import annotations

import hashlib
import json
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from clusterctl.errors import ProvisionError
from clusterctl.providers.local import image, layout, system
from clusterctl.util.assets import digest

_RECORD = "class.json"


def class_key(image_key: str, inputs: str) -> str:
    return digest(image_key, inputs)


def layer(key: str) -> Path:
    """The overlay's layer of a class.

    Raises:
        ProvisionError: it is not in the cache.
    """
    if not (layout.class_folder(key) / _RECORD).exists():
        what = "what the nodes have in common is not in the cache"
        fix = "`clusterctl up` makes it anew; nodes that were made from it need a `clusterctl down` first"
        raise ProvisionError(what, code="class-not-cached", where=str(layout.class_folder(key)), fix=fix)
    return layout.class_folder(key) / "upper"


def is_whole(key: str) -> bool:
    """Return whether the layer is in the cache, as it was made."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((layout.class_folder(key) / _RECORD).read_bytes())
        return bool(record["digest"] == _digest(layout.class_folder(key) / "upper"))
    return False


def baking(key: str, image_key: str, admin_key: str) -> AbstractContextManager[tuple[int, str]]:
    """A layer over the image that answers SSH while the body runs; yields (port, host key)."""

    def finish(building: Path) -> None:
        record = {"image": image_key, "made": time.time(), "digest": _digest(building / "upper")}
        (building / _RECORD).write_text(json.dumps(record))

    system.erase(layout.class_folder(key))  # a damaged one
    return image.baked_over(image.layers(image_key), layout.class_folder(key), admin_key, finish)


def is_used(key: str) -> bool:
    return any(layout.class_folder(key).name in image.classes_of(state.id) for state in image.states())


def _digest(upper: Path) -> str:
    return digest(*(f"{path.relative_to(upper)} {_mark(path)}" for path in _entries(upper)))


def _entries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _entries(path)


def _mark(path: Path) -> str:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"link {path.readlink()}"
    kind = stat.filemode(found.st_mode)[0]
    is_file = stat.S_ISREG(found.st_mode)
    said = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if is_file else f"{kind} {found.st_rdev}"
    return f"{said} {stat.S_IMODE(found.st_mode):o} {found.st_uid}:{found.st_gid}"
