"""Symbolic links in a job's folder that `collect` makes again in the run's folder.

A link is made only if it leads to a file or folder that is copied too, or to another such link. It then gets
a relative target inside the run's folder, also if the cluster reports another.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from clusterctl.transport.remote_incoming import Entry

# As long as Linux allows.
_LONGEST = 4096  # bytes
_HERE, _UP = b".", b".."

# Path of a link in the run's folder -> path of its target in the run's folder.
Links = Mapping[bytes, bytes]


def target_of(link: Entry) -> bytes:
    return base64.b64decode(link.payload)


def add_with_parents(paths: set[bytes], path: bytes) -> None:
    while path and path not in paths:
        paths.add(path)
        path = path.rpartition(b"/")[0]


def choose_links(links: Iterable[Entry], coming: Collection[bytes], top: str) -> dict[bytes, bytes]:
    """Return the links to make: path -> path of the target, both in the job's folder. Targets come first.

    coming: paths of the files and folders that are copied. top: path of the job's folder on the cluster.
    """
    targets = {entry.path: _path_in_run(entry, os.fsencode(top)) for entry in links}
    made: dict[bytes, bytes] = {}
    for path in targets:
        chain: dict[bytes, None] = {}
        end = path
        while end in targets and end not in made and end not in chain:
            chain[end] = None
            end = targets[end]
        if end in made or end in coming:
            made |= {link: targets[link] for link in reversed(chain)}
        else:
            # So that this chain is not followed again for each link of it.
            targets |= dict.fromkeys(chain, b"")
    return made


def _path_in_run(link: Entry, top: bytes) -> bytes:
    """Return the path in the job's folder that a link leads to; b"" if it leads elsewhere.

    A target such as `a/../b` counts as elsewhere, because `a` may be a link.
    """
    target = target_of(link)
    folder = link.path.split(b"/")[:-1]
    if target.startswith(top + b"/"):
        folder, target = [], target[len(top) :].lstrip(b"/")
    names = [name for name in target.split(b"/") if name not in {b"", _HERE}]
    depth = next((i for i, name in enumerate(names) if name != _UP), len(names))
    is_elsewhere = target.startswith(b"/") or len(target) > _LONGEST or b"\0" in target
    if is_elsewhere or depth > len(folder) or _UP in names[depth:]:
        return b""
    path = b"/".join([*folder[: len(folder) - depth], *names[depth:]])
    # Programs that follow links would never leave a folder with a link to itself.
    return b"" if (link.path + b"/").startswith(path + b"/") else path


def make_links(tree: Path, links: Links) -> None:
    """Make links in the complete folder of a run, except links that would replace a file or lead out."""
    root = tree.resolve()
    for path, target in links.items():
        link, place = root / os.fsdecode(path), root / os.fsdecode(target)
        # The user may have added links of that name, also in place of a folder.
        is_inside = link.parent.resolve() == link.parent and root in place.resolve().parents
        if is_inside and link.parent.is_dir() and place.exists() and not os.path.lexists(link):
            link.symlink_to(os.path.relpath(place, link.parent))
