"""Attach a cluster that other people operate: the provider finds out the needs of jobs there, then
an ordinary job, the bundled `probe`, proves that MPI programs run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from clusterctl.errors import SchedulerError, UsageError, WaitTimeoutError
from clusterctl.jobs.prepare import Preparer, Submission
from clusterctl.jobs.submit import Submitter
from clusterctl.jobs.watch import diagnosis_of, wait
from clusterctl.providers.attached import AttachedCluster, AttachRequest, MpiProof
from clusterctl.providers.base import Provider
from clusterctl.runs.collect import collect
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.session import Session, connect_session
from clusterctl.scheduler.sites.advice import ANOTHER_FOLDER
from clusterctl.spec.job import job_spec
from clusterctl.spec.names import Launcher
from clusterctl.state.inventory import job_inventory
from clusterctl.transport.base import remove_folder
from clusterctl.util.progress import Reporter

# bash ends a job's script so, and writes this, if the script's last command is missing or does not
# start: the Python of jobs.
_NOT_FOUND: Final = {126, 127}
_LACKS_PYTHON: Final = "/bin/python: "
_LOGS: Final = ("stdout.log", "stderr.log")


def attach(provider: Provider, request: AttachRequest) -> tuple[AttachedCluster, MpiProof]:
    """Make a cluster ready for jobs, or check it again, and prove MPI by a job.

    Raises the errors of ``Provider.attach`` and ``prove``.
    """
    attached, proof = _attach(provider, request)
    if proof.lacks_python and attached.site_python:
        request.reporter.note(f"the nodes lack the login node's Python: {attached.site_python}")
        return _attach(provider, replace(request, own_python=True))
    return attached, proof


def _attach(provider: Provider, request: AttachRequest) -> tuple[AttachedCluster, MpiProof]:
    """Record all that jobs show at once: if this process ends, the next `attach` knows the job that
    still waits.
    """
    attached = provider.attach(request)
    request.reporter.step("prove")
    workspace = attached.workspace
    with connect_session(job_inventory(workspace), workspace) as session:
        for proof in prove(session, attached, request):
            attached = provider.record_proof(attached, proof)
    return attached, proof


def prove(
    session: Session, attached: AttachedCluster, request: AttachRequest
) -> Iterator[MpiProof]:
    """Submit a job with each launcher until one has the right answer, or does not end in time.

    Yield the state of the proof for each job: first ``pending``, before the wait for the job. The
    last says why the earlier launchers have failed, unless MPI is proven.

    Raises the errors of `submit` but for a refusal of the job, and those of `wait` and `collect`.
    """
    causes: list[str] = []
    waiting = attached.waiting
    for launcher in attached.launchers:
        for proof in _trial(session, attached, launcher, waiting, request):
            is_proven = proof.state == "proven"
            yield proof if is_proven else replace(proof, why="; ".join([*causes, proof.why]))
        if proof.state != "failed" or proof.lacks_python:
            return
        causes.append(proof.why)
        waiting = ""


def _trial(
    session: Session,
    attached: AttachedCluster,
    launcher: Launcher,
    job_id: str,
    request: AttachRequest,
) -> Iterator[MpiProof]:
    """Yield the states of the proof with a launcher. job_id: the job of an earlier `attach`. "": a
    new job.
    """
    if not job_id or not _may_prove(session, job_id):
        try:
            job_id = _submit(session, attached, launcher, request.reporter)
        except (SchedulerError, UsageError) as exc:
            if exc.retryable:
                raise
            yield MpiProof("refused", launcher, why=exc.cause, fix=exc.fix)
            return
    request.reporter.note(
        f"job {job_id} tests MPI with {launcher}. If this command ends before it, the job goes on, "
        "and `clusterctl attach` again reads its result"
    )
    yield MpiProof("pending", launcher, job_id, why=f"job {job_id} has not ended")
    try:
        jobs = wait(session, [job_id], timeout_s=request.patience_s)
    except WaitTimeoutError as exc:
        yield MpiProof("pending", launcher, job_id, why=exc.why)
        return
    yield _proof_of(session, attached, jobs[0], launcher)


def _may_prove(session: Session, job_id: str) -> bool:
    """Return whether a job of an earlier `attach` waits, runs, or has ended well."""
    jobs = session.scheduler.jobs([job_id])
    return bool(jobs) and all(not job.ended or job.state is JobState.COMPLETED for job in jobs)


def _submit(
    session: Session, attached: AttachedCluster, launcher: Launcher, reporter: Reporter
) -> str:
    nodes = attached.proof_nodes
    options = {
        "nodes": nodes,
        # A single rank would need no launcher.
        "tasks_per_node": 1 if nodes > 1 else 2,
        "launcher": launcher,
        **({"time": f"{attached.minutes}m"} if attached.minutes else {}),
    }
    submission = Submission.of([job_spec("probe", options)])
    (prepared,) = Preparer(reporter.note).prepare(session, submission)
    return Submitter(session, reporter.note).submit(prepared).job_id


def _proof_of(
    session: Session, attached: AttachedCluster, job: JobInfo, launcher: Launcher
) -> MpiProof:
    """Return the result of a job that has ended, or that can never start. Collect its run, which is
    not the user's. The job's folder stays only if the proof has failed.
    """
    diagnosis = diagnosis_of(session, [job])
    if not job.ended:
        session.scheduler.cancel([job.id])
    (run,) = collect(session, [job.id], out=session.workspace.root / "proofs", listed=False)
    folder = Path(run.directory)
    versions = _versions(folder / "stdout.log")
    if job.state is JobState.COMPLETED and versions is not None:
        oldest = min(versions, key=lambda version: [*map(int, version.split("."))], default="")
        entry = session.ledger.find(job.id)
        if entry is not None and entry.remote_dir:
            remove_folder([session.transport], entry.remote_dir)
        return MpiProof("proven", launcher, job.id, run.nodes, oldest)
    if not any((folder / name).exists() for name in _LOGS):
        # Slurm opens both before the job starts.
        nodes = ", ".join(run.nodes)
        why = f"{launcher}: the job has no log in {attached.folder}, which {nodes} may not share"
        return MpiProof("failed", launcher, job.id, run.nodes, why=why, fix=ANOTHER_FOLDER)
    return MpiProof(
        "failed",
        launcher,
        job.id,
        run.nodes,
        why=f"{launcher}: {diagnosis.cause if diagnosis else f'{job.state.value}, no answer'}",
        fix=Ending.of([job], diagnosis).fix,
        lacks_python=job.exit_code in _NOT_FOUND and _LACKS_PYTHON in _text(folder / "stderr.log"),
    )


def _text(log: Path) -> str:
    """Return a log's text. "": the log does not exist, because the node does not see the job's
    folder.
    """
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def _versions(log: Path) -> list[str] | None:
    """Return the known versions of glibc, such as `2.36`, in the answer of `probe`. None: the job
    gave no answer or several answers, or a check has failed.
    """
    try:
        (line,) = [line for line in _text(log).splitlines() if line.startswith("{")]
        answer = json.loads(line)
        versions = [str(rank["glibc"]).rpartition(" ")[2] for rank in answer["ranks"]]
        is_right = answer["ok"] is True
    except (ValueError, LookupError, TypeError):
        return None
    return [text for text in versions if re.fullmatch(r"\d+\.\d+", text)] if is_right else None
