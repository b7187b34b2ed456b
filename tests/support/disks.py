"""A small disk that can be full, out of inodes, or read-only. Needs root.

It is a tmpfs in the mount namespace of a child process, so that no mount remains if a test is
killed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

FAULTS = {
    "full": "No space left on device",
    "no-inodes": "has no inodes left",
    "read-only": "Read-only file system",
}
_HOLD = 'mount -t tmpfs -o "size=$0m,nr_inodes=200" none /mnt && echo mounted && exec cat'


class SmallDisk:
    """``path`` is where it is reached; ``mount`` the command that mounts it anew, with other
    options.
    """

    def __init__(self, path: Path, mount: Sequence[str | Path]) -> None:
        self.path = path
        self._remount = mount
        self._fill = self.path / ".fill"

    def suffer(self, fault: str) -> None:
        """Make the disk full, out of inodes, or read-only: one of ``FAULTS``."""
        if fault == "read-only":
            self._mount("remount,ro")
        elif fault == "full":
            self.fill()
        else:
            self._fill.mkdir()
            try:
                for number in count():
                    (self._fill / str(number)).touch()
            except OSError:
                return

    def fill(self, *, but: int = 0) -> None:
        """Leave ``but`` bytes, in whole pages."""
        with self._fill.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                file.truncate(file.tell() - but)

    def recover(self) -> None:
        """Have room again."""
        self._mount("remount,rw")
        if self._fill.is_dir():
            for path in self._fill.iterdir():
                path.unlink()
            self._fill.rmdir()
        self._fill.unlink(missing_ok=True)

    def _mount(self, options: str) -> None:
        subprocess.run([*self._remount, "-o", options], check=True)


@contextmanager
def small_disk(mib: int = 4) -> Iterator[SmallDisk]:
    """One of that size and 200 inodes."""
    argv = ["unshare", "--mount", "sh", "-c", _HOLD, str(mib)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        try:
            inside = ("nsenter", f"--target={process.pid}", "--mount", "mount", "/mnt")
            yield SmallDisk(Path(f"/proc/{process.pid}/root/mnt"), inside)
        finally:
            process.kill()
