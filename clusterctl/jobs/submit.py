"""Stage a job's folder on the cluster and hand it over, once, whatever becomes of the connection."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.errors import (
    MachineError,
    SchedulerError,
    UnreachableError,
)
from clusterctl.jobs.environment import PLAIN, Environment, build
from clusterctl.jobs.mpirun_script import render_mpirun_script, taken
from clusterctl.jobs.script import partition_of, render_script
from clusterctl.jobs.source import Source, source_of
from clusterctl.jobs.stage import SentSource, client_facts, outputs_file, remove_folder, stage
from clusterctl.jobs.userscript import UserScript
from clusterctl.scheduler.models import JobRequest
from clusterctl.scheduler.session import Session
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
    session.scheduler.reject_if_busy()
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
        session.scheduler.script_name: script.encode(errors="surrogateescape"),
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
    try:
        job_id = session.scheduler.submit(_request(session, job, entry))
    except (SchedulerError, UnreachableError):  # not AnswerLostError: it may have been taken
        _forget(session, entry)
        raise
    session.ledger.update(entry, job_id=job_id)
    return Submitted(job_id, job.name, script, remote_dir, token, sent)


def _partition(spec: ClusterSpec, job: JobSpec) -> str | None:
    """The partition that a job goes to; None where its script may say another."""
    if job.partition is None and job.script is not None and UserScript.read(job.script).directives:
        return None
    return partition_of(spec, job).name


def _request(session: Session, job: JobSpec, entry: JobEntry) -> JobRequest:
    request = JobRequest(
        entry.token,
        entry.name,
        entry.remote_dir or "",
        session.scheduler.script_name,
        submitted_at=entry.submitted_at,
    )
    if session.spec.has_slurm:
        return request
    what = taken(session.spec, job)
    return replace(request, partition=what.partition, nodes=what.nodes, limit_s=what.limit_s)


def _forget(session: Session, entry: JobEntry) -> None:
    """The scheduler has not taken this job, and will not."""
    session.ledger.update(entry, refused=True)
    if entry.remote_dir is not None:
        remove_folder((session.transport, *session.of_partition(None)), entry.remote_dir)
