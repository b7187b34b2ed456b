"""The job or run that a name means: an ID, with or without its cluster, or a collected run's
folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.spec.names import did_you_mean, first_few
from clusterctl.state.ledger import (
    JobEntry,
    Ledger,
    ledgers,
    may_be_run,
    read_record,
    readable_runs,
    runs_folders,
    token_of_run,
)
from clusterctl.state.workspace import clusters_up

_JOB: Final = re.compile(
    r"(?:(?P<cluster>[a-z][a-z0-9-]*)/)?(?P<job>[A-Za-z]?\d+)(?:_(?P<task>\d+))?"
)
_TASK_FOLDER: Final = re.compile(r"task-(\d+)")
_MOST_CHOICES: Final = 5


@dataclass(frozen=True, slots=True)
class NamedRun:
    """The run, or the task of an array, that a name means.

    name: as the user gave it.
    run_folder: the run's folder on this machine, or another folder that the user named. None: not
        collected.
    token: identifies the run's job. "" if the folder is not a run's, or no run is on this machine.
    entry: the job in the cluster's ledger. None: the job was not submitted from here to the chosen
        cluster.
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
        return f"{self.cluster}/{number}" if self.cluster and number else self.name

    def reject_other_folder(self) -> None:
        """Raise UsageError if the user named a folder that is not a collected run."""
        if self.run_folder and not may_be_run(self.run_folder):
            raise UsageError(
                f"the folder {self.run_folder} is not a collected run",
                code="not-a-run",
                fix="pass a folder that was created by `clusterctl collect`",
            )

    def not_collected(self) -> UsageError:
        """Return the error for a run that is not on this machine."""
        job = (
            f"{self.entry.shown} was submitted from this machine"
            if self.entry
            else "no such job is known"
        )
        return UsageError(
            f"run {self.name} is not on this machine",
            code="run-not-collected",
            why=f"{job}, and no collected run has its id" if self.entry else f"{job} here",
            fix=f"`clusterctl collect {self.full_name}` copies the run, if the cluster has the job",
        )


def find_run(name: str, ledger: Ledger | None = None) -> NamedRun:
    """Return the run that a name means: a run on this machine, or a job that was submitted from
    here.

    A job id that is unknown here is returned too, because the job may come from another machine.

    name: the path of a run's folder, the folder's name, or a job id, ``[CLUSTER/]ID``; ``12_3`` is
        a task. Any other folder, such as a model's, comes last.
    ledger: the jobs of the chosen cluster, to which an id without a cluster refers. None: no
        cluster is chosen, so that the id may be of any cluster.

    Raises UsageError: nothing has the name; several runs have the name or the job id; only runs of
    other clusters than the chosen cluster have the job id; or the run of another cluster is not on
    this machine.
    """
    folders = runs_folders()
    by_cluster = {jobs.cluster: jobs for jobs in (*ledgers(), *([ledger] if ledger else []))}
    chosen = ledger.cluster if ledger else None
    paths = _paths_of(name, folders)
    runs = _runs_at(name, paths, by_cluster)
    match = _JOB.fullmatch(name)
    if match and not runs:
        runs = _runs_of_job(name, match, folders, by_cluster)
        if chosen is not None and not match["cluster"]:
            runs = _of_cluster(chosen, runs)
    if runs:
        run = _only(name, runs)
    elif paths:
        return NamedRun(name, paths[0])
    elif match and match["cluster"] in {None, *by_cluster}:
        cluster = match["cluster"] or chosen or ""
        run = NamedRun(name, job_id=match["job"], task=match["task"] or "", cluster=cluster)
    else:
        raise _unknown(name, folders)
    if chosen in {None, run.cluster}:
        return run
    if run.run_folder is None:
        raise run.not_collected()
    # The chosen cluster does not have the job's folder.
    return replace(run, entry=None)


def job_id_of(name: str, ledger: Ledger) -> str:
    """Return the id on the cluster of the job with this id, or of the run with this name.

    Raises UsageError: the run is not of a job of this cluster, or nothing has the name.
    """
    match = _JOB.fullmatch(name)
    if match and match["cluster"] in {None, ledger.cluster}:
        return name.rpartition("/")[2]
    run = find_run(name)
    run.reject_other_folder()
    entry = _entry_of(ledger, run.token)
    if entry is None or not entry.job_id:
        raise UsageError(
            f"run {name} is not of a job of cluster {ledger.cluster!r}",
            code="run-of-other-cluster",
            where=str(run.folder or ""),
            fix="use the files in that folder, or choose the run's cluster with --cluster",
        )
    return f"{entry.job_id}_{run.task}" if run.task else entry.job_id


def cluster_of(name: str, clusters: Collection[str]) -> str:
    """Return the cluster of the job or run with this name; "" if it is of none of these clusters.

    Raises UsageError: jobs of several of these clusters have the id, or no run has the name.
    """
    match = _JOB.fullmatch(name)
    if match is None:
        named = [find_run(name)]
    elif match["cluster"]:
        return match["cluster"] if match["cluster"] in clusters else ""
    else:
        named = list(
            _runs_of_job(name, match, runs_folders(), {jobs.cluster: jobs for jobs in ledgers()})
        )
    runs = {run.cluster: run for run in named if run.cluster in clusters}
    return _only(name, [*runs.values()]).cluster if runs else ""


def names_no_cluster(name: str) -> bool:
    """Return whether a name is only a job id, which may be of any cluster."""
    match = _JOB.fullmatch(name)
    return match is not None and not match["cluster"]


