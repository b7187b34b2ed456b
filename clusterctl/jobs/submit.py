"""Stage a job's folder on the cluster and hand it over, once, whatever becomes of the connection."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusterctl import __version__
from clusterctl.errors import (
    ClusterctlError,
    MachineError,
    SchedulerError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.jobs.source import Source, manifest, source_hash
from clusterctl.scheduler.base import JobRequest
from clusterctl.scheduler.mpirun_script import render_mpirun_script, with_nodes
from clusterctl.scheduler.script import PLAIN, Environment, partition_name, render_script
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.state.facts import ClusterFacts, applied_text
from clusterctl.state.submissions import (
    CLIENT_FACTS,
    OUTPUTS_FILE,
    SOURCE_FILE,
    SPEC_FILE,
    SWEEP_FILE,
    JobEntry,
)
from clusterctl.transport.base import Transport
from clusterctl.transport.copies import Copies, note
from clusterctl.transport.openssh import talking
from clusterctl.transport.put import Sent, begin_new_folder, send_new_folder, send_to_store
from clusterctl.transport.tree import Item, Kind, Progress, hash_items
from clusterctl.util.assets import asset, payload_hash
from clusterctl.util.process import parallel_map
from clusterctl.util.progress import SILENT, LineReporter

JOBS_FOLDER = "clusterctl/jobs"  # in the job user's home
MAX_DIFF = 1 << 20
PATIENCE_S = 15.0  # a submission does not wait long for what is good to know
# Of bundled jobs: flags that name a file to read, some of them behind its kind, as in idx:DIR.
_READ = frozenset({"--init", "--resume", "--checkpoint", "--config"})
_READ_BY_KIND = frozenset({"--data", "--tokenizer"})
_SPECIAL, _ESCAPED = re.compile(r"([\\*?\[\]!# ])"), r"\\\1"


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job of which nothing is wrong as far as this machine and the cluster can tell.

    script: the text of its script. source: the files that are sent with it. environment: its Python.
    token: its token, if its folder on the cluster is being made already; see ``begin``.
    known: more facts to record, of a replay those of the original.
    """

    job: JobSpec
    script: str
    source: Source | None = None
    environment: Environment = PLAIN
    token: str = ""
    known: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SentSource:
    """What of a script's folder a job was given; ``sent_bytes`` of it were not on the cluster yet."""

    files: int
    bytes: int
    sent_bytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was taken. ``script`` is the text of its script."""

    job_id: str
    name: str
    script: str
    remote_dir: str
    token: str
    source: SentSource | None


def script_of(facts: ClusterFacts, job: JobSpec, environment: Environment | None = None) -> str:
    """The text of a job's script, for plain sbatch, or for bash without a scheduler."""
    environment = environment or Environment(root=facts.root)
    if not facts.has_slurm:
        return render_mpirun_script(facts, job, payload_hash=payload_hash(), environment=environment)
    partition_name(facts, job)
    interval_s = facts.interval_s
    return render_script(job, payload_hash=payload_hash(), interval_s=interval_s, environment=environment)


def begin(session: Session, name: str) -> str:
    """Start what receives a job's folder on the cluster, which is prepared meanwhile. Its token."""
    token = _new_token()
    begin_new_folder(session.transport, f"{JOBS_FOLDER}/{name}-{token}")
    return token


def _new_token() -> str:
    return os.urandom(4).hex()


