"""The mounted file systems of a host, and the errors of file servers that refuse or are away."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from ansible.module_utils.file_servers import FILE_SERVERS

# The file server is away, or has forgotten the file: nothing that a job could have made.
LOST = frozenset(
    {
        errno.ESTALE,
        errno.EIO,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)
# The file server answers, and refuses: root_squash, a read-only export.
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Such as fuse.sshfs and fuse.glusterfs; a disk by FUSE is "fuseblk".
_FUSE = "fuse."
# mountinfo writes blanks and backslashes in octal.
_OCTAL = re.compile(r"\\([0-7]{3})")


ANSWER_S = 20.0


def answers(path: str, within_s: float = ANSWER_S) -> bool:
    """Return whether a path can be looked at in time. A file server that does not answer may block
    its programs for ever.
    """
    null = subprocess.DEVNULL
    process = subprocess.Popen(["stat", path], stdin=null, stdout=null, stderr=null)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        # The kernel may not end it before the server answers, so nothing waits for its end.
        process.kill()
        return False
    return True


class Mounts:
    """Reads the kernel's list of mounts, which no file server can delay."""

    def __init__(self, table: str = "/proc/self/mountinfo") -> None:
        self._table = Path(table)

    def is_mount_point(self, path: str) -> bool:
        """Return whether something is mounted at a path, even if its file server is away."""
        return path in self._types()

    def server_mount(self, path: str) -> str:
        """Return the mount point of the file server's file system that holds a path; "" if the path
        is on a disk of the host.
        """
        # The automounter mounts the folder only then.
        with suppress(OSError):
            os.stat(f"{path}/.")
        types = self._types()
        folder = Path(os.path.realpath(Path(path).parent), Path(path).name)
        for place in map(str, (folder, *folder.parents)):
            if (kind := types.get(place)) is not None:
                return place if kind in FILE_SERVERS or kind.startswith(_FUSE) else ""
        return ""

    def is_servers_error(self, path: str, exc: OSError) -> bool:
        """Return whether an error of a path is one of a file server, not of the host's own disk."""
        return exc.errno in LOST | _REFUSED and self.server_mount(path) != ""

    def _types(self) -> dict[str, str]:
        """Return mount point -> type of the file system that is seen there: the last one."""
        types = {}
        for line in self._table.read_text(errors="surrogateescape").splitlines():
            words, _, rest = line.partition(" - ")
            place = _OCTAL.sub(lambda code: chr(int(code[1], 8)), words.split(" ")[4])
            types[place] = rest.split(" ")[0]
        return types
