"""Client and job scripts for clusters without a scheduler: implements ``Jobs`` with mpirun and
systemd, over SSH.

Only a single job runs at a time, as a systemd unit on the job's first node.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import (
    ClusterctlError,
    Failure,
    SchedulerError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.scheduler.base import (
    JobInfo,
    JobRequest,
    JobState,
    NodeInfo,
    Nodes,
    comment_of,
    find_lost_job,
    own_exit,
    retry,
)
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.sites.script import (
    PLAIN,
    VERIFICATION_PER_NODE_S,
    Environment,
    ScriptTexts,
    common_words,
    mapping,
    mpirun_exports,
    program,
    verification_argv,
    watch_options,
)
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import OPTIONS
from clusterctl.spec.names import MPI_SSH, Launcher
from clusterctl.state.inventory import HEALTH_PROGRAM, Host, Inventory
from clusterctl.transport.base import Connect, Transport, as_user, remote_argv
from clusterctl.util import formatting
from clusterctl.util.assets import render
from clusterctl.util.process import Result, parallel_map
from clusterctl.util.progress import Clock

if TYPE_CHECKING:
    from clusterctl.scheduler.sites.site import Site

_HARDWARE = ("sh", "-c", "nproc; sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo")
_KIB_MIB = 1024
_HEALTH_S = 60.0
_IN_JOB_S = 120.0
_REPAIR = (
    "repair the node, then submit again, which repeats the health check; docs/gpus.md lists the "
    "checks"
)
_VERIFICATION_S = 30
# A host that did not answer is not contacted again for this time.
_AWAY_S = 15.0


@dataclass(frozen=True, slots=True)
class MpirunClient(Nodes):
    """Client for ``user``'s jobs. to: connects to a host as admin. transport: access to the
    controller.
    """

    script_name = "job.mpirun"
    drains_nodes = False
    id_pattern = re.compile(r"m([1-9][0-9]*)")
    id_example = "m1 (on a cluster without a scheduler)"

    inventory: Inventory
    user: str
    transport: Transport
    to: Connect
    clock: Clock = field(default_factory=Clock)
    patience_s: float = 60.0
    _away: dict[str, float] = field(default_factory=dict)  # host -> time

    def submit(self, request: JobRequest) -> str:
        """Start a job. Raises SchedulerError if another job runs, or if nodes are unhealthy."""
        first_node = request.nodes[0]
        try:
            return self._start(first_node, request)
        except TransportError as exc:
            return find_lost_job(self, request, exc)

    def _start(self, first_node: str, request: JobRequest) -> str:
        # This also records lost jobs, so that they no longer block other jobs.
        self.reject_if_busy()
        self._reject_unhealthy(request.nodes)
        names = ("token", "name", "folder", "partition", "nodes", "limit_s")
        record = {name: getattr(request, name) for name in names}
        start = {
            "do": "submit",
            "job": record,
            "script": request.script,
            "limit_s": request.limit_s,
        }
        answer = self._ask_once(first_node, start)
        if "busy" in answer:
            raise _busy(job_info(answer["busy"], self.user))
        if "failed" in answer:
            raise SchedulerError(
                f"{first_node} could not start the job",
                code="tool-failed",
                about="mpirun",
                where="systemd-run",
                why=str(answer["failed"]),
            )
        return str(answer["id"])

    def _reject_unhealthy(self, nodes: Sequence[str]) -> None:
        argv = ["sudo", "-n", HEALTH_PROGRAM]
        results = parallel_map(
            nodes, lambda node: self.to(node).run(argv, timeout_s=_HEALTH_S, check=False)
        )
        failures = tuple(
            Failure(
                "host-unfit",
                "; ".join(result.stdout.splitlines()),
                node,
                fix=_REPAIR,
                about="health",
            )
            for node, result in zip(nodes, results, strict=True)
            if result.rc == 1 and result.stdout.strip()
        )
        if failures:
            message = "the job was not started, because {hosts} failed the health check"
            raise SchedulerError.of_hosts(message, failures, code="host-unfit", about="health")

    def reject_if_busy(self) -> None:
        for job in self.own_jobs():
            if not job.ended and job.nodes:
                raise _busy(job)

    def jobs(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        for job_id in ids:
            self.check_id(job_id)
        return tuple(job for job in self.own_jobs() if job.id in ids) if ids else ()

    def own_jobs(self) -> tuple[JobInfo, ...]:
        records = self._ask(self.inventory.controller.name, {"do": "list"})["jobs"]
        jobs = {job.id: job for job in (job_info(record, self.user) for record in records)}
        for job in [job for job in jobs.values() if not job.ended and job.nodes]:
            jobs[job.id] = self._current_state(job)
        return tuple(jobs.values())

    def all_jobs(self) -> tuple[JobInfo, ...]:
        return self.own_jobs()

    def by_token(self, token: str, submitted_at: float) -> JobInfo | None:  # noqa: ARG002
        return next((job for job in self.own_jobs() if job.token == token), None)

    def cancel(self, ids: Sequence[str]) -> Mapping[str, ClusterctlError]:
        """Cancel jobs: send SIGTERM to each job's script, and later SIGKILL to processes that
        remain.
        """
        errors: dict[str, ClusterctlError] = {}
        for job in self.jobs(ids):
            if not job.nodes:
                errors[job.id] = SchedulerError(
                    f"job {job.id} can't be cancelled, because its nodes are unknown",
                    code="not-found",
                    about="job-nodes",
                    why=job.reason,
                )
                continue
            try:
                self._ask(job.nodes[0], {"do": "cancel", "ids": [job.id]})
            except (SchedulerError, TransportError) as exc:
                errors[job.id] = exc
        return errors

    def run_in_job(self, job: JobInfo, argv: Sequence[str]) -> Result:
        words = [*as_user(self.user), *argv]
        return self.to(job.nodes[0]).run(words, timeout_s=_IN_JOB_S, check=False)

    def nodes(self) -> tuple[NodeInfo, ...]:
        active = [job for job in self.own_jobs() if not job.ended]
        at_work = {node for job in active for node in job.nodes}
        hosts = self.inventory.compute
        return tuple(parallel_map(hosts, lambda host: self._node(host, at_work)))

    def run_verification_job(self, hosts: tuple[str, ...]) -> Result:
        limit_s = _VERIFICATION_S + VERIFICATION_PER_NODE_S * len(hosts)
        load = Environment(root=self.inventory.root).profile
        profile = f'cd && {{ [[ ! -r {load} ]] || . {load}; }} && exec "$@"'
        argv = [
            *(*as_user(self.user), "timeout", "--kill-after=5", str(limit_s)),
            *("env", "OMP_NUM_THREADS=1"),
            *("bash", "-c", profile, "probe"),
            *("mpirun", "-np", str(len(hosts)), "--host", ",".join(f"{host}:1" for host in hosts)),
            *("--map-by", "ppr:1:node", "-x", "PATH", "-x", "OMP_NUM_THREADS"),
            *verification_argv(self.inventory.root, hosts),
        ]
        return self.to(hosts[0]).run(argv, timeout_s=limit_s + 30, check=False)

    def _current_state(self, job: JobInfo) -> JobInfo:
        first_node = job.nodes[0]
        if self.inventory.host(first_node) is None:
            return replace(job, reason=f"{first_node} is no longer a host of this cluster")
        if not self._is_away(first_node):
            try:
                records = self._ask_once(first_node, {"do": "settle", "ids": [job.id]})["jobs"]
            except UnreachableError:
                self._away[first_node] = self.clock.now()
            else:
                return job_info(records[0], self.user) if records else job
        return replace(job, reason=f"{first_node} does not answer")

    def _is_away(self, host: str) -> bool:
        """Return whether the host left a call unanswered within the last ``_AWAY_S`` seconds."""
        return self.clock.now() - self._away.get(host, -_AWAY_S) < _AWAY_S

    def _node(self, host: Host, at_work: Iterable[str]) -> NodeInfo:
        cpus = host.cpus or 0
        memory_mib = host.memory_mib or 0
        state = "allocated" if host.name in at_work else "idle"
        down = NodeInfo(
            host.name,
            "down*",
            "the host does not answer",
            cpus,
            memory_mib,
            "",
            (host.partition or "",),
        )
        if self._is_away(host.name):
            return down
        try:
            threads, kib = self.to(host.name).run(_HARDWARE).stdout.split()
            cpus = host.cpus or int(threads)
            memory_mib = host.memory_mib or int(kib) // _KIB_MIB
        except (TransportError, ValueError):
            self._away[host.name] = self.clock.now()
            return down
        return replace(down, shown=state, reason="", cpus=cpus, memory_mib=memory_mib)

    def _ask(self, host: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a host's answer to a request. Repeat the request while the host is briefly
        unreachable.
        """
        return retry(self.clock, self.patience_s, lambda: self._ask_once(host, request))

    def _ask_once(self, host: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        request_text = json.dumps({"user": self.user, "folder": self.inventory.folder, **request})
        program = remote_argv("clusterctl.scheduler.sites.remote_jobs", request_text)[1:]
        output = self.to(host).run(["sudo", "-n", "/usr/bin/python3", "-I", "-S", *program]).stdout
        try:
            answer: Mapping[str, Any] = json.loads(output)
            return {**answer}
        except (ValueError, TypeError) as exc:
            problem = "the host's answer is not a valid list of jobs"
            raise SchedulerError(
                problem, code="internal", about="answer", where=host, why=output[:500]
            ) from exc


def _busy(job: JobInfo) -> SchedulerError:
    return SchedulerError(
        f"job {job.id} ({job.name}) is already running",
        code="in-use",
        about="hosts",
        where=", ".join(job.nodes),
        why=f"{job.user} started it at {formatting.moment(job.start_time or 0)}; without a "
        "scheduler, jobs do not queue",
        fix=f"wait until it ends (`clusterctl logs {job.id} -f`), or cancel it: `clusterctl "
        f"cancel {job.id}`",
    )


PREFIX: Final = "m"

# Result of a unit -> state, reason. See systemd.exec(5), $SERVICE_RESULT. The last three are
# clusterctl's.
_RESULTS: Final[Mapping[str, tuple[JobState, str]]] = {
    "success": (JobState.COMPLETED, ""),
    "exit-code": (JobState.FAILED, "NonZeroExitCode"),
    "signal": (JobState.FAILED, ""),
    "core-dump": (JobState.FAILED, ""),
    "timeout": (JobState.TIMEOUT, ""),
    "oom-kill": (JobState.OUT_OF_MEMORY, "OutOfMemory"),
    "shutdown": (JobState.NODE_FAIL, "the job's first node was shut down"),
    "lost": (
        JobState.NODE_FAIL,
        "the job's first node was restarted, or systemd no longer has the job",
    ),
    "start": (JobState.BOOT_FAIL, "the job's first node could not start the job"),
}
_SIGNALS: Final = {number.name.removeprefix("SIG"): number.value for number in signal.Signals}


def job_info(record: Mapping[str, Any], user: str) -> JobInfo:
    """Convert a record of remote_jobs.py. A damaged record becomes a job without nodes, in state
    UNKNOWN.
    """
    match = MpirunClient.id_pattern.fullmatch(str(record.get("id")))
    number = int(match[1]) if match else 0
    job = JobInfo(
        number=number, name="", user=user, state=JobState.UNKNOWN, reason="", prefix=PREFIX
    )
    try:
        if match is None:
            raise ValueError("the id is missing or invalid")
        end = record["end"]
        outcome = _outcome(end, cancelled=bool(record["cancelled"]))
        job = job if end is None else replace(job, state=outcome["state"])
        return replace(
            job,
            name=str(record["name"]),
            partition=str(record["partition"]),
            nodes=tuple(map(str, record["nodes"])),
            submit_time=int(record["time"]),
            start_time=int(record["time"]),
            end_time=None if end is None else int(end["time"]),
            time_limit_s=int(record.get("limit_s", 0)) or None,  # optional in records
            tres=f"node={len(record['nodes'])}",
            work_dir=str(record["folder"]),
            comment=comment_of(record["token"]),
            **outcome,
        )
    except (KeyError, ValueError, TypeError) as exc:
        return replace(job, reason=f"the job's record is damaged: {exc!r}"[:300])


def _outcome(end: Mapping[str, Any] | None, *, cancelled: bool) -> dict[str, Any]:
    if end is None:
        return {"state": JobState.COMPLETING if cancelled else JobState.RUNNING}
    state, reason = _RESULTS.get(str(end["result"]), (JobState.FAILED, str(end["result"])))
    if cancelled and state is not JobState.COMPLETED:
        state = JobState.CANCELLED
        reason = ""
    status = str(end["status"])
    told = (int(status), 0) if status.isdigit() else (0, _SIGNALS.get(status, 0))
    exit_code, ended_by = own_exit(state, *told)
    return {"state": state, "reason": reason, "exit_code": exit_code, "signal": ended_by}


def with_nodes(request: JobRequest, site: Site, of_job: Request) -> JobRequest:
    """Return the request with the first nodes of the job's partition, and the job's time limit."""
    partition = of_job.partition_in(site.inventory) or site.inventory.partitions[0]
    nodes = partition.nodes[: of_job.job.nodes]
    limit_s = of_job.job.time or partition.max_time or 0
    return replace(request, partition=partition.name, nodes=nodes, limit_s=limit_s)


def render_mpirun_script(
    site: Site, request: Request, *, payload_hash: str, environment: Environment = PLAIN
) -> str:
    """Return the bash script that runs a job. The script is started on the job's first node."""
    job = request.job
    nodes = with_nodes(JobRequest("", job.name, "", ""), site, request).nodes
    words = ScriptTexts(
        folder='"$PWD"',
        start='env -C "$start"',
        nodes=str(len(nodes)),
        slots=str(job.tasks_per_node),
        job_id="${CLUSTERCTL_JOB_ID:-m0}",
        launcher=_launcher(job, len(nodes)),
        started_by=f" --of=mpirun --per-node={job.tasks_per_node}",
    )
    return render(
        "job.mpirun.j2",
        **common_words(job, environment, payload_hash),
        nodes=nodes,
        slots=job.tasks_per_node,
        cpus=job.cpus or 1,
        job_options=" ".join(
            (
                *watch_options(job, site.inventory, environment),
                f"--nodes={','.join(nodes)} --ssh='{MPI_SSH}'",
            )
        ),
        program=program(request, environment, words, cluster=site.inventory.cluster),
    )


def _launcher(job: JobSpec, nodes: int) -> tuple[str, ...]:
    if job.launcher is Launcher.TORCHRUN:
        spread = "--map-by ppr:1:node --bind-to none"
        ranks = nodes
    else:
        spread = (
            "--map-by "
            f"{mapping(job, str(job.tasks_per_node))}{f':PE={job.cpus}' if job.cpus else ''}"
        )
        ranks = job.ranks or job.tasks
    return f"mpirun -np {ranks} --hostfile job.hosts {spread}", mpirun_exports(job)


def check_slurm_options(site: Site, request: Request) -> Iterator[UsageError]:  # noqa: ARG001
    """Yield errors if the job uses options or lines that only Slurm supports."""
    job = request.job
    script = request.script
    if script is not None and script.directives.lines:
        yield UsageError(
            f"the script {script.name} has #SBATCH lines, and this cluster does not run Slurm",
            code="unsupported",
            about="slurm",
            why=f"the first is {script.directives.lines[0].strip()!r}",
            fix="remove the #SBATCH lines, and use options of `clusterctl submit` instead",
        )
    given = {option.name: option.flag for option in OPTIONS.values() if option.needs_slurm}
    given = {name: flag for name, flag in given.items() if getattr(job, name)}
    # A scaling and a sweep also set options of Slurm.
    if "sweep" in given:
        given.pop("array", None)
    flags = [given["scaling"]] if "scaling" in given else [*given.values()]
    if "launcher" in job.model_fields_set and job.launcher is Launcher.SRUN:
        flags.append("--launcher srun")
    if flags:
        yield UsageError(
            f"this cluster has no scheduler, so jobs can't use {', '.join(flags)}",
            code="unsupported",
            about="slurm",
            why="only Slurm supports them; without it, jobs do not queue, and a job has its "
            "nodes to itself",
            fix="leave these options out, or use a cluster with `scheduler: slurm`",
        )
