"""What the machines of a lab are booted from, by kind."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clusterctl.providers.local import image, system
from clusterctl.providers.local.layout import CACHE, BakeRequest
from clusterctl.providers.local.provider import image_keys
from clusterctl.spec.models import LocalSettings
from clusterctl.util.assets import digest
from tests.support.el import repository
from tests.support.el.build import build, inputs

_KEPT_S = 24 * 3600


@dataclass(frozen=True)
class Tree:
    """``layers``: an overlay's lower ones, topmost first. ``web`` has what its machines find on the web, and
    ``web_hosts`` are the names by which they look.
    """

    layers: tuple[Path, ...]
    apt_hosts: frozenset[str]
    web: Path | None = None
    web_hosts: tuple[str, ...] = ()


def debian(distribution: Literal["debian-12", "debian-13"] = "debian-12") -> Path:
    """The bare Debian of the local image, made if it is not in the cache."""
    settings = LocalSettings(distribution=distribution)
    base, key = image_keys(settings)
    root = CACHE / f"base-{base}" / "root"
    if root.is_dir():
        return root
    nobody = "ssh-ed25519 AAAA"  # an image that is baked has a key; its base has none
    request = BakeRequest(
        key=key, base_key=base, distribution=settings.release, mirror=settings.mirror, admin_key=nobody
    )
    with image.cache_lock("up", lambda _: None):
        return image.build_base(request, lambda _: None)


@contextmanager
def el(cache: Path) -> Iterator[Path]:
    """The folder of the EL-shaped node (tests/support/el), made if it is not there; it stays meanwhile."""
    base = debian()
    key = digest(str(base), *inputs())
    folder, lock = cache / f"test-el-{key}", cache / f"test-el-{key}.lock"
    with (cache / "test-el.lock").open("w") as builders, lock.open("w") as used:
        fcntl.flock(builders, fcntl.LOCK_EX)
        fcntl.flock(used, fcntl.LOCK_SH)
        _forget_older(cache)
        if not folder.is_dir():
            building = folder.with_suffix(".building")
            system.erase(building)
            building.mkdir()
            try:
                build(base, building)
                building.rename(folder)
            finally:
                system.erase(building)
        fcntl.flock(builders, fcntl.LOCK_UN)
        yield folder


def _forget_older(cache: Path) -> None:
    """Remove the nodes that nobody uses just now and that were not used for a day."""
    for lock in cache.glob("test-el-*.lock"):
        with lock.open() as file, suppress(BlockingIOError):
            if time.time() - lock.stat().st_mtime > _KEPT_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                system.erase(lock.with_suffix(""))
                lock.unlink()


@contextmanager
def tree(kind: str, cache: Path) -> Iterator[Tree]:
    """What machines of that kind are made from; it stays while the body runs."""
    base = debian("debian-13" if kind == "debian-13" else "debian-12")
    if not kind.startswith("el"):
        yield Tree((base,), _apt_hosts(base))
        return
    with el(cache) as folder:
        yield Tree((folder / "upper", base), frozenset(), folder, repository.hosts())


def _apt_hosts(root: Path) -> frozenset[str]:
    return frozenset(re.findall(r"http://([^/\s]+)", (root / "etc/apt/sources.list").read_text()))
