"""The job or run that a name means. ``CLUSTER/ID`` is a job of that cluster. A number alone is a job
or run of this project, otherwise of the chosen cluster. Every other name is the path of a run's
folder, or the name of a folder in the folders of runs.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clusterctl.errors import NotUpError, UsageError
from clusterctl.spec.names import did_you_mean, first_few, is_cluster_name
from clusterctl.state.chosen import ChosenCluster, unknown_cluster
from clusterctl.state.ledger import (
    RUNS,
    JobEntry,
    Ledger,
    is_of_project,
    ledgers,
    may_be_run,
    read_record,
    readable_runs,
    runs_folders,
    token_of_run,
)
from clusterctl.state.workspace import Workspace
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
    entry: the job in the ledger of its cluster. None: the job was not submitted from here.
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

    def remote_on(self, cluster: str) -> str | None:
        """Return the folder on this cluster with the program's files of the run, or of the task;
        None if it is unknown, or the run is of another cluster.
        """
        folder = self.entry.program_dir if self.entry and cluster == self.cluster else ""
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

    @property
    def is_known(self) -> bool:
        """Whether this machine knows the job: it was submitted from here, or collected."""
        return self.entry is not None or self.run_folder is not None

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


@dataclass(frozen=True, slots=True)
class _Known:
    """What this machine knows of jobs, read once for all names of a command.

    ledgers: of all clusters. runs: those in ./runs of these jobs: job id -> cluster -> token -> folder.
    """

    ledgers: Sequence[Ledger]
    runs: Mapping[str, Mapping[str, Mapping[str, Path]]]

    @classmethod
    def of(cls, names: Iterable[str]) -> _Known:
        matches = filter(None, map(_JOB.fullmatch, names))
        ids = [match["job"] for match in matches if not match["cluster"]]
        return cls(ledgers(), _runs_of_jobs([RUNS.absolute()], ids) if ids else {})


def is_number(name: str) -> bool:
    """Return whether a name is a job id without its cluster."""
    match = _JOB.fullmatch(name)
    return match is not None and not match["cluster"]


def full_name(name: str, chosen: ChosenCluster) -> str:
    """Return ``CLUSTER/ID`` for a job id; every other name unchanged.

    Raises the errors of ``find_run``.
    """
    return find_run(name, chosen).full_name if is_number(name) else name


def cluster_of_jobs(
    names: Iterable[str], chosen: ChosenCluster, *, certain: bool = False
) -> ChosenCluster:
    """Return the choice for a command about the jobs or runs with these names.

    The options --cluster and -f override what a run's folder says. A number that is of no job of
    this project is of the cluster that a command without a name would use.

    certain: for commands that end jobs: raise UsageError if several clusters are known, and neither
        the name, this project nor a spec says which of them is meant.

    Raises:
        UsageError: nothing has the name, several jobs have it, or the jobs are of several clusters.
        NotUpError: the cluster of a job no longer exists, but its run is here.
    """
    if chosen.is_given:
        return chosen
    names = [*names]
    known = _Known.of(names)
    named = {_cluster_of(name, chosen, known, certain=certain): name for name in names}
    if len(named) > 1:
        raise UsageError(
            "these jobs are of several clusters",
            code="ambiguous",
            about="jobs",
            why=", ".join(
                f"{name} is of {cluster or 'the chosen cluster'}" for cluster, name in named.items()
            ),
            fix="run the command for each cluster",
        )
    for cluster, name in named.items():
        if cluster is not None:
            _reject_gone(cluster, name, chosen)
    return replace(chosen, name=next(iter(named), None))


def _reject_gone(cluster: str, name: str, chosen: ChosenCluster) -> None:
    """Raise NotUpError for a job whose cluster no longer exists, if the job's run is here."""
    if is_cluster_name(cluster) and Workspace.of(cluster).root.is_dir():
        return
    # Of words such as 12_[1-3], the whole job.
    run = find_run(name.partition("_[")[0] if _JOB.fullmatch(name) else name, chosen)
    if run.run_folder is not None:
        shown = shlex.quote(run.full_name)
        raise NotUpError(
            f"cluster {cluster!r} of job {name} is not up",
            why=f"its run is here: {run.run_folder}",
            fix=f"`clusterctl runs show {shown}` shows how the job ended, and `clusterctl report "
            f"{shown}` its report",
        )


def _cluster_of(name: str, chosen: ChosenCluster, known: _Known, *, certain: bool) -> str | None:
    """Return the name of a job's cluster. None: the cluster that a command without a name uses."""
    match = _JOB.fullmatch(name)
    if match is None:
        return _run_at(name).cluster or None
    if match["cluster"]:
        return match["cluster"]
    run = _by_number(name, match, chosen, known)
    if not certain or chosen.spec_file is not None:
        return run.cluster if run else None
    if run is None and len(known.ledgers) > 1:
        raise _unchosen(name, match)
    if run is not None and _entry_of(run.cluster, run.job_id) != run.entry:
        # The run is of this project, but the cluster's numbers have begun again since.
        raise _unchosen(name, match)
    return run.cluster if run else None


