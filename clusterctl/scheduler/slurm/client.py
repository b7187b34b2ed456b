"""Client for Slurm: runs Slurm's commands on the controller.

Queries are repeated for a limited time while slurmctld, slurmdbd or the host does not answer.
``sbatch`` is
not repeated: if its answer is lost, the job is searched for by the comment that clusterctl gave it.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar, Unpack

from clusterctl.errors import (
    AnswerLostError,
    ClusterctlError,
    CommandError,
    JobRefusedError,
    NoAnswerError,
    SchedulerError,
    SlurmAwayError,
    SlurmError,
    TransportError,
    UnreachableError,
)
from clusterctl.scheduler.base import (
    AccountingAwayError,
    JobInfo,
    JobRequest,
    Jobs,
    JobState,
    NodeInfo,
    comment_of,
    find_lost_job,
    retry,
)
from clusterctl.scheduler.request.arrays import fold_tasks
from clusterctl.scheduler.sites import advice
from clusterctl.scheduler.sites.advice import Advice
from clusterctl.scheduler.slurm import parse as slurm_parse
from clusterctl.scheduler.slurm.accounting import split_records
from clusterctl.scheduler.slurm.availability import HEALTH_REASON
from clusterctl.scheduler.slurm.parse import PartitionInfo
from clusterctl.scheduler.slurm.records import (
    recorded_job,
    recorded_jobs,
    with_accounted,
    with_comments,
)
from clusterctl.scheduler.slurm.refusals import RequestedOptions
from clusterctl.scheduler.slurm.trial import SbatchTrial
from clusterctl.scheduler.slurm.values import expand_nodes, fold_nodes
from clusterctl.spec.names import PROOF_ACCOUNT, PROOF_PARTITION, SLURMCTLD_PORT
from clusterctl.transport.base import Transport
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock

if TYPE_CHECKING:
    from clusterctl.state.ledger import Ledger

# What an error is about if Slurm has answered a command with a refusal.
_COMMAND: Final = "command"
_DAY_S = 86400
_T = TypeVar("_T", JobInfo, NodeInfo, PartitionInfo)
_NOT_CANCELLED = re.compile(r"scancel: error: Kill job error on job id ([0-9_,\[\]-]+): (.*)")
_UNKNOWN_ID = re.compile("Invalid job id specified")
_ENDED_MEANWHILE = re.compile(
    f"{_UNKNOWN_ID.pattern}|[Jj]ob.* already (finished|completing or completed)"
)
# Slurm accepted the connection, so a request that it did not answer in time may still be carried
# out.
_ON_ITS_WAY = re.compile(r"timed out|Zero Bytes|(send|receive|shutdown) failure", re.IGNORECASE)
# There was no connection at all, so nothing was sent.
_NOT_SENT = re.compile(r"slurm controller \(connect failure\)|Connection refused", re.IGNORECASE)
_BACK_SOON_S = 6.0
# Commands that ask slurmdbd, the accounting. For queries that can do without, and for the check of
# `status`.
_ACCOUNTING = ("sacct", "sacctmgr")
_ACCOUNTING_S = 5.0
# So many jobs are asked for at once as JSON, of which each has some 20 KB.
_MOST_RECORDS = 200
# Slurm rejects an earlier Unix time (parse_time in src/common/parse_time.c).
_FIRST_TIME = 1_000_000
_PING_S = 2
# slurmctld notices the loss of a node after SlurmdTimeout and a round of pings, and a job may end
# sooner.
_NOTICED_S = 120
# Longer than a busy slurmctld needs for an answer.
_ANSWER_S = 5.0
# Variables such as SBATCH_TIMELIMIT are unset, because they would override the options in the
# script. If slurmctld and its backup are down, sbatch would try to reach them for a MessageTimeout,
# so check with a ping first, unless a process listens on slurmctld's port (state 0A), because a
# ping is slower than the rest.
_UNSET = r"unset $(env | sed -n 's/^\(SBATCH_[A-Z0-9_]*\)=.*/\1/p')"
_SBATCH = f"""\
if ! grep -qs ":{SLURMCTLD_PORT:04X} [0-9A-F:]* 0A" /proc/net/tcp /proc/net/tcp6 &&
    timeout 2 scontrol ping | tr -d '\\n' | grep -v " is UP" | grep -q " is DOWN"; then
    echo "sbatch: error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
