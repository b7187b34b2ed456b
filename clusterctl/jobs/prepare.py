"""Read the jobs of `submit`, check them, prepare their files and packages, submit them."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clusterctl.agent.limits import check_use
from clusterctl.errors import (
    Notice,
    NotUpError,
    UsageError,
    excluded,
    marking_side_effects,
    printable,
    raise_together,
)
from clusterctl.jobs.bundled import (
    ChosenModel,
    reject_invalid_arguments,
    reject_missing,
    with_model,
)
from clusterctl.jobs.earlier import with_after, with_from_run
from clusterctl.jobs.plan import SubmitPlan, at_most, most_of_jobs
from clusterctl.jobs.project import with_project
from clusterctl.jobs.queue import known_jobs
from clusterctl.jobs.secret_files import reject_own_keys
from clusterctl.jobs.source import Source, source_of
from clusterctl.jobs.submit import (
    PreparedJob,
    SubmittedJob,
    Submitter,
    environments,
    local_image,
    reject_local_files,
    start_receiver,
)
from clusterctl.packages.package_files import find_package_file, suggesting_no_requirements
from clusterctl.scheduler.base import Outcome, refusing_wrong_ids, worst_job
from clusterctl.scheduler.request.request import IN_TURN, Request
from clusterctl.scheduler.session import Session, site_of
from clusterctl.scheduler.sites.checks import unfit_foreign_lines
from clusterctl.scheduler.sites.script import Environment, fitted_to
from clusterctl.scheduler.sites.site import Site
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.job_options import OPTIONS, JobOptions
from clusterctl.spec.names import ENGINES, NODE_RECEIVERS, SIF_ENGINES, Launcher, first_few
from clusterctl.spec.program import Language, is_job_file, language_of
from clusterctl.spec.sbatch import SINGLETON
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.inventory import Inventory, job_inventory, planned_inventory
from clusterctl.state.ledger import Ledger
from clusterctl.state.run_names import full_name
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import Result, call_on_hosts
from clusterctl.util.progress import SILENT, LineReporter
from clusterctl.util.redact import LEAST, looks_secret

if TYPE_CHECKING:
    from clusterctl.jobs.replay import Replay
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.spec.sweep import Scaling


# With these arguments, a training writes checkpoints, or may do so.
_MAY_SAVE: Final = ("--save-interval", "--config")
_BATCH: Final = "--global-batch-size"
# The bundled jobs with this option. The work of other bundled jobs grows with the ranks anyway.
_WITH_BATCH: Final = ("train", "bench")
# Larger files that are sent are not searched for values of --secret.
_MOST_SEARCHED: Final = 1 << 20  # bytes
# Room for the ending of the common name of a scaling's jobs.
_LONGEST: Final = 48
# The engine that has no read-only mounts.
_NO_READ_ONLY: Final = "ch-run"


@dataclass(frozen=True, slots=True)
class Submission:
    """The jobs of a `submit` or `replay` command.

    requests: of a single job, or of several from a job file.
    model: the trained model to use. None: the jobs need no model, or their arguments name it.
    replay: for `clusterctl replay`, the rebuilt job with its files. None: `clusterctl submit`.
    """

    requests: Sequence[Request]
    model: ChosenModel | None = None
    replay: Replay | None = None

    @classmethod
    def of(
        cls,
        jobs: Iterable[JobSpec],
        model: ChosenModel | None = None,
        replay: Replay | None = None,
        *,
        chosen: ChosenCluster | None = None,
    ) -> Submission:
        """Return the submission of jobs. Their scripts are read, and the runs that they use are
        looked up, here and only here.

        chosen: the cluster that the user has chosen, for runs that are named by a number. Default:
            none.

        Raises UsageError: a script can't be read, or no run has the name.
        """
        chosen = chosen or ChosenCluster()
        if model is not None:
            model = replace(model, run=full_name(model.run, chosen))
        return cls([Request.read(_with_full_name(job, chosen)) for job in jobs], model, replay)

    @property
    def jobs(self) -> tuple[JobSpec, ...]:
        return tuple(request.job for request in self.requests)


def _with_full_name(job: JobSpec, chosen: ChosenCluster) -> JobSpec:
    if job.from_run is None:
        return job
    return job.model_copy(update={"from_run": full_name(job.from_run, chosen)})


def read_jobs(
    target: str, given: Mapping[str, object], variants: Sequence[str] = ()
) -> tuple[JobSpec, ...]:
    """Return the jobs for a target of `submit`.

    target: the name of a bundled job, the path of a script or a job file, or ``-m MODULE``.
    given: options by field name of JobOptions. They override those in a job file.
    variants: names of variants of the job file. Empty: all variants.

    Raises:
        UsageError: there is no such job, or an option is wrong.
        SpecError: the job file is wrong.
    """
    if is_job_file(target):
        # A slow import, which only job files need.
        from clusterctl.spec.job_file import jobs_of_file  # noqa: PLC0415

        jobs = jobs_of_file(Path(target), given, variants)
        return _scaled(with_project(job, Path(target).parent) for job in jobs)
    if variants:
        raise UsageError(
            f"--variant does not apply to {target}",
            about="variant",
            why="only a job file defines variants",
            fix="leave out --variant, or submit a job file",
        )
    return _scaled([with_project(job_spec(target, given), Path())])


def _scaled(jobs: Iterable[JobSpec]) -> tuple[JobSpec, ...]:
    """Return the jobs, with a job for each size in place of a job with a scaling."""
    scaled = (_jobs_of(job, job.scaling) if job.scaling is not None else (job,) for job in jobs)
    return tuple(chain.from_iterable(scaled))


def _jobs_of(job: JobSpec, scaling: Scaling) -> Iterator[JobSpec]:
    """Yield a job for each repeat and number of nodes, tasks or GPUs. Their common name is new.

    All sizes run before the first repeat, so that a change of the load affects all of them.

    Raises UsageError: the job has options that a scaling sets, or it is not known how its work can
        grow.
    """
    varied = scaling.field
    # ``check_scaling`` refuses the other options that a scaling sets.
    if varied in job.model_fields_set:
        raise excluded(OPTIONS[varied].flag, f"--scaling {scaling.by}=")
    if (
        scaling.weak
        and job.sweep
        and _BATCH in {f"--{key.replace('_', '-')}" for key in job.sweep.keys}
    ):
        raise excluded(f"a sweep of {_BATCH}", "--set scaling.weak=true")
    name = f"{job.name[:_LONGEST]}-scaling-{secrets.token_hex(2)}"
    changes = {"name": name, "slurm": (*job.slurm, IN_TURN)}
    if job.sweep is not None:
        sweep = job.sweep.model_copy(update={"parallel": 1})
        job = job.model_copy(update={"sweep": sweep, "array": sweep.array})
    for _ in range(scaling.repeats):
        for size in scaling.sizes:
            sizes = {varied: size}
            if scaling.by == "gpus" and "tasks_per_node" not in job.model_fields_set:
                sizes["tasks_per_node"] = size
            args = _arguments(job, size, is_weak=scaling.weak)
            yield job.model_copy(update={**changes, **sizes, "args": args})


def _arguments(job: JobSpec, size: int, *, is_weak: bool) -> tuple[str, ...]:
    """Return the program's arguments; for weak scaling of a training with ``size`` times the
    batch.
    """
    if not is_weak or job.bundled not in _WITH_BATCH:
        return job.args
    words = [part for word in job.args for part in _split(word)]
    # The last of several counts.
    at = max(
        (number + 1 for number, word in enumerate(words) if word == _BATCH), default=len(words)
    )
    if at >= len(words) or not words[at].isdecimal():
        raise UsageError(
            f"weak scaling of {job.bundled} needs the batch of a node, task or GPU",
            about="weak",
            why="the whole batch is this number times the number of nodes, tasks or GPUs",
            fix=f"add `-- {_BATCH} N`",
        )
    return (*words[:at], str(int(words[at]) * size), *words[at + 1 :])


def _split(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith(f"{_BATCH}=") else [word]


def reads_packages_beside(job: JobSpec) -> bool:
    """Return whether a file beside the job's program may list its packages."""
    return (
        job.script is not None
        and job.container is None
        and not job.env_path
        and job.requirements is None
        and language_of(job.script) is Language.PYTHON
    )


