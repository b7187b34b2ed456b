"""The jobs of one `submit`: read, checked, prepared with their files and packages, and submitted."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError, Notice, UsageError
from clusterctl.jobs.arguments import reject_wrong_arguments
from clusterctl.jobs.environment import environment_of
from clusterctl.jobs.source import Source, source_of
from clusterctl.jobs.stage import begin
from clusterctl.jobs.submit import Submitted, reject_files_of_here, submit
from clusterctl.jobs.trained import MODEL, ChosenModel, model_arguments, reject_unless_fitting, with_model
from clusterctl.scheduler.script import Environment, reject_pmix, with_gpus, with_launcher
from clusterctl.scheduler.session import Session, distribution_of_hosts, script_of
from clusterctl.spec.job import JobSpec, is_job_file, job_spec
from clusterctl.state.facts import ClusterFacts, facts_of_spec
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.tree import Progress
from clusterctl.util.progress import SILENT, LineReporter

if TYPE_CHECKING:
    from clusterctl.jobs.replay import Replay
    from clusterctl.spec.distributions import Distribution
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


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job with the files that are sent with it, and its Python environment."""

    job: JobSpec
    source: Source | None
    environment: Environment


@dataclass(frozen=True, slots=True)
class PreparedSubmission:
    """Jobs of which nothing is wrong as far as this machine and the cluster can tell.

    token: the token of the first job, whose folder on the cluster is being made already.
    known: facts of the original, in a replay.
    """

    jobs: Sequence[PreparedJob]
    token: str
    known: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedJob:
    """A job that is not submitted: the text of its script, and the files that would be sent."""

    job: JobSpec
    script: str
    source: Source | None