def reject_files_of_here(session: Session, jobs: Sequence[JobSpec]) -> None:
    """Refuse a bundled job that is to read a file which only this machine has.

    Files outside of the home folder are not looked for: each node may have them on a disk of its own.

    Raises:
        UsageError: there is such a job.
        TransportError: the controller can't be reached.
    """
    home = os.path.expanduser("~")  # noqa: PTH111  # it never raises
    for flag, kind, path in (found for job in jobs if job.bundled for found in _files_read(job)):
        here = Path(os.path.abspath(path))  # noqa: PTH100  # . and .. have no name
        is_absolute = os.path.isabs(path)  # noqa: PTH117
        if not os.path.exists(path) or (is_absolute and not here.is_relative_to(home)):  # noqa: PTH110
            continue
        # A relative path is one in the job's folder, to which a bundled job brings no files.
        if is_absolute and not session.transport.run(["test", "-e", path], check=False).rc:
            continue
        there = " ".join(filter(None, (flag, shlex.quote(f"{kind}~/{here.name}"))))
        raise UsageError(
            f"{path} is on this machine, and not on the cluster",
            code="file-only-here",
            where=flag or "a file to predict",
            why="a job reads files of the cluster",
            fix=f"`clusterctl put {shlex.quote(path)}`, then say {there}",
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


@dataclass(frozen=True, slots=True)
class Submitter:
    """Submits jobs to the cluster of a session.

    report: called with each line about an environment that is built. progress: called as files are sent.
    """

    session: Session
    report: LineReporter = SILENT.note
    progress: Progress = lambda *_: None

    def submit(self, prepared: PreparedJob) -> Submitted:
        """Stage and submit a job; before that, build the environment that it needs.

        Raises:
            UsageError: the job asks for what the cluster does not have.
            MachineError: it can't be written down here; it was not submitted.
            TransferError: the folder changed meanwhile, or can't be made on the cluster.
            SchedulerError: it was refused; of Slurm its words, and the valid choices where they are known.
            TransportError: the controller can't be reached, or the submission is unresolved: a job that was
                taken all the same is found by its token when jobs are next listed or collected.
        """
        session, facts = self.session, self.session.facts
        session.scheduler.reject_if_busy()
        partition = partition_name(facts, prepared.job)
        others = session.transports_of_partition(partition)
        prepared = self._with_image(prepared, others)
        job = prepared.job
        ours = self._files(prepared)
        if prepared.environment.lock is not None:
            # It needs the models of specs and wheels, as few jobs do.
            from clusterctl.jobs.environment import Environments  # noqa: PLC0415

            environments = Environments(self.report, progress=self.progress)
            environments.build_for(session, prepared.environment, partition)
        token = prepared.token or _new_token()
        remote_dir, source, ours = self._stage(f"{job.name}-{token}", prepared.source, ours, others)
        entry = JobEntry(
            token=token,
            name=job.name,
            user=facts.job_user,
            submitted_at=time.time(),
            remote_dir=remote_dir,
        )
        try:
            if prepared.source is not None:
                note(session.workspace, _copies(session.transport.host, remote_dir, prepared.source))
            session.ledger.keep(token, ours)
            session.ledger.add(entry)  # before it is handed over: from here on, the token finds the job
        except MachineError:
            remove_folder((session.transport, *others), remote_dir)
            raise
        job_id = self._hand_over(job, entry)
        return Submitted(job_id, job.name, prepared.script, remote_dir, token, source)

    def _with_image(self, prepared: PreparedJob, others: Sequence[Transport]) -> PreparedJob:
        """Send the image of this machine that a job runs in, and return the job with the path there."""
        job = prepared.job
        # Not Path.is_file: what we may not look at, or can't be a name here, is the cluster's.
        if job.container is None or not os.path.isfile(job.container):  # noqa: PTH113
            return prepared
        image = Path(job.container)
        there = [
            send_to_store(transport, [image], progress=self.progress)[image]
            for transport in (self.session.transport, *others)
        ]
        job = job.model_copy(update={"container": there[0]})
        script = script_of(self.session.facts, job, prepared.environment)
        return replace(prepared, job=job, script=script, known={"image": str(image), **prepared.known})

    def _files(self, prepared: PreparedJob) -> dict[str, bytes]:
        """The content of our own files in a job's folder, by name."""
        job, source = prepared.job, prepared.source
        folder = job.script.parent if job.script is not None else Path.cwd()
        known = {"folder": str(source.folder) if source is not None else None, **prepared.known}
        told = client_facts(job, prepared.environment, folder=folder, known=known)
        ours = {
            **outputs_file(job),
            self.session.scheduler.script_name: prepared.script.encode(errors="surrogateescape"),
            SPEC_FILE: applied_text(self.session.workspace),
            CLIENT_FACTS: (json.dumps(told, indent=2) + "\n").encode(errors="replace"),
        }
        if job.sweep is not None:
            ours[SWEEP_FILE] = (json.dumps(job.sweep.record, indent=1) + "\n").encode()
        return ours

    def _stage(
        self, name: str, source: Source | None, ours: dict[str, bytes], others: Sequence[Transport]
    ) -> tuple[str, SentSource | None, dict[str, bytes]]:
        """Make the folder of a job on the hosts that need one, whole or not at all.

        Hosts that lack the payload get that before. Returns where the folder is, what of a script's folder
        was sent, and all files of ours in it.
        """
        items = source.items if source is not None else ()
        hashes = hash_items(source.files if source is not None else (), progress=self.progress)
        if source is not None:
            ours = {**ours, SOURCE_FILE: manifest(items, hashes)}
        payload = Item(payload_hash(), Kind.ARCHIVE, asset("payload"), mode=0, mtime_ns=0)
        folder, progress = f"{JOBS_FOLDER}/{name}", self.progress

        def send(to: Transport) -> Sent:
            shown = progress if to is self.session.transport else lambda *_: None
            return send_new_folder(to, (*items, payload), hashes, folder, ours=ours, progress=shown)

        sent = send(self.session.transport)
        try:
            parallel_map(others, send)
        except ClusterctlError:
            remove_folder((self.session.transport, *others), sent.folder)
            raise
        if source is None:
            return sent.folder, None, ours
        what = SentSource(sent.files, sent.bytes, sent.sent_bytes, source_hash(items, hashes))
        return sent.folder, what, ours

    def _hand_over(self, job: JobSpec, entry: JobEntry) -> str:
        """Have the scheduler take the job of an entry of the ledger; its id."""
        session, folder = self.session, entry.remote_dir or ""
        try:
            request = JobRequest(
                entry.token, job.name, folder, session.scheduler.script_name, submitted_at=entry.submitted_at
            )
            if not session.facts.has_slurm:  # with Slurm, the script says the rest
                request = with_nodes(request, session.facts, job)
            job_id = session.scheduler.submit(request)
        except (SchedulerError, UnreachableError):  # not AnswerLostError: it may have been taken
            session.ledger.update(entry, refused=True)
            remove_folder((session.transport, *session.transports_of_partition(None)), folder)
            raise
        session.ledger.update(entry, job_id=job_id)
        return job_id


def remove_folder(transports: Sequence[Transport], folder: str) -> None:
    """Remove a job's folder; from hosts that can't be reached it stays."""
    for transport in transports:
        with suppress(UnreachableError):
            transport.run(["rm", "-rf", "--", folder], check=False)


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

    Our own files are always brought home, and so is the script. `collect` reads the file that is kept here.
    """
    if not job.outputs:
        return {}
    script = [f"/{_SPECIAL.sub(_ESCAPED, job.script.name)}"] if job.script is not None else []
    said = {"version": 2, "patterns": [*job.outputs, *script]}
    return {OUTPUTS_FILE: (json.dumps(said, indent=1) + "\n").encode()}