@dataclass(frozen=True, slots=True)
class Preparer:
    """Finds the files and the Python environment of each job, and rejects jobs that can't run.

    note: called with each message to the user about a job.
    detail: called with each line that uv and pip print.
    """

    note: LineReporter
    detail: LineReporter = SILENT.note

    def plan(self, submission: Submission, spec: ClusterSpec) -> SubmitPlan:
        """Plan jobs for the cluster of ``spec``, which is not asked.

        UsageError: a job can't run.
        """
        workspace = Workspace.of(spec.name)
        try:
            inventory = site_of(job_inventory(workspace)).planned(spec)
        except NotUpError:
            inventory = planned_inventory(spec)
        jobs = self._prepared(submission, site_of(inventory), Ledger(workspace.jobs), spec=spec)
        most = most_of_jobs(spec, [job.request for job in jobs])
        check_use(most.asked)
        return SubmitPlan(spec, jobs, most)

    def prepare(self, session: Session, submission: Submission) -> tuple[PreparedJob, ...]:
        """Prepare jobs for the cluster of a session. Nothing is submitted.

        Raises:
            UsageError: a job can't run on the cluster.
            TransportError: the cluster can't be reached.
        """
        # The receiver of the first job's folder starts while the jobs are being checked.
        token = start_receiver(session, submission.jobs[0].name)
        reject_local_files(session, submission.jobs)
        first, *remaining = self._prepared(submission, session.site, session.ledger, session)
        if submission.replay is not None:
            reject_missing(session, first.job)
        return replace(first, token=token), *remaining

    def environment(self, session: Session, job: JobOptions) -> Environment:
        """Return the Python environment for `clusterctl shell`. UsageError: requirements can't be
        met.
        """
        partition = job.partition or session.inventory.partitions[0].name
        return self._environment(
            session.inventory, session.workspace, job, partition, session=session
        )

    def _prepared(
        self,
        submission: Submission,
        site: Site,
        ledger: Ledger,
        session: Session | None = None,
        spec: ClusterSpec | None = None,
    ) -> tuple[PreparedJob, ...]:
        followed = [with_after(job, site, ledger.cluster) for job in submission.jobs]
        self._notes(note for _, note in followed if note)
        jobs = tuple(job for job, _ in followed)
        if session is not None:
            jobs = tuple(_with_open_dependencies(session, job) for job in jobs)
        given, model = with_model(jobs, submission.model, ledger.cluster, session)
        if submission.replay is None:
            given = [self._with_packages(job, site.inventory) for job in given]
        pairs = zip(submission.requests, given, strict=True)
        requests = self._completed(site, [one.of(job) for one, job in pairs], ledger, session)
        jobs = tuple(request.job for request in requests)
        reject_invalid_arguments(jobs, submission.model, completed=True)
        # All jobs are checked before packages are resolved or a job is sent.
        raise_together(fault for request in requests for fault in site.faults(request))
        scripts = [site.render(request) for request in requests]
        for request in requests:
            if session is not None and request.job.container is not None:
                partition = request.partition_name_in(site.inventory)
                reject_without_engine(session, request.job, partition)
        if files := dict.fromkeys(filter(None, map(local_image, jobs))):
            # Few jobs have an image in a file.
            from clusterctl.jobs.images import archive_notice  # noqa: PLC0415

            self._notes(filter(None, map(archive_notice, files)))
        replay = submission.replay
        sources = [replay.source if replay else source_of(one) or model for one in requests]
        self._notes(note for source in sources if source for note in source.notes)
        for job, script, source in zip(jobs, scripts, sources, strict=True):
            reject_sent_secrets(job, script, source)
            reject_own_keys(source.items if source else (), ledger.workspace, spec)
        prepared = []
        extra_facts = replay.known if replay else {}
        for request, script, source in zip(requests, scripts, sources, strict=True):
            lock = replay.lock if replay else None
            environment = self._environment(
                site.inventory,
                ledger.workspace,
                request.job,
                request.partition_name_in(site.inventory),
                session=session,
                spec=spec,
                lock=lock,
            )
            is_own = environment.lock or environment.prefix
            text = site.render(request, environment) if is_own else script
            prepared.append(
                PreparedJob(request, text, source, environment, extra_facts=extra_facts)
            )
        return tuple(prepared)

    def _completed(
        self, site: Site, requests: Sequence[Request], ledger: Ledger, session: Session | None
    ) -> list[Request]:
        """Return the requests with the files of earlier runs, and with the defaults of the site.
        Note surprising defaults for the user.
        """
        continued = [with_from_run(request.job, ledger.cluster, session) for request in requests]
        for note in dict.fromkeys(note for _, note in continued if note):
            self.note(note)
        jobs = [job for job, _ in continued]
        has_pmix = site.inventory.pmix
        for job in jobs:
            if not has_pmix and "launcher" in job.model_fields_set and job.launcher == "srun":
                self.note(
                    f"note: {job.name}: mpirun starts the ranks because Slurm has no PMIx plugin "
                    "here"
                )
        restarted = [with_restarts(site, job) for job in jobs]
        for notice in filter(None, map(restart_notice, jobs, restarted)):
            self.note(notice)
        self._notes(filter(None, map(plain_secret_notice, jobs)))
        self._notes(filter(None, map(node_messages_notice, jobs)))
        pairs = zip(requests, restarted, strict=True)
        requests = [fitted_to(site, request.of(job)) for request, job in pairs]
        self._notes(note for request in requests for note in request.notes())
        for request in requests:
            self._notes(map(_unfit_notice, unfit_foreign_lines(site, request)))
        return requests

    def _with_packages(self, job: JobSpec, inventory: Inventory) -> JobSpec:
        """Return the job with the file that lists its packages, if it is beside a Python program,
        and with the packages of the file's workspace.
        """
        if job.env_path and job.requirements:
            raise excluded("--env-path", "--requirements")
        if job.script is None or job.container is not None or job.env_path:
            return job
        if not job.requirements and not reads_packages_beside(job):
            return job
        file = job.requirements or None
        with suggesting_no_requirements():
            if reads_packages_beside(job):
                file = self._found_packages(job, job.script, inventory)
            if file is None:
                return job
            # Most jobs have no packages.
            from clusterctl.packages import named_files, project_files  # noqa: PLC0415

            named_files.reject_named(file)

            members = [root.resolve() for root in project_files.member_roots(file)]
        if note := project_files.note_of_unread_lock(file):
            self._notes([note])
        place = job.place
        top = place.folder.resolve()
        inner = (os.path.relpath(root, top) for root in members if root.is_relative_to(top))
        project = replace(place, roots=tuple(dict.fromkeys([*place.roots, *inner])))
        return job.model_copy(update={"requirements": file, "project": project})

    def _found_packages(self, job: JobSpec, script: Path, inventory: Inventory) -> Path | None:
        """Return the file beside a Python program that lists its packages, and note it. None: there
        is no such file, pip can't install its packages, or all jobs have them.
        """
        file = find_package_file(script, job.place.folder)
        common = inventory.requirements
        if file is None or (common and file == Path(os.path.realpath(common))):
            return None
        from clusterctl.packages import named_files, project_files  # noqa: PLC0415 - as above

        named_files.reject_named(file)

        if error := project_files.unsupported_packages(file):
            text = f"the packages of {file.name} are not installed: {error.why}; {error.fix}"
            self._notes([Notice("packages-not-installed", text)])
            return None
        if file.suffix == ".txt":
            self.note(f"{file.name} lists the job's packages")
        return file

    def _notes(self, notes: Iterable[str]) -> None:
        """Show each of several notes once."""
        for note in dict.fromkeys(notes):
            text = f"note: {note}"
            self.note(Notice(note.code, text) if isinstance(note, Notice) else text)

    def _environment(
        self,
        inventory: Inventory,
        workspace: Workspace,
        job: JobOptions,
        partition: str | None,
        *,
        session: Session | None = None,
        spec: ClusterSpec | None = None,
        lock: str | None = None,
    ) -> Environment:
        """Return a job's Python environment.

        partition: that of the job. None: any. lock: of a replayed job ("": it has no packages).
        """
        environment = Environment.of(inventory)
        bundled = job.bundled if isinstance(job, JobSpec) else None
        if bundled or job.container:
            if job.requirements or job.env_path:
                option = "--env-path" if job.env_path else "--requirements"
                raise UsageError(
                    f"{option} does not apply to "
                    f"{'a container' if job.container else f'the bundled job {bundled}'}",
                    about="requirements",
                    why="containers and bundled jobs have their own Python environment",
                    fix=f"leave out {option}, or submit your own script",
                )
            return environment
        if job.env_path:
            return replace(environment, prefix=_prefix(session, job, partition, job.env_path))
        if inventory.requirements or job.requirements or lock:
            resolver = environments(report=self.note, heard=self.detail)
            environment = resolver.resolve_for_job(
                inventory, workspace, spec, job, lock, partition=partition
            )
        wheels = environment.lock.wheels if environment.lock else ()
        if job.launcher is Launcher.TORCHRUN and not any(wheel.name == "torch" for wheel in wheels):
            raise UsageError(
                "torchrun is part of torch, which is not in the job's Python environment",
                code="packages-unmet",
                about="torch",
                fix="use --requirements FILE with a line `torch`",
            )
        return environment


