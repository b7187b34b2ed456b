"""The job of a collected run, to be submitted again: options, arguments, files and packages as they were.

A run may come from elsewhere, so nothing in it is believed: paths, numbers and sizes are bounded, and a file
counts only with the sha256 that was sent.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ClusterShell.RangeSet import RangeSet

from clusterctl.errors import UsageError, printable
from clusterctl.jobs.source import MAX_BYTES, MAX_FILES, Source, is_taken
from clusterctl.scheduler.script import sweep_variable
from clusterctl.spec.job import BUNDLED_JOBS, JobSpec, job_of, sweep_arguments
from clusterctl.spec.job_options import JobOptions, job_options
from clusterctl.state.submissions import ENVIRONMENT_FILE, SOURCE_FILE, SWEEP_FILE
from clusterctl.transport.remote_open import read_json
from clusterctl.transport.tree import Item, Kind, hash_items
from clusterctl.util.assets import file_sha256

_OPTION: Final = re.compile(r"(?P<dashes>--?|)(?P<name>[A-Za-z][\w.-]*)(?P<value>=.*)?", re.DOTALL)
# What is not simply said again: it is changed, found anew, or about the one run.
_NOT_AGAIN: Final = frozenset({"args", "array", "container", "env", "requirements", "sweep", "tag", "note"})
_MAX_JSON: Final = 64 << 20
_MAX_PATH: Final = 4096
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")


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


def replayed(run: Path, again: Again) -> Replay:
    """The job of a run's folder, with its files where they are found.

    Raises:
        UsageError: the run does not tell its job, or files of it are nowhere on this machine as they were.
    """
    client = _mapping(_read_mapping(run, ENVIRONMENT_FILE).get("client"))
    said = _mapping(client.get("job"))
    if not said:
        raise _no_replay(run, "it has no record of what was submitted: that was done on another machine")
    lock, image = client.get("requirements"), client.get("image")
    source = _source(run, client, said)
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
    return Replay(
        job,
        source,
        lock if isinstance(lock, str) else "",
        known,
        printable(str(client.get("clusterctl") or "")),
        printable(str(client.get("payload") or "")),
        (note,) if gone else (),
    )


def _source(run: Path, client: Mapping[str, Any], said: Mapping[str, Any]) -> Source | None:
    """What was sent with the job; None if nothing was."""
    script, folder = said.get("script"), client.get("folder")
    if not script and not os.path.lexists(run / SOURCE_FILE):
        return None
    top = Path(script).parent if isinstance(script, str) else Path(folder) if isinstance(folder, str) else run
    commit = str(_mapping(client.get("git")).get("commit") or "")
    return _recover(run, run if "\0" in str(top) else top, commit if _COMMIT.fullmatch(commit) else "")


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
        raise _no_replay(run, "its record names neither a script nor a bundled job")
    kept |= _given(run, client, said)
    try:
        options = job_options({name: value for name, value in kept.items() if value not in (None, {}, [])})
        indices = job_options({"array": array} if isinstance(array, str) else {})
        job = job_of(str(target), options.given, folder=folder)
    except UsageError as exc:
        raise _no_replay(run, exc.why or exc.what) from exc
    if job.sweep is not None and [dict(values) for values in job.sweep.tasks] != _tasks(run):
        raise _no_replay(run, f"this clusterctl makes other values of its sweep than those in {SWEEP_FILE}")
    return job.model_copy(update={**indices.given, **now})


def _given(run: Path, client: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of the job: all that is not merely a default."""
    names = client.get("given")
    if not isinstance(names, list):
        raise _no_replay(run, "its record does not tell which options of the job were given")
    wanted = {name for name in names if isinstance(name, str)} & JobOptions.model_fields.keys() - _NOT_AGAIN
    return {name: said[name] for name in sorted(wanted) if said.get(name) is not None}


def _started(run: Path, said: Mapping[str, Any], again: Again) -> tuple[dict[str, Any], Any]:
    """How the program is started, with the changes; and the indices of its array."""
    args, env, array = said.get("args"), _mapping(said.get("env")), said.get("array")
    args = [one for one in args if isinstance(one, str)] if isinstance(args, list) else []
    sweep = {name: value for name, value in _mapping(said.get("sweep")).items() if value}
    sweep |= {"list": sweep.pop("cases")} if "cases" in sweep else {}
    if sweep and again.task:  # a job of its own, which is started as this task was
        values = _values(run, again.task)
        args += sweep_arguments(values)
        env |= {sweep_variable(key): value for key, value in values.items()}
        sweep, array = {}, None
    elif again.task:
        array = again.task
    listed = [key for one in _mappings(sweep.get("list")) for key in one]
    swept = {*_mapping(sweep.get("grid")), *_mapping(sweep.get("random")), *listed}
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
    return _mappings(_read_mapping(run, SWEEP_FILE).get("tasks"))


def _values(run: Path, task: str) -> dict[str, str]:
    """Those of one task."""
    values = next((one for number, one in enumerate(_tasks(run)) if str(number) == task), {})
    if not values or not all(isinstance(value, str) for value in values.values()):
        raise _no_replay(run, f"{SWEEP_FILE} does not have the values of task {printable(task[:99])}")
    return values


