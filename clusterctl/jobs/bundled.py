"""Bundled jobs: the arguments of their programs, and the trained models that they use.

A program's arguments are checked by its own parser. The model of a run is found here or on the cluster, given
to a job, or used on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.jobs.source import Source, token_of_run
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import MODEL_JOBS, JobSpec, Weights, sweep_arguments
from clusterctl.spec.names import did_you_mean
from clusterctl.state.submissions import RUNS, JobEntry
from clusterctl.transport.tree import walk
from clusterctl.util.assets import asset, file_sha256
from clusterctl.util.process import Result, run, run_streamed

_HELP: Final = frozenset({"-h", "--help"})
_LAUNCHERS: Final = ("SLURM_", "OMPI_", "PMI_", "PMIX_")  # variables of a job that we may be called from
MODEL: Final = "model"
RECORD: Final = "model.json"
_SETTINGS: Final = "config.toml"  # the run's, which says on what data it was trained
MODEL_FLAG: Final = "--model-folder"
# Job -> its own options that name a model, or a checkpoint.
_NAMING: Final = {"eval": (MODEL_FLAG, "--out", "--resume"), "export": (MODEL_FLAG, "--checkpoint")}
# The message leaves the rank out: there is only one.
_ERROR: Final = re.compile(r"payload: error: (?:\[(?P<code>[\w-]*)\] )?(?:rank 0 on \S+: )?(?P<what>.*)")


def reject_missing(session: Session, job: JobSpec) -> None:
    """Refuse a replay of what only the cluster of the original had: an image, or a model.

    Raises:
        UsageError: the cluster lacks one.
    """
    model = next((value for flag, value in pairwise(job.args) if flag == MODEL_FLAG), "")
    send_image = "`clusterctl submit SCRIPT --container IMAGE` sends one that is here"
    send_model = "`clusterctl submit JOB --run RUN` sends that of a collected run"
    for what, path, fix in (
        ("the image", job.container or "", send_image),
        ("the model", model and f"{model}/{RECORD}", send_model),
    ):
        if not path.startswith(("/", "~/")) or (what == "the image" and os.path.isfile(path)):  # noqa: PTH113
            continue
        # The command begins in the home.
        if session.transport.run(["test", "-e", path.removeprefix("~/")], check=False).rc:
            raise UsageError(
                f"{what} of the run is not on this cluster", code="not-on-cluster", where=path, fix=fix
            )


def reject_wrong(jobs: Sequence[JobSpec], chosen: ChosenModel | None) -> None:
    """Refuse jobs without the model that they need, and arguments that a bundled job's program would refuse.

    What only the run tells is not known here: files of the cluster, among them one after --config, and what
    depends on the number of ranks or on a GPU.

    Raises:
        UsageError: a job has no model; or an argument is unknown, has a wrong value, or contradicts another.
    """
    reject_unless_fitting(jobs, chosen)
    before = model_arguments(MODEL, chosen) if chosen else ()
    tasks: list[JobSpec] = []
    lines: list[list[str]] = []
    for job in jobs:
        if job.bundled and (before or job.args or job.sweep or job.bundled in MODEL_JOBS):
            for values in job.sweep.tasks if job.sweep is not None else [{}]:
                tasks.append(job)
                lines.append([job.bundled, *before, *job.args, *sweep_arguments(values)])
    answers = json.loads(_payload(["payload.cli.arguments"], json.dumps(lines)).stdout) if lines else []
    for job, said in zip(tasks, answers, strict=True):
        if said:
            raise UsageError(
                f"{job.bundled}: {said}",
                code="program-arguments",
                where=job.name if len(jobs) > 1 else "",
                fix=f"`clusterctl submit {job.bundled} -- --help` lists its arguments",
            )


def help_wanted(jobs: Sequence[JobSpec]) -> str | None:
    """The bundled job among these whose arguments ask for the program's help."""
    return next((job.bundled for job in jobs if job.bundled and not _HELP.isdisjoint(job.args)), None)


def help_of(bundled: str) -> str:
    """The help of a bundled job's program, with the command that it is submitted by."""
    columns = str(shutil.get_terminal_size().columns)
    done = _payload(["payload", bundled, "--help"], COLUMNS=columns)
    text = done.stdout.replace(f"python -m payload {bundled}", f"clusterctl submit {bundled} --", 1)
    if bundled in MODEL_JOBS:
        text += f"\n`clusterctl submit {bundled} --run RUN` gives --model-folder and --weights.\n"
    return text


