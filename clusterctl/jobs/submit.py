"""Upload a job's folder and submit the job, never again even if the connection is lost."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from clusterctl import __version__
from clusterctl.errors import (
    ClusterctlError,
    JobRefusedError,
    MachineError,
    Notice,
    SchedulerError,
    TransferError,
    TransportError,
    UnreachableError,
    UsageError,
    marking_side_effects,
    printable,
)
from clusterctl.jobs.listing import GIT
from clusterctl.jobs.source import Source, manifest, source_hash
from clusterctl.scheduler.base import JobRequest
from clusterctl.scheduler.claims import FirstGroup
from clusterctl.scheduler.request.job_secrets import (
    remove_old_secrets,
    remove_secrets,
    send_secrets,
)
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites.script import (
    PLAIN,
    Environment,
)
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import first_few
from clusterctl.spec.remote_folders import JOBS
from clusterctl.spec.remote_reference import SCHEME
from clusterctl.state.inventory import applied_text
from clusterctl.state.ledger import (
    CLIENT_FACTS,
    FIRST_FILE,
    IMAGE_FILE,
    OUTPUTS_FILE,
    PROGRAM_FOLDER,
    SOURCE_FILE,
    SPEC_FILE,
    SWEEP_FILE,
    JobEntry,
)
from clusterctl.transport.base import Transport, remove_folder
from clusterctl.transport.copies import LocalCopies, record_copies
from clusterctl.transport.openssh import start_conversation
from clusterctl.transport.put import Upload, UploadResult, begin_new_folder, store_of
from clusterctl.transport.tree import Item, ItemKind, Progress, hash_items, literal_pattern
from clusterctl.util import formatting
from clusterctl.util.assets import data_folder, payload_hash
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts, parallel_map
from clusterctl.util.progress import SILENT, LineReporter

if TYPE_CHECKING:
    from clusterctl.jobs.environment import Environments

MAX_DIFF = 1 << 20
# Further tries to send files that another program is changing.
_MORE_TRIES = 2
# A submission does not wait longer for optional facts such as the git commit.
PATIENCE_S = 15.0
# Flags of bundled jobs that name an input file; for some, the path follows a kind, as in idx:DIR.
_READ = frozenset({"--resume", "--checkpoint", "--config"})
_READ_BY_KIND = frozenset({"--data", "--tokenizer"})


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that has passed all checks and is ready to be submitted.

    request: the job's request to the scheduler. script: the text of the job script.
    source: the files to send with the job, if any.
    token: the job's identifier from ``start_receiver``. Empty: ``start_receiver`` was not called.
    extra_facts: entries to add to environment.client.json, such as the git commit of a replayed
        job.
    first: set for a job of `submit --first`.
    image_file: content of the file about an image from a registry. Empty: no image was fetched.
    """

    request: Request
    script: str
    source: Source | None = None
    environment: Environment = PLAIN
    token: str = ""
    extra_facts: Mapping[str, Any] = field(default_factory=dict)
    first: FirstGroup | None = None
    image_file: bytes = b""

    @property
    def job(self) -> JobSpec:
        return self.request.job


def local_image(job: JobSpec) -> Path | None:
    """Return the container image of a job, if it is a file on this machine."""
    container = job.container
    # Unlike Path.is_file, this does not raise. An unreadable or invalid path must be on the
    # cluster.
    if container is None or container.startswith(SCHEME) or not os.path.isfile(container):
        return None
    return Path(container)


