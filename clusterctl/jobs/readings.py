"""The activity of running jobs, from the files in their folders: the use of nodes and ranks from
telemetry, progress from metrics, hangs from events, and the last lines of logs.

No daemon and no right of an administrator is needed: telemetry runs in the job.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from clusterctl.errors import TransportError, printable
from clusterctl.jobs.events import hang_of, lasting_alarms
from clusterctl.jobs.remote_readings import HOST
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.history import Alarm, Hang, attempts_of
from clusterctl.scheduler.session import Session
from clusterctl.spec.metrics import is_loss
from clusterctl.state.ledger import METRICS_PLACES, PROGRAM_FOLDER
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.numbers import finite
from clusterctl.util.process import call_on_hosts
from clusterctl.util.terminal import plain_line

_PROGRAM: Final = "clusterctl.jobs.remote_readings"
# A host whose telemetry has not grown for this time, in seconds, is not shown with old values.
NO_TELEMETRY_S: Final = 20.0
_MOST_LINES: Final = 30
_MOST_POINTS: Final = 4096
_MOST_KEPT: Final = 1 << 16  # bytes of an unfinished line
_MOST_NAMES: Final = 1000
# Of MiB, percent, watts or bytes per second.
_MOST_AMOUNT: Final = 1e13
_LONGEST_NAME: Final = 40
_SPEED: Final = re.compile(r"(?:_per_s(?:ec(?:ond)?)?|_s|/s(?:ec)?)$")
# Keys of a line of metrics that are no metrics.
_NO_METRICS: Final = frozenset({"kind", "time", "_timestamp", "_runtime", "rank", "run"}).union(
    key for key, _ in METRICS_PLACES
)
# Lines of metrics with these kinds are not about a step.
_NO_STEPS: Final = frozenset({"run", "result", "config", "evaluation"})


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of a GPU. None: it does not report the value.

    percent: of the time in which it computed. power_w: watts. processes: the processes that compute
        on it.
    """

    index: int
    percent: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The use of a node. cpu_percent: of all its cores. rx_bytes_per_s, tx_bytes_per_s: received and
    sent through all interfaces. None: unknown.
    """

    node: str
    cpu_percent: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    rx_bytes_per_s: float | None = None
    tx_bytes_per_s: float | None = None
    gpus: tuple[GpuUse, ...] = ()


@dataclass(frozen=True, slots=True)
class RankUse:
    """The use of a node by a rank. cpu_percent: of one core. gpus: the GPUs on which it has a
    process.
    """

    rank: int
    node: str
    cpu_percent: float | None = None
    memory_mib: float | None = None
    gpus: tuple[GpuUse, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricValue:
    """The latest value of a metric of the program."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a program, by its metrics.jsonl. None: the metric is missing.

    step: such as step 410. curve: the last values of ``loss``, in order.
    """

    step: MetricValue | None = None
    loss: MetricValue | None = None
    speed: MetricValue | None = None
    curve: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class JobUse:
    """The activity of a running job. silent: the nodes without recent telemetry. log: its last
    lines.
    """

    id: str
    nodes: tuple[NodeUse, ...] = ()
    ranks: tuple[RankUse, ...] = ()
    silent: tuple[str, ...] = ()
    progress: Progress = Progress()
    hang: Hang | None = None
    alarms: tuple[Alarm, ...] = ()
    log: tuple[str, ...] = ()


class Lines:
    """Whole lines of a file that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, *, follows: bool) -> list[bytes]:
        """Return the lines that ``data`` completes. follows: whether it follows the last piece;
        otherwise its first line may have lost its beginning.
        """
        *whole, rest = ((self._rest if follows else b"") + data).split(b"\n")
        self._rest = rest[-_MOST_KEPT:]
        return whole


