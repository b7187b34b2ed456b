"""The job or run that a name means: ``ID`` is a job of the chosen cluster, ``CLUSTER/ID`` a job of
another; every other name is the path of a run's folder, or the name of a folder in the folders of
runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.spec.names import did_you_mean, first_few
from clusterctl.state.ledger import (
    JobEntry,
    Ledger,
    may_be_run,
    read_record,
    readable_runs,
    runs_folders,
    token_of_run,
)
from clusterctl.util.confine import reject_read

# `cancel` also takes several tasks, 12_[1-3], and as squeue writes them, 12_[1-3%2].
_JOB: Final = re.compile(
    r"(?:(?P<cluster>[a-z][a-z0-9-]*)/)?(?P<id>(?P<job>m?[0-9]+)(?:_(?:(?P<task>[0-9]+)|\[[0-9,:-]+(?:%[0-9]+)?\]))?)"
)
_TASK_FOLDER: Final = re.compile(r"task-([0-9]+)")
_MOST_CHOICES: Final = 5
_FORMS: Final = (
    "a job is its ID (12), a task 12_3, a job of another cluster CLUSTER/12, a run its folder or the "
    "folder's name (`clusterctl runs`); `cancel` also takes 12_[1-3]"
)


@dataclass(frozen=True, slots=True)
class NamedRun:
    """The run, or the task of an array, that a name means.

    name: as the user gave it.
    run_folder: the run's folder on this machine, or another folder that the user named. None: not
        collected.
    token: identifies the run's job. "" if the folder is not a run's, or no run is on this machine.
    entry: the job in the ledger of the chosen cluster. None: the job was not submitted from here to
        this cluster.
    job_id: the job's id, if the user named an id. task: the array task's number. Empty: the whole
        run.
    cluster: the name of the run's cluster. "" if it is unknown.
    """

    name: str
    run_folder: Path | None = None
    token: str = ""
    entry: JobEntry | None = None
    job_id: str = ""
    task: str = ""
    cluster: str = ""

    @property
    def folder(self) -> Path | None:
        """The folder on this machine of the run, or of the task; None if it is missing."""
        folder = self.run_folder and self.run_folder.joinpath(*self._below)
        return folder if folder and folder.is_dir() else None

    @property
    def remote(self) -> str | None:
        """The folder on the cluster with the program's files of the run, or of the task; None if
        unknown.
        """
        folder = self.entry.program_dir if self.entry else ""
        return self.below(folder) if folder else None

    def below(self, folder: str) -> str:
        """Return the folder of the named task in the folder of its array; the folder itself for a
        run.
        """
        return "/".join((folder, *self._below))

    @property
    def _below(self) -> tuple[str, ...]:
        return (f"task-{self.task}",) if self.task else ()

    @property
    def full_name(self) -> str:
        """The name with the cluster, if the user named an id: ``CLUSTER/ID``."""
        number = f"{self.job_id}_{self.task}" if self.task else self.job_id
        return f"{self.cluster}/{number}" if number else self.name

    def reject_other_folder(self) -> None:
        """Raise UsageError if the user named a folder that is not a collected run."""
        if self.run_folder and not may_be_run(self.run_folder):
            raise UsageError(
                f"the folder {self.run_folder} is not a collected run",
                code="file-invalid",
                about="run",
                fix="pass a folder that was created by `clusterctl collect`",
            )

    def not_collected(self) -> UsageError:
        """Return the error for a run that is not on this machine."""
        return UsageError(
            f"run {self.full_name} is not on this machine",
            code="not-found",
            about="collected-run",
            why=f"{self.entry.shown} was submitted from this machine, but not collected"
            if self.entry
            else "no folder of runs here has a run of this job",
            fix=f"`clusterctl collect {self.full_name}` copies the run, if the cluster has the job; "
            "a run of another cluster is CLUSTER/ID, or its folder",
        )


def is_id(name: str) -> bool:
    """Return whether a name is a job id alone, which is a job of the chosen cluster."""
    match = _JOB.fullmatch(name)
    return match is not None and not match["cluster"]


def cluster_of(name: str) -> str | None:
    """Return the cluster in a name, ``CLUSTER/ID``, or of a run's folder.

    None: the name is an id alone, or no run's.
    """
    match = _JOB.fullmatch(name)
    if match:
        return match["cluster"]
    run = _run_at(name)
    return run.cluster or None


def find_run(name: str, ledger: Ledger | None) -> NamedRun:
    """Return the run that a name means: a run on this machine, or a job of the chosen cluster.

    A job that is unknown here is returned too, because the job may come from another machine.

    name: the path of a run's folder, the folder's name, or a job id, ``[CLUSTER/]ID``; ``12_3`` is
        a task. Any other folder is returned as well, such as a model's.
    ledger: the jobs of the chosen cluster. None: no cluster is chosen, and ``is_id(name)`` is
        false.

    Raises UsageError: nothing has the name, several runs have it, or the run of another cluster is
    not on this machine.
    """
    match = _JOB.fullmatch(name)
    if match is None or match["id"].endswith("]"):
        return _run_at(name, ledger)
    chosen = ledger.cluster if ledger else ""
    cluster = match["cluster"] or chosen
    entry = ledger.find(match["job"]) if ledger and cluster == chosen else None
    runs = _runs_of_job(cluster, match["job"])
    # Slurm may have begun its numbers again.
    token = entry.token if entry else _only(name, runs)
    folder = runs.get(token)
    task = match["task"] or ""
    run = NamedRun(name, folder, token if folder else "", entry, match["job"], task, cluster)
    if folder is None and chosen not in {"", cluster}:
        raise run.not_collected()
    return run


def job_id_of(name: str, ledger: Ledger) -> str:
    """Return the id on the cluster of the job with this id, or of the run with this name.

    Raises UsageError: the run is not of a job of this cluster, or nothing has the name.
    """
    match = _JOB.fullmatch(name)
    if match and match["cluster"] in {None, ledger.cluster}:
        return match["id"]
    folder = ""
    if match is None:
        run = _run_at(name, ledger)
        run.reject_other_folder()
        if run.entry is not None and run.entry.job_id:
            return f"{run.entry.job_id}_{run.task}" if run.task else run.entry.job_id
        folder = str(run.folder or "")
    raise UsageError(
        f"{name} is not of a job of cluster {ledger.cluster!r}",
        code="not-found",
        about="run-of-cluster",
        where=folder,
        fix="choose its cluster with --cluster, or use the files in the run's folder",
    )


def _run_at(name: str, ledger: Ledger | None = None) -> NamedRun:
    """Return the run, or the task of a run, whose folder has this path or name; or another folder.

    ledger: as in ``find_run``.
    """
    folders = runs_folders()
    paths = _paths_of(name, folders)
    runs: dict[str, Path] = {}
    for path in paths:
        if token := token_of_run(_whole(path)[0]):
            # A copy of a run is the same run.
            runs.setdefault(token, path)
    if not runs:
        if not paths:
            raise _unknown(name, folders)
        return NamedRun(name, paths[0])
    token = _only(name, runs)
    folder, task = _whole(runs[token])
    cluster = str(read_record(folder).get("cluster"))
    entry = None
    if ledger is not None and cluster == ledger.cluster:
        entry = next((entry for entry in ledger.entries() if entry.token == token), None)
    return NamedRun(name, folder, token, entry, task=task, cluster=cluster)


def _paths_of(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return the folder with this path or, in the folders of runs, those with this name."""
    if not name:
        return []
    texts = (
        [name]
        if os.path.isdir(name) and "/" in name
        else [name, *(f"{folder}/{name}" for folder in folders)]
    )
    found = {text: Path(os.path.realpath(text)) for text in texts if os.path.isdir(text)}
    # A name without a slash may be that of a run in another folder of runs; but runs, and `runs`
    # itself, may be links to elsewhere.
    known = {str(folder) for folder in folders if str(folder) == os.path.realpath(folder)}
    for text, path in found.items():
        if text == name or "/" in name or str(path.parent) not in known:
            reject_read(text)
    return [*found.values()]


