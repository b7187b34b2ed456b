"""Runs on a host, as root: says what it is and how it stands. Standard library only, Python 3.9.

    python3 -I -S -c THIS_FILE REQUEST

REQUEST and the answer are one JSON object each; ``clusterctl.hosts.report`` has the types. A mark is a short
text that is the same as long as nothing has changed. Secrets stay here: of a file only its hash is told.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import json
import os
import pwd
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MISSING = "missing"
UNKNOWN = "no answer"
OS_RELEASE = "/etc/os-release"
BOOT_S = 20
ASK_S = 10
LEAST_FREE = 16 << 20
OWNER_ALL = stat.S_IRWXU
OTHERS_WRITE_OWNER_ALL = stat.S_IRWXU | stat.S_IWGRP | stat.S_IWOTH
LARGEST = 3
MOST_BYTES = 16 << 20  # of a file that is read whole
WALK_S = 5
PROPERTIES = "Id,LoadState,ActiveState,UnitFileState,InactiveExitTimestampMonotonic"


def run(argv: list[str], timeout_s: float) -> str | None:
    """What a command says; None if it fails, takes too long, or is not there."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def system_state() -> str:
    """systemd's own word for it, once it has booted: `running`, `degraded`, `stopping`..."""
    argv = ["systemctl", "is-system-running", "--wait"]
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=BOOT_S, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def distribution() -> str:
    """ID and VERSION_ID of os-release: `rocky-9.6`."""
    text = ""
    with suppress(OSError):
        text = Path(OS_RELEASE).read_text(errors="replace")
    pairs = (line.partition("=") for line in text.splitlines())
    said = {key: value.strip("\"' ") for key, _, value in pairs}
    return f"{said.get('ID', 'linux')}-{said.get('VERSION_ID', '')}".rstrip("-")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def file_mark(path: str) -> str:
    """Content, mode and owner of a regular file."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return "no file"
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return MISSING
    with os.fdopen(fd, "rb") as file:
        return f"{digest(file.read())} {stat.S_IMODE(found.st_mode):o} {found.st_uid}:{found.st_gid}"


def read_regular(path: str) -> str:
    """The content of a regular file of no great size; raises OSError for all else, and never waits."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        data = file.read(MOST_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    if data is None or len(data) > MOST_BYTES:
        raise OSError(errno.EINVAL, "not a regular file of that size", path)
    return data.decode(errors="replace")


@contextmanager
def acting(user: pwd.struct_passwd) -> Iterator[None]:
    """What is done meanwhile is done with an account's rights: root must follow no link of a job's."""
    if os.geteuid() != 0 or user.pw_uid == 0:
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def block_mark(path: str, begin: str, end: str) -> str:
    """The lines between two marks; what others wrote around them does not count."""
    try:
        text = read_regular(path)
    except OSError:
        return MISSING
    _, found, rest = text.partition(f"{begin}\n")
    inside, closed, _ = rest.partition(f"{end}\n")
    return digest(inside.encode()) if found and closed else MISSING


def unit_marks(units: dict[str, list[str]], systemctl: str = "systemctl") -> dict[str, str]:
    """`running`, or what is wrong, with `outdated` for a unit whose configuration changed after its start."""
    argv = [
        systemctl,
        "show",
        f"--property={PROPERTIES}",
        *(n if "." in n else f"{n}.service" for n in units),
    ]
    said = run(argv, ASK_S)
    marks = dict.fromkeys(units, UNKNOWN)
    for text in (said or "").split("\n\n"):
        unit = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        name = unit.get("Id", "").removesuffix(".service")
        if name in units:
            marks[name] = _unit_mark(unit, units[name])
    return marks


def _unit_mark(unit: dict[str, str], config: list[str]) -> str:
    if unit["LoadState"] in ("masked", "not-found"):
        return unit["LoadState"]
    words = ["running" if unit["ActiveState"] in ("active", "reloading") else "stopped"]
    if unit["ActiveState"] == "failed":
        words = ["failed"]
    if unit["UnitFileState"] != "enabled":
        words.append("disabled")
    started = time.time() - time.monotonic() + int(unit["InactiveExitTimestampMonotonic"] or 0) / 1e6
    if words[0] == "running" and any(ctime(path) > started for path in config):
        words.append("outdated")
    return " ".join(words)


def ctime(path: str) -> float:
    try:
        return Path(path).stat().st_ctime
    except OSError:
        return 0.0


