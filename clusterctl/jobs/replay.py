"""Rebuild a collected run's job, with its options, arguments, files, packages, to submit it.

A run may come from another person, so its content is not trusted: paths, numbers and sizes are
limited, and a file is used only if it has the recorded sha256.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ClusterShell.RangeSet import RangeSet

from clusterctl.errors import Notice, UsageError, printable
from clusterctl.jobs.source import (
    MAX_BYTES,
    MAX_FILES,
    Source,
    source_of,
    without_unnamed_secrets,
)
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.sites.script import sweep_variable
from clusterctl.spec.job import JobSpec, Project, job_of
from clusterctl.spec.job_options import Resubmission, job_options, options_with, quantities_of
from clusterctl.spec.metrics import goal_of
from clusterctl.spec.program import BUNDLED_JOBS, is_module
from clusterctl.spec.sbatch import SINGLETON, directives_of, quoted
from clusterctl.spec.sweep import ArgumentForm, are_pairs, configured_name, sweep_arguments
from clusterctl.state.ledger import ENVIRONMENT_FILE, SOURCE_FILE, SWEEP_FILE, run_path
from clusterctl.transport.remote_open import read_json
from clusterctl.transport.tree import Item, ItemKind, hash_items
from clusterctl.util.assets import file_sha256

_OPTION: Final = re.compile(
    r"(?P<dashes>--?|\+{0,2})(?P<name>[A-Za-z][\w./@-]*)(?P<value>=.*)?", re.DOTALL
)
_MAX_JSON: Final = 64 << 20
_MAX_PATH: Final = 4096
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")


class ReplayCode(StrEnum):
    """The files of a replayed script: those sent with the run, or its folder's current files."""

    SENT = "sent"
    CURRENT = "current"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The part of a run to submit again, and the changes.

    token: the identifier of the original run.
    task: the number of a single task of an array. Empty: the whole run.
    indices: numbers of the array's incomplete tasks, to run only these. Empty: all tasks.
    changes: new values of the program's options. flags: new values of options of `submit`.
    """

    token: str
    task: str = ""
    indices: Sequence[int] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)
    code: ReplayCode = ReplayCode.SENT


@dataclass(frozen=True, slots=True)
class Replay:
    """A job to submit again, with its files.

    lock: a text with the exact versions of the job's Python packages. Empty: no packages.
    known: entries for the new job's record (environment.client.json), such as the original git
        commit.
    version, payload: clusterctl's version at the original submission, and the hash of its bundled
        programs.
    notes: messages for the user.
    changed_files: path, shortened sha256 in the run, and now, of files that differ. None: no such
        file.
    """

    job: JobSpec
    source: Source | None
    lock: str
    known: Mapping[str, Any]
    version: str
    payload: str
    notes: tuple[str, ...]
    changed_files: tuple[tuple[str, str | None, str | None], ...] = ()


def replay_job(run: Path, again: ReplayRequest) -> Replay:
    """Rebuild the job of the collected run in ``run``. Files come from there or their origin.

    Raises UsageError if the run does not list its job's options, or a file is missing or changed.
    With ``ReplayCode.CURRENT``, only the script must exist.
    """
    client = _mapping(_read_mapping(run, ENVIRONMENT_FILE).get("client"))
    options = _mapping(client.get("job"))
    if not options:
        raise _no_replay(
            run, "the job was submitted from another machine, which has its options and files"
        )
    lock = client.get("requirements")
    image = client.get("image")
    # A bundled job has no files of its own, but may have a model that was sent.
    has_script = bool(options.get("script"))
    is_current = again.code is ReplayCode.CURRENT and has_script
    source = None if is_current else _source(run, client, options)
    local_image = _image(image, options.get("container"))
    job = _job(
        run,
        client,
        {**options, "container": local_image or options.get("container")},
        again,
        source,
    )
    if is_current:
        source = source_of(Request.read(job))
    elif source is not None and has_script:
        # A run may be of a version that sent all files.
        source = without_unnamed_secrets(replace(source, script=job.place.script), job.include)
    notes = [] if image is None or local_image is not None else [_image_notice(image)]
    if again.code is ReplayCode.CURRENT and not has_script:
        text = (
            "--code current changes nothing: a bundled job always runs the programs of this "
            "clusterctl"
        )
        notes.append(Notice("code-of-bundled-job", text))
    if (
        has_script
        and not is_current
        and source is not None
        and (changed := _changed_here(run, source))
    ):
        notes.append(_code_notice(changed, source.folder))
    original = {key: client.get(key) for key in ("git", "folder")}
    original |= {"job": {"script": options.get("script"), "folder": options.get("folder")}}
    facts = {
        **({"code": ReplayCode.CURRENT} if is_current else original),
        "replay_of": again.token,
        **({"of_failed": True} if again.indices else {}),
    }
    return Replay(
        job,
        source,
        lock if isinstance(lock, str) else "",
        facts,
        printable(str(client.get("clusterctl") or "")),
        printable(str(client.get("payload") or "")),
        tuple(notes),
        _changed_files(run, source) if is_current and source is not None else (),
    )


def _image_notice(image: object) -> Notice:
    text = (
        f"{printable(str(image))} is missing or changed on this machine; the cluster's copy is used"
    )
    return Notice("image-of-the-cluster", text)


def _code_notice(changed: Sequence[str], folder: Path) -> Notice:
    more = f" and {len(changed) - 1} more" if changed[1:] else ""
    return Notice(
        "code-changed-since",
        f"{printable(changed[0])}{more} in {folder} changed after the submission; the replay "
        "uses the files that were sent, and with `--code current` those of today",
    )


def _changed_here(run: Path, source: Source) -> list[str]:
    """Return the paths of a run's files that exist with other content in the folder that they came
    from.
    """
    files = _parse_source(_read_mapping(run, SOURCE_FILE))[0]
    changed = [file for file in files if os.path.lexists(source.folder / file.path)]
    same = _matching_files(changed, source.folder, own=True)
    return [file.path for file in changed if file.path not in same]


def _changed_files(run: Path, source: Source) -> tuple[tuple[str, str | None, str | None], ...]:
    """Return path, sha256 in the run and now of the files that differ, with shortened hashes."""
    hashes = hash_items(source.files)
    now = {item.path: hashes[item.origin] for item in source.files}
    rows = _mappings(_read_mapping(run, SOURCE_FILE).get("files"))
    sent = {str(row.get("path")): str(row.get("sha256")) for row in rows}
    return tuple(
        (
            printable(path),
            sent[path][:12] if path in sent else None,
            now[path][:12] if path in now else None,
        )
        for path in sorted(sent.keys() | now.keys())
        if sent.get(path) != now.get(path)
    )


def _source(run: Path, client: Mapping[str, Any], options: Mapping[str, Any]) -> Source | None:
    script = options.get("script")
    folder = client.get("folder")
    if not script and not os.path.lexists(run / SOURCE_FILE):
        return None
    top = (
        Path(folder)
        if isinstance(folder, str)
        else Path(script).parent
        if isinstance(script, str)
        else run
    )
    commit = str(_mapping(client.get("git")).get("commit") or "")
    return _recover(
        run, run if "\0" in str(top) else top, commit if _COMMIT.fullmatch(commit) else ""
    )


def _image(image: Any, remote_path: Any) -> str | None:
    """Return ``image`` if it is a local file and ``remote_path`` contains the file's sha256; else
    None.
    """
    # Unlike Path, this takes any name.
    if isinstance(image, str) and isinstance(remote_path, str) and os.path.isfile(image):
        return image if file_sha256(Path(image)) in remote_path else None
    return None


def _job(
    run: Path,
    client: Mapping[str, Any],
    recorded: Mapping[str, Any],
    again: ReplayRequest,
    source: Source | None,
) -> JobSpec:
    new_options = job_options(again.flags).given
    kept, array = _start_options(run, recorded, again)
    if again.indices:
        kept |= {key: recorded[key] for key in ("tag", "note") if recorded.get(key)}
        array = str(RangeSet(again.indices)) + "".join(str(array or "").partition("%")[1:])
    target = recorded.get("bundled")
    folder = Path()
    project = None
    if source is not None and recorded.get("script"):
        project = _project(run, recorded, source.folder)
        script = _script_of(run, project.script, source)
        target = f"./{script.name}"
        folder = script.parent
    elif again.code is ReplayCode.CURRENT and recorded.get("script"):
        target = str(recorded["script"])
        # Unlike Path, this takes any name.
        if not os.path.isfile(target):
            raise _no_replay(run, f"the script {printable(target)} is not on this machine")
        project = _project(run, recorded, Path(str(client.get("folder") or Path(target).parent)))
    elif target not in BUNDLED_JOBS:
        raise _no_replay(run, f"{ENVIRONMENT_FILE} has neither a script nor a bundled job")
    kept |= _given_options(run, client, recorded)
    after = recorded.get("after")
    if isinstance(after, list) and SINGLETON in after:
        kept["after"] = [SINGLETON]
    if again.task:
        kept.pop("pack", None)
    # The run has the names of its secrets. Their values come from this machine again.
    new_secrets = new_options.pop("secret", {})
    names = recorded.get("secret")
    names = [name for name in names if name not in new_secrets] if isinstance(names, list) else []
    # A value that is missing now is no fault of the run.
    kept["secret"] = job_options({"secret": names}).secret
    try:
        options = job_options(
            {name: value for name, value in kept.items() if value not in (None, {}, [])}
        )
        indices = job_options({"array": array} if isinstance(array, str) else {})
        job = job_of(str(target), _given_again(options.given, new_options), folder=folder)
    except UsageError as exc:
        raise _no_replay(run, exc.why or exc.what) from exc
    if job.sweep is not None and [dict(values) for values in job.sweep.tasks] != _tasks(run):
        raise _no_replay(
            run, f"this version of clusterctl computes other sweep values than {SWEEP_FILE} has"
        )
    if project is not None and recorded.get("project"):
        new_options |= {"project": project, "run_module": _module(recorded)}
    if again.code is ReplayCode.CURRENT and recorded.get("folder") is False:
        new_options |= {"folder": False}
    if new_secrets:
        new_options["secret"] = {**job.secret, **new_secrets}
    return job.model_copy(update={**indices.given, **new_options})


def _given_again(given: dict[str, Any], replaced: Iterable[str]) -> dict[str, Any]:
    """Return options without those of --slurm that name other jobs or a time, or set a ``replaced``
    quantity.
    """
    slurm: list[str] = []
    for request in directives_of(given.get("slurm", ())):
        if "--dependency" in request.quantities:
            if SINGLETON in re.split("[,?]", str(request.value)):
                slurm.append(f"--dependency={SINGLETON}")
        elif request.option and request.option.clock:
            continue
        elif remaining := request.without(quantities_of(replaced)):
            slurm.append(quoted(str(remaining)))
    return given | {"slurm": tuple(slurm)} if "slurm" in given else given


def _project(run: Path, recorded: Mapping[str, Any], folder: Path) -> Project:
    """Return the script's place in the files of a run, which are in ``folder``.

    Raises UsageError if the run's record is damaged.
    """
    place = _mapping(recorded.get("project"))
    script = place.get("script")
    start = place.get("start", ".")
    roots = place.get("roots", [])
    try:
        paths = ["." if path == "." else _checked_path(path) for path in (start, *roots)]
        script = _checked_path(Path(str(recorded["script"])).name if script is None else script)
    except (ValueError, TypeError) as exc:
        raise _no_replay(
            run, f"{ENVIRONMENT_FILE} is damaged: {printable(str(exc)[:200])}"
        ) from exc
    return Project(folder, script, paths[0], tuple(paths[1:]))


def _module(recorded: Mapping[str, Any]) -> str | None:
    module = recorded.get("run_module")
    return module if isinstance(module, str) and is_module(module) else None


def _given_options(
    run: Path, client: Mapping[str, Any], recorded: Mapping[str, Any]
) -> dict[str, Any]:
    names = client.get("given")
    if not isinstance(names, list):
        raise _no_replay(run, f"{ENVIRONMENT_FILE} does not list the options of the submission")
    given = {name for name in names if isinstance(name, str)}
    given &= {*options_with(again=Resubmission.REPEATED)}
    return {name: recorded[name] for name in sorted(given) if recorded.get(name) is not None}


def _start_options(
    run: Path, recorded: Mapping[str, Any], again: ReplayRequest
) -> tuple[dict[str, Any], Any]:
    """Return the job's args, env, sweep and container with the changes (name -> value), and its
    --array.
    """
    args = recorded.get("args")
    env = _mapping(recorded.get("env"))
    array = recorded.get("array")
    args = [arg for arg in args if isinstance(arg, str)] if isinstance(args, list) else []
    sweep = {name: value for name, value in _mapping(recorded.get("sweep")).items() if value}
    if "cases" in sweep:
        sweep["list"] = sweep.pop("cases")
    if "metric" in sweep and "goal" not in sweep and goal_of(str(sweep["metric"])) is None:
        # An earlier version took lower values for better, and recorded that.
        sweep |= {"goal": _read_mapping(run, SWEEP_FILE).get("goal")}
    form = sweep.get("form")
    # A single task of a sweep becomes a job without a sweep.
    if sweep and again.task:
        values = _values(run, again.task)
        args += sweep_arguments(values, form)
        env |= {sweep_variable(key): value for key, value in values.items()}
        sweep = {}
        array = None
    elif again.task:
        array = again.task
    listed_keys = [key for case in _mappings(sweep.get("list")) for key in case]
    keys = (*_mapping(sweep.get("grid")), *_mapping(sweep.get("random")), *listed_keys)
    swept = set(map(configured_name, keys))
    if key := next((key for key in again.changes if configured_name(key) in swept), None):
        raise UsageError(
            f"--set {key} is ambiguous, because each task of {run.name} has its own value",
            about="task-key",
            fix=f"replay a single task, such as `clusterctl replay RUN_3 --set {key}=VALUE`",
        )
    # Variables without a value would take this machine's value.
    env = {name: value for name, value in env.items() if isinstance(value, str)}
    args = with_changes(args, again.changes, pairs=form == ArgumentForm.PAIR or are_pairs(args))
    return {"args": args, "env": env, "sweep": sweep, "container": recorded.get("container")}, array


def _tasks(run: Path) -> list[dict[str, Any]]:
    return _mappings(_read_mapping(run, SWEEP_FILE).get("tasks"))


def _values(run: Path, task: str) -> dict[str, str]:
    values = next(
        (task_values for number, task_values in enumerate(_tasks(run)) if str(number) == task), {}
    )
    if not values or not all(isinstance(value, str) for value in values.values()):
        raise _no_replay(
            run, f"{SWEEP_FILE} does not have the values of task {printable(task[:99])}"
        )
    return values


def _script_of(run: Path, script: str, source: Source) -> Path:
    for item in source.files:
        if item.path == script:
            return item.origin
    raise _no_replay(run, f"{SOURCE_FILE} does not list the script {printable(script)}")


def _no_replay(run: Path, reason: str) -> UsageError:
    return UsageError(
        f"{run.name} can't be replayed",
        code="not-replayable",
        where=str(run),
        why=reason,
        fix="submit the program as a new job with `clusterctl submit`",
    )


def _read_mapping(run: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a run. UsageError: the file is missing or damaged."""
    try:
        return _mapping(read_json(os.fsencode(run), name.encode(), _MAX_JSON))
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc).partition("\n")[0]
        raise _no_replay(run, f"{name} can't be read: {printable(reason)}") from exc


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    """Return a list of mappings, with an empty mapping for each item of another type."""
    return [_mapping(item) for item in value] if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class _File:
    """A submitted file. ``path`` is relative to the script's folder."""

    path: str
    sha256: str
    size: int
    executable: bool


