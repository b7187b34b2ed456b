"""Starts, ends and tells of jobs. Runs on a host, as root: standard library only, Python 3.9.

    main(REQUEST)

REQUEST and the answer are one JSON object each. What is known of a job lies in its user's home, which all
hosts see: `~/clusterctl/mpirun/m1/` with `job.json`, how it ended (`end.json`, by its unit), and `cancelled`.
These files are opened as the user alone: root may have no rights there, and must follow no link of a job's.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from clusterctl.transport.remote_open import lock, read_json
from clusterctl.util.remote_rights import acting

Record = dict[str, Any]

REGISTRY = "clusterctl/mpirun"
ID = re.compile(r"m([1-9][0-9]*)")
FIELDS = {"token": str, "name": str, "folder": str, "partition": str, "nodes": list, "time": int}
MOST_BYTES = 1 << 20  # of a record
ASK_S = 20
STOP_S = 10  # from the signal to end until what is left is killed
LOST = "lost"

# The unit's main process. Its logs are the user's files: systemd itself would open them as root.
START = """\
#!/bin/sh
folder=${0%/*}
export CLUSTERCTL_JOB_ID="${folder##*/}"
exec /bin/bash "./$1" >>stdout.log 2>>stderr.log </dev/null
"""

# systemd runs it when the unit has ended, however that was.
ENDED = """\
#!/bin/sh
cd -- "${0%/*}" || exit
result=$SERVICE_RESULT
[ "$(systemctl is-system-running)" != stopping ] || result=shutdown
printf '{"result": "%s", "code": "%s", "status": "%s", "time": %s}\\n' \\
    "$result" "${EXIT_CODE:-}" "${EXIT_STATUS:-}" "$(date +%s)" >end.new
mv -- end.new end.json
"""


class User:
    def __init__(self, name: str) -> None:
        self.account = pwd.getpwnam(name)
        self.registry = Path(self.account.pw_dir, REGISTRY)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One at a time starts jobs, or says that they were lost."""
        with acting(self.account):
            self.registry.mkdir(parents=True, exist_ok=True)
            held = lock(os.fsencode(self.registry / ".lock"), fcntl.LOCK_EX, ASK_S)  # a job can hold it, too
        try:
            yield
        finally:
            os.close(held)

    def jobs(self) -> list[Record]:
        """All jobs there were, by number."""
        with acting(self.account):
            begun = [name for name in self._names() if os.path.lexists(self.registry / name / "job.json")]
            return [self._job(name) for name in begun]

    def _names(self) -> list[str]:
        try:
            names = [name for name in os.listdir(self.registry) if ID.fullmatch(name)]  # noqa: PTH208
        except FileNotFoundError:
            return []
        return sorted(names, key=lambda name: int(name[1:]))

    def new_name(self) -> str:
        """The name of the next job: that of one whose record was spoilt or removed is not given again."""
        with acting(self.account):
            return f"m{1 + max((int(name[1:]) for name in self._names()), default=0)}"

    def _job(self, name: str) -> Record:
        """What is noted of a job; nothing but its end where that is none of our records."""
        folder = self.registry / name
        return {
            **understood(read(folder / "job.json")),
            "id": name,
            "end": read(folder / "end.json"),
            "cancelled": (folder / "cancelled").exists(),
        }

    def write(self, name: str, file: str, text: str) -> None:
        """A file of a job, whole or not at all."""
        with acting(self.account):
            folder = self.registry / name
            folder.mkdir(exist_ok=True)
            new = folder / f".{file}.new"
            with suppress(FileNotFoundError):  # a job may have put anything there
                new.unlink()
            with open_new(new) as out:
                out.write(text)
            new.replace(folder / file)


