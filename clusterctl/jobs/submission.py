"""The jobs of one `submit`: read, checked, prepared with their files and packages, and submitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError, NotUpError, UsageError
from clusterctl.jobs.bundled import ChosenModel, reject_missing, with_model
from clusterctl.jobs.source import source_of
from clusterctl.jobs.submit import (
    PreparedJob,
    Submitted,
    Submitter,
    begin,
    reject_files_of_here,
    script_of,
)
from clusterctl.scheduler.script import Environment, reject_pmix, with_gpus, with_launcher
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec, is_job_file, job_spec
from clusterctl.spec.names import Launcher
from clusterctl.state.facts import ClusterFacts, facts_of, facts_of_spec
from clusterctl.state.submissions import Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import SILENT, LineReporter

if TYPE_CHECKING:
    from clusterctl.jobs.replay import Replay
    from clusterctl.spec.job_options import JobOptions
    from clusterctl.spec.models import ClusterSpec


@dataclass(frozen=True, slots=True)
class Submission:
    """The jobs that one `submit` or `replay` asks for.

    jobs: several only of a job file.
    model: the trained model that the job uses. None: it uses none, or its arguments name it.
    replay: the replay whose job it is. None: it is none.
    """

    jobs: Sequence[JobSpec]
    model: ChosenModel | None = None
    replay: Replay | None = None


def read_jobs(target: str, given: Mapping[str, object], variants: Sequence[str] = ()) -> tuple[JobSpec, ...]:
    """Return the jobs that a user names.

    target: a bundled job, the path of a script, or of a job file.
    given: options of the jobs by the names of JobOptions' fields. They win over a job file's.
    variants: the variants of the job file. Empty: the file as it is, with all of its variants.

    Raises:
        UsageError: there is no such job, or an option is wrong.
        SpecError: the job file is wrong.
    """
    if is_job_file(target):
        # A job file is read by models, whose import takes longer than all else of `submit`.
        from clusterctl.spec.job_file import jobs_of_file  # noqa: PLC0415

        return jobs_of_file(Path(target), given, variants)
    if variants:
        raise UsageError(
            f"{target} has no variants",
            code="no-variants",
            why="only a job file has",
            fix="leave out --variant",
        )
    return (job_spec(target, given),)


@dataclass(frozen=True, slots=True)
class Preparer:
    """Finds what is sent with each job and its Python environment, and rejects jobs that can't run.

    note: called with each line about a job that the user should read.
    detail: called with each line that pip prints.
    """

    note: LineReporter
    detail: LineReporter = SILENT.note

    def render(self, submission: Submission, spec: ClusterSpec) -> tuple[PreparedJob, ...]:
        """Prepare jobs for the cluster of this spec, which is not asked for anything. Nothing is sent.

        Raises:
            UsageError: a job can't run there.
        """
        workspace = Workspace.of(spec.name)
        try:
            pmix = facts_of(workspace).pmix
        except NotUpError:
            pmix = True
        facts = replace(facts_of_spec(spec), pmix=pmix)
        return self._prepared(submission, facts, Ledger(workspace.jobs), spec=spec)

    def prepare(self, session: Session, submission: Submission) -> tuple[PreparedJob, ...]:
        """Prepare jobs for the cluster of a session. Nothing is submitted.

        Raises:
            UsageError: a job can't run on the cluster.
            TransportError: the cluster can't be reached.
        """
        # What receives the folder of the first job is started first: it gets ready while we look.
        token = begin(session, submission.jobs[0].name)
        reject_files_of_here(session, submission.jobs)
        first, *others = self._prepared(submission, session.facts, session.ledger, session)
        if submission.replay is not None:
            reject_missing(session, first.job)
        return replace(first, token=token), *others

    def environment(self, session: Session, job: JobOptions) -> Environment:
        """Return the Python environment that the spec and the options of an allocation ask for.

        Raises:
            UsageError: the requirements can't be met.
        """
        return self._environment(session.facts, session.workspace, job)

    def _prepared(
        self,
        submission: Submission,
        facts: ClusterFacts,
        ledger: Ledger,
        session: Session | None = None,
        spec: ClusterSpec | None = None,
    ) -> tuple[PreparedJob, ...]:
        """Prepare jobs. Without a session the cluster is not asked, and the ledger is believed."""
        replay = submission.replay
        jobs, model = with_model(submission.jobs, submission.model, ledger.entries(), session)
        for job in jobs if not facts.pmix else ():
            if "launcher" in job.model_fields_set and job.launcher == "srun":
                self.note(f"note: {job.name}: mpirun starts the ranks, for Slurm has no plugin for PMIx here")
            reject_pmix(job)
        jobs = [with_launcher(with_gpus(facts, job), has_pmix=facts.pmix) for job in jobs]
        # A job that can't run is rejected before packages of any are looked for, or any is sent.
        scripts = [script_of(facts, job) for job in jobs]
        sources = [replay.source if replay else source_of(job) or model for job in jobs]
        for note in dict.fromkeys(note for source in sources if source for note in source.notes):
            self.note(f"note: {note}")
        prepared, known = [], replay.known if replay else {}
        for job, script, source in zip(jobs, scripts, sources, strict=True):
            lock = replay.lock if replay else None
            environment = self._environment(facts, ledger.workspace, job, spec=spec, lock=lock)
            text = script_of(facts, job, environment) if environment.lock else script
            prepared.append(PreparedJob(job, text, source, environment, known=known))
        return tuple(prepared)

    def _environment(
        self,
        facts: ClusterFacts,
        workspace: Workspace,
        job: JobOptions | JobSpec,
        *,
        spec: ClusterSpec | None = None,
        lock: str | None = None,
    ) -> Environment:
        """Resolve requirements. ``lock`` is the text of a lock to use instead, "" for no packages."""
        environment = Environment(root=facts.root)
        if isinstance(job, JobSpec) and (job.bundled or job.container):
            if job.requirements is not None:
                raise UsageError(
                    f"{'a container' if job.container else f'the bundled job {job.bundled}'} takes no "
                    "requirements",
                    code="no-requirements-here",
                    why="it runs with a Python of its own",
                    fix="leave --requirements out, or submit a script of yours",
                )
            return environment
        if facts.requirements or job.requirements or lock:
            # It needs the models of specs and wheels, as few jobs do.
            from clusterctl.jobs.environment import Environments, distribution_of_hosts  # noqa: PLC0415

            distribution = distribution_of_hosts(workspace, spec)
            environment = Environments(self.note, self.detail).resolve(facts, distribution, job, lock)
        wheels = environment.lock.wheels if environment.lock else ()
        by_torch = isinstance(job, JobSpec) and job.launcher is Launcher.TORCHRUN
        if by_torch and not any(wheel.name == "torch" for wheel in wheels):
            raise UsageError(
                "torchrun comes with torch, which the job's Python does not have",
                code="torchrun-without-torch",
                fix="say --requirements FILE with a line that says torch",
            )
        return environment


def submit_prepared(submitter: Submitter, jobs: Sequence[PreparedJob]) -> Iterator[Submitted]:
    """Submit jobs, one after the other. Each is returned as soon as the scheduler has it.

    Raises:
        ClusterctlError: a job was not submitted. See ``Submitter.submit``.
    """
    for number, job in enumerate(jobs):
        with jobs_are_submitted(number > 0):
            submitted = submitter.submit(job)
        yield submitted


@contextmanager
def jobs_are_submitted(some: bool = True) -> Iterator[None]:
    """Mark errors of the body as raised once jobs were submitted: they are no reason to submit again."""
    try:
        yield
    except ClusterctlError as exc:
        exc.had_side_effects = exc.had_side_effects or some
        raise
