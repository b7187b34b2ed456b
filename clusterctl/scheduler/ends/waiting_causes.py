"""The causes for which jobs wait, in an order: the first that applies is the cause.

Most are Slurm's own reason, in words: to add one, add a row to ``_REASONS``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from clusterctl.scheduler.base import JobInfo, NodeInfo
from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.ends.known import Cause
from clusterctl.scheduler.sites.advice import Advice
from clusterctl.scheduler.slurm.availability import (
    DRAINED_STATES,
    HEALTH_REASON,
    NO_NODES,
    Availability,
    availability_of,
    is_reserved,
    waits_for_nodes,
)
from clusterctl.scheduler.slurm.values import expand_nodes
from clusterctl.util import formatting

_UNAVAILABLE: Final = re.compile(r"UnavailableNodes:(\S+)")
_MOST_SHOWN: Final = 3  # nodes
# Slurm takes a year for jobs without a time limit, so that a later start is no estimate.
_LONGEST_S: Final = 60 * 86_400


class _Reason(NamedTuple):
    """A reason of Slurm. pattern: in Slurm's word. for_guests: the fix for users who do not operate
    the cluster. "": the same fix.

    Texts may contain {id}, {reason}, {partition}, {asked}, {limit}, {soon} and {repair}.
    """

    code: str
    pattern: str
    what: str
    fix: str
    for_guests: str = ""


_CANCEL: Final = "cancel the job with `clusterctl cancel {id}`"
_RELEASE: Final = "`clusterctl ssh -- scontrol release {id}`"
_RELEASE_AS_ADMIN: Final = "`clusterctl ssh --admin -- sudo scontrol release {id}`"
_ASK: Final = "ask the site's administrators, or cancel the job with `clusterctl cancel {id}`"
# Tried before the states of the nodes.
_HELD: Final = (
    _Reason(
        "held-after-launch-failure",
        r"launch.fail.*requeued.held",
        "held by Slurm, because a node could not start the job",
        f"{{repair}}; or try again with {_RELEASE}",
    ),
    _Reason(
        "user-environment",
        r"(?i)user.env.retrieval.fail",
        "held by Slurm, because the login environment of the job's user could not be read",
        f"correct ~/.bashrc and ~/.profile on the cluster (`clusterctl ssh`), then {_RELEASE}",
    ),
    _Reason(
        "dependency-never-satisfied",
        r"DependencyNeverSatisfied",
        "the job can never start, because a job that this job depends on failed",
        f"{_CANCEL}, and submit it again with another dependency",
    ),
    _Reason(
        "waiting-for-dependency",
        r"^Dependency\b",
        "another job must end first",
        "wait; `clusterctl jobs` shows the other job",
    ),
)
_REASONS: Final = (
    # Slurm also gives this reason for nodes that are drained.
    _Reason(
        "waiting-for-unavailable-nodes",
        r"ReqNodeNotAvail.*[Rr]eserved",
        "nodes that the job needs are drained or reserved{soon}",
        "`clusterctl ssh -- sinfo -R` shows drained nodes, `clusterctl ssh -- scontrol show "
        "reservation` shows reservations; a job with a shorter --time may start before a reservation",
    ),
    _Reason(
        "waiting-for-nodes-out-of-service",
        NO_NODES,
        "nodes that the job needs are out of service",
        "{repair}; `clusterctl ssh -- sinfo -R` shows why they are out of service",
    ),
    _Reason(
        "held",
        r"JobHeldUser",
        "the job is held: it starts only after it is released",
        f"release the job with {_RELEASE}, or {_CANCEL}",
    ),
    _Reason(
        "held",
        r"JobHeldAdmin",
        "an administrator holds the job",
        f"ask the administrator, or release the job with {_RELEASE_AS_ADMIN}",
        _ASK,
    ),
    _Reason(
        "held",
        r"requeued.in.held.state",
        "the job was requeued and is held (scontrol requeuehold): it starts only after it is released",
        f"release the job with {_RELEASE_AS_ADMIN}, or {_CANCEL}",
        _ASK,
    ),
    _Reason(
        "held",
        r"JobHoldMaxRequeue",
        "held by Slurm, because the job was requeued too often",
        f"read the log with `clusterctl logs {id}`; then release the job with {_RELEASE}, or cancel it",
    ),
    _Reason(
        "waiting-for-time",
        r"^BeginTime$",
        "the start time of the job has not come yet{soon}",
        "wait; Slurm also starts a requeued job only after a pause",
    ),
    _Reason(
        "partition-down",
        r"PartitionDown|PartitionInactive",
        "the partition is down or inactive",
        "use another --partition, or set this partition to UP with `scontrol update`",
        "use another --partition, or ask the site's administrators",
    ),
    _Reason(
        "waiting-beyond-partition",
        r"PartitionConfig",
        "the job can never start: it asks for {asked}, more than partition {partition} has now",
        f"{_CANCEL}, and ask for fewer --nodes; or give the partition more nodes in the spec, and run "
        "`clusterctl up`",
        f"{_CANCEL}, and ask for fewer --nodes, a shorter --time or another --partition",
    ),
    _Reason(
        "waiting-beyond-limits",
        r"PartitionTimeLimit",
        "the job can never start: partition {partition} does not allow its time limit{limit}",
        f"{_CANCEL}, and use a shorter --time or another --partition",
    ),
    _Reason(
        "waiting-beyond-limits",
        r"PartitionNodeLimit|BadConstraints|NodeConfig\w*|MaxMemPerLimit",
        "the job can never start, because it asks for more than the partition has ({reason})",
        f"{_CANCEL}, then ask for less or use another --partition; `clusterctl status` shows the nodes",
    ),
    _Reason(
        "waiting-beyond-job-limit",
        r"(?:QOS|Assoc)(?:Max\w+Per(?:Job|Node)(?:Limit)?$|Min\w+)",
        "the job can never start: its account or QOS does not allow a job of this size ({reason})",
        f"{_CANCEL}, and ask for another size, or use another --qos or --account; `clusterctl ssh -- "
        "sacctmgr show qos` shows limits",
    ),
    _Reason(
        "waiting-without-permission",
        r"(?:Account|QOS)NotAllowed|Invalid(?:Account|QOS)",
        "the job can never start: its account or QOS may not use partition {partition} ({reason})",
        f"{_CANCEL}, and use another --account, --qos or --partition",
    ),
    _Reason(
        "reservation-gone",
        r"Reservation(?:Deleted|Invalid)",
        "the job can never start, because its reservation no longer exists",
        f"{_CANCEL}, and submit it again without the reservation",
    ),
    _Reason(
        "waiting-for-own-array",
        r"JobArrayTaskLimit",
        "as many tasks of this array are running as the array allows, such as 4 with --array 1-10%4",
        "wait, or raise the limit with `clusterctl ssh -- scontrol update jobid={id} "
        "arraytaskthrottle=N`",
    ),
    _Reason(
        "waiting-for-quota",
        r"(?:QOS|Assoc|Max\w+Per(?:Account|User))\w*",
        "a limit of the account or QOS leaves no room for the job ({reason}){soon}",
        "wait for other jobs to end; a job that alone asks for more than the limit never starts: "
        "`clusterctl ssh -- sacctmgr show assoc` and `sacctmgr show qos` list the limits",
    ),
    _Reason(
        "waiting-for-licenses",
        r"^Licenses\b",
        "the licenses that the job needs are in use",
        "wait",
    ),
    _Reason(
        "waiting-for-reservation",
        r"^Reservation$",
        "the reservation has not begun yet{soon}",
        "wait",
    ),
    _Reason(
        "waiting-for-priority",
        r"^Priority$",
        "jobs of higher priority are ahead in the queue{soon}",
        "wait; `clusterctl jobs` shows the queue",
    ),
    _Reason(
        "waiting-for-resources",
        r"^Resources$",
        "other jobs are using the nodes, cores or memory that the job needs{soon}",
        "wait, or ask for less; `clusterctl status` shows which nodes are free",
    ),
    _Reason(
        "waiting-for-the-scheduler",
        r"^(?:None)?$",
        "Slurm has not considered the job yet{soon}",
        "wait a few seconds",
    ),
)


def waiting_cause(evidence: Evidence) -> Cause:
    """Return why a pending job waits."""
    return (
        _of_reason(evidence, _HELD)
        or _unavailable_nodes(evidence)
        or _of_reason(evidence, _REASONS)
        or Cause(
            code="waiting-for-another-reason",
            what=f"Slurm gives the reason {evidence.job.reason}{_soon(evidence.job)}",
            fix="`man squeue` explains the reason in its section JOB REASON CODES",
        )
    )


def _of_reason(evidence: Evidence, reasons: Sequence[_Reason]) -> Cause | None:
    job, advice = evidence.job, evidence.advice
    row = next((row for row in reasons if re.search(row.pattern, job.reason)), None)
    if row is None:
        return None
    asked = re.search(r"\bnode=(\d+)", job.tres)
    values = {
        "id": job.id,
        "reason": job.reason,
        "partition": job.partition,
        "asked": f"{asked[1]} nodes" if asked else "more nodes",
        "limit": f" of {formatting.duration(job.time_limit_s)}" if job.time_limit_s else "",
        "soon": _soon(job),
        "repair": advice.repair,
    }
    fix = row.fix if advice.is_operator else row.for_guests or row.fix
    return Cause(code=row.code, what=row.what.format(**values), fix=fix.format(**values))


def _soon(job: JobInfo) -> str:
    """Return Slurm's estimate of the start: ``; Slurm expects to start it in 5m``."""
    soon = job.expected_start - time.time() if job.expected_start else 0
    is_near = 0 < soon < _LONGEST_S
    return f"; Slurm expects to start it in {formatting.duration(round(soon))}" if is_near else ""


