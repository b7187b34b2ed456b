"""Mounts an NFS export for a moment, as the roles will, and tests the rights of root there.

A part of remote_reach.py. The mount is in a mount namespace of its own: no other program sees it,
and it ends with the process. Standard library only, Python 3.9.
"""

import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

# Seconds. A server that is away must not stop the check.
MOUNT_S = 20.0
ALL_S = 45.0
OPTIONS = "soft,timeo=30,retrans=1,noatime"
CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000


def examine_export(request: Mapping[str, Any]) -> dict[str, Any]:
    """Mount an export and look at it. Call this before the process has threads.

    request: server, export; homes: user -> uid; mark: name of the cluster's folder beside them;
        writes: whether to test root's rights.
    Return ``said`` if the export can't be mounted, ``untested`` if the host can't find out, else
    the result of ``look_at``.
    """
    place = tempfile.mkdtemp(prefix=".clusterctl-nfs-")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = mount_and_look(place, request)
        except (OSError, subprocess.SubprocessError) as exc:
            answer = {"untested": str(exc)}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read() if select.select([pipe], [], [], ALL_S)[0] else b""
    if text:
        os.waitpid(child, 0)
    else:
        os.kill(child, signal.SIGKILL)
    with suppress(OSError):
        Path(place).rmdir()
    return json.loads(text) if text else {"said": f"no answer within {ALL_S:g} s"}


def mount_and_look(place: str, request: Mapping[str, Any]) -> dict[str, Any]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC_PRIVATE, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    said = []
    for words in mounts(request["server"]):
        argv = ["mount", *words, f"{request['server']}:{request['export']}", place]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=MOUNT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        if done.returncode == 0:
            return look_at(Path(place), request)
        said.append(" ".join(done.stderr.split()))
    # mount(8)'s words if the kernel has no NFS.
    is_untested = "unknown filesystem type" in said[0]
    return {"untested" if is_untested else "said": said[0].replace(place, "FOLDER")}


def mounts(server: str) -> Iterator[Sequence[str]]:
    """Yield the options of mount(8) to try in turn: several without the program mount.nfs, which
    negotiates the version.
    """
    if shutil.which("mount.nfs", path="/sbin:/usr/sbin:" + os.environ.get("PATH", "")):
        yield ("-t", "nfs", "-o", f"{OPTIONS},retry=0")
        return
    address = socket.getaddrinfo(server, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    for kind, version in (("nfs4", "vers=4.2"), ("nfs4", "vers=4.0"), ("nfs", "vers=3,nolock")):
        yield ("-i", "-t", kind, "-o", f"{OPTIONS},{version},addr={address}")


def look_at(place: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the NFS version, the owners of homes, whether the mark exists, and root's rights.

    owners: user -> uid, of homes that exist. refused: why root can't create a folder; "" if it can.
    owner: the uid that a new folder of root has. given: uid -> the uid that a folder shows after
    root gave it to the uid.
    """
    version = re.search(rf" {re.escape(str(place))} .*\bvers=([\d.]+)", mount_table())
    homes = place / "home"
    answer: dict[str, Any] = {
        "version": version[1] if version else "",
        "owners": {name: uid for name in request["homes"] if (uid := owner_of(homes / name)) is not None},
        "mark": owner_of(homes / request["mark"]) is not None,
        "refused": "",
        "owner": 0,
        "given": {},
    }  # fmt: skip
    if not request["writes"]:
        return answer
    try:
        probe = tempfile.mkdtemp(prefix=".clusterctl-", dir=homes if homes.is_dir() else place)
    except OSError as exc:
        return {**answer, "refused": exc.strerror}
    try:
        answer["owner"] = owner_of(Path(probe))
        for uid in sorted(set(request["homes"].values()))[:1] if answer["owner"] == 0 else ():
            os.chown(probe, uid, uid)
            answer["given"] = {str(uid): owner_of(Path(probe))}
    except OSError as exc:
        answer["refused"] = exc.strerror
    finally:
        Path(probe).rmdir()
    return answer


def mount_table() -> str:
    return Path("/proc/self/mountinfo").read_text(errors="replace")


def owner_of(path: Path) -> Optional[int]:
    try:
        return path.stat().st_uid
    except OSError:
        return None