def _surroundings() -> dict[str, str]:
    """The environment of a program that runs alone on this machine, on all cores, whoever called us."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(_LAUNCHERS)}
    cores = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return {"OMP_NUM_THREADS": cores, **env, "PYTHONPATH": str(asset("payload").parent)}


def _payload(program: Sequence[str], stdin: str = "", **variables: str) -> Result:
    """Run a part of the payload that needs the standard library only: without site, that is quick."""
    env = {**_surroundings(), **variables}
    done = run([sys.executable, "-P", "-S", "-m", *program], stdin=stdin, env=env)
    if done.rc:
        why = (done.stderr.strip().splitlines() or [f"it ended with {done.rc}"])[-1]
        raise ClusterctlError(
            "the bundled program can't be asked for its arguments", code="program-not-asked", why=why
        )
    return done


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """``run`` is a collected run's folder, its name below ./runs, or a job's id."""

    run: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the model of a run is: its folder here, and where the ledger says that the cluster has it."""

    here: Path | None
    remote: str | None


def reject_unless_fitting(jobs: Sequence[JobSpec], chosen: ChosenModel | None) -> None:
    """
    Raises:
        UsageError: a model is chosen for a job that uses none, or none for one that needs it.
    """
    for job in jobs:
        if chosen is not None and (job.bundled not in MODEL_JOBS or len(jobs) > 1):
            raise UsageError(
                f"--run chooses the model of one of {', '.join(MODEL_JOBS)}",
                code="option-needs-option",
                fix="leave it out, or name that job",
            )
        naming = _NAMING.get(job.bundled or "", (MODEL_FLAG,))
        named = chosen or any(word.partition("=")[0] in naming for word in job.args)
        if job.bundled in MODEL_JOBS and not named:
            checkpoint = f"; or a checkpoint: `-- {naming[-1]} DIR`" if naming[1:] else ""
            raise UsageError(
                f"{job.bundled} needs a trained model: clusterctl submit {job.bundled} --run RUN",
                code="needs-trained-model",
                fix=f"RUN is a collected run's folder, its name below ./runs, or a job's id{checkpoint}",
            )


def folder_of_run(run: str) -> Path | None:
    """The folder on this machine that is called so, from here or from ./runs on."""
    places = (Path(os.path.abspath(path)) for path in (run, RUNS / run))  # noqa: PTH100  # . and .. have no name
    return next((path for path in places if os.path.isdir(path)), None) if run else None  # noqa: PTH112  # any name


def _find(run: str, entries: Sequence[JobEntry]) -> _Found:
    """
    Raises:
        UsageError: there is no such run, or it is home without a model.
    """
    homes = (Path(e.run_dir) for e in entries if e.run_dir and Path(e.run_dir).name == run)
    folder = folder_of_run(run) or next((path for path in homes if path.is_dir()), None)
    if folder is not None:
        here = _model_of(folder)
        if here is None:
            raise _no_model(run, f"there is no {MODEL}/{RECORD} in {folder}")
        entry = _entry_of(folder, entries)
        return _Found(here, _remote(entry.remote_dir if entry else None))
    number, _, task = run.partition("_")
    inner = f"task-{task}" if task else ""
    if not number.isdecimal():
        raise _no_run(run)
    entry = next((entry for entry in reversed(entries) if entry.job_id == number), None)
    home = Path(entry.run_dir) if entry and entry.run_dir else None
    return _Found(home and _model_of(home / inner), _remote(entry.remote_dir if entry else None, inner))


def _model_of(run: Path) -> Path | None:
    """The model's folder of a run's folder, or of itself."""
    return next((folder for folder in (run / MODEL, run) if (folder / RECORD).is_file()), None)


def _entry_of(run: Path, entries: Sequence[JobEntry]) -> JobEntry | None:
    """The submission that a collected run is of, if it was made from here."""
    token = token_of_run(run)
    return next((entry for entry in entries if entry.token == token), None)


def _remote(folder: str | None, inner: str = "") -> str | None:
    """Where the cluster has, or had, the model of a job with this folder."""
    return "/".join(filter(None, (folder, inner, MODEL))) if folder else None


