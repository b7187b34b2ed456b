"""Bundled jobs, which run clusterctl's own programs: check arguments, find trained models.

Each program's argument parser checks the arguments of its jobs. A trained model is the result of an
earlier run, on this machine or on the cluster. The model is passed to a job, or to a program on
this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Final

from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.jobs.earlier import folders_on_cluster
from clusterctl.jobs.source import Source
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import AFTER, FROM_RUN
from clusterctl.spec.program import MODEL_JOBS, Weights
from clusterctl.spec.sweep import sweep_arguments
from clusterctl.state.run_names import NamedRun, find_run
from clusterctl.transport.tree import list_items
from clusterctl.util.assets import data_folder, file_sha256
from clusterctl.util.process import Result, run, stdout_pieces

_HELP: Final = frozenset({"-h", "--help"})
# Variables of a job in which clusterctl itself may be running.
_LAUNCHERS: Final = ("SLURM_", "OMPI_", "PMI_", "PMIX_")
MODEL: Final = "model"
RECORD: Final = "model.json"
# The run's settings, which name the training data.
_SETTINGS: Final = "config.toml"
MODEL_FLAG: Final = "--model-folder"
# Options that name a model or a checkpoint, by job.
_NAMING: Final = {"eval": (MODEL_FLAG, "--out", "--resume"), "export": (MODEL_FLAG, "--checkpoint")}
# Fields of a job that set its number of ranks, and options of programs that depend on this number.
_RANKS: Final = frozenset({"ranks", "tasks_per_node"})
_OF_RANKS: Final = frozenset(
    "--tp --pp --ranks --zero --bucket-mib --overlap --compress --scale-lr".split()
)
# The packages that a bundled program needs on this machine: the extra `local`.
_ARRAYS: Final = ("numpy", "ml_dtypes")
# The rank is left out of the message because there is only one rank.
_ERROR: Final = re.compile(
    r"payload: error: (?:\[(?P<code>[\w-]*)\] )?(?:rank 0 on \S+: )?(?P<what>.*)"
)


def reject_missing(session: Session, job: JobSpec) -> None:
    """Raise UsageError if a replayed job's image, model or earlier run is not on the cluster."""
    model = next((value for flag, value in pairwise(job.args) if flag == MODEL_FLAG), "")
    send_image = "`clusterctl submit SCRIPT --container IMAGE` sends a local image"
    send_model = "`clusterctl submit JOB --run RUN` sends the model of a collected run"
    for subject, path, fix in (
        ("the image", job.container or "", send_image),
        ("the model", model and f"{model}/{RECORD}", send_model),
        (
            "the earlier run",
            job.env.get(FROM_RUN, ""),
            "`clusterctl submit --from-run RUN` sends a run",
        ),
        *(
            ("the folder of an earlier job", value, "`clusterctl submit --after ID` names another")
            for name, value in job.env.items()
            if name.startswith(AFTER)
        ),
    ):
        if not path.startswith(("/", "~/")) or (subject == "the image" and os.path.isfile(path)):
            continue
        # The command starts in the home folder.
        if session.transport.run(["test", "-e", path.removeprefix("~/")], check=False).rc:
            raise UsageError(
                f"{subject} of the job is not on this cluster",
                code="not-found",
                about="file-on-cluster",
                where=path,
                fix=fix,
            )


def reject_invalid_arguments(
    jobs: Sequence[JobSpec], chosen: ChosenModel | None = None, *, completed: bool = False
) -> None:
    """Raise UsageError if a bundled job lacks a required model, or its program would reject the
    arguments.

    The program itself checks the sizes of models and data, limits that depend on a GPU, and files
    on the cluster (such as that of --config), when it starts.
    The number of ranks is checked if the job sets it. chosen: the trained model that --run selects,
    if any.
    completed: the jobs have the arguments for the model, and their default numbers of ranks on the
    cluster. Then only arguments for a run on this machine, or that depend on these numbers, are
    checked.
    """
    reject_unless_fitting(jobs, chosen)
    model_args = model_arguments(MODEL, chosen) if chosen and not completed else ()
    lines = []
    for job in jobs:
        ranks = (job.ranks or job.tasks) if completed or job.model_fields_set & _RANKS else None
        run = _used_run(job, chosen) if job.bundled and completed else None
        for words, values in _lines(job) if job.bundled else ():
            has_word_of_ranks = not _OF_RANKS.isdisjoint(word.partition("=")[0] for word in words)
            needs_check = model_args or words or job.bundled in MODEL_JOBS
            if (has_word_of_ranks or run) if completed else needs_check:
                where = " ".join([*([job.name] if len(jobs) > 1 else []), *values])
                lines.append(
                    (job, where, [job.bundled, *model_args, *words], ranks, run and str(run))
                )
    calls = [line[2:] for line in lines]
    answers = (
        json.loads(_payload(["payload.training.fit"], json.dumps(calls)).stdout) if calls else []
    )
    for (job, where, *_), problem in zip(lines, answers, strict=True):
        if problem:
            raise UsageError(
                f"{job.bundled}: {problem}",
                about="program",
                where=where,
                fix=f"`clusterctl submit {job.bundled} -- --help` lists its arguments",
            )


