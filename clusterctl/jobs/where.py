"""`where`: the places of a cluster that accept a job, their free capacity, and the expected start.

Slurm's answers are remembered in the workspace, because a site may be asked only at its pace.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from clusterctl.errors import ClusterctlError, Notice, SlurmAwayError, SlurmError
from clusterctl.jobs.first import JobPlace
from clusterctl.providers.registry import provider_of
from clusterctl.scheduler.base import NodeInfo
from clusterctl.scheduler.request.capacity import Capacity, Shape, capacity_of, shape_of
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites.script import fitted_to, render_script
from clusterctl.scheduler.slurm.parse import PartitionInfo
from clusterctl.scheduler.slurm.trial import SbatchTrial
from clusterctl.spec.units import parse_slurm_time_s
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import payload_hash
from clusterctl.util.disk import read_text
from clusterctl.util.typed_json import from_json

# At most this many questions are put to Slurm at once. The next command puts the rest.
MOST_ASKED: Final = 16
# An older answer tells no start.
_FRESH_S: Final = 600.0
# Slurm expects a job without a time limit to end 365 days after its start.
_LATEST_S: Final = 180 * 86400.0
_MOST_REMEMBERED: Final = 400
_REMEMBERED_S: Final = 30 * 86400.0
# An expected start that is so near is as good as now.
NOW_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A place for a job.

    accepted: whether Slurm would accept the job now. None: unknown, since Slurm was not asked yet,
        or refuses the job as it does while nodes are out of service, for which a job may wait.
    words: Slurm's answer. asked_at: its time; None: Slurm was not asked yet.
    start: the expected start. All times are in Unix seconds by the local clock.
    usd_per_hour: the price of the job's nodes; None: unknown.
    finding: a contradiction in these values, or the step to take before the place can be used.
    is_known: whether `submit` can use the partition. is_blocked: whether the job would not start
        there now, although Slurm may accept it.
    """

    place: JobPlace
    accepted: bool | None
    words: str
    asked_at: float | None
    start: int | None
    capacity: Capacity
    usd_per_hour: float | None
    finding: str
    is_known: bool
    is_blocked: bool = False

    @property
    def is_submittable(self) -> bool:
        """Whether Slurm accepts the job, which can start, and `submit` can use the partition."""
        return self.is_known and self.accepted is True and not self.is_blocked

    def as_dict(self, now: float) -> dict[str, Any]:
        return {
            **asdict(self.place),
            "accepted": self.accepted,
            "slurm": self.words,
            "asked_s": None if self.asked_at is None else round(now - self.asked_at, 1),
            "expected_start": self.start,
            "usd_per_hour": self.usd_per_hour,
            **asdict(self.capacity),
            "finding": self.finding,
            "submittable": self.is_submittable,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Slurm's earlier answers. trials: hash of a job script -> answer. asked_at: of the last."""

    asked_at: float = 0.0
    trials: Mapping[str, SbatchTrial] = field(default_factory=dict)

    @classmethod
    def read(cls, workspace: Workspace) -> _Memory:
        """Read the workspace's file. A missing or damaged file is an empty memory."""
        with suppress(ValueError, TypeError):
            return from_json(cls, json.loads(read_text(workspace.where)))
        return cls()

    def write(self, workspace: Workspace, now: float) -> None:
        recent = sorted(
            (item for item in self.trials.items() if now - item[1].asked_at < _REMEMBERED_S),
            key=lambda item: item[1].asked_at,
        )
        kept = replace(self, trials=dict(recent[-_MOST_REMEMBERED:]))
        write_atomic(workspace.where, f"{json.dumps(asdict(kept))}\n")


def candidates_of(session: Session, request: Request) -> tuple[Candidate, ...]:
    """Return the places of a cluster for a job.

    Slurm is asked about the places at the pace of the site, first about those of which no answer
    is remembered, then about those with the oldest.

    Raises:
        UsageError: the cluster does not run Slurm, or it lacks the job's partition.
        SchedulerError, TransportError: the cluster does not answer.
    """
    session.site.reject_without_slurm()
    partitions, _ = session.scheduler.partitions_and_own_jobs()
    # A site may show its users no nodes (PrivateData).
    try:
        nodes = session.scheduler.nodes()
    except SlurmAwayError:
        raise
    except SlurmError:
        nodes = ()
    requests = {
        place: fitted_to(session.site, place.of(request))
        for place in _places(session, request, nodes, partitions)
    }
    scripts = {place: _script(session, each) for place, each in requests.items()}
    memory = _Memory.read(session.workspace)
    memory = _with_trials(session, memory, [*scripts.values()])
    memory.write(session.workspace, time.time())
    shape = shape_of(request)
    infos = {each.name: each for each in partitions}
    return tuple(
        _candidate(
            session,
            place,
            memory.trials.get(_key(script)),
            capacity=capacity_of(_nodes_of(place, nodes), shape) if nodes else Capacity(),
            obstacle=_obstacle(infos.get(place.partition or ""), requests[place]),
            shape=shape,
        )
        for place, script in scripts.items()
    )


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the best places first: by acceptance, expected start, price and room."""
    now = time.time()

    def key(each: Candidate) -> tuple[Any, ...]:
        acceptance = (True, None, False).index(each.accepted)
        start = math.inf if each.start is None else max(each.start - now - NOW_S, 0)
        price = math.inf if each.usd_per_hour is None else each.usd_per_hour
        return (
            acceptance,
            each.is_blocked,
            start,
            price,
            -(each.capacity.fitting or 0),
            each.place.shown,
        )

    return sorted(candidates, key=key)


def _places(
    session: Session,
    request: Request,
    nodes: Sequence[NodeInfo],
    infos: Sequence[PartitionInfo],
) -> Iterator[JobPlace]:
    """Yield the places that the job's options leave open. If the site chooses the partition of each
    job, a place has no partition.
    """
    known = dict.fromkeys(name for node in nodes for name in node.partitions)
    if not nodes:
        known = dict.fromkeys(each.name for each in infos)
    partitions: Sequence[str | None] = [*known]
    job = request.job
    if job.partition is not None:
        if job.partition not in known:
            raise session.site.unknown_partition(job.partition)
        partitions = [job.partition]
    elif session.inventory.is_routed:
        partitions = [None]
    accounts: Sequence[str | None] = (job.account,)
    if request.last("--account") is None:
        with suppress(ClusterctlError):
            accounts = session.scheduler.accounts(session.inventory.job_user)
    for partition in partitions:
        for account in accounts or (None,):
            yield JobPlace(session.inventory.cluster, partition, account)


def _script(session: Session, request: Request) -> str:
    """Return the job script for a place. Slurm alone judges whether the job fits there."""
    return render_script(session.inventory, request, payload_hash=payload_hash())


def _key(script: str) -> str:
    return hashlib.sha256(script.encode(errors="surrogateescape")).hexdigest()[:32]


def _with_trials(session: Session, memory: _Memory, scripts: Sequence[str]) -> _Memory:
    """Ask Slurm about job scripts at the pace of the site.

    If it was asked so lately that the pace forbids, remembered answers suffice, or else this waits.
    """
    trials = dict(memory.trials)
    pace_s = session.site.pace.pending_s
    rest_s = min(pace_s - (time.time() - memory.asked_at), pace_s)
    if rest_s > 0:
        if all(_key(script) in trials for script in scripts):
            return memory
        session.scheduler.clock.sleep(rest_s)
    oldest_first = sorted(
        scripts, key=lambda script: trials[key].asked_at if (key := _key(script)) in trials else 0
    )
    for script in oldest_first[:MOST_ASKED]:
        trial = session.scheduler.trial(script)
        if trial is not None:
            trials[_key(script)] = trial
    return replace(memory, trials=trials, asked_at=time.time())


def _candidate(
    session: Session,
    place: JobPlace,
    trial: SbatchTrial | None,
    *,
    capacity: Capacity,
    obstacle: Obstacle,
    shape: Shape | None,
) -> Candidate:
    accepted = trial.accepted if trial is not None else None
    # In a partition that is down, Slurm lets jobs wait without looking at its nodes.
    # A site that shows no nodes may have some out of service.
    are_nodes_out = not capacity.nodes or capacity.usable_nodes < capacity.nodes or obstacle.blocks
    if trial is not None and trial.is_about_nodes_out and are_nodes_out:
        accepted = None
    spec = session.spec
    price = provider_of(spec.provider).node_price(spec, place.partition or "")
    is_known = place.partition in {None, *(each.name for each in session.inventory.partitions)}
    candidate = Candidate(
        place=place,
        accepted=accepted,
        words=trial.words if trial is not None else "",
        asked_at=trial.asked_at if trial is not None else None,
        start=_start(trial) if trial is not None and not obstacle.notice else None,
        capacity=capacity,
        usd_per_hour=None if price is None or shape is None else price * shape.nodes,
        finding="",
        is_known=is_known,
        is_blocked=obstacle.blocks,
    )
    if obstacle.notice and accepted is not False:
        return replace(candidate, finding=obstacle.notice)
    return replace(candidate, finding=_finding(session, candidate, trial, shape))


def _start(trial: SbatchTrial) -> int | None:
    """Return the expected start. None: unknown, also if the queue has changed since the answer."""
    is_fresh = time.time() - trial.asked_at <= _FRESH_S
    return None if not is_fresh or _waits_for_endless_jobs(trial) else trial.start


def _waits_for_endless_jobs(trial: SbatchTrial) -> bool:
    """Return whether Slurm expects the start after the end of jobs without a time limit."""
    return trial.start is not None and trial.start - trial.asked_at > _LATEST_S


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a job that Slurm accepts may not start: with --test-only, Slurm then expects a start as if
    there were no obstacle.

    notice: the reason. "": there is no obstacle. blocks: whether the job does not start now, as far
        as clusterctl knows.
    """

    notice: Notice | str = ""
    blocks: bool = False


def _obstacle(partition: PartitionInfo | None, request: Request) -> Obstacle:
    """Return the obstacle of a job in a partition. partition: None: Slurm does not list it."""
    if request.last("--hold") is not None:
        text = "the job is held (--hold): it starts after `scontrol release`"
        return Obstacle(Notice("where-held", text), blocks=True)
    if partition is not None and not partition.is_up:
        text = "the partition is down; jobs wait until it is up"
        return Obstacle(Notice("where-partition-down", text), blocks=True)
    limit = partition.max_time if partition is not None else ""
    # A limit that is no time, such as UNLIMITED, is none.
    with suppress(ValueError):
        # Without EnforcePartLimits, Slurm accepts a longer job, which then waits.
        if request.time_s is not None and request.time_s > parse_slurm_time_s(limit):
            text = (
                f"longer than the partition's time limit ({limit}): the job waits, unless its QOS "
                "has the flag PartitionTimeLimit"
            )
            return Obstacle(Notice("where-beyond-limit", text), blocks=True)
    return Obstacle()


def _nodes_of(place: JobPlace, nodes: Iterable[NodeInfo]) -> Iterator[NodeInfo]:
    """Return the nodes of a place's partition, or else of all."""
    return (node for node in nodes if place.partition in {None, *node.partitions})


def _finding(
    session: Session, each: Candidate, trial: SbatchTrial | None, shape: Shape | None
) -> str:
    """Return where the values of a place contradict each other, or why `submit` can't use it."""
    if each.accepted and not each.is_known:
        error = session.site.unknown_partition(each.place.partition or "")
        text = f"`submit` can't use this partition yet: {error.fix}"
        return Notice("where-not-submittable", text)
    if each.accepted is None and each.asked_at is not None:
        text = "nodes of the partition are out of service; a job that needs them waits for them"
        if not each.capacity.nodes:
            text = "nodes, which Slurm does not show, may be out of service, so that the job waits"
        return Notice("where-nodes-out", text)
    if each.accepted and trial is not None and _waits_for_endless_jobs(trial):
        text = "the job waits for jobs without a time limit, so Slurm can't tell when it starts"
        return Notice("where-endless-jobs", text)
    fitting = each.capacity.fitting
    if not each.accepted or each.start is None or fitting is None or shape is None:
        return ""
    starts_later = each.start - (each.asked_at or 0) > NOW_S
    if starts_later and fitting >= shape.nodes:
        text = "nodes have room, yet Slurm expects a later start: they may be kept for jobs with a "
        return Notice(
            "where-room-but-later", f"{fitting} {text}higher priority, or for a reservation"
        )
    if not starts_later and fitting < shape.nodes:
        text = (
            "nodes are known to have room, yet Slurm expects a start within a minute: a job may end"
        )
        return Notice("where-no-room-but-now", f"only {fitting} {text}, or be preempted")
    return ""
