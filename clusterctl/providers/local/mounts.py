"""Mounts: overlays on an image, and what is mounted where, read from the kernel's table."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from clusterctl.providers.local import processes
from clusterctl.providers.local.run import run

_DOOMED = ".removed-"


def mounted_under(folder: Path) -> tuple[Path, ...]:
    """Mount points at or below a folder, deepest first."""
    prefix = str(folder)
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == prefix or point.startswith(prefix + "/"):
            points.append(Path(point))
    return tuple(sorted(points, key=lambda p: len(p.parts), reverse=True))


def mount_disk(folder: Path, size_mib: int) -> Path:
    """Mount ``folder/disk``, a file system of that size in a sparse file, made if it is not there yet.

    Only the blocks that are in use take room on this machine.
    """
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir(parents=True, exist_ok=True)
    if not image.exists():
        unfinished = image.with_suffix(".new")
        with unfinished.open("wb") as file:
            file.truncate(size_mib << 20)
        run(["mkfs.ext4", "-q", "-F", "-m", "0", str(unfinished)], what="making a node's disk")
        unfinished.rename(image)
    if not mounted_under(point):
        run(["mount", "-o", "loop,discard", str(image), str(point)], what="mounting a node's disk")
    return point


def disk_mib(folder: Path) -> int | None:
    """The size of the disk that ``mount_disk`` made there; None if there is none."""
    image = folder / "disk.img"
    return image.stat().st_size >> 20 if image.exists() else None


def loops_under(folder: Path) -> tuple[str, ...]:
    """Loop devices whose file lies below a folder, removed already or not."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it was just given back
            if backing.read_text().startswith(f"{folder}/"):
                found.append(backing.parts[3])
    return tuple(found)


def mount_overlay(lower: tuple[Path, ...], folder: Path, changes: Path | None = None) -> Path:
    """Mount ``folder/root`` over the lower layers, topmost first; `upper` in ``changes`` takes the changes.

    ``changes`` is ``folder`` itself unless it is given.
    """
    changes = changes or folder
    root, upper, work = folder / "root", changes / "upper", changes / "work"
    if mounted_under(root):
        return root
    for part in (root, upper, work):
        part.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={':'.join(map(str, lower))},upperdir={upper},workdir={work}"
    run(["mount", "-t", "overlay", "clusterctl", "-o", options, str(root)], what="mounting the overlay")
    return root


def erase(folder: Path) -> None:
    """Unmount and delete a node's or a cluster's folder. Never walks into something still mounted.

    Whatever ends this midway leaves the folder whole or gone: a node that lacks some files would start.
    """
    for point in mounted_under(folder):
        run(["umount", str(point)], what=f"unmounting {point}")
    gone = doomed(folder)
    if gone.exists():
        delete(gone)
    if folder.exists():
        delete(folder.rename(gone))


def doomed(folder: Path) -> Path:
    """What a folder is called while it is deleted. One that is hidden is never taken for whole."""
    return folder if folder.name.startswith(".") else folder.with_name(f"{_DOOMED}{folder.name}")


def erase_doomed(place: Path) -> None:
    """Delete what an ``erase`` that was ended midway has left in there."""
    for folder in place.glob(f"{_DOOMED}*"):
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a folder with `rm`: a job can nest folders deeper than Python's recursion, or a path, may go."""
    run(["rm", "-rf", "--one-file-system", "--", str(folder)], what=f"deleting {folder}")


def rooted_under(folder: Path) -> tuple[int, ...]:
    """Processes whose root is an overlay with its changes below the folder, still mounted here or not."""
    own = f"upperdir={folder}/"

    def rooted(process: Path) -> bool | None:
        lines = (process / "mountinfo").read_text().splitlines()
        return any(line.split()[4] == "/" and own in line for line in lines) or None

    return tuple(pid for pid, _ in processes.look(rooted))