def _lines(job: JobSpec) -> list[tuple[list[str], list[str]]]:
    """Return the arguments of each task of a job, and those of them that a sweep sets."""
    sweep = job.sweep
    swept = [sweep_arguments(values, sweep.form) for values in sweep.tasks] if sweep else [[]]
    return [([*job.args, *words], words) for words in swept]


def _used_run(job: JobSpec, chosen: ChosenModel | None) -> Path | None:
    """Return the local folder of the chosen model, or of the run to continue; None if missing."""
    name = chosen.run if chosen else job.from_run
    folder = find_run(name).folder if name else None
    return _model_of(folder) if chosen else folder


def bundled_job_with_help(jobs: Sequence[JobSpec]) -> str | None:
    """Return the name of the first bundled job with --help in its arguments, or None."""
    return next(
        (job.bundled for job in jobs if job.bundled and not _HELP.isdisjoint(job.args)), None
    )


def help_of(bundled: str) -> str:
    """Return the help text of a bundled job's program, rewritten for `clusterctl submit`."""
    columns = str(shutil.get_terminal_size().columns)
    done = _payload(["payload", bundled, "--help"], COLUMNS=columns)
    text = done.stdout.replace(f"python -m payload {bundled}", f"clusterctl submit {bundled} --", 1)
    if bundled in MODEL_JOBS:
        text += f"\n`clusterctl submit {bundled} --run RUN` sets --model-folder and --weights.\n"
    return text


