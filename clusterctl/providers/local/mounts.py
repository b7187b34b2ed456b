"""Mounts: overlays on an image, and what is mounted where, read from the kernel's table."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from clusterctl.providers.local.run import run


def mounted_under(folder: Path) -> tuple[Path, ...]:
    """Mount points at or below a folder, deepest first."""
    prefix = str(folder)
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == prefix or point.startswith(prefix + "/"):
            points.append(Path(point))
    return tuple(sorted(points, key=lambda p: len(p.parts), reverse=True))


def mount_overlay(lower: tuple[Path, ...], folder: Path) -> Path:
    """Mount ``folder/root`` over the lower layers, topmost first, with ``folder/upper`` for the changes."""
    root, upper, work = folder / "root", folder / "upper", folder / "work"
    if mounted_under(root):
        return root
    for part in (root, upper, work):
        part.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={':'.join(map(str, lower))},upperdir={upper},workdir={work}"
    run(["mount", "-t", "overlay", "clusterctl", "-o", options, str(root)], what="mounting the overlay")
    return root


def erase(folder: Path) -> None:
    """Unmount and delete a node's or a cluster's folder. Never walks into something still mounted."""
    for point in mounted_under(folder):
        run(["umount", str(point)], what=f"unmounting {point}")
    if folder.exists():
        shutil.rmtree(folder)


def rooted_under(folder: Path) -> tuple[int, ...]:
    """Processes whose root is an overlay with its changes below the folder, still mounted here or not."""
    own = f"upperdir={folder}/"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                lines = (entry / "mountinfo").read_text().splitlines()
                if any(line.split()[4] == "/" and own in line for line in lines):
                    found.append(int(entry.name))
    return tuple(found)