def _script_of(run: Path, script: str, source: Source) -> Path:
    """Where the script's content is found."""
    for item in source.files:
        if item.path == Path(script).name:
            return item.origin
    raise _no_replay(run, f"{SOURCE_FILE} does not have its script {printable(Path(script).name)}")


def _no_replay(run: Path, why: str) -> UsageError:
    return UsageError(
        f"{run.name} can't be replayed",
        code="not-replayable",
        where=str(run),
        why=why,
        fix="submit its program anew",
    )


def _read_mapping(run: Path, name: str) -> dict[str, Any]:
    """The mapping in a file of a run; UsageError if it is none, a link, or damaged."""
    try:
        return _mapping(read_json(os.fsencode(run), name.encode(), _MAX_JSON))
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or str(exc).partition("\n")[0]
        raise _no_replay(run, f"{name} can't be read: {printable(why)}") from exc


def _mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return dict(value) if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    """The same of each in a list."""
    return [_mapping(one) for one in value] if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class _File:
    """A file that was sent. ``path`` is below the folder."""

    path: str
    sha256: str
    size: int
    executable: bool


def _recover(run: Path, top: Path, commit: str) -> Source:
    """What source.json of a run lists: each file from the run, or from the folder ``top`` it was sent from.

    ``commit`` is that of the folder then; "" if it is not known.

    Raises:
        UsageError: a file is in neither as it was sent, or the list is damaged.
    """
    try:
        files, links, folders = _listed(_read_mapping(run, SOURCE_FILE))
    except ValueError as exc:
        raise _no_replay(run, f"{SOURCE_FILE} is damaged: {printable(str(exc)[:200])}") from exc
    found = _found(files, run, own=False)
    found |= _found([file for file in files if file.path not in found], top, own=True)
    if missing := [file.path for file in files if file.path not in found]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UsageError(
            f"{printable(missing[0])}{more} of {run.name} is not on this machine as it was sent",
            code="sent-files-missing",
            where=str(run / SOURCE_FILE),
            why=f"neither {run} nor {top} has it with the same sha256",
            fix=f"put it back into {top} as it was{f' in commit {commit[:12]}' if commit else ''}, "
            "or submit the program as it is now",
        )
    items = [Item(path, Kind.FOLDER, top / path, 0o755, time.time_ns()) for path in folders]
    items += [found[file.path] for file in files]
    items += [Item(path, Kind.LINK, top / path, 0o777, 0, target=target) for path, target in links.items()]
    return Source(top, tuple(items))


def _listed(document: Mapping[str, Any]) -> tuple[list[_File], dict[str, str], list[str]]:
    """The files, the links and the folders that were sent; ValueError if the list can't be followed."""
    files: list[_File] = []
    links: dict[str, str] = {}
    for row in _mappings(document.get("files")):
        path, sha256, size = _inner(row.get("path")), str(row.get("sha256")), row.get("size")
        if not _SHA256.fullmatch(sha256) or not isinstance(size, int) or size < 0:
            raise ValueError(f"it does not tell what {path} was")
        files.append(_File(path, sha256, size, row.get("executable") is True))
    for row in _mappings(document.get("links")):
        target = row.get("target")
        if not isinstance(target, str) or not 0 < len(target) <= _MAX_PATH or "\0" in target:
            raise ValueError("it does not tell where a link leads")
        links[_inner(row.get("path"))] = target
    if len(files) + len(links) > MAX_FILES or sum(file.size for file in files) > MAX_BYTES:
        raise ValueError("it lists more than a job may have")
    leaves, listed = [*(file.path for file in files), *links], document.get("folders")
    folders = {_inner(path) for path in listed} if isinstance(listed, list) else set()
    folders |= {str(above) for path in (*leaves, *folders) for above in PurePosixPath(path).parents} - {"."}
    # A file below what is a link here would be written to where that leads.
    if len({*leaves}) < len(leaves) or not folders.isdisjoint(leaves):
        raise ValueError("it has two things of one name")
    return files, links, sorted(folders)


def _inner(name: object) -> str:
    """A path below the folder, of no file of clusterctl's own."""
    path = PurePosixPath(name if isinstance(name, str) and len(name) <= _MAX_PATH else "/")
    raw = os.fsencode(path)  # UnicodeEncodeError is a ValueError
    if b"\0" in raw or path.is_absolute() or ".." in path.parts or not path.parts or is_taken(str(path)):
        raise ValueError(f"no job may have a file {name}")
    return str(path)


def _found(files: Sequence[_File], folder: Path, *, own: bool) -> dict[str, Item]:
    """The files that a folder has as they were sent. Links are followed only in the user's ``own`` folder."""
    items: list[Item] = []
    real = os.path.realpath(folder)
    for file in files:
        place = folder / file.path
        try:
            status = place.stat()
            if not own and os.path.realpath(place) != os.path.join(real, file.path):  # noqa: PTH118 - any name
                continue
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size == file.size and os.access(place, os.R_OK):
            mode = 0o755 if file.executable else 0o644
            items.append(Item(file.path, Kind.FILE, place, mode, status.st_mtime_ns, status.st_size))
    hashes, wanted = hash_items(items), {file.path: file.sha256 for file in files}
    return {item.path: item for item in items if hashes[item.origin] == wanted[item.path]}


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