def _recover(run: Path, top: Path, commit: str) -> Source:
    """Return the files in a run's source.json, taken from ``run`` or the original ``top``.

    commit: the git commit of ``top`` at submission. Empty: unknown. Raises UsageError if a file is
        missing or changed in both folders.
    """
    try:
        files, links, folders = _parse_source(_read_mapping(run, SOURCE_FILE))
    except ValueError as exc:
        raise _no_replay(run, f"{SOURCE_FILE} is damaged: {printable(str(exc)[:200])}") from exc
    items_found = _matching_files(files, run, own=False)
    items_found |= _matching_files(
        [file for file in files if file.path not in items_found], top, own=True
    )
    if missing := [file.path for file in files if file.path not in items_found]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UsageError(
            f"{printable(missing[0])}{more} of {run.name} is missing or changed on this machine",
            code="not-replayable",
            about="files",
            where=str(run / SOURCE_FILE),
            why=f"neither {run} nor {top} has the file with the recorded sha256",
            fix=f"restore the file in {top}{f' from commit {commit[:12]}' if commit else ''}, "
            "or replay with the current files: --code current",
        )
    items = [Item(path, ItemKind.FOLDER, top / path, 0o755, time.time_ns()) for path in folders]
    items += [items_found[file.path] for file in files]
    items += [
        Item(path, ItemKind.LINK, top / path, 0o777, 0, target=target)
        for path, target in links.items()
    ]
    return Source(top, tuple(items))