def _unavailable_nodes(evidence: Evidence) -> Cause | None:
    """Return that nodes are reserved, or out of service, by their states, because Slurm's reason is
    the same.
    """
    job = evidence.job
    if not waits_for_nodes(job):
        return None
    named = _UNAVAILABLE.search(job.reason)
    names = evidence.required or _expand(named[1] if named else "")
    partitions = set(job.partition.split(","))
    nodes = (
        [node for node in evidence.nodes if node.name in names]
        if names
        else [node for node in evidence.nodes if partitions & set(node.partitions)]
    )
    out = [node for node in nodes if not node.usable and not is_reserved(node)]
    if out:
        more = f" (and {len(out) - _MOST_SHOWN} more)" if len(out) > _MOST_SHOWN else ""
        text = "; ".join(_state_of(node) for node in out[:_MOST_SHOWN]) + more
        return Cause(
            code="waiting-for-nodes-out-of-service",
            what=f"the job needs nodes that are out of service: {text}",
            fix=_fix_for_nodes(out, evidence.advice),
        )
    if any(map(is_reserved, nodes)):
        return Cause(
            code="waiting-for-reserved-nodes",
            what=f"the nodes that the job needs are reserved{_soon(job)}",
            fix="wait, or use a shorter --time, so that the job ends before the reservation begins: "
            "`clusterctl ssh -- scontrol show reservation`",
        )
    return None


