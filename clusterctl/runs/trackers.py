"""Offline recordings of Weights & Biases, MLflow or Trackio, sent from this machine to the user's
servers by the user's own installation of these tools. clusterctl neither reads nor keeps the keys.

A recording is a folder, or a file, that a tool has written without network. It is sent once: the
run's folder has a list of the sent recordings (``SYNCED_FILE``).
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

from typing_extensions import override  # until Python 3.12

from clusterctl.errors import CollectError, Failure, MachineError, UsageError, printable
from clusterctl.scheduler.base import GOING_ON
from clusterctl.state.ledger import PROGRAM_FOLDER, SYNCED_FILE
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import write_atomic
from clusterctl.util import mlflow_copy
from clusterctl.util.process import Result, run_with_lines, temporary_folder

_MOST_REASON: Final = 300  # characters
# Lines of mlflow_copy.py that a user has to see begin with it.
_NOTE: Final = "note: "
_SERVER: Final = "MLFLOW_TRACKING_URI"
Heard = Callable[[str], None]
# States of ``SyncResult``.
SENT: Final = "sent"
BEFORE: Final = "before"
FAILED: Final = "failed"
INCOMPLETE: Final = "incomplete"
LEFT: Final = "left"


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result of sending a recording.

    path: in the run's folder. state: sent; before: it was sent earlier; failed; incomplete: files of it
        are only on the cluster; left: it must not be sent yet, or not at all.
    reason: why it was not sent.
    """

    job_id: str
    tool: str
    path: str
    state: str
    reason: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class Tracker(ABC):
    """A tool that records a program's measurements.

    name: also the name of the tool's program. beside: names of folders beside a recording that
        belong to it.
    """

    name: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raise an error if the tool can't send anything from here."""
        if shutil.which(self.name) is None:
            raise MachineError(
                f"{self.name} is not installed here, so nothing can be sent with it",
                code="tool-missing",
                about="tracker",
                fix=f"pip install {self.name}, then log in with it as its documentation says",
            )

    @abstractmethod
    def finds(self, folder: Path, folders: Sequence[str], files: Sequence[str]) -> Iterator[str]:
        """Yield the names of the recordings in a folder of a run."""

    def stays(self, recording: Path) -> str:  # noqa: ARG002
        """Return why a recording is not to be sent. "": it is."""
        return ""

    def is_sent(self, recording: Path) -> bool:  # noqa: ARG002
        """Return whether the tool itself has noted that a recording was sent."""
        return False

    @abstractmethod
    def send(self, run: RunRecord, recording: Path, work: Path, heard: Heard) -> Result:
        """Run the tool. work: an empty folder for its files. heard: called with each line of output."""


class WeightsAndBiases(Tracker):
    """`wandb sync` reads the recording and adds a marker to it."""

    name = "wandb"

    @override
    def finds(self, folder: Path, folders: Sequence[str], files: Sequence[str]) -> Iterator[str]:
        for name in folders:
            if name.startswith("offline-run-") and any((folder / name).glob("*.wandb")):
                yield name

    @override
    def is_sent(self, recording: Path) -> bool:
        records = [*recording.glob("*.wandb")]
        return all(path.with_name(f"{path.name}.synced").exists() for path in records)

    @override
    def send(self, run: RunRecord, recording: Path, work: Path, heard: Heard) -> Result:
        # Its own log files would get into the current folder.
        # Without a limit it asks a server that does not answer for a quarter of an hour.
        env = {"WANDB_DIR": str(work), "WANDB_X_GRAPHQL_RETRY_MAX": "4", **os.environ}
        result = run_with_lines([self.name, "sync", str(recording)], heard, env=env)
        # Since 0.24 or so it exits with 0 also if the server refused the run (wandb/cli/beta_sync.py
        # of 0.31 only prints the server's answer). It adds the marker only to sent recordings.
        return result if result.rc or self.is_sent(recording) else Result(1, result.stdout, "")


