"""Program that starts, cancels and lists jobs without a scheduler. Runs on hosts as root, for
Python 3.9.

    main(REQUEST)

REQUEST and the answer are JSON objects. A job's records are in its user's folder of clusterctl, which
all hosts share: `mpirun/m1/` holds `job.json`, `end.json` (written by the job's unit at its end) and
`cancelled`. All are opened as the user: root may have no rights in a shared home, and must not follow
a job's links.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from clusterctl.spec.remote_folders import MPIRUN
from clusterctl.transport.remote_open import lock, read_json
from clusterctl.util.remote_rights import acting_as

Record = dict[str, Any]

ID = re.compile(r"m([1-9][0-9]*)")
FIELDS = {"token": str, "name": str, "folder": str, "partition": str, "nodes": list, "time": int}
MOST_BYTES = 1 << 20  # of a record
ASK_S = 20
STOP_S = 10  # SIGTERM to SIGKILL
LOST = "lost"

# The unit's main process. It opens the logs with the user's rights; systemd itself would open them
# as root.
START = """\
#!/bin/sh
folder=${0%/*}
export CLUSTERCTL_JOB_ID="${folder##*/}"
exec /bin/bash "./$1" >>stdout.log 2>>stderr.log </dev/null
"""

# systemd runs this script whenever the unit has ended.
ENDED = """\
#!/bin/sh
cd -- "${0%/*}" || exit
result=$SERVICE_RESULT
[ "$(systemctl is-system-running)" != stopping ] || result=shutdown
printf '{"result": "%s", "code": "%s", "status": "%s", "time": %s}\\n' \\
    "$result" "${EXIT_CODE:-}" "${EXIT_STATUS:-}" "$(date +%s)" >end.new
mv -- end.new end.json
"""


class JobUser:
    """The account of jobs. folder: its folder of clusterctl; a relative path starts at its home."""

    def __init__(self, name: str, folder: str) -> None:
        self.account = pwd.getpwnam(name)
        self.registry = Path(self.account.pw_dir, folder, MPIRUN)

    def acting(self) -> AbstractContextManager[None]:
        """Have the body run with the user's rights."""
        return acting_as(self.account.pw_uid, self.account.pw_gid)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self.acting():
            self.registry.mkdir(parents=True, exist_ok=True)
            # The wait is limited, because a job can hold the lock.
            lock_fd = lock(os.fsencode(self.registry / ".lock"), fcntl.LOCK_EX, ASK_S)
        try:
            yield
        finally:
            os.close(lock_fd)

    def jobs(self) -> list[Record]:
        """Return the records of all jobs, sorted by number."""
        with self.acting():
            names = [
                name for name in self._names() if os.path.lexists(self.registry / name / "job.json")
            ]
            return [self._job(name) for name in names]

    def _names(self) -> list[str]:
        try:
            names = [name for name in os.listdir(self.registry) if ID.fullmatch(name)]
        except FileNotFoundError:
            return []
        return sorted(names, key=lambda name: int(name[1:]))

    def new_name(self) -> str:
        """Return the name of the next job. Names of jobs with damaged or removed records are not
        reused.
        """
        with self.acting():
            return f"m{1 + max((int(name[1:]) for name in self._names()), default=0)}"

    def _job(self, name: str) -> Record:
        """Return the record of a job. If job.json is invalid, the record has only id, end and
        cancelled.
        """
        folder = self.registry / name
        return {
            **valid_record(read(folder / "job.json")),
            "id": name,
            "end": read(folder / "end.json"),
            "cancelled": (folder / "cancelled").exists(),
        }

    def write(self, name: str, file: str, text: str) -> None:
        with self.acting():
            folder = self.registry / name
            folder.mkdir(exist_ok=True)
            new = folder / f".{file}.new"
            # A job may have created any file at this path.
            with suppress(FileNotFoundError):
                new.unlink()
            with open_new(new) as out:
                out.write(text)
            new.replace(folder / file)


