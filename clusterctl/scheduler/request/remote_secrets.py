"""Writes the values of `submit --secret`. Runs on the cluster: standard library only, Python 3.9.

    main(FOLDER)

FOLDER is the new folder of a job's values, as in payload/node/secret_values.py. stdin is the content
of its file. The program fails with a message (exit status 1) if other users could read it.
"""

from __future__ import annotations

import os
import stat
import sys

FILE = "environ"
MODE = 0o700


def main(folder: str) -> None:
    os.umask(0o077)
    above = os.path.dirname(folder)
    for one in (above, folder):
        if not os.path.isdir(one):
            os.mkdir(one, MODE)
        # A file system may set other modes, or a link may lead to a folder of another user.
        os.chmod(one, MODE)
        status = os.lstat(one)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise SystemExit(f"{one} is not a folder of your own")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise SystemExit(f"the file system lets other users open {one}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(f"{folder}/{FILE}", flags, 0o600), "wb") as file:
        file.write(sys.stdin.buffer.read())
        file.flush()
        os.fsync(file.fileno())