def _expand(nodelist: str) -> tuple[str, ...]:
    try:
        return expand_nodes(nodelist)
    except ValueError:
        return ()


def _state_of(node: NodeInfo) -> str:
    """Return ``n2 is drained: /tmp is full``."""
    states = {node.state, *node.flags}
    words = (
        ("not responding", {"NOT_RESPONDING"}),
        ("down", {"DOWN", "ERROR", "UNKNOWN"}),
        ("drained", DRAINED_STATES),
        ("powered off", {"POWERED_DOWN", "FUTURE"}),
    )
    state = next((word for word, those in words if states & those), node.shown)
    return f"{node.name} is {state}" + (f": {node.reason}" if node.reason else "")


def _fix_for_nodes(out: Sequence[NodeInfo], advice: Advice) -> str:
    names = " ".join(node.name for node in out[:_MOST_SHOWN])
    if advice.is_operator and all(node.reason.startswith(HEALTH_REASON) for node in out):
        command = f"`clusterctl ssh {out[0].name}`"
        return f"correct this on the node ({command}); its health check then returns it to service"
    if advice.is_operator and all(availability_of(node) is Availability.DRAINED for node in out):
        return (
            f"a person drained them: once they may be used again, `clusterctl node resume {names}`"
        )
    return f"{advice.repair}; `clusterctl ssh -- sinfo -R` shows why they are out of service"