@dataclass(frozen=True, slots=True)
class SentSource:
    """Number, size and hash of a job's files. ``sent_bytes``: size of those the cluster lacked."""

    folder: str
    files: int
    bytes: int
    sent_bytes: int
    hash: str

    @property
    def summary(self) -> str:
        """A line such as ``3 files, 2.5 KiB, from /home/ada/proj: 1.0 KiB sent``."""
        amount = counted(self.files, "file")
        sent = f"{formatting.size(self.sent_bytes)} sent"
        return f"{amount}, {formatting.size(self.bytes)}, from {printable(self.folder)}: {sent}"


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A submitted job. ``script`` is the text of its job script."""

    job_id: str
    name: str
    script: str
    remote_dir: str
    token: str
    source: SentSource | None


def environments(**options: Any) -> Environments:
    """Return an object that resolves and builds Python environments. ``options``: its fields."""
    # This import is slow, and few jobs need it.
    from clusterctl.jobs.environment import Environments  # noqa: PLC0415

    return Environments(**options)


def start_receiver(session: Session, name: str) -> str:
    """Start the remote program that receives a job's folder. Return a new token of the job."""
    token = new_token()
    folder = session.inventory.folder
    begin_new_folder(session.transport, f"{folder}/{JOBS}/{name}-{token}", store=store_of(folder))
    return token


def new_token() -> str:
    """Return a random text to identify a job."""
    return os.urandom(4).hex()


def reject_local_files(session: Session, jobs: Sequence[JobSpec]) -> None:
    """Reject (UsageError) bundled jobs with an input file that is on this machine but not on the
    cluster.

    Absolute paths outside the home folder are not checked, as each node may have them on its own
    disk.
    """
    # Unlike Path.home, this never raises.
    home = os.path.expanduser("~")
    for flag, kind, path in (file for job in jobs if job.bundled for file in _files_read(job)):
        # This gives `.` and `..` a name.
        local_path = Path(os.path.abspath(path))
        is_absolute = os.path.isabs(path)
        if not os.path.exists(path) or (is_absolute and not local_path.is_relative_to(home)):
            continue
        # The program finds a relative path below the home folder, in which the command starts.
        if not session.transport.run(["test", "-e", path], check=False).rc:
            continue
        arguments = " ".join(filter(None, (flag, shlex.quote(f"{kind}~/{local_path.name}"))))
        raise UsageError(
            f"{path} exists on this machine but not on the cluster",
            code="not-found",
            about="file-on-cluster",
            where=flag or "a file to predict",
            why="jobs read files on the cluster",
            fix=f"run `clusterctl put {shlex.quote(path)}`, then use {arguments}",
        )