def _parse_source(document: Mapping[str, Any]) -> tuple[list[_File], dict[str, str], list[str]]:
    """Return the files, links (path -> target), folders of a source.json. ValueError: malformed."""
    files: list[_File] = []
    links: dict[str, str] = {}
    for row in _mappings(document.get("files")):
        path = _checked_path(row.get("path"))
        sha256 = str(row.get("sha256"))
        size = row.get("size")
        if not _SHA256.fullmatch(sha256) or not isinstance(size, int) or size < 0:
            raise ValueError(f"size or sha256 of {path} is missing")
        files.append(_File(path, sha256, size, row.get("executable") is True))
    for row in _mappings(document.get("links")):
        target = row.get("target")
        if not isinstance(target, str) or not 0 < len(target) <= _MAX_PATH or "\0" in target:
            raise ValueError("the target of a link is missing")
        links[_checked_path(row.get("path"))] = target
    if len(files) + len(links) > MAX_FILES or sum(file.size for file in files) > MAX_BYTES:
        raise ValueError("it lists more files or bytes than a job may have")
    leaves = [*(file.path for file in files), *links]
    listed = document.get("folders")
    folders = {_checked_path(path) for path in listed} if isinstance(listed, list) else set()
    folders |= {
        str(parent) for path in (*leaves, *folders) for parent in PurePosixPath(path).parents
    } - {"."}
    # If a folder were a link, files below it would be written to the link's target.
    if len({*leaves}) < len(leaves) or not folders.isdisjoint(leaves):
        raise ValueError("it has two entries with the same name")
    return files, links, sorted(folders)


