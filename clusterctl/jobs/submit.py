"""Stage a job's folder on the cluster and hand it over, once, whatever becomes of the connection."""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusterctl import __version__
from clusterctl.errors import (
    MachineError,
    Notice,
    SchedulerError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.jobs.environment import build
from clusterctl.jobs.source import Source, source_of
from clusterctl.jobs.stage import SentSource, remove_folder, stage
from clusterctl.scheduler.script import PLAIN, Environment, partition_name
from clusterctl.scheduler.session import Session, request_of, script_of
from clusterctl.spec.job import JobSpec
from clusterctl.state.facts import applied_text
from clusterctl.state.submissions import CLIENT_FACTS, SPEC_FILE, SWEEP_FILE, JobEntry
from clusterctl.transport.copies import Copies, note
from clusterctl.transport.openssh import talking
from clusterctl.transport.put import send_to_store
from clusterctl.transport.tree import Progress
from clusterctl.util.assets import payload_hash
from clusterctl.util.progress import LineReporter

MAX_DIFF = 1 << 20
PATIENCE_S = 15.0  # a submission does not wait long for what is good to know
OUTPUTS_FILE = "outputs.json"
# Of bundled jobs: flags that name a file to read, some of them behind its kind, as in idx:DIR.
_READ = frozenset({"--init", "--resume", "--checkpoint", "--config"})
_READ_BY_KIND = frozenset({"--data", "--tokenizer"})
_WITH_A_MODEL = ("model.json", "config.json")  # a file of weights is read with what lies beside it
_SPECIAL, _ESCAPED = re.compile(r"([\\*?\[\]!# ])"), r"\\\1"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was taken. ``script`` is the text of its script."""

    job_id: str
    name: str
    script: str
    remote_dir: str
    token: str
    source: SentSource | None


def reject_files_of_here(session: Session, jobs: Sequence[JobSpec], *, report: LineReporter) -> None:
    """Refuse a job that is to read what only this machine has; report where its nodes may have it, too.

    Raises:
        UsageError: a bundled job is to read a file that is on this machine, and not on the cluster.
        TransportError: the controller can't be reached.
    """
    for flag, kind, path in (found for job in jobs if job.bundled for found in _files_read(job)):
        if not os.path.exists(path):  # noqa: PTH110  # any name
            continue
        # A relative path is one in the job's folder, to which a bundled job brings no files.
        if os.path.isabs(path) and not session.transport.run(["test", "-e", path], check=False).rc:  # noqa: PTH117
            continue
        here = Path(os.path.abspath(path))  # noqa: PTH100  # . and .. have no name
        is_weights = flag == "--init" and here.is_file()
        with_model = is_weights and any((here.parent / name).exists() for name in _WITH_A_MODEL)
        top = here.parent if with_model else here
        there = f"{kind}~/{here.relative_to(top.parent)}"
        put = shlex.join(["clusterctl", "put", path if top == here else str(top)])
        fix = f"`{put}`, then say {' '.join(filter(None, (flag, shlex.quote(there))))}"
        home = os.path.expanduser("~")  # noqa: PTH111  # it never raises
        if os.path.isabs(path) and not here.is_relative_to(home):  # noqa: PTH117  # may be on a disk of each node
            report(
                Notice(
                    "file-not-on-controller",
                    f"note: the controller has no {path}; if the nodes don't either, {fix}",
                )
            )
            continue
        raise UsageError(
            f"{path} is on this machine, and not on the cluster",
            code="file-only-here",
            where=flag or "a file to predict",
            why="a job reads files of the cluster",
            fix=fix,
        )


def _files_read(job: JobSpec) -> Iterator[tuple[str, str, str]]:
    """What the job is told to read: the flag, the kind with its colon, and the path."""
    words = list(job.args)
    while words:
        flag, equals, text = (word := words.pop(0)).partition("=")
        if flag.startswith("--"):
            # A switch has no value; predict, whose files follow no flag, has no switches.
            text = text if equals else words.pop(0) if words and not words[0].startswith("--") else ""
            kind, colon, path = text.partition(":")
            if flag in _READ_BY_KIND and colon:
                yield flag, f"{kind}:", path
            elif flag in _READ and text not in {"auto", "never"}:
                yield flag, "", text
        elif job.bundled == "predict":
            yield "", "", word


def submit(
    session: Session,
    job: JobSpec,
    *,
    token: str | None = None,
    source: Source | None = None,
    environment: Environment = PLAIN,
    known: Mapping[str, Any] = MappingProxyType({}),
    progress: Progress = lambda *_: None,
    report: LineReporter = lambda _text: None,
) -> Submitted:
    """Stage and submit a job; before that, build the environment that it needs.

    ``source`` and ``environment`` are what ``source_of`` and ``environment_of`` have found for it. ``known``
    are more facts, see ``client_facts``; ``token`` is what ``begin`` has returned for it.

    Raises:
        UsageError: the job can't be run, or asks for what the cluster does not have.
        MachineError: it can't be written down here; it was not submitted.
        TransferError: the folder changed meanwhile, or can't be made on the cluster.
        SchedulerError: it was refused; of Slurm its words, and the valid choices where they are known.
        TransportError: the controller can't be reached, or the submission is unresolved: a job that was taken
            all the same is found by its token when jobs are next listed or collected.
    """
    facts = session.facts
    script = script_of(facts, job, environment)  # what is wrong is said before anything is sent
    session.scheduler.reject_if_busy()
    source = source or source_of(job)
    others = session.transports_of_partition(partition_name(facts, job)) if session.unshared_nodes else ()
    # Not Path.is_file: what we may not look at, or can't be a name here, is the cluster's.
    if job.container is not None and os.path.isfile(job.container):  # noqa: PTH113
        image = Path(job.container)
        there = send_to_store(session.transport, [image], progress=progress)[image]
        for other in others:
            send_to_store(other, [image], progress=progress)
        job = job.model_copy(update={"container": there})
        known = {"image": str(image), **known}
        script = script_of(facts, job, environment)
    folder = job.script.parent if job.script is not None else Path.cwd()
    known = {"folder": str(source.folder) if source is not None else None, **known}
    told = client_facts(job, environment, folder=folder, known=known)
    rented = environment.lock is not None and session.spec.provider.is_cloud
    for transport in (session.transport, *others):
        build(transport, environment, report=report, progress=progress, rented=rented)
    token = token or secrets.token_hex(4)
    ours: Mapping[str, bytes] = {
        **outputs_file(job),
        session.scheduler.script_name: script.encode(errors="surrogateescape"),
        SPEC_FILE: applied_text(session.workspace),
        CLIENT_FACTS: (json.dumps(told, indent=2) + "\n").encode(errors="replace"),
    }
    if job.sweep is not None:
        ours = {**ours, SWEEP_FILE: (json.dumps(job.sweep.record, indent=1) + "\n").encode()}
    remote_dir, sent, ours = stage(
        session.transport, f"{job.name}-{token}", source, ours, others=others, progress=progress
    )
    entry = JobEntry(
        token=token,
        name=job.name,
        user=facts.job_user,
        submitted_at=time.time(),
        remote_dir=remote_dir,
    )
    try:
        if source is not None:
            note(session.ledger.workspace, _copies(session.transport.host, remote_dir, source))
        session.ledger.keep(token, ours)
        session.ledger.add(entry)  # before it is handed over: from here on, the job can be found by its token
    except MachineError:
        remove_folder((session.transport, *others), remote_dir)
        raise
    try:
        job_id = session.scheduler.submit(request_of(facts, job, entry, session.scheduler.script_name))
    except (SchedulerError, UnreachableError):  # not AnswerLostError: it may have been taken
        session.ledger.update(entry, refused=True)
        remove_folder((session.transport, *session.transports_of_partition(None)), remote_dir)
        raise
    session.ledger.update(entry, job_id=job_id)
    return Submitted(job_id, job.name, script, remote_dir, token, sent)


def _copies(host: str, remote_dir: str, source: Source) -> Iterator[Copies]:
    """Where the files of a job's folder are here: a model's folder may have another name."""
    names: dict[tuple[str, str], list[str]] = {}
    for item in source.files:
        here, path, top = str(item.origin.absolute()), item.path, remote_dir
        if not here.endswith(f"/{path}"):
            first, _, path = path.partition("/")
            top = f"{remote_dir}/{first}"
        names.setdefault((top, here.removesuffix(f"/{path}")), []).append(path)
    for (top, folder), found in names.items():
        yield Copies(host, top, folder, tuple(found), sent=True)


def client_facts(
    job: JobSpec,
    environment: Environment = PLAIN,
    *,
    folder: Path,
    known: Mapping[str, Any] = MappingProxyType({}),
    patience_s: float = PATIENCE_S,
) -> dict[str, Any]:
    """The content of environment.client.json; ``folder`` is the one whose git state counts.

    ``known`` is added. Of a replay it has the git state, and what of the job is the original's.
    """
    said = {**job.record, **known.get("job", {})}
    return {
        "clusterctl": __version__,
        "payload": payload_hash(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "job": json.loads(json.dumps(said, default=str)),  # a path may be no UTF-8
        # The rest are defaults, which give way to a script's own lines.
        "given": sorted(job.model_fields_set),
        "requirements": environment.lock.text if environment.lock else None,
        "git": known["git"] if "git" in known else _git(folder, patience_s),
        **{key: value for key, value in known.items() if key not in {"git", "job"}},
    }


def _git(folder: Path, patience_s: float) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the folder; None where git can't say."""

    def git(*words: str) -> bytes:
        return output_of(["git", "--no-optional-locks", "-C", str(folder), *words], MAX_DIFF, patience_s)

    try:
        commit, _, root = git("rev-parse", "HEAD", "--show-toplevel").rstrip(b"\n").partition(b"\n")
        status = git("status", "--porcelain", "--", ".")
        # Neither the user's diff programs nor their colours and prefixes: `replay` applies it again.
        plain = "--no-ext-diff --no-textconv --no-color --no-renames --no-relative --binary".split()
        plain += ["--src-prefix=a/", "--dst-prefix=b/"]
        is_new = all(line.startswith(b"??") for line in status.splitlines())
        diff = b"" if is_new else git("diff", *plain, "HEAD", "--", ".")  # which tells nothing of new files
    except TransportError:  # no git, no repository, no commit yet, or too large to be looked through in time
        return None
    return {
        "commit": commit.decode(errors="replace"),
        "root": root.decode(errors="replace"),
        "status": status[:MAX_DIFF].decode(errors="replace"),
        "diff": diff[:MAX_DIFF].decode(errors="replace"),
        "diff_truncated": len(diff) > MAX_DIFF,
    }


def output_of(argv: Sequence[str], most: int, patience_s: float) -> bytes:
    """What a program prints, up to a little more than ``most`` bytes; raises TransportError if it fails."""
    output = bytearray()
    with talking(argv, stdin=subprocess.DEVNULL, silence_s=patience_s) as talk:
        while len(output) <= most and (chunk := talk.receive()):
            output += chunk
        if len(output) <= most:
            talk.finish()
    return bytes(output)


def outputs_file(job: JobSpec) -> dict[str, bytes]:
    """outputs.json, if the job says what its outputs are: patterns, of which the last that matches counts.

    Our own files are always brought home, and so is the script. The job can change the file: it is read with
    care, and its patterns are matched as such (see runs/remote_files.py), never made into expressions.
    """
    if not job.outputs:
        return {}
    script = [f"/{_SPECIAL.sub(_ESCAPED, job.script.name)}"] if job.script is not None else []
    said = {"version": 2, "patterns": [*job.outputs, *script]}
    return {OUTPUTS_FILE: (json.dumps(said, indent=1) + "\n").encode()}
