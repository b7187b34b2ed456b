"""The list of submitted jobs (jobs.jsonl), and the collected runs.

A run on this machine is recognized by its record, run.json. The model of a record is in run_record.py,
which is
slow to import. Also here: the names of clusterctl's files in folders of jobs and runs.

Unknown keys in jobs.jsonl are ignored, because another version of clusterctl may have written the
file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, get_type_hints

from clusterctl.errors import DiskError, MachineError, UsageError
from clusterctl.spec.names import SPEC_NAME, first_few
from clusterctl.spec.program import is_project
from clusterctl.state.workspace import Workspace, state_home
from clusterctl.util.disk import append_line, read_lines, read_rows, translating_write_errors

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_TOKEN = re.compile(r"[A-Za-z0-9]+")
# This file is in the folder of all workspaces.
_FOLDERS: Final = "runs.jsonl"
_RUN_TOKEN: Final = re.compile(r"[0-9a-f]{8}")
# Each report has this text in its first bytes.
REPORT_MARK: Final = b'<meta name="generator" content="clusterctl">'
_REPORT_HEAD: Final = 1000
# Maximum size of a run.json.
_MOST_RECORD: Final = 16 << 20  # bytes
_MOST_SHOWN: Final = 3

RUN_FILE = "run.json"
SUMS_FILE = "SHA256SUMS"
# The recordings that `collect --sync` has sent from a run.
SYNCED_FILE = "synced.json"
SOURCE_FILE = "source.json"
SWEEP_FILE = "sweep-tasks.json"
OUTPUTS_FILE = "outputs.json"
FIRST_FILE = "first.json"
# Names the parts of an image that submit --container has fetched from a registry.
IMAGE_FILE = "container.json"
SPEC_FILE = "spec.yaml"
CLIENT_FACTS = "environment.client.json"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
# What `collect` has parsed of metrics.
TABLE_FILE = "table.zip"
# Keys of a line of metrics for the place of its values, the best first, and the unit of the place.
METRICS_PLACES: Final = (
    ("step", "step"),
    ("global_step", "step"),
    ("_step", "step"),
    ("iteration", "step"),
    ("epoch", "epoch"),
)
# The folder in a job's folder with the files of its program, in which the program starts. Nothing
# in it is clusterctl's. A run's folder has these files beside clusterctl's.
PROGRAM_FOLDER = "files"
# SENT_FILES are written to a job's folder by `submit`, WRITTEN_FILES by the job's script, and
# ADDED_FILES are added to a run's folder by `collect`. The logs of array tasks also have numbers.
SENT_FILES = frozenset(
    (
        f"job.sbatch job.mpirun {SPEC_FILE} {SOURCE_FILE} {SWEEP_FILE} {OUTPUTS_FILE} "
        f"{CLIENT_FACTS} {FIRST_FILE} {IMAGE_FILE}"
    ).split()
)
WRITTEN_FILES = frozenset(
    (
        "stdout.log stderr.log rank-logs telemetry telemetry.log build.log job.hosts job.events "
        "hang.json alarm.json heartbeat"
    ).split()
)
ADDED_FILES = frozenset(
    f"{RUN_FILE} sacct.json {ENVIRONMENT_FILE} {TABLE_FILE} {SUMS_FILE} {SYNCED_FILE}".split()
)
_OWN = frozenset(name.encode() for name in SENT_FILES | WRITTEN_FILES | ADDED_FILES)
TASK = re.compile(rb"task-[0-9]+")
TASKS_LOG = re.compile(rb"(stdout|stderr)-[0-9]+\.log")
# The suffix in a run's folder of a program's files and folders that have a name of clusterctl's.
FROM_JOB = b".from-job"
# The default folder of collected runs.
RUNS = Path("runs")
# The reason recorded for large input files that are not collected, because the user has them.
UNCHANGED = "unchanged since it was submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """A submitted job, recorded before it is sent to Slurm. ``token``: random text that identifies
    the job.

    job_id: set when sbatch has answered. refused: whether Slurm rejected the job, so it never gets
        an id.
    state: the job's final state; None until it is known. Of an array, that of the worst task.
    task_states: for an array, the final states that Slurm has told: `COMPLETED:0-3,7 FAILED:4-6`.
    state_at: when Slurm told them, in Unix seconds by the local clock.
    run_dir: local folder with the job's collected results. run_state: the job's state when they
        were copied.
    compared_ns: when ``run_dir`` was last compared with the job's folder, in nanoseconds by the
        cluster's clock. 0: unknown.
    folder: the folder on this machine from which the job was submitted. None: unknown.
    files: the folder below ``remote_dir`` with the program's files. None: a job of an earlier
        version, with all its files in ``remote_dir`` itself.
    first: identifies the jobs of a `submit --first`, of which a single job runs its program.
    is_across: whether these jobs are on several clusters. chosen: whether this job is to run among
        them.
    kept: whether the cluster knows that it runs, so that the other jobs can be cancelled.
    lost_to: the job that runs instead, for a cancelled job of `submit --first`. It is also
        ``refused``.
    has_secrets: whether the cluster may have values of `--secret`, which are removed with the job.
    """

    token: str
    name: str
    user: str
    submitted_at: float
    job_id: str | None = None
    remote_dir: str | None = None
    refused: bool = False
    state: str | None = None
    task_states: str | None = None
    state_at: float | None = None
    run_dir: str | None = None
    run_state: str | None = None
    files: str | None = None
    first: str | None = None
    is_across: bool = False
    chosen: bool = False
    kept: bool = False
    lost_to: str | None = None
    folder: str | None = None
    has_secrets: bool = False
    compared_ns: int = 0

    @property
    def program_dir(self) -> str:
        """The folder on the cluster with the program's files; "" if it is unknown."""
        return "/".join(filter(None, (self.remote_dir, self.files))) if self.remote_dir else ""

    @property
    def shown(self) -> str:
        return f"job {self.job_id or 'of unknown id'} ({self.name})"