def user_mark(name: str) -> str:
    """Its lines in the tables of accounts and groups."""
    try:
        user = pwd.getpwnam(name)
        return (
            f"{user.pw_uid}:{user.pw_gid} {grp.getgrgid(user.pw_gid).gr_name} {user.pw_dir} {user.pw_shell}"
        )
    except KeyError:
        return MISSING


def home_mark(user: str, home: str) -> str:
    """Whether sshd lets its owner in: nobody else may write there."""
    try:
        found = Path(home).stat()
        fit = (
            found.st_uid == pwd.getpwnam(user).pw_uid and found.st_mode & OTHERS_WRITE_OWNER_ALL == OWNER_ALL
        )
    except (OSError, KeyError):
        return MISSING
    return "fit" if fit else f"unfit {stat.S_IMODE(found.st_mode):o}"


def has_home(user: str, home: str) -> bool:
    """Whether that is the home of an account here; one that is missing has none of its own."""
    try:
        return pwd.getpwnam(user).pw_dir == home
    except KeyError:
        return True


def key_mark(user: str, home: str, key: str) -> str:
    """Whether the cluster's key may log in. Other keys there are the user's own affair.

    An account that was there before us has a home of its own. A job can make anything of the file.
    """
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return MISSING
    kind_and_key = " ".join(key.split()[:2])
    with acting(account):
        lines = [line for place in {home, account.pw_dir} - {""} for line in _keys(place)]
    return "there" if any(line.startswith(kind_and_key) for line in lines) else MISSING


def _keys(home: str) -> list[str]:
    try:
        return read_regular(f"{home}/.ssh/authorized_keys").splitlines()
    except OSError:
        return []


def accounting_mark(queries: list[list[str]]) -> str:
    """All that the queries to the accounting say."""
    answers = [run(["sacctmgr", "--noheader", "--parsable2", "show", *words], ASK_S) for words in queries]
    if None in answers:
        return UNKNOWN
    return digest("\n\n".join("\n".join(sorted(text.splitlines())) for text in answers if text).encode())


def full_disks(paths: list[str]) -> Iterator[dict[str, object]]:
    """The file systems that have no room left, each once, with what is largest there."""
    seen = set()
    for path in paths:
        try:
            found, device = os.statvfs(path), Path(path).stat().st_dev
        except OSError:
            continue
        if device in seen:
            continue
        seen.add(device)
        free = found.f_bavail * found.f_frsize
        no_names = found.f_files > 0 and found.f_favail == 0
        if free < LEAST_FREE or no_names:
            size = found.f_blocks * found.f_frsize
            yield {
                "path": path,
                "free": free,
                "size": size,
                "names": not no_names,
                "largest": largest(path, device),
            }


def largest(top: str, device: int) -> list[tuple[int, str]]:
    """Bytes and names of the largest files of a file system, as far as a few seconds show them."""
    found: list[tuple[int, str]] = []
    left = [top]
    give_up = time.monotonic() + WALK_S
    while left and time.monotonic() < give_up:
        with suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_blocks * 512, entry.path))
                    elif stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                        left.append(entry.path)
        found = sorted(found, reverse=True)[:LARGEST]
    return found


def look(asked: dict[str, Any]) -> dict[str, str]:
    """Every mark that was asked for, by kind and name."""
    marks = {f"file {path}": file_mark(path) for path in asked["files"]}
    marks |= {f"block {path}": block_mark(path, *edges) for path, edges in asked["blocks"].items()}
    marks |= {f"path {path}": "there" if Path(path).exists() else MISSING for path in asked["paths"]}
    marks |= {f"user {name}": user_mark(name) for name in asked["users"]}
    marks |= {f"home {name}": home_mark(name, home) for name, home in asked["homes"].items()}
    far = {name for name, home in asked["far_homes"].items() if has_home(name, home)}
    keys = {name: key for name, key in asked["keys"].items() if name not in far}
    marks |= {f"key {name}": key_mark(name, asked["homes"].get(name, ""), key) for name, key in keys.items()}
    marks |= {f"unit {name}": mark for name, mark in unit_marks(asked["units"]).items()}
    if asked["accounting"]:
        running = marks.get("unit slurmdbd", "").startswith("running")
        marks["accounting all"] = accounting_mark(asked["accounting"]) if running else UNKNOWN
    return marks


def main() -> None:
    asked = json.loads(sys.argv[1])
    answer: dict[str, object] = {"state": system_state()}
    if answer["state"] != "stopping":
        answer["distribution"] = distribution()
        answer["facts"] = run(asked["facts"], 3 * ASK_S) or ""
        answer["marks"] = look(asked)
        answer["full"] = list(full_disks(asked["space"]))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