class MetricsTail:
    """The lines of a metrics.jsonl: the last values, and those of the loss."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._step: MetricValue | None = None
        self._curves: dict[str, deque[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        if str(line.get("kind")) in _NO_STEPS:
            return
        for key, axis in METRICS_PLACES:
            if (place := _number(line, key)) is not None:
                self._step = MetricValue(axis, place)
                break
        for key, value in line.items():
            if key in _NO_METRICS or (number := finite(value)) is None:
                continue
            name = printable(key[:_LONGEST_NAME])
            if name in self._last or len(self._last) < _MOST_NAMES:
                self._last[name] = number
                if is_loss(name):
                    self._curves.setdefault(name, deque(maxlen=_MOST_POINTS)).append(number)

    def progress(self) -> Progress:
        loss = min(self._curves, key=_order, default=None)
        speed = next((name for name in self._last if _SPEED.search(name)), None)
        return Progress(
            self._step,
            MetricValue(loss, self._last[loss]) if loss else None,
            MetricValue(speed, self._last[speed]) if speed else None,
            tuple(self._curves[loss]) if loss else (),
        )


@dataclass
class Readings:
    """The content of a running job's files so far.

    sent: host that has the files -> file -> number of bytes that were read.
    """

    sent: dict[str, dict[str, int]] = field(default_factory=dict)
    _lines: dict[tuple[str, str], Lines] = field(default_factory=dict)
    _hosts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _samples: dict[str, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)
    _events: bytes = b""
    _metrics: MetricsTail = field(default_factory=MetricsTail)
    _log: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_LINES))

    def add(self, host: str, file: str, at: int, data: bytes, now: float) -> None:
        """Add the bytes of a file of ``host`` from ``at`` on, read at the time ``now`` of a clock."""
        kind, _, name = file.partition("/")
        if name and not HOST.fullmatch(f"{name}.jsonl"):
            return
        sent = self.sent.setdefault(host, {})
        follows = at == sent.get(file, 0)
        is_anew = at == 0 and not follows
        sent[file] = at + len(data)
        lines = self._lines.setdefault((host, file), Lines()).feed(data, follows=follows)
        if kind == "host":
            self._hosts[name] = next(iter(_objects(lines)), {})
        elif kind == "telemetry":
            for line in _objects(lines):
                if line.get("kind") == "sample":
                    self._samples[name] = now, line
        elif kind == "events":
            self._events = ((b"" if is_anew else self._events) + data)[-_MOST_KEPT:]
        elif kind == "metrics":
            if is_anew:
                self._metrics = MetricsTail()
            for line in _objects(lines):
                self._metrics.add(line)
        elif kind in ("stdout", "stderr"):
            shown = (plain_line(line.decode(errors="surrogateescape")) for line in lines)
            self._log.extend(line for line in shown if line.strip())

    def use(self, job: JobInfo, now: float, silent_s: float = NO_TELEMETRY_S) -> JobUse:
        """Return the job's activity, from the samples that were read in the last ``silent_s``
        seconds.
        """
        recent = {
            host: sample
            for host, (at, sample) in self._samples.items()
            if host in job.nodes and now - at <= silent_s
        }
        nodes = tuple(
            _node(host, self._hosts.get(host, {}), recent[host])
            for host in job.nodes
            if host in recent
        )
        ranks = [rank for node in nodes for rank in _ranks(node, recent[node.node])]
        last = attempts_of(self._events.decode(errors="replace"))[-1]
        return JobUse(
            id=job.id,
            nodes=nodes,
            ranks=tuple(sorted(ranks, key=lambda use: (use.rank, use.node))),
            # Telemetry of a job that has just started may still come.
            silent=tuple(
                node for node in job.nodes if node not in recent and (job.elapsed_s or 0) > silent_s
            ),
            progress=self._metrics.progress(),
            hang=hang_of(last),
            alarms=lasting_alarms(last),
            log=tuple(self._log),
        )


def _order(name: str) -> tuple[bool, bool, int]:
    """Return a key by which the loss of training comes first, and then the shortest name."""
    return name != "loss", "train" not in name.lower(), len(name)


def _objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the JSON objects in lines. Other lines, such as the end of a cut line, are left out."""
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            parsed = json.loads(line)
            if isinstance(parsed, dict):
                found.append(parsed)
    return found


def _number(values: Mapping[str, Any], key: str) -> float | None:
    return finite(values.get(key))


