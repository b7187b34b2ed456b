"""Stage a job's folder on the cluster and hand it over, once, whatever becomes of the connection."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import (
    AnswerLostError,
    ClusterctlError,
    MachineError,
    SchedulerError,
    SlurmError,
    TransportError,
    UnreachableError,
)
from clusterctl.jobs.environment import PLAIN, Environment, build
from clusterctl.jobs.mpirun_script import Taken, render_mpirun_script, taken
from clusterctl.jobs.script import fix_of, partition_of, render_script
from clusterctl.jobs.source import Source, source_of
from clusterctl.jobs.stage import SentSource, client_facts, outputs_file, remove_folder, stage
from clusterctl.jobs.userscript import UserScript
from clusterctl.scheduler.base import backoff
from clusterctl.scheduler.mpirun.client import JobRequest, MpirunClient
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.client import SlurmAwayError, SlurmClient
from clusterctl.spec.job import JobSpec
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.ledger import CLIENT_FACTS, SPEC_FILE, JobEntry
from clusterctl.transport.base import Transport
from clusterctl.transport.local import LocalTransport
from clusterctl.transport.put import send_to_store
from clusterctl.transport.tree import Progress
from clusterctl.util.assets import payload_hash
from clusterctl.util.progress import LineReporter

SCRIPT = "job.sbatch"
MPIRUN_SCRIPT = "job.mpirun"  # where there is no scheduler

# There was no connection at all, so nothing was sent.
_NOT_SENT = re.compile(r"slurm controller \(connect failure\)|Connection refused", re.IGNORECASE)
_BACK_SOON_S = 6.0
# Slurm had the connection: a request that it did not answer in time may be carried out later.
_ON_ITS_WAY = re.compile(r"timed out|Zero Bytes|(send|receive|shutdown) failure", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was taken. ``script`` is the text of its script."""

    job_id: str
    name: str
    script: str
    remote_dir: str
    token: str
    source: SentSource | None


def script_of(spec: ClusterSpec, job: JobSpec, environment: Environment = PLAIN) -> str:
    """What `--dry-run` prints: the job's script, which works with plain sbatch, or bash without a scheduler.

    Raises:
        UsageError: the user's script can't be read or can't be run as a job, or its partition can't have it.
    """
    outputs_file(job)  # a pattern that is wrong is said here, too
    if not spec.has_slurm:
        return render_mpirun_script(spec, job, payload_hash=payload_hash(), environment=environment)
    _partition(spec, job)
    return render_script(
        job, payload_hash=payload_hash(), interval_s=spec.monitoring.interval, environment=environment
    )


def submit(
    session: Session,
    job: JobSpec,
    *,
    source: Source | None = None,
    environment: Environment = PLAIN,
    local: Transport | None = None,
    progress: Progress = lambda *_: None,
    report: LineReporter = lambda _text: None,
) -> Submitted:
    """Stage and submit a job; before that, build the environment that it needs.

    ``source`` and ``environment`` are what ``source_of`` and ``environment_of`` have found for it.

    Raises:
        UsageError: the job can't be run, or asks for what the cluster does not have.
        MachineError: it can't be written down here; it was not submitted.
        TransferError: the folder changed meanwhile, or can't be made on the cluster.
        SchedulerError: it was refused; of Slurm its words, and the valid choices where they are known.
        TransportError: the controller can't be reached, or the submission is unresolved: a job that was taken
            all the same is found by its token when jobs are next listed or collected.
    """
    script = script_of(session.spec, job, environment)  # what is wrong is said before anything is sent
    if isinstance(session.scheduler, MpirunClient):
        session.scheduler.refuse_while_busy()
    source = source or source_of(job)
    others = session.of_partition(_partition(session.spec, job)) if session.node_local else ()
    # Not Path.is_file: what we may not look at, or can't be a name here, is the cluster's.
    if job.container is not None and os.path.isfile(job.container):  # noqa: PTH113
        image = Path(job.container)
        there = send_to_store(session.transport, [image], progress=progress)[image]
        for other in others:
            send_to_store(other, [image], progress=progress)
        job = job.model_copy(update={"container": there})
        script = script_of(session.spec, job, environment)
    folder = job.script.parent if job.script is not None else Path.cwd()
    facts = client_facts(job, environment, local=local or LocalTransport(), folder=folder)
    for transport in (session.transport, *others):
        build(transport, environment, report=report, progress=progress)
    token = secrets.token_hex(4)
    ours: Mapping[str, bytes] = {
        **outputs_file(job),
        (SCRIPT if session.spec.has_slurm else MPIRUN_SCRIPT): script.encode(errors="surrogateescape"),
        SPEC_FILE: dump_spec(session.spec).encode(),
        CLIENT_FACTS: (json.dumps(facts, indent=2) + "\n").encode(errors="replace"),
    }
    remote_dir, sent, ours = stage(
        session.transport, f"{job.name}-{token}", source, ours, others=others, progress=progress
    )
    entry = JobEntry(
        token=token,
        name=job.name,
        user=session.spec.job_user.name,
        submitted_at=time.time(),
        remote_dir=remote_dir,
    )
    try:
        session.ledger.keep(token, ours)
        session.ledger.add(entry)  # before it is handed over: from here on, the job can be found by its token
    except MachineError:
        remove_folder((session.transport, *others), remote_dir)
        raise
    if isinstance(session.scheduler, MpirunClient):
        job_id = _start(session, session.scheduler, entry, taken(session.spec, job))
    else:
        job_id = _sbatch(session, entry, remote_dir)
    session.ledger.update(entry, job_id=job_id)
    return Submitted(job_id, job.name, script, remote_dir, token, sent)