def find_run(name: str, chosen: ChosenCluster | None = None, *, certain: bool = False) -> NamedRun:
    """Return the run that a name means: a run on this machine, or a job of a cluster.

    A job that is unknown here is returned too, because the job may come from another machine.

    name: the path of a run's folder, the folder's name, or a job id, ``[CLUSTER/]ID``; ``12_3`` is
        a task. Any other folder is returned as well, such as a model's.
    chosen: the cluster that the user has chosen. Default: none.
    certain: for commands that remove runs: raise UsageError for a number that is of no job of this
        project, unless the user has named the cluster.

    Raises UsageError: nothing has the name, several jobs or runs have it, it is a number that is of
    no job of this project and no cluster is chosen, or the user has named another cluster.
    """
    chosen = chosen or ChosenCluster()
    match = _JOB.fullmatch(name)
    run: NamedRun | None
    if match is None or match["id"].endswith("]"):
        run = _run_at(name)
    elif match["cluster"]:
        run = _of_cluster(name, match["cluster"], match)
    else:
        run = _by_number(name, match, chosen, _Known.of([name]), certain=certain)
        if run is None:
            raise _unchosen(name, match)
    if chosen.is_given and run.cluster not in {"", cluster := chosen.workspace().root.name}:
        raise _of_other_cluster(name, cluster)
    return run


def newest_job(chosen: ChosenCluster) -> NamedRun:
    """Return the job that was submitted last: from this project, or else to the cluster that the
    user has named.

    Raises UsageError: there is no such job.
    """
    here = Path.cwd()
    known: Sequence[Ledger] = ledgers()
    if chosen.is_given:
        workspace = chosen.workspace()
        if not workspace.root.is_dir():
            raise unknown_cluster(workspace.root.name)
        known = [Ledger(workspace.jobs)]
    jobs = [
        (job, ledger.cluster)
        for ledger in known
        for job in ledger.entries()
        if job.job_id and not job.refused
    ]
    of_project = [pair for pair in jobs if pair[0].folder and is_of_project(pair[0].folder, here)]
    candidates = of_project or (jobs if chosen.is_given else [])
    if not candidates:
        raise UsageError(
            "no job was submitted from this folder",
            code="not-found",
            about="job",
            fix="name a job: `clusterctl jobs` lists them",
        )
    entry, cluster = max(candidates, key=lambda pair: pair[0].submitted_at)
    folder = Path(entry.run_dir) if entry.run_dir else None
    token = entry.token if folder else ""
    job_id = entry.job_id or ""
    return NamedRun(f"{cluster}/{job_id}", folder, token, entry, job_id, cluster=cluster)


def _by_number(
    name: str,
    match: re.Match[str],
    chosen: ChosenCluster,
    known: _Known,
    *,
    certain: bool = False,
) -> NamedRun | None:
    """Return the job that a number means: of this project, otherwise of the chosen cluster.

    None: this project has no such job, and the user has chosen no cluster; with ``certain``, also
    if only ./cluster.yaml has chosen it.

    Raises UsageError: several clusters have such a job.
    """
    if chosen.is_given:
        return _of_cluster(name, chosen.workspace().root.name, match)
    found = {run.cluster: run for run in _of_project(name, match, known)}
    if certain and not found:
        return None
    if chosen.spec_file is not None:
        run = _of_cluster(name, chosen.workspace().root.name, match)
        if run.is_known or not found:
            found.setdefault(run.cluster, run)
    if len(found) > 1:
        raise _ambiguous(name, found.values())
    return next(iter(found.values()), None)


def _of_cluster(name: str, cluster: str, match: re.Match[str]) -> NamedRun:
    """Return the job of this cluster with this id, which may be unknown here."""
    if entry := _entry_of(cluster, match["job"]):
        return _submitted(name, cluster, match, entry)
    runs = _runs_of_jobs(runs_folders(), [match["job"]]).get(match["job"], {})
    return _collected(name, cluster, match, runs.get(cluster, {}))


def _of_project(name: str, match: re.Match[str], known: _Known) -> Iterator[NamedRun]:
    """Yield the jobs with this id that were submitted from this project, or whose run is in ./runs:
    one for each cluster.
    """
    here = Path.cwd()
    clusters = set()
    for ledger in known.ledgers:
        entry = ledger.find(match["job"])
        if entry is not None and entry.folder and is_of_project(entry.folder, here):
            clusters.add(ledger.cluster)
            yield _submitted(name, ledger.cluster, match, entry)
    for cluster, runs in known.runs.get(match["job"], {}).items():
        if cluster in clusters:
            continue
        entry = _entry_of(cluster, match["job"])
        if entry is not None and entry.token in runs:
            yield _submitted(name, cluster, match, entry)
        else:
            yield _collected(name, cluster, match, runs)