def _checked_path(name: object) -> str:
    """Return ``name``. Raises ValueError if it leads out of the program's folder."""
    path = PurePosixPath(name if isinstance(name, str) and len(name) <= _MAX_PATH else "/")
    raw = os.fsencode(path)
    if b"\0" in raw or path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"a job can't have a file {name}")
    return str(path)


def _matching_files(files: Sequence[_File], folder: Path, *, own: bool) -> dict[str, Item]:
    """Return path -> file for those ``files`` with an unchanged copy in ``folder``. own: follow
    links.
    """
    items: list[Item] = []
    real = os.path.realpath(folder)
    for file in files:
        # A run's folder also has clusterctl's files.
        name = file.path if own else os.fsdecode(run_path(os.fsencode(file.path)))
        path = folder / name
        try:
            status = path.stat()
            # Unlike Path, this takes any name.
            if not own and os.path.realpath(path) != os.path.join(real, name):
                continue
        except (OSError, ValueError):
            continue
        if (
            stat.S_ISREG(status.st_mode)
            and status.st_size == file.size
            and os.access(path, os.R_OK)
        ):
            mode = stat.S_IMODE(status.st_mode) & 0o666
            if file.executable:
                mode |= mode >> 2 & 0o111
            items.append(
                Item(file.path, ItemKind.FILE, path, mode, status.st_mtime_ns, status.st_size)
            )
    hashes = hash_items(items)
    expected = {file.path: file.sha256 for file in files}
    return {item.path: item for item in items if hashes[item.origin] == expected[item.path]}