def with_model(
    jobs: Sequence[JobSpec],
    chosen: ChosenModel | None,
    entries: Sequence[JobEntry],
    session: Session | None = None,
) -> tuple[Sequence[JobSpec], Source | None]:
    """The job with the model that is chosen for it, and what is sent with it. Without a choice, all as it is.

    A model on storage that the hosts share is used where it lies. ``entries`` are the ledger's. Without a
    ``session`` they are believed.

    Raises:
        UsageError: neither the cluster nor this machine has it.
        TransportError: the cluster can't be reached.
    """
    if chosen is None:
        return jobs, None
    found = _find(chosen.run, entries)
    remote = found.remote if session is None else _shared(session, found)
    if remote is None and found.here is None:
        raise _not_there(chosen.run, found)
    (job,) = jobs
    arguments = (*model_arguments(remote or MODEL, chosen), *job.args)
    sent = _sent(found.here, chosen.weights) if found.here is not None and remote is None else None
    return (job.model_copy(update={"args": arguments}),), sent


def model_arguments(folder: str, chosen: ChosenModel) -> tuple[str, ...]:
    """Of the program that uses the model in this folder."""
    return (MODEL_FLAG, folder, "--weights", chosen.weights.value)


def _shared(session: Session, found: _Found) -> str | None:
    """Where all hosts of the cluster see the model; None if they don't, or if it is not the one here."""
    if session.unshared_nodes or found.remote is None:
        return None
    looked = session.transport.run(["sha256sum", "--", f"{found.remote}/{RECORD}"], check=False)
    is_same = found.here is None or looked.stdout.startswith(file_sha256(found.here / RECORD))
    return found.remote if looked.rc == 0 and is_same else None


def _sent(model: Path, weights: Weights) -> Source:
    """The model as it goes into a job's folder, without weights that are not asked for."""
    others = {_weights_file(model, one) for one in Weights} - {_weights_file(model, weights)}
    items = [item for item in walk([model])[0] if Path(item.path).name not in others]
    items = [replace(item, path=f"{MODEL}{item.path.removeprefix(model.name)}") for item in items]
    settings = model.parent / _SETTINGS
    return Source(model.parent, (*items, *(walk([settings])[0] if settings.is_file() else ())))


def _weights_file(model: Path, weights: Weights) -> str | None:
    try:
        return str(json.loads((model / RECORD).read_bytes())["files"][weights.value]["file"])
    except (OSError, ValueError, LookupError, TypeError):  # the program says what is wrong with it
        return None


def use_here(
    job: JobSpec,
    chosen: ChosenModel,
    entries: Sequence[JobEntry],
    heard: Callable[[bytes], None],
    *,
    as_json: bool = False,
) -> None:
    """Use a model on this machine, without a cluster; ``heard`` gets what the program prints, as it comes.

    Raises:
        UsageError: the run is not here, or the program was asked for what it can't do.
        ClusterctlError: it failed.
    """
    model = _find(chosen.run, entries).here
    if model is None:
        raise UsageError(
            f"the model of run {chosen.run} is not on this machine",
            code="run-not-collected",
            why="--local uses a run that was collected",
            fix=f"`clusterctl collect {chosen.run}`, or leave out --local to use it on the cluster",
        )
    as_wanted = ("--output", "json") if as_json and job.bundled in {"sample", "predict"} else ()
    arguments = (*model_arguments(str(model), chosen), *as_wanted, *job.args)
    program = [sys.executable, "-P", "-m", "payload", str(job.bundled), *arguments]
    done = run_streamed(program, heard, env={**_surroundings(), "PAYLOAD_ERROR_CODES": "1"})
    if done.rc:
        said = (done.stderr.strip().splitlines() or [f"the program ended with {done.rc}"])[-1]
        error = _ERROR.fullmatch(said)
        kind = UsageError if done.rc == UsageError.exit_code else ClusterctlError
        raise kind(error["what"] if error else said, code=(error and error["code"]) or "")


def _no_run(run: str) -> UsageError:
    names = [path.name for path in RUNS.iterdir()] if RUNS.is_dir() else []
    return UsageError(
        f"there is no run {run!r}",
        code="unknown-run",
        why="it is no folder, no name below ./runs, and no job's id",
        fix=did_you_mean(run, names) or "`clusterctl jobs` lists the jobs, `clusterctl collect` copies runs",
    )


def _no_model(run: str, why: str, fix: str = "") -> UsageError:
    return UsageError(
        f"run {run} has no model",
        code="run-without-model",
        why=why,
        fix=f"{fix}name a run of `train`, which leaves one when it ends",
    )


def _not_there(run: str, found: _Found) -> UsageError:
    if found.remote is None:
        return UsageError(
            f"there is no job {run} with a model",
            code="unknown-job",
            fix="`clusterctl jobs` lists those submitted from here",
        )
    why = f"neither this machine nor storage that all hosts share has {found.remote}/{RECORD}"
    return _no_model(run, why, f"`clusterctl collect {run}` first; or ")