def open_new(path: Path) -> TextIO:
    """Open for writing; what a job has put there in place of a file is an error, and never waited for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w")


def read(path: Path) -> Record | None:
    """The JSON object in a file, which a job may have put anything in place of."""
    try:
        found = read_json(os.fsencode(path.parent), os.fsencode(path.name), MOST_BYTES)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def understood(job: Record | None) -> Record:
    """The record of a job, or an empty one where it is none that we wrote."""
    if job is None or not all(isinstance(job.get(name), kind) for name, kind in FIELDS.items()):
        return {}
    return job if job["nodes"] and all(isinstance(node, str) for node in job["nodes"]) else {}


def unit(name: str) -> str:
    return f"clusterctl-job-{name}.service"


def is_there(name: str) -> bool:
    """Whether systemd still has the job's unit: it runs, begins or ends."""
    argv = ["systemctl", "show", "--property=ActiveState", "--value", unit(name)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_S, check=True)
    return done.stdout.strip() not in ("inactive", "failed", "")


def submit(user: User, asked: Record) -> Record:
    """Start a job, unless another one goes on; a token that is known already stands for its job."""
    with user.alone():
        for job in user.jobs():
            if job.get("token") == asked["job"]["token"]:
                return {"id": job["id"]}
            if job["end"] is None and "nodes" in job:
                return {"busy": job}
        name = user.new_name()
        user.write(name, "start", START)
        user.write(name, "ended", ENDED)
        user.write(name, "job.json", json.dumps({**asked["job"], "time": int(time.time())}))
        argv = systemd_run(user, name, asked)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_S, check=False)
        if done.returncode != 0:
            end = {"result": "start", "code": "", "status": "", "time": int(time.time())}
            user.write(name, "end.json", json.dumps(end))
            return {"failed": done.stderr.strip()}
    return {"id": name}


def systemd_run(user: User, name: str, asked: Record) -> list[str]:
    folder = str(user.registry / name)
    limit = asked["limit_s"]
    properties = {
        "Type": "exec",
        "WorkingDirectory": asked["job"]["folder"],
        "ExecStopPost": f'/bin/sh "{folder}/ended"',
        "KillMode": "mixed",  # the job's script alone is told to end, and tells its ranks
        "TimeoutStopSec": str(STOP_S),
        "LimitMEMLOCK": "infinity",
        "TasksMax": "infinity",
        **({"RuntimeMaxSec": str(limit)} if limit else {}),
    }
    return [
        *("systemd-run", "--quiet", "--collect", f"--unit={unit(name)}", f"--uid={user.account.pw_name}"),
        *(f"--property={key}={value}" for key, value in properties.items()),
        *("/bin/sh", f"{folder}/start", asked["script"]),
    ]


def settle(user: User, asked: Record) -> Record:
    """The jobs of these ids, which are this host's; of one whose unit is gone without a word, it is noted."""
    with user.alone():
        for job in user.jobs():
            # Asked in this order: a unit that ends has left its word before it is gone.
            if job["id"] in asked["ids"] and job["end"] is None and not is_there(job["id"]):
                with acting(user.account):
                    told = read(user.registry / job["id"] / "end.json") is not None
                if not told:
                    end = {"result": LOST, "code": "", "status": "", "time": int(time.time())}
                    user.write(job["id"], "end.json", json.dumps(end))
        return {"jobs": [job for job in user.jobs() if job["id"] in asked["ids"]]}


def cancel(user: User, asked: Record) -> Record:
    for name in asked["ids"]:
        if not ID.fullmatch(name):
            raise ValueError(name)
        user.write(name, "cancelled", "")
        argv = ["systemctl", "stop", "--no-block", unit(name)]
        subprocess.run(argv, capture_output=True, timeout=ASK_S, check=False)  # it may have ended just now
    return {}


def main(request: str) -> None:
    asked = json.loads(request)
    user = User(asked["user"])
    verbs = {"submit": submit, "settle": settle, "cancel": cancel, "list": lambda *_: {"jobs": user.jobs()}}
    json.dump(verbs[asked["do"]](user, asked), sys.stdout)