def _whole(path: Path) -> tuple[Path, str]:
    """Return the folder of a run, and the task's number: of a task's folder, that of its run."""
    task = _TASK_FOLDER.fullmatch(path.name)
    return (path.parent, task[1]) if task and token_of_run(path.parent) else (path, "")


def _runs_of_job(cluster: str, job_id: str) -> dict[str, Path]:
    """Return token -> folder of the runs on this machine of a cluster's jobs with this id."""
    mentions_id = re.compile(rb'"job_id":\s*"%s"' % job_id.encode())
    runs: dict[str, Path] = {}
    for path in readable_runs(runs_folders()):
        record = read_record(path, mentions_id)
        if (record.get("job_id"), record.get("cluster")) == (job_id, cluster):
            runs.setdefault(str(record.get("token")), path)
    return runs


def _only(name: str, runs: dict[str, Path]) -> str:
    """Return the token of the only run; "" if there is no run. UsageError: there are several."""
    if len(runs) > 1:
        raise UsageError(
            f"{len(runs)} runs have the name {name}",
            code="ambiguous",
            about="run",
            why=first_few([*map(str, runs.values())], _MOST_CHOICES),
            fix="use the folder of one of these runs instead",
        )
    return next(iter(runs), "")


def _unknown(name: str, folders: Iterable[Path]) -> UsageError:
    runs = sorted(path.name for folder in folders for path in folder.glob("*") if path.is_dir())
    return UsageError(
        f"there is no job or run {name!r}",
        code="not-found",
        about="run",
        why=f"searched folders: {', '.join(map(str, folders)) or 'none, as no run was collected yet'}",
        fix=did_you_mean(name, runs) or _FORMS,
    )