def with_changes(args: Sequence[str], changes: Mapping[str, str], *, pairs: bool) -> list[str]:
    """Change options in arguments, which may look like ``--lr 0.1``, ``--lr=0.1``, ``lr=0.1``.

    The value ``true`` means the option without a value. ``false`` removes the option, as in a
    sweep. Options that are not in ``args`` are added at the end, but before a ``--``; with
    ``pairs`` in the form ``lr=1``.
    """
    names = {key.replace("_", "-"): key for key in changes}
    remaining = list(args)
    words = []
    done = set()
    while remaining and remaining[0] != "--":
        word = remaining.pop(0)
        match = _OPTION.fullmatch(word)
        key = names.get(match["name"].replace("_", "-")) if match else None
        if match is None or key is None or not (match["dashes"] or match["value"]):
            words.append(word)
            continue
        if match["value"] is None and remaining and not _is_option(remaining[0]):
            remaining.pop(0)
        # The first occurrence of a repeated option gets the value. Later occurrences are removed.
        if key not in done:
            done.add(key)
            words += _words(
                match["dashes"] + match["name"], changes[key], joined=match["value"] is not None
            )
    for key in changes:
        new = [f"{key}={changes[key]}"] if pairs else _words(f"--{key}", changes[key], joined=False)
        if key not in done:
            words += new
    return words + remaining


def _is_option(word: str) -> bool:
    match = _OPTION.fullmatch(word)
    return word == "--" or (match is not None and match["dashes"] != "")


def _words(option: str, value: str, *, joined: bool) -> list[str]:
    if joined:
        return [f"{option}={value}"]
    if value in {"true", "false"}:
        return [option] if value == "true" else []
    return [f"{option}={value}"] if _is_option(value) else [option, value]
