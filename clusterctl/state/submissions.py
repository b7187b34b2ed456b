"""The ledger of submissions in the workspace, and the names of the files in a job's folder and a run's.

Later versions read the ledger, so unknown keys are tolerated.
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
from clusterctl.util.disk import append_line, read_rows, writing

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_TOKEN = re.compile(r"[A-Za-z0-9]+")

RUN_FILE = "run.json"
SOURCE_FILE = "source.json"
SWEEP_FILE = "sweep-tasks.json"
OUTPUTS_FILE = "outputs.json"
SPEC_FILE = "spec.yaml"
CLIENT_FACTS = "environment.client.json"
ENVIRONMENT_FILE = "environment.json"
# What is ours: what `submit` puts into a job's folder, what the job's script writes there, and what
# `collect` adds to a run's. Logs of an array's tasks have numbers besides.
SENT_FILES = frozenset(
    f"job.sbatch job.mpirun {SPEC_FILE} {SOURCE_FILE} {SWEEP_FILE} {OUTPUTS_FILE} {CLIENT_FACTS}".split()
)
WRITTEN_FILES = frozenset(
    "stdout.log stderr.log rank-logs metrics.jsonl telemetry telemetry.log hostfile job.events".split()
)
ADDED_FILES = frozenset(f"{RUN_FILE} sacct.json {ENVIRONMENT_FILE} SHA256SUMS".split())
RUNS = Path("runs")  # where `collect` brings runs to, unless --out says otherwise
UNCHANGED = "unchanged since it was submitted"  # why large files that the user has are not brought home


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """One submission, known by its token before Slurm has heard of it.

    ``job_id`` is None until sbatch has answered; ``refused`` says that it never will. ``state`` is the final
    state, once seen. ``run_dir`` is where the run was collected to, ``run_state`` the job's state then.
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
    """The workspace's jobs.jsonl. Lines are appended; a later one about a token adds to the earlier ones.

    Beside it, jobs/TOKEN/ holds our files of a job's folder as they were sent: there, a job can change them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[dict[str, Any]] = []
        self.refusal: DiskError | None = None
        """Why something that has become known is not in the file: a later clusterctl finds it out again."""

    @property
    def workspace(self) -> Workspace:
        return Workspace(self._path.parent)

    def entries(self) -> tuple[JobEntry, ...]:
        """All submissions, oldest first."""
        merged: dict[str, dict[str, Any]] = {}
        for row in (*read_rows(self._path), *self._unwritten):
            if "token" in row:
                merged.setdefault(row["token"], {}).update(row)
        return tuple(
            JobEntry(**{key: value for key, value in row.items() if key in _KEYS}) for row in merged.values()
        )

    def find(self, job_id: str) -> JobEntry | None:
        """The submission of this job, or of the array that it is a task of."""
        base = job_id.partition("_")[0]
        return next((entry for entry in reversed(self.entries()) if entry.job_id == base), None)

    def add(self, entry: JobEntry) -> JobEntry:
        """Record a submission; it is on disk when this returns."""
        row = {key: value for key, value in asdict(entry).items() if value is not None}
        append_line(self._path, json.dumps(row, separators=(",", ":")))
        return entry

    def update(self, entry: JobEntry, **changes: str | bool) -> JobEntry:
        """Record changes of a submission; on a full disk they are kept in memory, and ``refusal`` is set."""
        row = {"token": entry.token, **changes}
        try:
            append_line(self._path, json.dumps(row, separators=(",", ":")))
        except DiskError as exc:
            self._unwritten.append(row)
            self.refusal = exc
        return replace(entry, **changes)  # type: ignore[arg-type]  # fields of these types

    def keep(self, token: str, files: Mapping[str, bytes]) -> None:
        """Store the files that we put into a job's folder, all of them or none."""
        folder = self._kept(token)
        try:
            with writing(folder):
                for place in (folder.parent, folder):
                    place.mkdir(mode=0o700, exist_ok=True)
                for name, content in files.items():
                    with os.fdopen(os.open(folder / name, _NEW, 0o600), "wb") as file:
                        file.write(content)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def kept(self, token: str) -> Mapping[str, bytes]:
        """The same files; none of a job that was submitted from elsewhere."""
        folder = self._kept(token)
        return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}

    def _kept(self, token: str) -> Path:
        # A token that was read from a job's comment may be anything.
        return self._path.with_suffix("") / (token if _TOKEN.fullmatch(token) else "-")