Change = str | bool | int | float
_REQUIRED: Final = frozenset(field.name for field in fields(JobEntry) if field.default is MISSING)


@cache
def _kinds() -> Mapping[str, Any]:
    """Return the types of the values of an entry, by key."""
    more = dict.fromkeys(("submitted_at", "state_at"), float | int)
    return get_type_hints(JobEntry) | more


@dataclass(frozen=True, slots=True)
class _Rows:
    """The content of jobs.jsonl. tokens: job id -> token of its last submission.

    damaged: numbers of lines that can't be read. lost: ids or tokens of jobs without their first
        line.
    """

    entries: tuple[JobEntry, ...]
    tokens: Mapping[str, str]
    damaged: Sequence[int]
    lost: Sequence[str]

    @classmethod
    def read(cls, path: Path, more: Iterable[dict[str, Any]]) -> _Rows:
        merged: dict[str, dict[str, Any]] = {}
        damaged = []
        kinds = _kinds()
        for number, row in (*read_lines(path), *((0, row) for row in more)):
            known = {key: value for key, value in (row or {}).items() if key in kinds}
            if known.get("token") and all(isinstance(known[key], kinds[key]) for key in known):
                merged.setdefault(known["token"], {}).update(known)
            elif row is None or known:
                damaged.append(number)
        # A job that has lost its first line is found again by its id.
        lost = [
            str(row.get("job_id") or row["token"])
            for row in merged.values()
            if _REQUIRED - row.keys()
        ]
        entries = tuple(JobEntry(**row) for row in merged.values() if row.keys() >= _REQUIRED)
        tokens = {e.job_id: e.token for e in entries if e.job_id and not e.refused}
        return cls(entries, tokens, damaged, lost)

    def damage(self, path: Path) -> str:
        texts = []
        if self.damaged:
            numbers = first_few([*map(str, self.damaged)], _MOST_SHOWN)
            is_one = len(self.damaged) == 1
            lines = f"line {numbers} is" if is_one else f"lines {numbers} are"
            them = "it" if is_one else "them"
            texts.append(f"{path}: {lines} damaged and ignored; remove {them} to end this note")
        if self.lost:
            texts.append(
                f"{path} has lost the submission of job {first_few(self.lost, _MOST_SHOWN)}; "
                f"`clusterctl collect {self.lost[0]}` finds it again if the cluster has it"
            )
        return "; ".join(texts)


