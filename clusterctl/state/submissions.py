"""The list of submitted jobs (jobs.jsonl), and the names of clusterctl's files in folders of jobs and runs.

Unknown keys in jobs.jsonl are ignored, because another version of clusterctl may have written the file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from clusterctl.errors import DiskError
from clusterctl.state.workspace import Workspace
from clusterctl.util.disk import append_line, read_rows, translating_write_errors

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_TOKEN = re.compile(r"[A-Za-z0-9]+")

RUN_FILE = "run.json"
SOURCE_FILE = "source.json"
SWEEP_FILE = "sweep-tasks.json"
OUTPUTS_FILE = "outputs.json"
FIRST_FILE = "first.json"
SPEC_FILE = "spec.yaml"
CLIENT_FACTS = "environment.client.json"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
# The folder in a job's folder with the files of its program, in which the program starts. Nothing in it is
# clusterctl's. A run's folder has these files beside clusterctl's.
PROGRAM_FOLDER = "files"
# SENT_FILES are written to a job's folder by `submit`, WRITTEN_FILES by the job's script, and ADDED_FILES are
# added to a run's folder by `collect`. The logs of array tasks also have numbers.
SENT_FILES = frozenset(
    (
        f"job.sbatch job.mpirun {SPEC_FILE} {SOURCE_FILE} {SWEEP_FILE} {OUTPUTS_FILE} {CLIENT_FACTS} "
        f"{FIRST_FILE}"
    ).split()
)
WRITTEN_FILES = frozenset(
    "stdout.log stderr.log rank-logs telemetry telemetry.log job.hosts job.events hang.json heartbeat".split()
)
ADDED_FILES = frozenset(f"{RUN_FILE} sacct.json {ENVIRONMENT_FILE} SHA256SUMS".split())
_OWN = frozenset(name.encode() for name in SENT_FILES | WRITTEN_FILES | ADDED_FILES)
TASK, TASKS_LOG = re.compile(rb"task-[0-9]+"), re.compile(rb"(stdout|stderr)-[0-9]+\.log")
# The suffix in a run's folder of a program's files and folders that have a name of clusterctl's.
FROM_JOB = b".from-job"
# The default folder of collected runs.
RUNS = Path("runs")
# The reason recorded for large input files that are not collected, because the user has them.
UNCHANGED = "unchanged since it was submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """A submitted job, recorded before it is sent to Slurm. ``token``: random text that identifies the job.

    job_id: set when sbatch has answered. refused: whether Slurm rejected the job, so it never gets an id.
    state: the job's final state; None until it is known.
    run_dir: local folder with the job's collected results. run_state: the job's state when they were copied.
    files: the folder below ``remote_dir`` with the program's files. None: a job of an earlier version, with
        all its files in ``remote_dir`` itself.
    first: identifies the jobs of a `submit --first`, of which a single job runs its program.
    is_across: whether these jobs are on several clusters. chosen: whether this job is to run among them.
    kept: whether the cluster knows that it runs, so that the other jobs can be cancelled.
    lost_to: the job that runs instead, for a cancelled job of `submit --first`. It is also ``refused``.
    """

    token: str
    name: str
    user: str
    submitted_at: float
    job_id: str | None = None
    remote_dir: str | None = None
    refused: bool = False
    state: str | None = None
    run_dir: str | None = None
    run_state: str | None = None
    files: str | None = None
    first: str | None = None
    is_across: bool = False
    chosen: bool = False
    kept: bool = False
    lost_to: str | None = None

    @property
    def program_dir(self) -> str:
        """The folder on the cluster with the program's files; "" if it is unknown."""
        return "/".join(filter(None, (self.remote_dir, self.files))) if self.remote_dir else ""

    @property
    def shown(self) -> str:
        return f"job {self.job_id or 'of unknown id'} ({self.name})"


_KEYS = frozenset(field.name for field in fields(JobEntry))


