"""The job of a collected run, to be submitted again: options, arguments, files and packages as they were."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ClusterShell.RangeSet import RangeSet

from clusterctl.errors import UsageError, printable
from clusterctl.jobs.recover import mapping, mappings, no_replay, read_mapping, recover
from clusterctl.jobs.source import Source
from clusterctl.jobs.trained import MODEL_FLAG, RECORD
from clusterctl.scheduler.script import sweep_variable
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import BUNDLED_JOBS, JobSpec, job_of
from clusterctl.spec.job_options import JobOptions, job_options
from clusterctl.spec.sweep import arguments
from clusterctl.state.submissions import ENVIRONMENT_FILE, SOURCE_FILE, SWEEP_FILE
from clusterctl.util.assets import file_sha256
from clusterctl.util.process import temporary_folder

_OPTION: Final = re.compile(r"(?P<dashes>--?|)(?P<name>[A-Za-z][\w.-]*)(?P<value>=.*)?", re.DOTALL)
# What is not simply said again: it is changed, found anew, or about the one run.
_NOT_AGAIN: Final = frozenset({"args", "array", "container", "env", "requirements", "sweep", "tag", "note"})


@dataclass(frozen=True, slots=True)
class Again:
    """What of a run is to be submitted again, and what is to be changed.

    ``token`` is that of the original run. ``task`` is the number of one task of an array, ``indices`` are
    those of its tasks that had not completed. ``changes`` are options of the program, ``flags`` of `submit`.
    """

    token: str
    task: str = ""
    indices: Sequence[int] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replay:
    """The job, and what is sent with it.

    ``lock`` is the text of its environment's lock, "" where it had none. ``known`` are facts of the original,
    which its replay records as its own. ``version`` is that of the clusterctl which submitted the original,
    ``payload`` the hash of its bundled programs. ``notes`` are worth saying to the user.
    """

    job: JobSpec
    source: Source | None
    lock: str
    known: Mapping[str, Any]
    version: str
    payload: str
    notes: tuple[str, ...]


@contextmanager
def replayed(run: Path, again: Again) -> Iterator[Replay]:
    """The job of a run's folder, with its files where they are found.

    Raises:
        UsageError: the run does not tell its job, or files of it are nowhere on this machine as they were.
    """
    client = mapping(read_mapping(run, ENVIRONMENT_FILE).get("client"))
    said = mapping(client.get("job"))
    if not said:
        raise no_replay(run, "it has no record of what was submitted: that was done on another machine")
    lock, image = client.get("requirements"), client.get("image")
    with temporary_folder() as temporary:
        source = _source(run, client, said, temporary)
        here = _image(image, said.get("container"))
        gone = image is not None and here is None
        note = f"{printable(str(image))} is not here as it was: the cluster's copy is used"
        job = _job(run, client, {**said, "container": here or said.get("container")}, again, source)
        known = {
            "job": {"script": said.get("script")},
            "git": client.get("git"),
            "folder": client.get("folder"),
            "replay_of": again.token,
            **({"of_failed": True} if again.indices else {}),
        }
        yield Replay(
            job,
            source,
            lock if isinstance(lock, str) else "",
            known,
            printable(str(client.get("clusterctl") or "")),
            printable(str(client.get("payload") or "")),
            (note,) if gone else (),
        )


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


def _source(run: Path, client: Mapping[str, Any], said: Mapping[str, Any], temporary: Path) -> Source | None:
    """What was sent with the job; None if nothing was."""
    script, folder = said.get("script"), client.get("folder")
    if not script and not os.path.lexists(run / SOURCE_FILE):
        return None
    top = Path(script).parent if isinstance(script, str) else Path(folder) if isinstance(folder, str) else run
    return recover(run, run if "\0" in str(top) else top, mapping(client.get("git")), temporary)


def _image(image: Any, there: Any) -> str | None:
    """The image on this machine, if it is the one whose place on the cluster is named by its hash."""
    if isinstance(image, str) and isinstance(there, str) and os.path.isfile(image):  # noqa: PTH113 - any name
        return image if file_sha256(Path(image)) in there else None
    return None


def _job(
    run: Path, client: Mapping[str, Any], said: Mapping[str, Any], again: Again, source: Source | None
) -> JobSpec:
    """The job with what had been said of it, and what is said now."""
    now = job_options(again.flags).given
    kept, array = _started(run, said, again)
    if again.indices:
        kept |= {key: said[key] for key in ("tag", "note") if said.get(key)}
        array = str(RangeSet(again.indices)) + "".join(str(array or "").partition("%")[1:])
    target, folder = said.get("bundled"), Path()
    if source is not None and said.get("script"):
        script = _script_of(run, str(said["script"]), source)
        target, folder = f"./{script.name}", script.parent
    elif target not in BUNDLED_JOBS:
        raise no_replay(run, "its record names neither a script nor a bundled job")
    kept |= _given(client, said)
    try:
        options = job_options({name: value for name, value in kept.items() if value not in (None, {}, [])})
        indices = job_options({"array": array} if isinstance(array, str) else {})
        job = job_of(str(target), options.given, folder=folder)
    except UsageError as exc:
        raise no_replay(run, exc.why or exc.what) from exc
    if job.sweep is not None and [dict(values) for values in job.sweep.tasks] != _tasks(run):
        raise no_replay(run, f"this clusterctl makes other values of its sweep than those in {SWEEP_FILE}")
    return job.model_copy(update={**indices.given, **now})


def _given(client: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of the job: all that is not merely a default."""
    fields, names = JobOptions.model_fields, client.get("given")
    if not isinstance(names, list):  # the record of an older version: what is no default was said
        names = [name for name, one in fields.items() if said.get(name) not in (None, [], {}, one.default)]
    wanted = {name for name in names if isinstance(name, str)} & fields.keys() - _NOT_AGAIN
    return {name: said[name] for name in sorted(wanted) if said.get(name) is not None}