class MLflow(Tracker):
    """MLflow has no command that sends runs, so mlflow_copy.py does it with the user's MLflow."""

    name = "mlflow"
    beside = ("mlruns",)

    @override
    def check(self) -> None:
        super().check()
        if not os.environ.get(_SERVER):
            raise UsageError(
                "no tracking server of MLflow is set, so nothing can be sent to it",
                about="tracker-server",
                why=f"the variable {_SERVER} is not set here",
                fix=f"export {_SERVER}=https://SERVER",
            )

    @override
    def finds(self, folder: Path, folders: Sequence[str], files: Sequence[str]) -> Iterator[str]:
        if "mlflow.db" in files:
            yield "mlflow.db"
        # Beside mlflow.db, this folder only has artifacts.
        elif "mlruns" in folders and any((folder / "mlruns").glob("*/meta.yaml")):
            yield "mlruns"

    @override
    def send(self, run: RunRecord, recording: Path, work: Path, heard: Heard) -> Result:
        # MLflow changes a store that it opens, for example to its version's schema.
        copy = work / recording.name
        env = dict(os.environ)
        if recording.is_dir():
            shutil.copytree(recording, copy, symlinks=True, ignore=_in_artifacts)
            store = copy.as_uri()
            # Since 3.11 it refuses this kind of store without the variable.
            env["MLFLOW_ALLOW_FILE_STORE"] = "true"
        else:
            _copy_files(recording.parent, f"{recording.name}*", work)
            store = f"sqlite:///{copy}"
            upgrade = run_with_lines([self.name, "db", "upgrade", store], heard, cwd=work)
            if upgrade.rc:
                return upgrade
        here = str(run.directory)
        moved = [f"{run.remote_dir}/{PROGRAM_FOLDER}", here, run.remote_dir, here]
        program = Path(mlflow_copy.__file__).read_text(encoding="utf-8")
        argv = [_python_of(self.name), "-c", program, store, *moved]
        return run_with_lines(argv, heard, env=env)


def _in_artifacts(folder: str, names: Sequence[str]) -> Sequence[str]:
    """Return the names that a copy of a folder of MLflow leaves out. It refuses a run without the
    folder ``artifacts``.
    """
    return names if Path(folder).name == "artifacts" else ()


class Trackio(Tracker):
    """`trackio sync` sends a project to a Space of its own: it would replace the project's data
    from another Space (``upload_project_to_bucket`` of 0.43).
    """

    name = "trackio"
    beside = ("media", "artifacts")

    @override
    def finds(self, folder: Path, folders: Sequence[str], files: Sequence[str]) -> Iterator[str]:
        for name in files:
            if name.endswith(".db") and f"{name[:-3]}.lock" in files:
                yield name

    @override
    def stays(self, recording: Path) -> str:
        with suppress(sqlite3.Error), temporary_folder() as work:
            copy = _copy_project(recording, work)
            with closing(sqlite3.connect(copy)) as database:
                query = "SELECT value FROM project_metadata WHERE key = 'space_id'"
                space = database.execute(query).fetchone()
                return f"the program itself sends it to the Space {space[0]}" if space else ""
        return ""

    @override
    def send(self, run: RunRecord, recording: Path, work: Path, heard: Heard) -> Result:
        copy = _copy_project(recording, work)
        for name in self.beside:
            if (recording.parent / name).is_dir():
                shutil.copytree(recording.parent / name, work / name, symlinks=True)
        argv = [self.name, "sync", "--project", copy.stem, "--private"]
        return run_with_lines(argv, heard, env={**os.environ, "TRACKIO_DIR": str(work)})


def _copy_project(recording: Path, work: Path) -> Path:
    """Copy a database of Trackio, which changes it when it opens it. Return the copy."""
    _copy_files(recording.parent, f"{recording.stem}.*", work)
    return work / recording.name


def _copy_files(folder: Path, pattern: str, work: Path) -> None:
    """Copy a database and the files beside it, such as its log, but no folder."""
    for path in folder.glob(pattern):
        if path.is_file():
            shutil.copy2(path, work / path.name)


TRACKERS: Final[Mapping[str, Tracker]] = MappingProxyType(
    {tracker.name: tracker for tracker in (WeightsAndBiases(), MLflow(), Trackio())}
)


def chosen_trackers(names: Sequence[str]) -> tuple[Tracker, ...]:
    """Return the tools of `collect --sync`.

    Raises:
        UsageError: a name is unknown, or the tool has no server.
        MachineError: a tool is not installed here.
    """
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                f"--sync: {name!r} is not a tool that clusterctl knows",
                about="value-unknown",
                fix=f"use {', '.join([*TRACKERS][:-1])} or {[*TRACKERS][-1]}",
            )
    trackers = tuple(TRACKERS[name] for name in dict.fromkeys(names))
    for tracker in trackers:
        tracker.check()
    return trackers