def _unfit_notice(fault: UsageError) -> Notice:
    text = f"{fault.where} does not fit here: {fault.cause}: {fault.fix}"
    return Notice("foreign-directive-unfit", text)


def _prefix(session: Session | None, job: JobOptions, partition: str | None, wanted: str) -> str:
    """Return the folder of the environment of --env-path. Without a session, the cluster is not
    asked.
    """
    if session is not None:
        from clusterctl.jobs.environment import existing_environment  # noqa: PLC0415

        script = job.script if isinstance(job, JobSpec) else None
        needs_python = script is not None and language_of(script) is Language.PYTHON
        return existing_environment(session, wanted, partition, needs_python=needs_python)
    if wanted.startswith("/"):
        return wanted
    raise UsageError(
        f"the folder of the environment {wanted} is not known",
        code="unsupported",
        about="env-path",
        why="only the cluster knows it, and it is not asked now",
        fix="use --env-path with a folder that begins with /",
    )


def _with_open_dependencies(session: Session, job: JobSpec) -> JobSpec:
    """Return the job without dependencies on jobs that have ended as required. Slurm soon forgets
    such jobs.

    Raises:
        UsageError: a dependency can never be satisfied, or there is no job with this ID.
    """
    if not job.after:
        return job
    remaining = []
    for dependency in job.after:
        if dependency == SINGLETON:
            remaining.append(dependency)
            continue
        job_id, _, end = dependency.partition(":")
        with refusing_wrong_ids(f"--after {dependency}"):
            needed = known_jobs(session, [job_id])
        if not all(job.ended for job in needed):
            remaining.append(f"{job_id}:{end}".rstrip(":"))
        elif end != "any" and ((worst := worst_job(needed)).outcome is Outcome.COMPLETED) == (
            end == "notok"
        ):
            raise UsageError(
                f"--after {dependency} can never be satisfied: job {job_id} ended as {worst.state}",
                code="job-unfit",
                about="dependency",
                fix=f"submit job {job_id} again, or use --after {job_id}:any",
            )
    return job.model_copy(update={"after": tuple(remaining)})