def reject_wrong(jobs: Sequence[JobSpec], model: ChosenModel | None) -> None:
    """Reject jobs without the model that they need, and arguments that a bundled job's program rejects.

    Raises:
        UsageError: there is such a job.
    """
    reject_unless_fitting(jobs, model)
    reject_wrong_arguments(jobs, model_arguments(MODEL, model) if model else ())


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What has to be known of a cluster to prepare jobs for it.

    entries: the jobs that were submitted from here.
    session: None: the cluster is not asked, and the entries are believed.
    """

    facts: ClusterFacts
    distribution: Callable[[], Distribution]
    entries: Sequence[JobEntry]
    session: Session | None = None

    @classmethod
    def of(cls, session: Session) -> _Cluster:
        """Return what a session knows."""
        entries = session.ledger.entries()
        return cls(session.facts, lambda: session.distribution, entries, session)


@dataclass(frozen=True, slots=True)
class Preparer:
    """Finds what is sent with each job and its Python environment, and rejects jobs that can't run.

    note: called with each line about a job that the user should read.
    detail: called with each line that pip prints.
    """

    note: LineReporter
    detail: LineReporter = SILENT.note

    def read_jobs(
        self, target: str, given: Mapping[str, object], variants: Sequence[str] = ()
    ) -> tuple[JobSpec, ...]:
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

            jobs = jobs_of_file(Path(target), given, variants)
            others = {field: value for field, value in given.items() if field != "args"}
            for job in jobs_of_file(Path(target), others, variants) if "args" in given else ():
                if job.args:
                    replaced = f"note: {job.name}: the file's args are replaced: {shlex.join(job.args)}"
                    self.note(Notice("args-replaced", replaced))
            return jobs
        if variants:
            raise UsageError(
                f"{target} has no variants",
                code="no-variants",
                why="only a job file has",
                fix="leave out --variant",
            )
        return (job_spec(target, given),)

    def render(self, submission: Submission, spec: ClusterSpec) -> tuple[RenderedJob, ...]:
        """Return the scripts that the jobs would run by on the cluster of this spec. Nothing is sent.

        Raises:
            UsageError: a job can't run there.
        """
        # The record of hosts is read by models, which `submit` itself has no need of.
        from clusterctl.state.inventory import inventory_if_known  # noqa: PLC0415

        workspace = Workspace.of(spec.name)
        hosts = inventory_if_known(workspace)
        facts = replace(facts_of_spec(spec), pmix=hosts is None or hosts.pmix)
        distribution = partial(distribution_of_hosts, spec, workspace)
        jobs = self._prepared(submission, _Cluster(facts, distribution, Ledger(workspace.jobs).entries()))
        return tuple(
            RenderedJob(one.job, script_of(facts, one.job, one.environment), one.source) for one in jobs
        )

    def prepare(self, session: Session, submission: Submission) -> PreparedSubmission:
        """Prepare jobs for the cluster of a session. Nothing is submitted.

        Raises:
            UsageError: a job can't run on the cluster.
            TransportError: the cluster can't be reached.
        """
        # What receives the folder of the first job is started first: it gets ready while we look.
        token = begin(session, submission.jobs[0].name)
        reject_files_of_here(session, submission.jobs, report=self.note)
        jobs = self._prepared(submission, _Cluster.of(session))
        return PreparedSubmission(jobs, token, submission.replay.known if submission.replay else {})

    def environment(self, session: Session, job: JobOptions) -> Environment:
        """Return the Python environment that the spec and the options of an allocation ask for.

        Raises:
            UsageError: the requirements can't be met.
        """
        return self._environment(_Cluster.of(session), job, None)

    def _prepared(self, submission: Submission, cluster: _Cluster) -> list[PreparedJob]:
        jobs, model = with_model(submission.jobs, submission.model, cluster.entries, cluster.session)
        for job in jobs if not cluster.facts.pmix else ():
            if "launcher" in job.model_fields_set and job.launcher == "srun":
                self.note(f"note: {job.name}: mpirun starts the ranks, for Slurm has no plugin for PMIx here")
            if note := reject_pmix(job):
                self.note(f"note: {note}")
        jobs = [with_launcher(with_gpus(cluster.facts, job), has_pmix=cluster.facts.pmix) for job in jobs]
        # A job that can't run is rejected before packages of any are looked for, or any is sent.
        for job in jobs:
            script_of(cluster.facts, job)
        replay = submission.replay
        sources = [replay.source if replay else source_of(job) or model for job in jobs]
        for note in dict.fromkeys(note for source in sources if source for note in source.notes):
            self.note(f"note: {note}")
        lock = replay.lock if replay else None
        environments = [self._environment(cluster, job, lock) for job in jobs]
        return [PreparedJob(*each) for each in zip(jobs, sources, environments, strict=True)]

    def _environment(self, cluster: _Cluster, job: JobOptions | JobSpec, lock: str | None) -> Environment:
        """Resolve requirements. ``lock`` is the text of a lock to use instead, "" for no packages."""
        return environment_of(
            cluster.facts,
            job,
            distribution=cluster.distribution,
            report=self.note,
            heard=self.detail,
            replayed=lock,
        )


def submit_prepared(
    session: Session,
    prepared: PreparedSubmission,
    *,
    progress: Progress = lambda *_: None,
    report: LineReporter = SILENT.note,
) -> Iterator[Submitted]:
    """Submit the jobs, one after the other. Each is returned as soon as the scheduler has it.

    Raises:
        ClusterctlError: a job was not submitted. See `jobs.submit.submit`.
    """
    token: str | None = prepared.token
    for number, one in enumerate(prepared.jobs):
        with jobs_are_submitted(number > 0):
            submitted = submit(
                session,
                one.job,
                token=token,
                source=one.source,
                environment=one.environment,
                known=prepared.known,
                progress=progress,
                report=report,
            )
        token = None
        yield submitted


@contextmanager
def jobs_are_submitted(some: bool = True) -> Iterator[None]:
    """Mark errors of the body as raised once jobs were submitted: they are no reason to submit again."""
    try:
        yield
    except ClusterctlError as exc:
        exc.had_side_effects = exc.had_side_effects or some
        raise