def open_new(path: Path) -> TextIO:
    """Open a file for writing. Raises OSError, without blocking, if the path is a pipe or link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w")


def read(path: Path) -> Record | None:
    """Return the JSON object in a file, or None for other content, which a job may have written."""
    try:
        record = read_json(os.fsencode(path.parent), os.fsencode(path.name), MOST_BYTES)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def valid_record(job: Record | None) -> Record:
    """Return the record of a job, or {} if a field that clusterctl writes is missing or invalid."""
    if job is None or not all(isinstance(job.get(name), kind) for name, kind in FIELDS.items()):
        return {}
    return job if job["nodes"] and all(isinstance(node, str) for node in job["nodes"]) else {}


def unit(name: str) -> str:
    return f"clusterctl-job-{name}.service"


def unit_exists(name: str) -> bool:
    """Return whether systemd still has the job's unit: starting, running or stopping."""
    argv = ["systemctl", "show", "--property=ActiveState", "--value", unit(name)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_S, check=True)
    return result.stdout.strip() not in ("inactive", "failed", "")


def submit(user: JobUser, request: Record) -> Record:
    """Start a job if it was not started before. Return {"id": ID}, {"busy": OTHER JOB}, {"failed":
    ERROR}.
    """
    with user.locked():
        for job in user.jobs():
            if job.get("token") == request["job"]["token"]:
                return {"id": job["id"]}
            if job["end"] is None and "nodes" in job:
                return {"busy": job}
        name = user.new_name()
        user.write(name, "start", START)
        user.write(name, "ended", ENDED)
        user.write(name, "job.json", json.dumps({**request["job"], "time": int(time.time())}))
        argv = systemd_run(user, name, request)
        result = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_S, check=False)
        if result.returncode != 0:
            end = {"result": "start", "code": "", "status": "", "time": int(time.time())}
            user.write(name, "end.json", json.dumps(end))
            return {"failed": result.stderr.strip()}
    return {"id": name}


def systemd_run(user: JobUser, name: str, request: Record) -> list[str]:
    folder = str(user.registry / name)
    limit = request["limit_s"]
    properties = {
        "Type": "exec",
        "WorkingDirectory": request["job"]["folder"],
        "ExecStopPost": f'/bin/sh "{folder}/ended"',
        # Only the job's script gets SIGTERM; it ends its ranks.
        "KillMode": "mixed",
        "TimeoutStopSec": str(STOP_S),
        "LimitMEMLOCK": "infinity",
        "TasksMax": "infinity",
        **({"RuntimeMaxSec": str(limit)} if limit else {}),
    }
    return [
        "systemd-run",
        "--quiet",
        "--collect",
        f"--unit={unit(name)}",
        f"--uid={user.account.pw_name}",
        *(f"--property={key}={value}" for key, value in properties.items()),
        "/bin/sh",
        f"{folder}/start",
        request["script"],
    ]


def record_lost_jobs(user: JobUser, request: Record) -> Record:
    """Write end.json for jobs that systemd no longer has. Return {"jobs": records of requested
    jobs}.
    """
    with user.locked():
        for job in user.jobs():
            # Check the unit after the record: a unit writes its end before it disappears.
            if job["id"] in request["ids"] and job["end"] is None and not unit_exists(job["id"]):
                with user.acting():
                    has_end = read(user.registry / job["id"] / "end.json") is not None
                if not has_end:
                    end = {"result": LOST, "code": "", "status": "", "time": int(time.time())}
                    user.write(job["id"], "end.json", json.dumps(end))
        return {"jobs": [job for job in user.jobs() if job["id"] in request["ids"]]}


def cancel(user: JobUser, request: Record) -> Record:
    for name in request["ids"]:
        if not ID.fullmatch(name):
            raise ValueError(name)
        user.write(name, "cancelled", "")
        argv = ["systemctl", "stop", "--no-block", unit(name)]
        # The unit may have ended just now, so the exit status is ignored.
        subprocess.run(argv, capture_output=True, timeout=ASK_S, check=False)
    return {}


def main(text: str) -> None:
    request = json.loads(text)
    user = JobUser(request["user"], request["folder"])
    verbs = {"submit": submit, "settle": record_lost_jobs, "cancel": cancel}
    verbs["list"] = lambda *_: {"jobs": user.jobs()}
    json.dump(verbs[request["do"]](user, request), sys.stdout)
