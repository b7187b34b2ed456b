"""What the machines of a lab are booted from, by kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from clusterctl.providers.local import image
from clusterctl.providers.local.layout import CACHE, BakeRequest
from clusterctl.providers.local.provider import image_keys

Kind = Literal["debian", "el"]


def debian() -> Path:
    """The bare Debian of the local image, made if it is not in the cache."""
    base, key = image_keys(image.DEFAULT_MIRROR)
    root = CACHE / f"base-{base}" / "root"
    if root.is_dir():
        return root
    nobody = "ssh-ed25519 AAAA"  # an image that is baked has a key; its base has none
    request = BakeRequest(key=key, base_key=base, mirror=image.DEFAULT_MIRROR, admin_key=nobody)
    with image.cache_lock(_silent):
        return image.build_base(request, _silent)


@contextmanager
def tree(kind: Kind, cache: Path) -> Iterator[tuple[tuple[Path, ...], frozenset[str]]]:
    """The lower layers, topmost first, and the hosts that apt there fetches from; they stay meanwhile."""
    base = debian()
    yield (base,), _apt_hosts(base)


def _apt_hosts(root: Path) -> frozenset[str]:
    return frozenset(re.findall(r"http://([^/\s]+)", (root / "etc/apt/sources.list").read_text()))


def _silent(_: str) -> None:
    return None