def _started(run: Path, said: Mapping[str, Any], again: Again) -> tuple[dict[str, Any], Any]:
    """How the program is started, with the changes; and the indices of its array."""
    args, env, array = said.get("args"), mapping(said.get("env")), said.get("array")
    args = [one for one in args if isinstance(one, str)] if isinstance(args, list) else []
    sweep = {name: value for name, value in mapping(said.get("sweep")).items() if value}
    sweep |= {"list": sweep.pop("cases")} if "cases" in sweep else {}
    if sweep and again.task:  # a job of its own, which is started as this task was
        values = _values(run, again.task)
        args += arguments(values)
        env |= {sweep_variable(key): value for key, value in values.items()}
        sweep, array = {}, None
    elif again.task:
        array = again.task
    listed = [key for one in mappings(sweep.get("list")) for key in one]
    swept = {*mapping(sweep.get("grid")), *mapping(sweep.get("random")), *listed}
    if key := next((key for key in again.changes if key in swept), None):
        raise UsageError(
            f"each task of {run.name} has a {key} of its own",
            code="key-of-each-task",
            fix=f"name a task: `clusterctl replay RUN_3 --set {key}=VALUE`",
        )
    env = {name: value for name, value in env.items() if isinstance(value, str)}  # none of this machine's
    args = with_changes(args, again.changes)
    return {"args": args, "env": env, "sweep": sweep, "container": said.get("container")}, array


def _tasks(run: Path) -> list[dict[str, Any]]:
    """The values of each task of a sweep."""
    return mappings(read_mapping(run, SWEEP_FILE).get("tasks"))


def _values(run: Path, task: str) -> dict[str, str]:
    """Those of one task."""
    values = next((one for number, one in enumerate(_tasks(run)) if str(number) == task), {})
    if not values or not all(isinstance(value, str) for value in values.values()):
        raise no_replay(run, f"{SWEEP_FILE} does not have the values of task {printable(task[:99])}")
    return values


def _script_of(run: Path, script: str, source: Source) -> Path:
    """Where the script's content is found."""
    for item in source.files:
        if item.path == Path(script).name:
            return item.origin
    raise no_replay(run, f"{SOURCE_FILE} does not have its script {printable(Path(script).name)}")


def with_changes(args: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """Arguments with other values of options, given as ``--lr 0.1``, ``--lr=0.1`` or ``lr=0.1``.

    ``true`` is the option alone, ``false`` leaves it out, as in a sweep. New options come last, but before
    a ``--``.
    """
    names = {key.replace("_", "-"): key for key in changes}
    rest, words, done = list(args), [], set()
    while rest and rest[0] != "--":
        word = rest.pop(0)
        match = _OPTION.fullmatch(word)
        key = names.get(match["name"].replace("_", "-")) if match else None
        if match is None or key is None or not (match["dashes"] or match["value"]):
            words.append(word)
            continue
        if match["value"] is None and rest and not _is_option(rest[0]):
            rest.pop(0)
        if key not in done:  # of an option that is repeated, the first gets the value, and the others go
            done.add(key)
            words += _words(match["dashes"] + match["name"], changes[key], joined=match["value"] is not None)
    for key in changes:
        words += _words(f"--{key}", changes[key], joined=False) if key not in done else []
    return words + rest


def _is_option(word: str) -> bool:
    match = _OPTION.fullmatch(word)
    return word == "--" or (match is not None and match["dashes"] != "")


def _words(option: str, value: str, *, joined: bool) -> list[str]:
    if joined:
        return [f"{option}={value}"]
    if value in {"true", "false"}:
        return [option] if value == "true" else []
    return [f"{option}={value}"] if _is_option(value) else [option, value]