def reject_without_engine(session: Session, job: JobSpec, partition: str | None) -> None:
    """Raise UsageError if all nodes that the job can run on lack an engine for containers, or if
    the job asks for a read-only mount and their engine has no such mounts.

    The nodes themselves are asked, as machines of the user may have one from elsewhere. A node that
    does not answer may have an engine, and a module may provide it. partition: None: any.
    """
    if job.container is None or job.module:
        return
    engines = SIF_ENGINES if job.container.endswith(".sif") else ENGINES
    # The first engine in the list runs the image; its path is on the last line.
    find = ("sh", "-c", " || ".join(f"command -v {name}" for name in engines))
    transports = session.nodes
    of_job = [facts for facts in session.inventory.partitions if partition in (None, facts.name)]
    nodes = [node for facts in of_job for node in facts.nodes if node in transports]
    # Usually the nodes are alike, so that the first is enough.
    for asked in (nodes[:1], nodes[1:]):
        answers, silent = call_on_hosts(asked, lambda node: transports[node].run(find, check=False))
        if any(answer.rc == 0 for answer in answers.values()):
            _reject_read_only_mount(job, answers)
            return
        if silent:
            return
    if nodes:
        raise UsageError(
            f"the nodes can't run --container {job.container}",
            code="unsupported",
            about="container",
            why=f"{nodes[0]} has no container engine ({', '.join(engines)})",
            fix="install Apptainer: `software: {apptainer: true}` in the spec, then `clusterctl "
            "up`; or submit with --requirements in place of --container",
        )