class Ledger:
    """The list of a cluster's submitted jobs, in jobs.jsonl. A change appends a line, which updates
    the job.

    jobs/TOKEN/ has copies of the files that clusterctl sent, because a job can change files in its
    folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: list[dict[str, Any]] = []
        self._read: tuple[object, _Rows] | None = None
        self.refusal: DiskError | None = None
        """The error that kept an update out of the file. A later command finds the facts again."""

    @property
    def workspace(self) -> Workspace:
        return Workspace(self._path.parent)

    @property
    def cluster(self) -> str:
        return self.workspace.root.name

    def entries(self) -> tuple[JobEntry, ...]:
        """Return all submitted jobs, the oldest first."""
        state: list[int] = [len(self._unwritten)]
        with suppress(FileNotFoundError):
            status = self._path.stat()
            state += [status.st_ino, status.st_size, status.st_mtime_ns]
        # A query of the scheduler needs the entries several times.
        if self._read is None or self._read[0] != state:
            self._read = (state, _Rows.read(self._path, self._unwritten))
        return self._read[1].entries

    @property
    def damage(self) -> str:
        """A sentence about damaged lines of jobs.jsonl, which are ignored; "" if there are none."""
        self.entries()
        return self._read[1].damage(self._path) if self._read else ""

    def is_superseded(self, entry: JobEntry) -> bool:
        """Return whether a later submission has the job's id: Slurm's numbers have begun again
        since.
        """
        self.entries()
        latest = self._read[1].tokens if self._read else {}
        return latest.get(entry.job_id or "", entry.token) != entry.token

    def find(self, job_id: str) -> JobEntry | None:
        """Return the entry of this job or array task; None if the job was not submitted from this
        machine.
        """
        base = job_id.partition("_")[0]
        return next((entry for entry in reversed(self.entries()) if entry.job_id == base), None)

    def add(self, entry: JobEntry) -> JobEntry:
        """Record a submitted job. The record is on disk when this method returns."""
        row = {key: value for key, value in asdict(entry).items() if value is not None}
        append_line(self._path, json.dumps(row, separators=(",", ":")))
        return entry

    def update(self, entry: JobEntry, **changes: Change) -> JobEntry:
        """Return the changed entry. Record the changes: in memory if the disk is full (see
        ``refusal``).
        """
        try:
            return self.record(entry, **changes)
        except DiskError as exc:
            self._unwritten.append({"token": entry.token, **changes})
            self.refusal = exc
        return replace(entry, **changes)  # type: ignore[arg-type]  # fields of these types

    def record(self, entry: JobEntry, **changes: Change) -> JobEntry:
        """Return the changed entry. The changes are on disk when this method returns."""
        append_line(
            self._path, json.dumps({"token": entry.token, **changes}, separators=(",", ":"))
        )
        return replace(entry, **changes)  # type: ignore[arg-type]  # fields of these types

    def keep(self, token: str, files: Mapping[str, bytes]) -> None:
        """Store copies of the files (name -> content) sent for a job. After an error, no file is
        stored.
        """
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
        """Return name -> content of files that ``keep`` stored; {} if another machine submitted the
        job.
        """
        folder = self._folder(token)
        return (
            {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
        )

    def kept_file(self, token: str, name: str) -> bytes:
        """Return the content of a single file that ``keep`` stored; b"" if there is no such
        file.
        """
        with suppress(FileNotFoundError):
            return (self._folder(token) / name).read_bytes()
        return b""

    def _folder(self, token: str) -> Path:
        # A token read from a job's comment is not trusted.
        return self._path.with_suffix("") / (token if _TOKEN.fullmatch(token) else "-")


def is_of_project(folder: str | None, here: Path) -> bool:
    """Return whether a job's folder is ``here`` or of the same project. True if the folder is
    unknown.
    """
    return folder is None or Path(folder) == here or _project_of(Path(folder)) == _project_of(here)


def _project_of(folder: Path) -> Path:
    """Return the nearest root of a project at or above a folder; the folder itself if there is
    none.
    """
    # Unlike Path.home, this never raises.
    home = Path(os.path.expanduser("~"))
    above = takewhile(lambda path: path not in (home, path.parent), (folder, *folder.parents))
    return next(
        (path for path in above if is_project(path) or (path / SPEC_NAME).exists()),
        folder,
    )


def runs_folder_of(entry: JobEntry) -> Path:
    """Return the folder `runs` of the job's folder; ./runs if that is of this project or can't be
    written.
    """
    if entry.folder is None or is_of_project(entry.folder, Path.cwd()):
        return RUNS.absolute()
    beside = Path(entry.folder) / RUNS
    parent = beside if beside.exists() else beside.parent
    return beside if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK) else RUNS.absolute()


def is_own(name: bytes) -> bool:
    """Return whether a file or folder of this name, in a run's or task's folder, is
    clusterctl's.
    """
    return name in _OWN or TASKS_LOG.fullmatch(name) is not None


def split_path(path: bytes) -> tuple[bytes, bytes, bytes]:
    """Split a path in a run's folder: the folder of an array task with a slash, or b""; a name; the
    rest.
    """
    task, slash, below = path.partition(b"/")
    above, path = (task + slash, below) if below and TASK.fullmatch(task) else (b"", path)
    name, slash, rest = path.partition(b"/")
    return above, name, slash + rest


def run_path(path: bytes, siblings: Collection[bytes] = ()) -> bytes:
    """Return the path that a file in the program's folder gets in the run's folder.

    siblings: all paths in the program's folder. The suffix ``FROM_JOB`` makes a name that is not
        among them.
    """
    above, name, rest = split_path(path)
    new = name
    while is_own(new) or (new != name and above + new in siblings):
        new += FROM_JOB
    return above + new + rest


def program_path(path: bytes) -> bytes | None:
    """Return the path in the program's folder of a file in a run's folder; None if it is
    clusterctl's.
    """
    above, name, rest = split_path(path)
    original = name
    while original.endswith(FROM_JOB):
        original = original[: -len(FROM_JOB)]
    if original != name and is_own(original):
        return above + original + rest
    return None if is_own(name) else path


def job_paths(path: bytes, files: bytes) -> Iterator[bytes]:
    """Yield the paths that a file of the run's folder may have in the job's folder. files: see
    JobEntry.
    """
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


def read_record(folder: Path, pattern: re.Pattern[bytes] | None = None) -> dict[str, Any]:
    """Return the content of a run's record; {} if it can't be read or does not contain
    ``pattern``.
    """
    path = folder / RUN_FILE
    with suppress(OSError, ValueError, RecursionError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_RECORD:
            text = path.read_bytes()
            record = json.loads(text) if pattern is None or pattern.search(text) else {}
            return record if isinstance(record, dict) else {}
    return {}


def token_of_run(folder: Path) -> str:
    """Return the token that identifies a collected run's job; "" if the folder is not a collected
    run.
    """
    token = read_record(folder).get("token")
    return token if isinstance(token, str) and _RUN_TOKEN.fullmatch(token) else ""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a collected run, also if its run.json is missing or damaged."""
    return bool(token_of_run(folder)) or lacks_record(folder)