def _submitted(name: str, cluster: str, match: re.Match[str], entry: JobEntry) -> NamedRun:
    """Return a job of the ledger of a cluster. Slurm may have begun its numbers again since another
    run had this id.
    """
    folder = Path(entry.run_dir) if entry.run_dir else None
    if folder is None or token_of_run(folder) != entry.token:
        # The user has moved the run, or another state folder has collected it.
        folders = runs_folders() if folder else [RUNS.absolute()]
        runs = _runs_of_jobs(folders, [match["job"]]).get(match["job"], {})
        folder = runs.get(cluster, {}).get(entry.token)
    token = entry.token if folder else ""
    return NamedRun(name, folder, token, entry, match["job"], match["task"] or "", cluster)


def _collected(name: str, cluster: str, match: re.Match[str], runs: Mapping[str, Path]) -> NamedRun:
    """Return the run of a job that the ledger does not have. runs: token -> folder.

    Raises UsageError: several runs have this id.
    """
    token = _only(name, runs)
    entry = next((e for e in _entries(cluster) if token and e.token == token), None)
    task = match["task"] or ""
    return NamedRun(name, runs.get(token), token, entry, match["job"], task, cluster)


def _entries(cluster: str) -> tuple[JobEntry, ...]:
    """Return the jobs that were submitted from here to this cluster."""
    # The record of a run may have any name.
    return Ledger(Workspace.of(cluster).jobs).entries() if is_cluster_name(cluster) else ()


def _entry_of(cluster: str, job_id: str) -> JobEntry | None:
    return Ledger(Workspace.of(cluster).jobs).find(job_id) if is_cluster_name(cluster) else None


def _ambiguous(name: str, found: Iterable[NamedRun]) -> UsageError:
    runs = [*found]
    return UsageError(
        f"{len(runs)} jobs have the number {name}",
        code="ambiguous",
        about="job",
        why=first_few([_described(run) for run in runs], _MOST_CHOICES),
        fix=f"name the job with its cluster, such as {runs[0].full_name}",
    )


def _unchosen(name: str, match: re.Match[str]) -> UsageError:
    """Return the error for a number that is of no job of this project, if no cluster is chosen."""
    clusters = dict.fromkeys(
        (
            *(ledger.cluster for ledger in ledgers() if ledger.find(match["job"])),
            *_runs_of_jobs(runs_folders(), [match["job"]]).get(match["job"], {}),
        )
    )
    known = [NamedRun(name, None, "", None, match["job"], match["task"] or "", c) for c in clusters]
    return UsageError(
        f"{name} is not the number of a job of this folder",
        code="ambiguous" if known else "not-found",
        about="job",
        why=f"other jobs with this number: {first_few([run.full_name for run in known], _MOST_CHOICES)}"
        if known
        else "neither ./runs nor the jobs that were submitted from this folder have it",
        fix=f"name the job with its cluster: {known[0].full_name if known else f'CLUSTER/{name}'}, or "
        "the folder of its run",
    )


def _described(run: NamedRun) -> str:
    if run.run_folder is not None:
        return f"{run.full_name} ({run.run_folder})"
    return f"{run.full_name} ({run.entry.name})" if run.entry else run.full_name


def job_id_of(name: str, ledger: Ledger) -> str:
    """Return the id on the cluster of the job with this id, or of the run with this name.

    Raises UsageError: the run is not of a job of this cluster, or nothing has the name.
    """
    match = _JOB.fullmatch(name)
    if match and match["cluster"] in {None, ledger.cluster}:
        return match["id"]
    folder = ""
    if match is None:
        run = _run_at(name)
        run.reject_other_folder()
        if run.entry is not None and run.entry.job_id and run.cluster == ledger.cluster:
            return f"{run.entry.job_id}_{run.task}" if run.task else run.entry.job_id
        folder = str(run.folder or "")
    raise _of_other_cluster(name, ledger.cluster, folder)


def _of_other_cluster(name: str, cluster: str, folder: str = "") -> UsageError:
    return UsageError(
        f"{name} is not of a job of cluster {cluster!r}",
        code="not-found",
        about="run-of-cluster",
        where=folder,
        fix="choose its cluster with --cluster, or use the files in the run's folder",
    )


def _run_at(name: str) -> NamedRun:
    """Return the run, or the task of a run, whose folder has this path or name; or another folder."""
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
    entry = next((entry for entry in _entries(cluster) if entry.token == token), None)
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


def _runs_of_jobs(
    folders: Iterable[Path], ids: Collection[str]
) -> dict[str, dict[str, dict[str, Path]]]:
    """Return job id -> cluster -> token -> folder of the runs in these folders of jobs with these
    ids.
    """
    mentions_id = re.compile(rb'"job_id":\s*"(?:%s)"' % "|".join(ids).encode())
    runs: dict[str, dict[str, dict[str, Path]]] = {}
    for path in readable_runs(folders):
        record = read_record(path, mentions_id)
        if (job_id := record.get("job_id")) in ids:
            of_job = runs.setdefault(str(job_id), {})
            of_cluster = of_job.setdefault(str(record.get("cluster")), {})
            of_cluster.setdefault(str(record.get("token")), path)
    return runs


def _only(name: str, runs: Mapping[str, Path]) -> str:
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