def sync_run(run: RunRecord, trackers: Sequence[Tracker], heard: Heard) -> Iterator[SyncResult]:
    """Send the recordings of a run. Yield the result of each.

    heard: called with the notes of a tool.
    """
    for tracker in trackers:
        for recording in _recordings(run.directory, tracker):
            path = str(recording.relative_to(run.directory))
            state, reason = _sync(run, tracker, recording, heard)
            yield SyncResult(run.job_id, tracker.name, printable(path), state, reason)


def _recordings(run: Path, tracker: Tracker) -> list[Path]:
    """Return the recordings in the folder of a run, without following links."""
    return [
        Path(folder, name)
        for folder, folders, files in os.walk(run)
        for name in sorted(tracker.finds(Path(folder), folders, files))
        if not Path(folder, name).is_symlink()
    ]


def _sync(run: RunRecord, tracker: Tracker, recording: Path, heard: Heard) -> tuple[str, str]:
    """Return the state and the reason of ``SyncResult``."""
    path = str(recording.relative_to(run.directory))
    sent = _sent(run.directory)
    if path in sent.get(tracker.name, {}) or tracker.is_sent(recording):
        return BEFORE, ""
    if run.state in GOING_ON:
        return LEFT, "the job has not ended"
    if lacking := _lacking(run, tracker, recording):
        return INCOMPLETE, f"it is not complete here: {lacking}"
    try:
        if reason := tracker.stays(recording):
            return LEFT, printable(reason)
        heard(f"{tracker.name} sends {printable(path)} of job {run.job_id}")
        with temporary_folder() as work:
            result = tracker.send(run, recording, work, partial(_hear, heard, tracker))
    except OSError as exc:
        return FAILED, printable(str(exc))
    if result.rc:
        return FAILED, _last_line(result)
    sent.setdefault(tracker.name, {})[path] = int(time.time())
    write_atomic(run.directory / SYNCED_FILE, json.dumps(sent, indent=1) + "\n")
    return SENT, ""


def _hear(heard: Heard, tracker: Tracker, line: str) -> None:
    if line.startswith(_NOTE):
        heard(f"{_NOTE}{tracker.name}: {line.removeprefix(_NOTE)}")


def sync_error(synced: Sequence[SyncResult]) -> CollectError | None:
    """Return the error for the recordings that could not be sent. None: all were sent."""
    failures = [_failure(each) for each in synced if each.state in {FAILED, INCOMPLETE}]
    if not failures:
        return None
    return CollectError(
        f"{len(failures)} of {len(synced)} recordings could not be sent",
        about="tracker",
        why="; ".join(failure.cause for failure in failures),
        fix="; ".join(dict.fromkeys(failure.fix for failure in failures)),
        failures=tuple(failures),
    )


def _failure(synced: SyncResult) -> Failure:
    fix = "run the command again: it sends only the rest"
    if synced.state == INCOMPLETE:
        command = f"clusterctl collect {synced.job_id} --all --sync {synced.tool}"
        fix = f"`{command}` also copies the files that stayed on the cluster"
    return Failure(
        "transfer-failed",
        f"job {synced.job_id}: {synced.path}: {synced.tool}: {synced.reason}",
        fix=fix,
        retryable=synced.state == FAILED,
        about="tracker",
    )


def _sent(run: Path) -> dict[str, dict[str, int]]:
    """Return the sent recordings of a run: tool -> path -> time in Unix seconds."""
    try:
        return dict(json.loads((run / SYNCED_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _lacking(run: RunRecord, tracker: Tracker, recording: Path) -> str:
    """Return why a file of a recording is not here. "": all are here."""
    place = recording.parent.relative_to(run.directory)
    parts = [place / recording.name, *(place / name for name in tracker.beside)]
    for skipped in run.not_here:
        path = Path(skipped.path.removeprefix(f"{PROGRAM_FOLDER}/"))
        if skipped.only_there and any(path.is_relative_to(part) for part in parts):
            return f"{skipped.path}: {skipped.reason}"
    return ""


def _last_line(result: Result) -> str:
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    return printable(lines[-1].strip()[-_MOST_REASON:]) if lines else f"exit {result.rc}"


def _python_of(program: str) -> str:
    """Return the Python that runs a program of a Python package."""
    path = Path(shutil.which(program) or program).resolve()
    beside = path.with_name("python")
    if beside.exists():
        return str(beside)
    with path.open("rb") as script:
        first = script.readline(4096).decode(errors="replace")
    return first.removeprefix("#!").strip().split(" ")[0] if first.startswith("#!") else "python3"