def lacks_record(folder: Path) -> bool:
    """Return whether a folder has other files that `collect` adds to each run, but no record that
    fits.
    """
    return has_files_of_runs(folder) and not token_of_run(folder)


def has_files_of_runs(folder: Path | str) -> bool:
    """Return whether a folder has files, other than run.json, that `collect` adds to each run."""
    return all(os.path.isfile(f"{folder}/{name}") for name in (SUMS_FILE, ENVIRONMENT_FILE))


def is_own_report(path: Path) -> bool:
    """Return whether the path is a report that clusterctl wrote: a regular file that contains its
    marker.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return is_file and REPORT_MARK in os.read(descriptor, _REPORT_HEAD)
        finally:
            os.close(descriptor)
    return False


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folder if it has a run.json; otherwise its subfolders with a run.json or without
    access.

    Raises UsageError if the folder can't be read.
    """
    folder = Path(os.path.realpath(folder))
    if may_be_run(folder):
        yield folder
        return
    try:
        with os.scandir(folder) as entries:
            subfolders = [
                entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError as exc:
        raise UsageError(
            "the folder of runs can't be read",
            code="file-unreadable",
            where=str(folder),
            why=exc.strerror or str(exc),
            fix="use a folder that `clusterctl collect` created",
        ) from exc
    for entry in subfolders:
        if may_be_run(entry.path):
            yield Path(os.path.realpath(entry.path) if entry.is_symlink() else entry.path)


def readable_runs(folders: Iterable[Path]) -> Iterable[Path]:
    """Return the folders of the runs in ``folders``, as far as these can be read."""
    runs: dict[Path, None] = {}
    for folder in folders:
        with suppress(UsageError):
            runs |= dict.fromkeys(run_folders(folder))
    return runs


def may_be_run(folder: Path | str) -> bool:
    """Return whether a folder has a run.json or other files of runs, or can't be entered.

    The reader of the record reports the problem.
    """
    try:
        # Path would be slow for thousands.
        return stat.S_ISREG(os.stat(f"{folder}/{RUN_FILE}").st_mode)
    except PermissionError:
        return True
    except OSError:
        return has_files_of_runs(folder)


def runs_folders() -> tuple[Path, ...]:
    """Return ./runs and all other folders with collected runs on this machine, if they exist."""
    paths = (RUNS.absolute(), *_noted("folder"))
    # Unlike Path.is_dir, this never raises.
    return tuple(dict.fromkeys(path for path in paths if os.path.isdir(path)))


def ledgers() -> tuple[Ledger, ...]:
    """Return the lists of jobs of all clusters that this machine knows."""
    return tuple(Ledger(Workspace(path).jobs) for path in sorted(state_home().glob("[!.]*/")))


def note_runs_folder(folder: Path) -> None:
    """Add a folder to the list of folders with runs. Ignore a full disk: the runs are already
    copied.
    """
    _note("folder", folder)


def note_copied_folder(folder: Path) -> None:
    """Record a folder into which `collect --all` copies files that belong to no run."""
    _note("copied", folder)


def copied_folders() -> tuple[Path, ...]:
    """Return the folders into which `collect --all` copied files that belong to no run."""
    return _noted("copied")


def _note(key: str, folder: Path) -> None:
    path = state_home() / _FOLDERS
    if folder not in _noted(key):
        with suppress(MachineError):
            append_line(path, json.dumps({key: str(folder)}))


def _noted(key: str) -> tuple[Path, ...]:
    texts = (row.get(key) for row in read_rows(state_home() / _FOLDERS))
    return tuple(Path(text) for text in texts if isinstance(text, str) and text.startswith("/"))