def _reject_read_only_mount(job: JobSpec, answers: Mapping[str, Result]) -> None:
    """Raise UsageError if a job asks for a read-only mount, and a node can't have one.

    answers: of the nodes that were asked for the path of their engine.
    """
    read_only = next((mount for mount in job.mount if mount.endswith(":ro")), None)
    unable = [
        node for node, found in answers.items() if found.stdout.strip().endswith(_NO_READ_ONLY)
    ]
    if read_only and unable:
        raise UsageError(
            f"the nodes can't have the read-only --mount {read_only}",
            code="unsupported",
            about="mount",
            where=unable[0],
            why="its container engine is Charliecloud, which has no read-only mounts",
            fix=f"use --mount {read_only.removesuffix(':ro')}, or install Apptainer on the nodes",
        )


def with_restarts(site: Site, job: JobSpec) -> JobSpec:
    """Return the job; requeue it if it has a chain, or if it is a training with checkpoints.

    A training that continues an earlier run resumes from the newest checkpoint unless its arguments
    say otherwise. After a restart, a training resumes in any case.
    """
    changes: dict[str, Any] = {}
    if job.bundled == "train" and job.from_run is not None and not _has(job, "--resume"):
        changes["args"] = (*job.args, "--resume", "auto")
    if site.restarts_jobs:
        is_default = job.bundled == "train" and _has(job, "--save-interval")
        is_open = "requeue" not in job.model_fields_set
        if is_open and (job.chain is not None or is_default):
            changes["requeue"] = True
    return job.model_copy(update=changes) if changes else job