def _paths_of(name: str, folders: Iterable[Path]) -> Sequence[Path]:
    """Return the folders with this path or, in the folders of runs, with this name."""
    texts = (name, *(f"{folder}/{name}" for folder in folders)) if name else ()
    paths = [Path(os.path.realpath(text)) for text in texts if os.path.isdir(text)]
    # A path means only its own folder.
    return paths[: 1 if "/" in name and os.path.isdir(name) else None]


def _runs_at(
    name: str, paths: Iterable[Path], by_cluster: Mapping[str, Ledger]
) -> Sequence[NamedRun]:
    """Return the collected runs, or tasks of these, with these folders."""
    runs: dict[str, NamedRun] = {}
    for path in paths:
        task = _TASK_FOLDER.fullmatch(path.name)
        for folder, number in ((path, ""), *([(path.parent, task[1])] if task else ())):
            if token := token_of_run(folder):
                cluster = str(read_record(folder).get("cluster"))
                entry = _entry_of(by_cluster.get(cluster), token)
                runs.setdefault(
                    token, NamedRun(name, folder, token, entry, task=number, cluster=cluster)
                )
                break
    return [*runs.values()]


def _runs_of_job(
    name: str, match: re.Match[str], folders: Iterable[Path], by_cluster: Mapping[str, Ledger]
) -> Sequence[NamedRun]:
    """Return the runs and jobs of all clusters, or of the named cluster, that have this job id."""
    job_id = match["job"]
    task = match["task"] or ""
    runs: dict[str, NamedRun] = {}
    mentions_id = re.compile(rb'"job_id":\s*"%s"' % job_id.encode())
    for path in readable_runs(folders):
        record = read_record(path, mentions_id)
        token = str(record.get("token"))
        cluster = str(record.get("cluster"))
        if record.get("job_id") == job_id and match["cluster"] in {None, cluster}:
            entry = _entry_of(by_cluster.get(cluster), token)
            runs.setdefault(token, NamedRun(name, path, token, entry, job_id, task, cluster))
    for cluster, ledger in by_cluster.items():
        if match["cluster"] in {None, cluster} and (entry := ledger.find(job_id)):
            runs.setdefault(
                entry.token, NamedRun(name, None, entry.token, entry, job_id, task, cluster)
            )
    return [*runs.values()]


def _of_cluster(cluster: str, runs: Sequence[NamedRun]) -> Sequence[NamedRun]:
    """Return the runs of a cluster. Raise UsageError if only other clusters have such a run."""
    own = [run for run in runs if run.cluster == cluster]
    if runs and not own:
        name = runs[0].name
        names = list(dict.fromkeys(run.full_name for run in runs))
        raise UsageError(
            f"no run of job {name} of cluster {cluster!r} is known here",
            code="run-of-other-cluster",
            why=f"other clusters have {first_few(names, _MOST_CHOICES)}",
            fix=f"use {names[0]}; or {cluster}/{name}, if another machine submitted the job",
        )
    return own


def _only(name: str, runs: Sequence[NamedRun]) -> NamedRun:
    """Return the only run. Raise UsageError, with names that can be used, if there are several."""
    if len(runs) == 1:
        return runs[0]
    full_names = [run.full_name for run in runs]
    choices = [
        run.full_name
        if full_names.count(run.full_name) == 1
        else str(
            run.run_folder
            or f"job {run.job_id}, not collected (`clusterctl collect {run.full_name}`)"
        )
        for run in runs
    ]
    raise UsageError(
        f"{len(runs)} runs have the name or the job id {name}",
        code="run-ambiguous",
        why=first_few(choices, _MOST_CHOICES),
        fix="use the name of one of these runs instead",
    )


def _entry_of(ledger: Ledger | None, token: str) -> JobEntry | None:
    return (
        next((entry for entry in ledger.entries() if entry.token == token), None)
        if ledger
        else None
    )


def _unknown(name: str, folders: Iterable[Path]) -> UsageError:
    for link in (folder / name for folder in folders if name):
        # Path.is_symlink raises for a name that is too long.
        if os.path.islink(link):
            return UsageError(
                f"the run {name!r} is a link to a folder that does not exist",
                code="run-link-dangles",
                where=str(link),
                why=f"it leads to {link.readlink()}",
                fix="mount or restore that folder, or remove the link",
            )
    places = ", ".join(map(str, folders)) or "none, as no run was collected yet"
    why = f"searched folders: {places}"
    match = _JOB.fullmatch(name)
    if match and match["cluster"]:
        why = (
            f"no cluster {match['cluster']!r} is known on this machine; searched folders: {places}"
        )
    return UsageError(
        f"there is no job or run {name!r}",
        code="unknown-run",
        why=why,
        fix=_meant(name, [path.name for folder in folders for path in folder.glob("*")])
        or "`clusterctl runs` lists the runs, and `clusterctl jobs` the jobs; "
        "pass a run's folder, the folder's name or the job id",
    )


def _meant(name: str, runs: Iterable[str]) -> str:
    """Return what an unknown name may mean: jobs with this name, a cluster, or a run. "": unknown."""
    runs = sorted(runs)
    if of_job := [run for run in runs if name and run.endswith(f"-{name}")]:
        return f"runs of jobs with this name: {first_few(of_job, _MOST_CHOICES)}"
    jobs = [
        f"{ledger.cluster}/{entry.job_id}"
        for ledger in ledgers()
        for entry in ledger.entries()
        if entry.job_id and entry.name == name
    ]
    if jobs:
        return f"jobs with this name: {first_few([*reversed(jobs)], _MOST_CHOICES)}"
    if name in clusters_up():
        return f"it is a cluster: choose it with `--cluster {name}`, and name a job by its id"
    return did_you_mean(name, runs)