def _local_variables() -> dict[str, str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith(_LAUNCHERS)}
    cores = str(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return {"OMP_NUM_THREADS": cores, **env, "PYTHONPATH": str(data_folder("payload").parent)}


def _payload(program: Sequence[str], stdin: str = "", **variables: str) -> Result:
    env = {**_local_variables(), **variables}
    # -S makes Python start fast, without packages: these checks need none.
    result = run([sys.executable, "-P", "-S", "-m", *program], stdin=stdin, env=env)
    if result.rc:
        reason = (result.stderr.strip().splitlines() or [f"it ended with {result.rc}"])[-1]
        raise ClusterctlError(
            "the arguments of the bundled job could not be checked",
            about="program",
            why=reason,
        )
    return result


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The trained model of a run. run: its folder, the folder's name in ./runs, or the job id."""

    run: str
    weights: Weights


def reject_unless_fitting(jobs: Sequence[JobSpec], chosen: ChosenModel | None) -> None:
    """Raise UsageError if a job lacks the model that it needs, or can't use the ``chosen`` model of
    --run.
    """
    for job in jobs:
        if chosen is not None and (job.bundled not in MODEL_JOBS or len(jobs) > 1):
            raise UsageError(
                "--run names the run with the model for a single job of type "
                f"{', '.join(MODEL_JOBS)}",
                about="option-missing",
                fix="leave out --run, or submit a single such job",
            )
        naming = _NAMING.get(job.bundled or "", (MODEL_FLAG,))
        named = chosen or any(word.partition("=")[0] in naming for word in job.args)
        if job.bundled in MODEL_JOBS and not named:
            checkpoint = f"; or a checkpoint: `-- {naming[-1]} DIR`" if naming[1:] else ""
            raise UsageError(
                f"{job.bundled} needs a trained model: clusterctl submit {job.bundled} --run RUN",
                about="trained-model",
                fix="RUN is a collected run's folder, its name below ./runs, or a job "
                f"id{checkpoint}",
            )


def _model_of(run: Path | None) -> Path | None:
    """Return the folder that contains a model: ``run``/model or ``run`` itself; otherwise None."""
    folders = (run / MODEL, run) if run is not None else ()
    return next((folder for folder in folders if (folder / RECORD).is_file()), None)


def with_model(
    jobs: Sequence[JobSpec],
    chosen: ChosenModel | None,
    cluster: str,
    session: Session | None = None,
) -> tuple[Sequence[JobSpec], Source | None]:
    """Return the jobs with arguments for the chosen model, and the model's files to send with the
    job.

    The files are None if the cluster's shared folder has the model, or if ``chosen`` is None.

    cluster: where the jobs will run. session: to check that the cluster has the model.

    Raises:
        UsageError: neither the cluster nor this machine has the model.
        TransportError: the cluster can't be reached.
    """
    if chosen is None:
        return jobs, None
    named = find_run(chosen.run)
    here = _model_of(named.folder)
    remote = f"{folder}/{MODEL}" if (folder := named.remote_on(cluster)) else None
    if session is not None:
        remote = _shared_path(session, named, here)
    if remote is None and here is None:
        raise _missing_model(named, session)
    (job,) = jobs
    args = (*model_arguments(remote or MODEL, chosen), *job.args)
    sent = _model_files(here, chosen.weights) if here is not None and remote is None else None
    return (job.model_copy(update={"args": args}),), sent


def model_arguments(folder: str, chosen: ChosenModel) -> tuple[str, ...]:
    """Return the arguments that make a bundled program load the model in ``folder``."""
    return (MODEL_FLAG, folder, "--weights", chosen.weights.value)


def _shared_path(session: Session, run: NamedRun, here: Path | None) -> str | None:
    """Return the model's path in the shared folder; None if it is missing or is not the model
    ``here``.
    """
    sha256 = file_sha256(here / RECORD) if here is not None else ""
    for folder in folders_on_cluster(session, run):
        argv = ["sh", "-c", 'sha256sum <"$1"', "sh", f"{folder}/{MODEL}/{RECORD}"]
        looked = session.transport.run(argv, check=False)
        if looked.rc == 0 and looked.stdout.startswith(sha256):
            return f"{folder}/{MODEL}"
    return None


def _model_files(model: Path, weights: Weights) -> Source:
    """Return a model's files to send with a job, without the weights that the job does not use."""
    unused_weights = {_weights_file(model, kind) for kind in Weights} - {
        _weights_file(model, weights)
    }
    items = [item for item in list_items([model])[0] if Path(item.path).name not in unused_weights]
    items = [replace(item, path=f"{MODEL}{item.path.removeprefix(model.name)}") for item in items]
    settings = model.parent / _SETTINGS
    return Source(
        model.parent, (*items, *(list_items([settings])[0] if settings.is_file() else ()))
    )


def _weights_file(model: Path, weights: Weights) -> str | None:
    try:
        return str(json.loads((model / RECORD).read_bytes())["files"][weights.value]["file"])
    except (OSError, ValueError, LookupError, TypeError):
        # The job's program reports a damaged model itself.
        return None


def run_on_this_machine(
    job: JobSpec,
    chosen: ChosenModel,
    *,
    as_json: bool = False,
) -> Generator[bytes, None, None]:
    """Run a bundled job's program with a model on this machine, and yield its output as it arrives.

    as_json: the program prints JSON, if it can.

    Raises:
        UsageError: the run is not on this machine, the packages of the extra `local` are missing,
            or the program rejects its arguments.
        ClusterctlError: the program failed.
    """
    named = find_run(chosen.run)
    if (model := _model_of(named.folder)) is None:
        raise _missing_model(named)
    if missing := [name for name in _ARRAYS if find_spec(name) is None]:
        raise UsageError(
            f"--local needs packages that are not installed here: {', '.join(missing)}",
            code="tool-missing",
            about="local",
            fix="pip install 'clusterctl[local]'",
        )
    output_option = ("--output", "json") if as_json and job.bundled in {"sample", "predict"} else ()
    arguments = (*model_arguments(str(model), chosen), *output_option, *job.args)
    program = [sys.executable, "-P", "-m", "payload", str(job.bundled), *arguments]
    result = yield from stdout_pieces(
        program, env={**_local_variables(), "PAYLOAD_ERROR_CODES": "1"}
    )
    if result.rc:
        last_line = (result.stderr.strip().splitlines() or [f"the program ended with {result.rc}"])[
            -1
        ]
        error = _ERROR.fullmatch(last_line)
        what = error["what"] if error else last_line
        about = (error and error["code"]) or ""
        if result.rc == UsageError.exit_code:
            raise UsageError(what, about=about)
        raise ClusterctlError(what, code="job-failed", about=about)


def _missing_model(run: NamedRun, session: Session | None = None) -> UsageError:
    """Return the error for a run without a model, or one that must be collected before its use."""
    is_there = (
        session is not None
        and session.site.folders.are_one
        and run.cluster == session.ledger.cluster
    )
    if run.folder is None and not is_there:
        return run.not_collected()
    places = [str(run.folder)] if run.folder else []
    if session and (folder := run.remote_on(session.ledger.cluster)):
        places.append(f"{folder} on the cluster")
    return UsageError(
        f"run {run.name} has no model",
        about="model",
        why=f"there is no {MODEL}/{RECORD} in {' or '.join(places) or 'the folder of its job'}",
        fix="use a run of `train`, which saves a model when it ends",
    )