def restart_notice(before: JobSpec, job: JobSpec) -> Notice | None:
    """Return a message about restarts that the user may not expect. before: the job as the user
    wrote it.
    """
    if job.requeue and not before.requeue and job.chain is None:
        text = (
            f"{job.name} runs with --requeue: after a failure or its time limit it continues "
            "from its "
        )
        return Notice("requeued-by-default", f"{text}newest checkpoint; --no-requeue prevents that")
    if job.requeue and job.bundled == "train" and not any(_has(job, flag) for flag in _MAY_SAVE):
        text = f"{job.name} writes no checkpoints, so each restart begins from zero"
        return Notice("requeue-without-checkpoints", f"{text}: add `-- --save-interval N`")
    return None


def plain_secret_notice(job: JobSpec) -> Notice | None:
    """Return a message about variables of --env that look like secrets."""
    names = [name for name, value in job.env.items() if looks_secret(name, value)]
    if not names:
        return None
    flags = " ".join(f"--secret {name}" for name in names)
    return Notice(
        "env-looks-secret",
        f"--env writes {first_few(names)} to the job's script and records in plain text: use "
        f"{flags} instead",
    )


def node_messages_notice(job: JobSpec) -> Notice | None:
    """Return a message about where messages about a job are sent from, if it has the variable that
    payload/node/messages.py reads.
    """
    if NODE_RECEIVERS not in job.secret:
        return None
    if job.array is not None and not job.pack:
        text = (
            f"{job.name}: the tasks of an array send no messages, so {NODE_RECEIVERS} has no effect"
        )
        return Notice("no-messages-from-node", text)
    text = f"{job.name}: messages are sent from its first node, if that has a way out: see its log"
    return Notice("messages-from-node", text)


def reject_sent_secrets(job: JobSpec, script: str, source: Source | None) -> None:
    """Raise UsageError if a small file that is sent with a job, or its script, has a secret."""
    values = {name: value.get_secret_value() for name, value in job.secret.items()}
    # A short value may be an ordinary word.
    searched = {name: value.encode() for name, value in values.items() if len(value) >= LEAST}
    if not searched:
        return
    written = "\0".join((script, *_texts_in(job.record)))
    files = (item for item in (source.files if source else ()) if item.size <= _MOST_SEARCHED)
    texts = ((item.path, _bytes_of(item.origin)) for item in files)
    for path, text in (("", written.encode(errors="surrogateescape")), *texts):
        for name in (name for name, value in searched.items() if value in text):
            raise UsageError(
                f"the value of --secret {name} would be sent in {printable(path)}"
                if path
                else f"the job's script or options contain the value of --secret {name}",
                code="would-send-secret",
                about="value",
                why="files and options of a job are recorded and collected",
                fix=f"move the file to another folder, or use --exclude {shlex.quote(path)}"
                if path
                else f"have the program read the variable {name}",
            )


def _texts_in(value: object) -> Iterator[str]:
    """Yield all texts in a job's record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (
            text for key, entry in value.items() for text in (*_texts_in(key), *_texts_in(entry))
        )
    elif isinstance(value, list | tuple):
        yield from (text for entry in value for text in _texts_in(entry))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        # The upload names files that can't be read.
        return b""


def _has(job: JobSpec, flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in job.args)


def submit_prepared(submitter: Submitter, jobs: Sequence[PreparedJob]) -> Iterator[SubmittedJob]:
    """Submit jobs in turn. Yield each job after its submission. Raises the errors of
    ``Submitter.submit``, and LimitError, before anything is submitted, if an agent may not submit
    these jobs.
    """
    most = at_most(submitter.session.site, [job.request for job in jobs], lambda _: 0.0)
    check_use(most.asked, reserves=True)
    for number, job in enumerate(jobs):
        with marking_side_effects(number > 0):
            submitted = submitter.submit(job)
        yield submitted
