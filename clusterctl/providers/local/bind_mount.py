"""Mounts a folder of this machine in the mount namespace of a node. Runs as a program of its own,
because a process with threads can't enter a mount namespace. Standard library only.

    bind_mount.py FOLDER PID TARGET

PID is that of a process of the node, TARGET a folder of the node. Needs Linux 5.2.
"""

from __future__ import annotations

import ctypes
import os
import sys

# System calls of all architectures, and constants of <linux/mount.h>, <fcntl.h> and <sched.h>.
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_AT_FDCWD = -100
_CLONE = 1
_RECURSIVE = 0x8000
_FROM_THE_FILE = 4
_MOUNT_NAMESPACE = 0x20000


def main(folder: str, pid: str, target: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: int | bytes) -> int:
        result: int = getattr(libc, function)(*arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    tree = call(
        "syscall", _OPEN_TREE, _AT_FDCWD, os.fsencode(folder), _CLONE | _RECURSIVE | os.O_CLOEXEC
    )
    call("setns", os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), _MOUNT_NAMESPACE)
    call("syscall", _MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _FROM_THE_FILE)


if __name__ == "__main__":
    main(*sys.argv[1:])