def _amount(value: Any) -> float | None:
    """Return the use of a resource. None: unknown, or impossible, as in telemetry that a job has
    forged.
    """
    number = finite(value)
    return number if number is not None and 0 <= number < _MOST_AMOUNT else None


def _amount_of(values: Mapping[str, Any], key: str) -> float | None:
    return _amount(values.get(key))


def _node(name: str, host: Mapping[str, Any], sample: Mapping[str, Any]) -> NodeUse:
    def total(key: str) -> float | None:
        links = sample.get(key)
        if not isinstance(links, dict):
            return None
        return _amount(sum(value for value in map(finite, links.values()) if value is not None))

    return NodeUse(
        name,
        _amount_of(sample, "cpu_percent"),
        _amount_of(sample, "memory_used_mib"),
        _amount_of(host, "memory_total_mib"),
        total("net_rx_bytes_per_s"),
        total("net_tx_bytes_per_s"),
        tuple(_gpus(sample)),
    )


def _gpus(sample: Mapping[str, Any]) -> list[GpuUse]:
    listed = sample.get("gpus")
    uses = []
    for gpu in listed if isinstance(listed, list) else ():
        index = gpu.get("index") if isinstance(gpu, dict) else None
        if isinstance(index, int):
            processes = gpu.get("processes")
            uses.append(
                GpuUse(
                    index,
                    _amount_of(gpu, "util"),
                    _amount_of(gpu, "mem_used_mib"),
                    _amount_of(gpu, "mem_total_mib"),
                    _amount_of(gpu, "power_w"),
                    processes if isinstance(processes, int) else None,
                )
            )
    return uses


def _ranks(node: NodeUse, sample: Mapping[str, Any]) -> list[RankUse]:
    listed = sample.get("ranks")
    uses = []
    for number, rank in listed.items() if isinstance(listed, dict) else ():
        if re.fullmatch(r"[0-9]{1,6}", number) and isinstance(rank, dict):
            own = rank.get("gpus")
            indices = own if isinstance(own, list) else []
            uses.append(
                RankUse(
                    int(number),
                    node.node,
                    _amount_of(rank, "cpu_percent"),
                    _amount_of(rank, "memory_mib"),
                    tuple(gpu for gpu in node.gpus if gpu.index in indices),
                )
            )
    return uses


def read(
    session: Session, jobs: Sequence[JobInfo], readings: Mapping[str, Readings], now: float
) -> None:
    """Add the new data in the folders of ``jobs`` to their ``readings`` (job id -> readings).

    A single command on the cluster reads them all; without a shared folder, one on each host.
    Raises TransportError if no host answers.
    """
    hosts: dict[str, Transport] = {}
    on_host: dict[str, list[JobInfo]] = {}
    for job in jobs:
        for host, transport in session.hosts_with_files(job.nodes):
            hosts[host] = transport
            on_host.setdefault(host, []).append(job)

    def ask(host: str) -> list[Mapping[str, Any]]:
        requests = [
            {
                "top": job.work_dir,
                "task": "" if job.task is None else str(job.task),
                "files": PROGRAM_FOLDER,
                "sent": readings[job.id].sent.get(host, {}),
            }
            for job in on_host[host]
        ]
        stdin = json.dumps(requests).encode()
        return _answer(hosts[host], hosts[host].run(remote_argv(_PROGRAM), stdin=stdin).stdout)

    answers, errors = call_on_hosts(hosts, ask)
    if errors and not answers:
        raise next(iter(errors.values()))
    for host, answer in answers.items():
        for job, files in zip(on_host[host], answer, strict=False):
            for name, (at, data) in files.items():
                readings[job.id].add(host, name, at, data, now)


def _answer(transport: Transport, text: str) -> list[Mapping[str, tuple[int, bytes]]]:
    try:
        return [
            {name: (int(at), base64.b64decode(data)) for name, (at, data) in files.items()}
            for files in json.loads(text)
        ]
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error) as exc:
        raise TransportError(
            "the program that reads jobs' folders on the cluster gave a malformed answer",
            code="internal",
            about="answer",
            where=transport.host,
            why=printable(text[:200]),
            host=transport.host,
        ) from exc