def _files_read(job: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Yield (option, path's prefix such as ``idx:`` or "", path) for input files in job.args."""
    words = list(job.args)
    while words:
        flag, equals, text = (word := words.pop(0)).partition("=")
        if flag.startswith("--"):
            # A switch has no value. Only predict has files without a flag, and it has no switches.
            text = (
                text if equals else words.pop(0) if words and not words[0].startswith("--") else ""
            )
            kind, colon, path = text.partition(":")
            if flag in _READ_BY_KIND and colon:
                yield flag, f"{kind}:", path
            elif flag in _READ and text not in {"auto", "never"}:
                yield flag, "", text
        elif job.bundled == "predict":
            yield "", "", word


def _current_folder() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        # The current folder was removed.
        return None


def reject_other_paths(
    session: Session, folder: str, nodes: Sequence[Transport], sent: Sequence[UploadResult]
) -> None:
    """Raise TransferError if the job's folder has another path on a node than ``folder``, that on
    the controller. ``sent``: the folder of each of ``nodes``, which is then removed.
    """
    paths = {to.host: one.folder for to, one in zip(nodes, sent, strict=True)}
    if not (others := {host: path for host, path in paths.items() if path != folder}):
        return
    for to in nodes:
        remove_folder([to], paths[to.host])
    different = ", ".join(f"{path} on {host}" for host, path in others.items())
    raise TransferError(
        "the folder of jobs has different paths on the hosts",
        code="host-unfit",
        about="folder",
        why=f"a job's folder needs the same path on all hosts, but it is {folder} on "
        f"{session.transport.host}, and {different}",
        fix=f"let no part of {folder} be a link there, or give the hosts a shared folder "
        "(provider.shared), then run `clusterctl up`",
    )


@dataclass(frozen=True, slots=True)
class Submitter:
    """Submits jobs to a session's cluster. ``report``: called with messages for the user."""

    session: Session
    report: LineReporter = SILENT.note
    progress: Progress = lambda *_: None

    def submit(self, prepared: PreparedJob) -> SubmittedJob:
        """Build the job's Python environment, upload the job's folder, and submit the job.

        Raises:
            UsageError: the job requests resources that the cluster does not have.
            MachineError: this machine's list of jobs can't be written. The job was not submitted.
            TransferError: a file changed during the upload, or the folder can't be created on the
                cluster.
            SchedulerError: the scheduler rejected the job. The error has its message and the valid
                choices.
            TransportError: the controller can't be reached, or it is unknown whether the job was
                submitted. If it was submitted, the next command that lists or collects jobs finds
                it.
        """
        self.session.scheduler.reject_if_busy()
        submitter, prepared = self._without_silent_nodes(prepared)
        return submitter._submit_to_all(prepared)

    def _without_silent_nodes(self, prepared: PreparedJob) -> tuple[Submitter, PreparedJob]:
        """If hosts share no folder, leave out nodes that don't answer. Return the submitter and the
        job for the other nodes. Raise UnreachableError if no node answers.
        """
        session = self.session
        nodes = session.transports_of_partition(
            prepared.request.partition_name_in(session.inventory)
        )
        by_name = {name: to for name, to in session.nodes.items() if to in nodes}
        _, failed = call_on_hosts(by_name, lambda name: by_name[name].run(["true"]))
        silent = {name: exc for name, exc in failed.items() if isinstance(exc, UnreachableError)}
        if not silent:
            return self, prepared
        if len(silent) == len(nodes):
            raise next(iter(silent.values()))
        names = sorted(silent)
        request = session.site.without_nodes(prepared.request, names)
        text = (
            f"note: {', '.join(names)} does not answer, so the job will not run there: hosts share "
            "no folder, and it could not get the job's files"
        )
        self.report(Notice("node-left-out", text))
        answering = {name: to for name, to in session.nodes.items() if name not in silent}
        script = session.site.render(request, prepared.environment)
        prepared = replace(prepared, request=request, script=script)
        return replace(self, session=replace(session, nodes=answering)), prepared

    def _submit_to_all(self, prepared: PreparedJob) -> SubmittedJob:
        session = self.session
        inventory = self.session.inventory
        partition = prepared.request.partition_name_in(session.inventory)
        nodes = session.transports_of_partition(partition)
        prepared = self._with_image(prepared, nodes)
        job = prepared.job
        own_files = self._files(prepared)
        if prepared.environment.lock is not None:
            builder = environments(report=self.report, progress=self.progress)
            builder.build_for(session, prepared.environment, partition)
        token = prepared.token or new_token()
        remote_dir, source, own_files = self.stage(
            f"{job.name}-{token}", prepared.source, own_files, nodes
        )
        entry = JobEntry(
            token=token,
            name=job.name,
            user=inventory.job_user,
            submitted_at=time.time(),
            remote_dir=remote_dir,
            files=PROGRAM_FOLDER,
            first=prepared.first.id if prepared.first else None,
            is_across=prepared.first is not None and prepared.first.is_across,
            folder=_current_folder(),
            has_secrets=bool(job.secret),
        )
        try:
            session.ledger.keep(token, own_files)
            # The entry is written before the submission, so that the token identifies the job in
            # any case.
            session.ledger.add(entry)
        except MachineError:
            remove_folder((session.transport, *nodes), remote_dir)
            raise
        try:
            if job.secret:
                remove_old_secrets(session)
            send_secrets(job, remote_dir, (session.transport, *nodes))
        except (SchedulerError, TransferError, TransportError):
            self._withdraw(entry)
            raise
        job_id = self._submit(prepared.request, entry)
        return SubmittedJob(job_id, job.name, prepared.script, remote_dir, token, source)

    def _with_image(self, prepared: PreparedJob, nodes: Sequence[Transport]) -> PreparedJob:
        """Fetch or send the container image. Return the job with the image's digest, or with the
        new path.
        """
        image = local_image(prepared.job)
        container, image_file = self.place_image(prepared.job, nodes)
        request = prepared.request.of(prepared.job.model_copy(update={"container": container}))
        if image is None:
            return replace(prepared, request=request, image_file=image_file)
        script = self.session.site.render(request, prepared.environment)
        extra_facts = {"image": str(image), **prepared.extra_facts}
        return replace(prepared, request=request, script=script, extra_facts=extra_facts)

    def place_image(self, job: JobSpec, nodes: Sequence[Transport]) -> tuple[str | None, bytes]:
        """Fetch a job's container image from its registry, or send a local one to the controller
        and ``nodes``.

        Return its name with the digest, or its path there, and the content of IMAGE_FILE. Empty:
        the image is not from a registry.
        """
        container = job.container
        if container is not None and container.startswith(SCHEME):
            # Few jobs have an image from a registry.
            from clusterctl.jobs.images import fetch  # noqa: PLC0415

            fetched = fetch(self.session, nodes, container, self.report, self.progress)
            return fetched.reference, fetched.file
        image = local_image(job)
        if image is None:
            return container, b""
        store = store_of(self.session.inventory.folder)
        remote_images = [
            Upload(transport, self.progress).to_store([image], store=store)[image]
            for transport in (self.session.transport, *nodes)
        ]
        return remote_images[0], b""

    def _files(self, prepared: PreparedJob) -> dict[str, bytes]:
        """Return name -> content of the files that clusterctl adds to a job's folder."""
        job = prepared.job
        source = prepared.source
        folder = job.place.folder if job.script is not None else Path.cwd()
        extra_facts = {
            "folder": str(source.folder) if source is not None else None,
            **prepared.extra_facts,
        }
        facts = client_facts(job, prepared.environment, folder=folder, known=extra_facts)
        own_files = {
            **outputs_file(job),
            self.session.scheduler.script_name: prepared.script.encode(errors="surrogateescape"),
            SPEC_FILE: applied_text(self.session.workspace),
            CLIENT_FACTS: (json.dumps(facts, indent=2) + "\n").encode(errors="replace"),
        }
        if prepared.first is not None:
            own_files[FIRST_FILE] = prepared.first.file
        if prepared.image_file:
            own_files[IMAGE_FILE] = prepared.image_file
        if job.sweep is not None:
            own_files[SWEEP_FILE] = (json.dumps(job.sweep.record, indent=1) + "\n").encode()
        return own_files

    def stage(
        self,
        name: str,
        source: Source | None,
        files: dict[str, bytes],
        nodes: Sequence[Transport],
    ) -> tuple[str, SentSource | None, dict[str, bytes]]:
        """Do the same as ``_stage``. If files change meanwhile, send them as they are then."""
        for _ in range(_MORE_TRIES):
            try:
                return self._stage(name, source, files, nodes)
            except (TransferError, UsageError) as exc:
                if source is None or not (exc.about == "changed" or exc.code == "file-unreadable"):
                    raise
                source = source.listed_again()
        return self._stage(name, source, files, nodes)

    def _stage(
        self,
        name: str,
        source: Source | None,
        files: dict[str, bytes],
        nodes: Sequence[Transport],
    ) -> tuple[str, SentSource | None, dict[str, bytes]]:
        """Create the job's folder on the controller and ``nodes``. If a host fails, remove all.

        The program's files go to a folder in it, so that the program meets no file of clusterctl's.

        Also sends clusterctl's bundled programs to hosts that lack them. Returns the folder's path,
        the size of ``source`` (None: no source), and ``files`` (name -> content) with source.json
        added.
        """
        items: Sequence[Item] = source.items if source is not None else ()
        hashes = hash_items(source.files if source is not None else (), progress=self.progress)
        if source is not None:
            files = {**files, SOURCE_FILE: manifest(items, hashes)}
        payload = Item(payload_hash(), ItemKind.ARCHIVE, data_folder("payload"), mode=0, mtime_ns=0)
        program = Item(PROGRAM_FOLDER, ItemKind.FOLDER, Path(), 0o755, time.time_ns())
        items = [
            program,
            *(replace(item, path=f"{PROGRAM_FOLDER}/{item.path}") for item in items),
            payload,
        ]
        area = self.session.inventory.folder
        folder = f"{area}/{JOBS}/{name}"
        store = store_of(area)

        def send(to: Transport) -> UploadResult:
            upload = Upload(to, self.progress) if to is self.session.transport else Upload(to)
            return upload.new_folder(items, hashes, folder, store=store, ours=files)

        sent = send(self.session.transport)
        try:
            reject_other_paths(self.session, sent.folder, nodes, parallel_map(nodes, send))
            if source is not None:
                copies = _copies(
                    self.session.transport.host, f"{sent.folder}/{PROGRAM_FOLDER}", source
                )
                record_copies(self.session.workspace, copies)
        except ClusterctlError:
            remove_folder((self.session.transport, *nodes), sent.folder)
            raise
        if source is None:
            return sent.folder, None, files
        if sent.grown:
            names = first_few([path.removeprefix(f"{PROGRAM_FOLDER}/") for path in sent.grown])
            text = (
                f"note: {printable(names)} was still growing; the job has the part that was listed"
            )
            self.report(Notice("file-still-grows", text))
        sent_source = SentSource(
            str(source.folder),
            sent.files,
            sent.bytes,
            sent.sent_bytes,
            source_hash(source.items, hashes),
        )
        return sent.folder, sent_source, files

    def _submit(self, of_job: Request, entry: JobEntry) -> str:
        session = self.session
        folder = entry.remote_dir or ""
        try:
            request = JobRequest(
                entry.token,
                of_job.job.name,
                folder,
                session.scheduler.script_name,
                submitted_at=entry.submitted_at,
                options=of_job.options,
            )
            request = session.site.request(request, of_job)
            job_id = session.scheduler.submit(request)
        except (SchedulerError, UnreachableError) as exc:
            # After an AnswerLostError the job may have been submitted, so it is not handled here.
            self._withdraw(entry)
            if isinstance(exc, JobRefusedError):
                raise self._all_refusals(of_job, exc) from exc
            raise
        with marking_side_effects():
            session.ledger.update(entry, job_id=job_id)
        return job_id

    def _all_refusals(self, request: Request, first: JobRefusedError) -> JobRefusedError:
        """Return the error for a job that Slurm refuses, with all its reasons.

        Slurm names a single reason at a time, so it is asked again without the options at fault.
        """
        site = self.session.site
        whys = [first.why]
        fixes = [first.fix]
        with suppress(SchedulerError, TransportError):
            while at_fault := site.asked(request.options).at_fault(whys[-1]):
                request = request.without(at_fault)
                trial = self.session.scheduler.trial(site.render(request))
                if trial is None or trial.accepted:
                    break
                whys.append(trial.words)
                fixes.append(site.asked(request.options).fix(trial.words))
        return JobRefusedError(
            first.what,
            where=first.where,
            why="\n".join(dict.fromkeys(whys)),
            fix="\n".join(dict.fromkeys(filter(None, fixes))),
        )

    def _withdraw(self, entry: JobEntry) -> None:
        """Record that a job was not submitted, and remove its folders from all hosts."""
        session = self.session
        session.ledger.update(entry, refused=True)
        if entry.has_secrets:
            remove_secrets(session, [entry])
        hosts = (session.transport, *session.transports_of_partition(None))
        remove_folder(hosts, entry.remote_dir or "")


def _copies(host: str, program_dir: str, source: Source) -> Iterator[LocalCopies]:
    """Yield a record of each local folder with files that were copied to a program's folder on
    ``host``.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for item in source.files:
        local_path = str(item.origin.absolute())
        path = item.path
        top = program_dir
        if not local_path.endswith(f"/{path}"):
            first, _, path = path.partition("/")
            top = f"{program_dir}/{first}"
        names.setdefault((top, local_path.removesuffix(f"/{path}")), []).append(path)
    for (top, folder), paths in names.items():
        yield LocalCopies(host, top, folder, tuple(paths), sent=True)


def client_facts(
    job: JobSpec,
    environment: Environment = PLAIN,
    *,
    folder: Path,
    known: Mapping[str, Any] = MappingProxyType({}),
    patience_s: float = PATIENCE_S,
) -> dict[str, Any]:
    """Return the content of environment.client.json: facts about the job and this machine.

    folder: the folder to take the git commit and uncommitted changes from.
    known: facts to add. For a replay, the git state and job fields of the original job.
    """
    recorded_job = {**job.record, **known.get("job", {})}
    return {
        "clusterctl": __version__,
        "payload": payload_hash(),
        "python": platform.python_version(),
        "system": platform.platform(),
        # Paths that are not UTF-8 become text.
        "job": json.loads(json.dumps(recorded_job, default=str)),
        # All other fields are defaults, which a script's own #SBATCH lines override.
        "given": sorted(job.model_fields_set - {"run_module", "project", "places"}),
        "requirements": environment.lock.text if environment.lock else None,
        "git": known["git"] if "git" in known else _git(folder, patience_s),
        **{key: value for key, value in known.items() if key not in {"git", "job"}},
    }


def _git(folder: Path, patience_s: float) -> dict[str, Any] | None:
    """Return a folder's git commit and uncommitted changes; None if git fails or takes too long."""

    def git(*words: str) -> bytes:
        argv = [*GIT, "-C", str(folder), *words]
        output = bytearray()
        with start_conversation(argv, stdin=subprocess.DEVNULL, silence_s=patience_s) as talk:
            while len(output) <= MAX_DIFF and (chunk := talk.receive()):
                output += chunk
            if len(output) <= MAX_DIFF:
                talk.finish()
        return bytes(output)

    try:
        commit, _, root = git("rev-parse", "HEAD", "--show-toplevel").rstrip(b"\n").partition(b"\n")
        status = git("status", "--porcelain", "--", ".")
        # `replay` applies the diff, so the user's diff programs, colours and prefixes are disabled.
        plain = "--no-ext-diff --no-textconv --no-color --no-renames --no-relative --binary".split()
        plain += ["--src-prefix=a/", "--dst-prefix=b/"]
        is_new = all(line.startswith(b"??") for line in status.splitlines())
        # `git diff` does not show new files.
        diff = b"" if is_new else git("diff", *plain, "HEAD", "--", ".")
    except TransportError:
        # There is no git, repository or commit, or the repository is too large for the time limit.
        return None
    return {
        "commit": commit.decode(errors="replace"),
        "root": root.decode(errors="replace"),
        "status": status[:MAX_DIFF].decode(errors="replace"),
        "diff": diff[:MAX_DIFF].decode(errors="replace"),
        "diff_truncated": len(diff) > MAX_DIFF,
    }


def outputs_file(job: JobSpec) -> dict[str, bytes]:
    """Return {"outputs.json": content}, with patterns of the files to collect; {} if the job has no
    patterns.

    The script and clusterctl's own files are always collected. `collect` reads this machine's copy.
    """
    if not job.outputs:
        return {}
    script = [literal_pattern(job.place.script)] if job.script is not None else []
    content = {"version": 2, "patterns": [*job.outputs, *script]}
    return {OUTPUTS_FILE: (json.dumps(content, indent=1) + "\n").encode()}