class Ledger:
    """The list of a cluster's submitted jobs, in jobs.jsonl. A change appends a line, which updates the job.

    jobs/TOKEN/ has copies of the files that clusterctl sent, because a job can change files in its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[dict[str, Any]] = []
        self.refusal: DiskError | None = None
        """The error that kept an update out of the file. A later command finds the facts again."""

    @property
    def workspace(self) -> Workspace:
        return Workspace(self._path.parent)

    def entries(self) -> tuple[JobEntry, ...]:
        """Return all submitted jobs, the oldest first."""
        merged: dict[str, dict[str, Any]] = {}
        for row in (*read_rows(self._path), *self._unwritten):
            if "token" in row:
                merged.setdefault(row["token"], {}).update(row)
        return tuple(
            JobEntry(**{key: value for key, value in row.items() if key in _KEYS}) for row in merged.values()
        )

    def find(self, job_id: str) -> JobEntry | None:
        """Return the entry of this job or array task; None if the job was not submitted from this machine."""
        base = job_id.partition("_")[0]
        return next((entry for entry in reversed(self.entries()) if entry.job_id == base), None)

    def add(self, entry: JobEntry) -> JobEntry:
        """Record a submitted job. The record is on disk when this method returns."""
        row = {key: value for key, value in asdict(entry).items() if value is not None}
        append_line(self._path, json.dumps(row, separators=(",", ":")))
        return entry

    def update(self, entry: JobEntry, **changes: str | bool) -> JobEntry:
        """Return the changed entry. Record the changes: in memory if the disk is full (see ``refusal``)."""
        try:
            return self.record(entry, **changes)
        except DiskError as exc:
            self._unwritten.append({"token": entry.token, **changes})
            self.refusal = exc
        return replace(entry, **changes)  # type: ignore[arg-type]  # fields of these types

    def record(self, entry: JobEntry, **changes: str | bool) -> JobEntry:
        """Return the changed entry. The changes are on disk when this method returns."""
        append_line(self._path, json.dumps({"token": entry.token, **changes}, separators=(",", ":")))
        return replace(entry, **changes)  # type: ignore[arg-type]  # fields of these types

    def keep(self, token: str, files: Mapping[str, bytes]) -> None:
        """Store copies of the files (name -> content) sent for a job. After an error, no file is stored."""
        folder = self._folder(token)
        try:
            with translating_write_errors(folder):
                for directory in (folder.parent, folder):
                    directory.mkdir(mode=0o700, exist_ok=True)
                for name, content in files.items():
                    with os.fdopen(os.open(folder / name, _NEW, 0o600), "wb") as file:
                        file.write(content)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def kept(self, token: str) -> Mapping[str, bytes]:
        """Return name -> content of files that ``keep`` stored; {} if another machine submitted the job."""
        folder = self._folder(token)
        return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}

    def kept_file(self, token: str, name: str) -> bytes:
        """Return the content of a single file that ``keep`` stored; b"" if there is no such file."""
        with suppress(FileNotFoundError):
            return (self._folder(token) / name).read_bytes()
        return b""

    def _folder(self, token: str) -> Path:
        # A token read from a job's comment is not trusted.
        return self._path.with_suffix("") / (token if _TOKEN.fullmatch(token) else "-")


def is_own(name: bytes) -> bool:
    """Return whether a file or folder of this name, in a run's or task's folder, is clusterctl's."""
    return name in _OWN or TASKS_LOG.fullmatch(name) is not None


def split_path(path: bytes) -> tuple[bytes, bytes, bytes]:
    """Split a path in a run's folder: the folder of an array task with a slash, or b""; a name; the rest."""
    task, slash, below = path.partition(b"/")
    above, path = (task + slash, below) if below and TASK.fullmatch(task) else (b"", path)
    name, slash, rest = path.partition(b"/")
    return above, name, slash + rest


def run_path(path: bytes, siblings: Collection[bytes] = ()) -> bytes:
    """Return the path that a file in the program's folder gets in the run's folder.

    siblings: all paths in the program's folder. The suffix ``FROM_JOB`` makes a name that none of them has.
    """
    above, name, rest = split_path(path)
    new = name
    while is_own(new) or (new != name and above + new in siblings):
        new += FROM_JOB
    return above + new + rest


def program_path(path: bytes) -> bytes | None:
    """Return the path in the program's folder of a file in a run's folder; None if it is clusterctl's."""
    above, name, rest = split_path(path)
    original = name
    while original.endswith(FROM_JOB):
        original = original[: -len(FROM_JOB)]
    if original != name and is_own(original):
        return above + original + rest
    return None if is_own(name) else path


def job_paths(path: bytes, files: bytes) -> Iterator[bytes]:
    """Yield the paths that a file of the run's folder may have in the job's folder. files: see JobEntry."""
    inner = program_path(path)
    if inner is not None:
        yield b"%s/%s" % (files, inner)
    if inner not in {None, path}:
        yield b"%s/%s" % (files, path)
    # A program may also have written files beside its folder.
    above, name, rest = split_path(path)
    while name.endswith(FROM_JOB):
        yield above + name + rest
        name = name[: -len(FROM_JOB)]
    yield above + name + rest