def _partition(spec: ClusterSpec, job: JobSpec) -> str | None:
    """The partition that a job goes to; None where its script may say another."""
    if job.partition is None and job.script is not None and UserScript.read(job.script).directives:
        return None
    return partition_of(spec, job).name


def _start(session: Session, mpirun: MpirunClient, entry: JobEntry, what: Taken) -> str:
    """Start the job on the first of its nodes, which are its alone.

    Raises:
        AnswerLostError: it may have been started.
        SchedulerError: it was refused, as by another job that runs; nothing of it stays.
    """
    folder = entry.remote_dir or ""
    start = JobRequest(
        entry.token, entry.name, folder, MPIRUN_SCRIPT, what.partition, what.nodes, limit_s=what.limit_s
    )
    try:
        return mpirun.submit(start)
    except SchedulerError:
        _forget(session, entry)
        raise
    except TransportError as exc:
        with suppress(SchedulerError, TransportError):
            if (job := mpirun.by_comment(entry.comment, entry.submitted_at)) is not None:
                return job.whole_id
        raise AnswerLostError(
            f"{what.nodes[0]} did not say whether it started the job",
            where=what.nodes[0],
            why=exc.why or exc.what,
            fix="look at `clusterctl jobs` before submitting again: the job is listed if it was started",
            host=what.nodes[0],
        ) from exc


def _sbatch(session: Session, entry: JobEntry, remote_dir: str) -> str:
    """Hand the job over; a second time only where Slurm can't have had the first request.

    Raises:
        AnswerLostError: it may have been taken.
        UnreachableError: slurmctld is not there; nothing of the job stays.
        SlurmError: it was refused; nothing of it stays.
    """
    # An appended log survives a requeue; by hand, a second sbatch in the folder starts its logs anew.
    options = (f"--comment={entry.comment}", f"--chdir={remote_dir}", "--open-mode=append")
    for tries_left in (1, 0):
        try:
            return session.slurm.sbatch(remote_dir, SCRIPT, *options)
        except (SlurmAwayError, UnreachableError, AnswerLostError) as exc:
            # Unreachable: sbatch may still be at it.
            may_be_taken = not isinstance(exc, SlurmAwayError) or _ON_ITS_WAY.search(exc.why)
            if not may_be_taken and _NOT_SENT.search(exc.why):
                if tries_left and _back_soon(session.slurm):
                    continue
                raise _not_sent(session, entry, exc) from exc
            if job_id := _found(session, entry, exc):
                return job_id
            if may_be_taken or not tries_left:
                raise _unresolved(session, entry, exc) from exc
        except SlurmError as exc:
            _forget(session, entry)
            raise SlurmError(exc.what, why=exc.why, fix=fix_of(session.slurm, exc.why)) from exc
    raise AssertionError("the last try returns")


def _found(session: Session, entry: JobEntry, cause: ClusterctlError) -> str | None:
    """The id of the job if Slurm has it. It is waited for until it answers, within bounds."""
    try:
        job = session.slurm.by_comment(entry.comment, entry.submitted_at)
    except (SlurmError, TransportError) as exc:
        raise _unresolved(session, entry, cause) from exc
    return job.whole_id if job else None


def _back_soon(slurm: SlurmClient) -> bool:
    """Whether slurmctld is there again before long."""
    give_up = slurm.clock.now() + _BACK_SOON_S
    with suppress(TransportError):
        for pause in backoff(first_s=0.5, longest_s=2.0):
            if slurm.is_there():
                return True
            if slurm.clock.now() + pause > give_up:
                break
            slurm.clock.sleep(pause)
    return False


def _forget(session: Session, entry: JobEntry) -> None:
    """Slurm has not taken this job, and will not."""
    session.ledger.update(entry, refused=True)
    if entry.remote_dir is not None:
        remove_folder((session.transport, *session.of_partition(None)), entry.remote_dir)


def _not_sent(session: Session, entry: JobEntry, exc: ClusterctlError) -> UnreachableError:
    _forget(session, entry)
    return UnreachableError(
        "Slurm does not answer, and the job was not submitted",
        where=f"slurmctld on {session.transport.host}",
        why=exc.why,
        fix="`clusterctl up` starts what was stopped; then submit again",
        host=session.transport.host,
    )


def _unresolved(session: Session, _entry: JobEntry, exc: ClusterctlError) -> AnswerLostError:
    return AnswerLostError(
        "Slurm did not say whether it took the job",
        where=session.transport.host,
        why=exc.why or exc.what,
        fix="look at `clusterctl jobs` before submitting again: the job is listed if it was taken",
        host=session.transport.host,
    )
