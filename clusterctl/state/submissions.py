"""The list of submitted jobs (jobs.jsonl), and the names of clusterctl's files in folders of jobs and runs.

Unknown keys in jobs.jsonl are ignored, because another version of clusterctl may have written the file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
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
SPEC_FILE = "spec.yaml"
CLIENT_FACTS = "environment.client.json"
ENVIRONMENT_FILE = "environment.json"
# SENT_FILES are written to a job's folder by `submit`, WRITTEN_FILES by the job's script, and ADDED_FILES are
# added to a run's folder by `collect`. The logs of array tasks also have numbers.
SENT_FILES = frozenset(
    f"job.sbatch job.mpirun {SPEC_FILE} {SOURCE_FILE} {SWEEP_FILE} {OUTPUTS_FILE} {CLIENT_FACTS}".split()
)
WRITTEN_FILES = frozenset(
    "stdout.log stderr.log rank-logs metrics.jsonl telemetry telemetry.log job.hosts job.events hang.json "
    "heartbeat".split()
)
ADDED_FILES = frozenset(f"{RUN_FILE} sacct.json {ENVIRONMENT_FILE} SHA256SUMS".split())
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
        row = {"token": entry.token, **changes}
        try:
            append_line(self._path, json.dumps(row, separators=(",", ":")))
        except DiskError as exc:
            self._unwritten.append(row)
            self.refusal = exc
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

    def _folder(self, token: str) -> Path:
        # A token read from a job's comment is not trusted.
        return self._path.with_suffix("") / (token if _TOKEN.fullmatch(token) else "-")