fi
{_UNSET}
cd -- "$1" && shift && exec sbatch "$@\""""
_TRIAL = f"{_UNSET}; cd / && exec sbatch --test-only"
_TRIAL_S = 20.0
# A step beside the job's own steps.
_STEP = (
    "srun --quiet --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 --mem=0 --gres=none "
    "--cpu-bind=none --mpi=none"
).split()
_STEP_S = 120.0
# scancel has a line for each of many jobs.
_LONGEST_ERROR = 1 << 16
# munged does not run on the host of the command, or refuses it.
_NO_MUNGE = re.compile(r"Munge encode failed: .*")
_NOTHING = RequestedOptions()


class _How(TypedDict, total=False):
    """Options of a query, see ``SlurmClient._ask_all``."""

    nothing: re.Pattern[str] | None
    env: Mapping[str, str]
    patience_s: float | None


@dataclass
class SlurmClient(Jobs):
    """Client for Slurm as the user of ``transport``. Queries wait up to ``patience_s`` for an
    answer.

    ledger: names the folders of jobs, whose records replace the accounting. None: the records are
        not used.
    no_accounting: why the cluster has no accounting that this user may read. "": it has.
    advice: what users can do about the cluster itself.
    """

    transport: Transport
    clock: Clock = field(default_factory=Clock)
    patience_s: float = 60.0
    ledger: Ledger | None = None
    no_accounting: str = ""
    advice: Advice = advice.OWN
    # Whether a command got no answer, so that the next command checks slurmctld first.
    _in_doubt: bool = field(default=False, init=False)
    _is_accounting_away: bool = field(default=False, init=False)

    script_name = "job.sbatch"
    id_pattern = re.compile(r"[1-9][0-9]{0,8}(_[0-9]{1,9})?")
    id_example = "12, or 12_3 for an array's task; `cancel` also takes 12_[1-3]"

    def version(self) -> str:
        return slurm_parse.parse_version(self._ask(["sinfo", "--version"]))

    def is_there(self) -> bool:
        """Return whether slurmctld accepts connections."""
        return " is UP" in self.transport.run(["scontrol", "ping"], check=False).stdout

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self._query(slurm_parse.SINFO)

    def jobs(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        """Return jobs from squeue, and from sacct if squeue lacks them. An array's id means all its
        tasks.

        For the number that Slurm itself gives a task of an array (SLURM_JOB_ID), return the task.
        """
        return self._find(ids, in_full=False)

    def jobs_in_full(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        return self._find(ids, in_full=True)

    def _find(self, ids: Sequence[str], *, in_full: bool) -> tuple[JobInfo, ...]:
        """Return the result of ``jobs`` or ``jobs_in_full``."""
        for job_id in ids:
            self.check_id(job_id)
        if not ids:
            return ()
        found_jobs = tuple(
            job for job in self._queued(_jobs_option(*ids), nothing=_UNKNOWN_ID) if job.number
        )
        # squeue soon forgets ended tasks of an array that is still running, so also ask sacct for
        # arrays.
        complete = {str(job.number) for job in found_jobs if job.task is None} | {
            job.id for job in found_jobs
        }
        missing = [job_id for job_id in ids if job_id not in complete]
        if missing or in_full:
            try:
                accounted = self._ended(ids if in_full else missing, missing, in_full=in_full)
            except AccountingAwayError as exc:
                exc.queued = _sorted(
                    [*{job.id: job for job in (*exc.queued, *found_jobs)}.values()]
                )
                raise
            # For a moment, sacct has the last task of an array without its task number.
            arrays = {job.number for job in (*found_jobs, *accounted) if job.task is not None}
            queued_ids = {job.id for job in found_jobs}
            missing_ids = {*missing}
            if in_full:
                found_jobs = tuple(with_accounted(job, accounted) for job in found_jobs)
            new = {
                job.id: job
                for job in accounted
                if job.id not in queued_ids
                and missing_ids & {job.id, str(job.number), str(job.slurm_id)}
                and not (job.task is None and job.number in arrays)
            }
            found_jobs += tuple(new.values())
        return _sorted(found_jobs)

    def _ended(
        self, ids: Sequence[str], missing: Sequence[str], *, in_full: bool
    ) -> Sequence[JobInfo]:
        """Return jobs from the accounting or, without it, those that the queue lacks from their own
        records. missing: these of ``ids``.
        """
        query = slurm_parse.SACCT_STEPS if in_full else slurm_parse.SACCT
        try:
            return self._accounted(_jobs_option(*ids), query=query)
        except AccountingAwayError as exc:
            numbers = [job_id.partition("_")[0] for job_id in missing]
            jobs = (
                recorded_jobs(self.transport, self.ledger, numbers)
                if self.ledger is not None
                else ()
            )
            if {*numbers} > {str(job.number) for job in jobs}:
                exc.queued = jobs
                raise
            return jobs

    def nodes_and_jobs(self) -> tuple[tuple[NodeInfo, ...], tuple[JobInfo, ...]]:
        return self._with_queue(slurm_parse.SINFO)

    def partitions_and_own_jobs(self) -> tuple[tuple[PartitionInfo, ...], tuple[JobInfo, ...]]:
        try:
            return self._with_queue(slurm_parse.PARTITIONS, "--me")
        except SlurmError as exc:
            if exc.about != _COMMAND:
                raise
        # A site may show its users no nodes (PrivateData), without which sinfo shows nothing.
        shown = self._ask(["scontrol", "show", "partition", "--oneliner"])
        return slurm_parse.parse_shown_partitions(shown), self.own_jobs()

    def nodes_out_of_service(self) -> tuple[NodeInfo, ...]:
        return self._query(slurm_parse.SINFO, slurm_parse.OUT_OF_SERVICE)

    def accounts(self, user: str) -> tuple[str, ...]:
        if self.no_accounting:
            return ()
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "where"]
        answer = self._ask([*argv, f"user={user}", "format=Account"], patience_s=_ACCOUNTING_S)
        names = dict.fromkeys(answer.splitlines())
        return tuple(name for name in names if name not in {"", PROOF_ACCOUNT})

    def trial(self, script: str) -> SbatchTrial:
        result = self.transport.run(
            ["sh", "-c", _TRIAL],
            stdin=script.encode(errors="surrogateescape"),
            env=slurm_parse.ENVIRONMENT,
            timeout_s=_TRIAL_S,
            check=False,
        )
        if result.rc != 0 and SlurmAwayError.words.search(result.stderr):
            raise SlurmAwayError("slurmctld did not answer sbatch", why=result.stderr.strip())
        return SbatchTrial.of(result.rc, result.stderr, time.time())

    def _with_queue(
        self, query: slurm_parse.Query[_T], *options: str
    ) -> tuple[tuple[_T, ...], tuple[JobInfo, ...]]:
        separator: str = slurm_parse.new_separator()
        queue = [*slurm_parse.SQUEUE.command(separator), *options]
        rows, jobs = self._ask_all([query.command(separator), queue])
        own = slurm_parse.SQUEUE.parse(jobs, separator)
        return query.parse(rows, separator), _sorted(own)

    def own_jobs(self) -> tuple[JobInfo, ...]:
        return _sorted(self._queued("--me"))

    def all_jobs(self) -> tuple[JobInfo, ...]:
        return _sorted(self._queued())

    def by_token(self, token: str, submitted_at: float) -> JobInfo | None:
        for job in self.own_jobs():
            if job.token == token:
                return job
        # The cluster's clock may differ, so search two more days.
        days = 2 + max(0, int((time.time() - submitted_at) // _DAY_S))
        try:
            accounted = self._accounted(f"--starttime=now-{days}days")
        except AccountingAwayError:
            ended = (
                recorded_job(self.transport, self.ledger, token)
                if self.ledger is not None
                else None
            )
            if ended is None and not self.no_accounting:
                raise
            return ended
        return next((job for job in accounted if job.token == token), None)

    def submit(self, request: JobRequest) -> str:
        """Submit a job. Repeat sbatch once, and only if Slurm can't have received the first
        request.
        """
        # Appended logs survive a requeue. A second sbatch in the folder, by hand, truncates them.
        comment = comment_of(request.token)
        asked = RequestedOptions(request.options, self.advice, not self.no_accounting)
        options = (
            f"--comment={comment}",
            f"--chdir={request.folder}",
            "--open-mode=append",
        )
        for tries_left in (1, 0):
            try:
                return self.sbatch(request.folder, request.script, *options, asked=asked)
            except (SlurmAwayError, UnreachableError, AnswerLostError) as exc:
                was_not_sent = _NOT_SENT.search(exc.why) and not _ON_ITS_WAY.search(exc.why)
                # Unless the request was certainly not sent, sbatch may still be working on it.
                if not isinstance(exc, SlurmAwayError) or not was_not_sent:
                    return find_lost_job(self, request, exc)
                if not tries_left or not self._wait_for_slurmctld():
                    raise self._not_submitted(exc) from exc
        raise AssertionError("the last try returns")

    def _wait_for_slurmctld(self) -> bool:
        for _ in self.clock.polls(_BACK_SOON_S, first_s=0.5, longest_s=5.0):
            with suppress(TransportError):
                if self.is_there():
                    return True
        return False

    def _not_submitted(self, exc: ClusterctlError) -> UnreachableError:
        return UnreachableError(
            "Slurm does not answer, and the job was not submitted",
            where=f"slurmctld on {self.transport.host}",
            why=exc.why,
            fix=f"{self.advice.repair}, then submit again",
            host=self.transport.host,
        )

    def sbatch(
        self,
        folder: str,
        script: str,
        *options: str,
        asked: RequestedOptions = _NOTHING,
    ) -> str:
        """Submit a script from its folder and return the job's id. asked: the options in it, for a
        refusal.

        Raises:
            SlurmError: Slurm rejected the job.
            SlurmAwayError: sbatch could not reach slurmctld; the job may have been accepted.
            UnreachableError: no answer from sbatch, which may still be running.
            AnswerLostError: sbatch succeeded, but did not print a job id.
        """
        result = self.transport.run(
            ["sh", "-c", _SBATCH, "sh", folder, "--parsable", *options, "--", script],
            check=False,
        )
        if result.rc != 0:
            if SlurmAwayError.words.search(result.stderr):
                raise SlurmAwayError("slurmctld did not answer sbatch", why=result.stderr.strip())
            words = (
                re.sub(r"^sbatch: (error: )?", "", line)
                for line in result.stderr.strip().splitlines()
            )
            reason = "; ".join(words)
            raise JobRefusedError(
                "Slurm rejected the job",
                where=" ".join(["sbatch", *map(str, asked.options)]) if asked.options else "",
                why=reason,
                fix=asked.fix(reason),
            )
        job_id = (
            result.stdout.strip().splitlines()[-1].partition(";")[0]
            if result.stdout.strip()
            else ""
        )
        if not job_id.isdigit():
            raise AnswerLostError(
                "sbatch did not print a job id", why=result.stdout[:500], host=self.transport.host
            )
        return job_id

    def cancel(self, ids: Sequence[str]) -> Mapping[str, ClusterctlError]:
        for job_id in ids:
            self.check_id(job_id)
        words = _words_of(ids)
        self._forbid_requeue([*words])
        try:
            self._ask(["scancel", *words])
        except SlurmError as exc:
            refusals = dict(_NOT_CANCELLED.findall(exc.why))
            if not refusals:
                raise
            return {
                job_id: SlurmError(
                    f"job {job_id} can't be cancelled",
                    about="job-cancel",
                    why=reason,
                )
                for word, reason in refusals.items()
                if not _ENDED_MEANWHILE.search(reason)
                for job_id in words.get(word, [word])
            }
        return {}

    def _forbid_requeue(self, words: Sequence[str]) -> None:
        """Forbid Slurm to requeue jobs, because a program may requeue its job when it gets
        SIGTERM.
        """
        try:
            self._ask(["scontrol", "update", f"jobid={','.join(words)}", "requeue=0"])
        except SlurmAwayError:
            raise
        except SlurmError:
            # Slurm rejects every change of some waiting jobs, which scancel cancels all the same.
            for word in words if len(words) > 1 else ():
                self._forbid_requeue([word])

    def run_in_job(self, job: JobInfo, argv: Sequence[str]) -> Result:
        step = [*_STEP, f"--jobid={job.id}", f"--nodelist={job.nodes[0]}"]
        return self.transport.run([*step, *argv], timeout_s=_STEP_S, check=False)

    def lost_nodes(self, jobs: Sequence[JobInfo]) -> Mapping[str, Mapping[str, str]]:
        # A job that has lost its only node ends as NODE_FAIL.
        asked = [job for job in jobs if job.nodes and job.last_start is not None]
        asked = [job for job in asked if len(job.nodes) > 1 or job.state is not JobState.FAILED]
        if not asked:
            return {}
        spans = {
            job.id: (job.last_start or 0, job.end_time or job.last_start or 0) for job in asked
        }
        names = fold_nodes([*dict.fromkeys(node for job in asked for node in job.nodes)])
        since = min(start for start, _ in spans.values())
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", "event", f"nodes={names}"]
        argv += [f"start=uts{since}", "format=nodename,start,state,reason"]
        outages = "" if self.no_accounting else self._ask(argv, patience_s=_ACCOUNTING_S)
        # Until Slurm sets a node down that does not answer, the accounting has no event.
        latest = max(end for _, end in spans.values())
        is_recent = time.time() < latest + _NOTICED_S
        rows = self._query(slurm_parse.SINFO, f"--nodes={names}") if is_recent else []
        silent = {node.name: node.reason or "Not responding" for node in rows if node.is_lost}
        lost = {}
        for job in asked:
            start, end = spans[job.id]
            now_silent = silent if time.time() < end + _NOTICED_S else {}
            of_all = now_silent | slurm_parse.parse_outages(outages, start, end + _NOTICED_S)
            lost[job.id] = {node: why for node, why in of_all.items() if node in job.nodes}
        return lost

    def unfit_nodes(self, names: Sequence[str]) -> Mapping[str, str]:
        rows = self._query(slurm_parse.SINFO, f"--nodes={fold_nodes(names)}")
        return {
            node.name: node.reason.removeprefix(HEALTH_REASON).strip()
            for node in rows
            if node.name in names and node.reason.startswith(HEALTH_REASON)
        }

    def required_nodes(self) -> dict[int, tuple[str, ...]]:
        # %F: the number of the job or array. %n: the nodes that it asks for by name.
        answer = self._ask(["squeue", "--noheader", "--states=PENDING", "--format=%F|%n"])
        rows = (line.split("|", 1) for line in answer.splitlines() if "|" in line)
        required = {int(number): nodes for number, nodes in rows if number.isdigit() and nodes}
        return {number: expand_nodes(nodes) for number, nodes in required.items()}

    def accounting(self, ids: Sequence[str]) -> Mapping[str, str] | None:
        for job_id in ids:
            self.check_id(job_id)
        if self.no_accounting:
            return None
        texts: dict[str, str] = {}
        for at in range(0, len(ids), _MOST_RECORDS):
            part = ids[at : at + _MOST_RECORDS]
            answer = self._ask(
                ["sacct", "--json", _jobs_option(*part)], env={}, patience_s=_ACCOUNTING_S
            )
            try:
                texts |= split_records(answer, part)
            except ValueError as exc:
                raise self._no_json(answer) from exc
        return texts

    def _no_json(self, answer: str) -> SlurmError:
        return SlurmError(
            "sacct's answer is not valid JSON",
            code="internal",
            about="slurm-answer",
            why=answer[-200:],
        )

    def accounted(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        for job_id in ids:
            self.check_id(job_id)
        if self.no_accounting:
            return ()
        return self._accounted(_jobs_option(*ids), query=slurm_parse.SACCT_STEPS)

    def history(self, since: int) -> tuple[JobInfo, ...] | None:
        if self.no_accounting:
            return None
        jobs = self._accounted("--allusers", f"--starttime=uts{max(since, _FIRST_TIME)}")
        # The first user also runs the verification job.
        return tuple(job for job in jobs if job.partition != PROOF_PARTITION)

    def accounting_failure(self) -> str:
        if self.no_accounting:
            return ""
        argv = ["timeout", str(_PING_S), *"sacctmgr --noheader show cluster format=cluster".split()]
        result = self.transport.run(argv, check=False)
        silent = f"no answer to sacctmgr for {_PING_S} s"
        return "" if result.rc == 0 else result.stderr.strip() or silent

    def _queued(self, *options: str, nothing: re.Pattern[str] | None = None) -> tuple[JobInfo, ...]:
        return self._query(slurm_parse.SQUEUE, *options, nothing=nothing)

    def _accounted(
        self, *options: str, query: slurm_parse.Query[JobInfo] = slurm_parse.SACCT
    ) -> tuple[JobInfo, ...]:
        reason = self.no_accounting
        try:
            if not reason:
                # Without an answer, jobs may have records of their own.
                patience_s = None if self.ledger is None else _ACCOUNTING_S
                jobs = self._query(query, *options, patience_s=patience_s)
                return slurm_parse.with_attempts(with_comments(self.ledger, jobs))
        except SlurmAwayError:
            raise
        except SlurmError as exc:
            reason = exc.why or exc.what
        message = "Slurm's accounting gives no usable answer"
        raise AccountingAwayError(
            message, why=reason, fix="`clusterctl jobs` shows the jobs in the queue"
        )

    def _query(
        self, query: slurm_parse.Query[_T], *options: str, **how: Unpack[_How]
    ) -> tuple[_T, ...]:
        separator: str = slurm_parse.new_separator()
        return query.parse(self._ask([*query.command(separator), *options], **how), separator)

    def _ask(self, argv: Sequence[str], **how: Unpack[_How]) -> str:
        """Return the stdout of a command."""
        return self._ask_all([argv], **how)[0]

    def _ask_all(
        self,
        commands: Sequence[Sequence[str]],
        *,
        nothing: re.Pattern[str] | None = None,
        env: Mapping[str, str] = slurm_parse.ENVIRONMENT,
        patience_s: float | None = None,
    ) -> list[str]:
        """Run commands in a single round trip; stop at the first failure. Return each command's
        stdout.

        nothing: pattern of an error message that means an empty answer.
        patience_s: how long to try again while Slurm does not answer. Default and maximum: the
            client's.
        """
        boundary = slurm_parse.new_separator()
        line = f" && printf %s {shlex.quote(boundary)} && ".join(map(shlex.join, commands))
        argv = commands[0] if len(commands) == 1 else ["sh", "-c", line]
        is_accounting = commands[0][0] in _ACCOUNTING
        limit_s = self.patience_s if patience_s is None else min(patience_s, self.patience_s)
        # An earlier query has waited for the accounting already.
        limit_s = 0 if is_accounting and self._is_accounting_away else limit_s

        def ask() -> list[str]:
            result = self._run(argv, env, None if is_accounting else _ANSWER_S)
            if result.rc == 0:
                if is_accounting:
                    self._is_accounting_away = False
                return result.stdout.split(boundary)
            if nothing is not None and nothing.search(result.stderr):
                return [""] * len(commands)
            # Each command before the failed one has written its boundary.
            failed_command = commands[result.stdout.count(boundary)]
            raise self._failure(failed_command[0], result, limit_s)

        return retry(self.clock, limit_s, ask)

    def _failure(self, command: str, result: Result, limit_s: float) -> SchedulerError:
        """Return the error for a command that failed. limit_s: how long it was tried."""
        reason = result.stderr.strip()[-_LONGEST_ERROR:]
        if SlurmAwayError.words.search(result.stderr):
            return self._away_error(command, reason, limit_s)
        if said := _NO_MUNGE.search(result.stderr):
            # Slurm advises an option of munged, which is not the cause.
            return SlurmError(
                f"{command} can't use munge, by which Slurm knows its users",
                code="slurm-away",
                about="munge",
                why=said[0],
                fix=f"{self.advice.repair}; running jobs are not affected",
            )
        error = SlurmError(
            f"{command} failed with exit status {result.rc}",
            about=_COMMAND,
            why=reason,
            fix=self.advice.repair if SlurmError.broken.search(reason) else "",
        )
        error.__cause__ = CommandError(command, rc=result.rc, stderr=result.stderr)
        return error

    def _run(self, argv: Sequence[str], env: Mapping[str, str], doubt_s: float | None) -> Result:
        """Run a command. If it has no answer in ``doubt_s`` seconds, ping slurmctld; repeat the
        command only if slurmctld answers. None: slurmctld does not answer this command, but the
        accounting, which may take long.
        """
        if not self._in_doubt and doubt_s is not None:
            with suppress(NoAnswerError):
                return self.transport.run(argv, check=False, env=env, timeout_s=doubt_s)
            self._in_doubt = True
        if doubt_s is None and not self._in_doubt:
            return self.transport.run(argv, check=False, env=env)
        if not self.is_there():
            raise self._away_error(
                "a ping", "slurmctld does not accept connections", self.patience_s
            )
        self._in_doubt = False
        return self.transport.run(argv, check=False, env=env)

    def _away_error(self, command: str, reason: str, limit_s: float) -> SchedulerError:
        if command in _ACCOUNTING:
            self._is_accounting_away = True
            return AccountingAwayError(
                "Slurm's accounting (slurmdbd) does not answer",
                why=reason.splitlines()[-1],
                fix=f"{self.advice.repair}; jobs run without the accounting",
            )
        return SlurmAwayError(
            f"slurmctld has not answered {command} for {limit_s:g} s",
            why=reason,
            fix=f"{self.advice.repair}; running jobs are not affected",
        )


def _words_of(ids: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return words for scancel and scontrol -> the ids that each selects: ``12_[1-3]`` for several
    tasks of an array.
    """
    by_array: dict[str, list[str]] = {}
    for job_id in ids:
        by_array.setdefault(job_id.partition("_")[0], []).append(job_id)
    words: dict[str, list[str]] = {}
    for number, own in by_array.items():
        if len(own) > 1 and number not in own:
            tasks = fold_tasks(int(job_id.partition("_")[2]) for job_id in own)
            words[f"{number}_[{tasks}]"] = own
        else:
            words |= {job_id: [job_id] for job_id in own}
    return words


def _jobs_option(*ids: str) -> str:
    return "--jobs=" + ",".join(ids)


def _sorted(jobs: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
    return tuple(sorted(jobs, key=lambda job: (job.number, job.task or 0)))
