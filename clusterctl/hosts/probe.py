"""Probe hosts over SSH in parallel. A single command per host returns all its facts
(HostReport).
"""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.errors import (
    ClusterctlError,
    KeyRefusedError,
    SlurmError,
    TransportError,
    TunnelError,
    TunnelRefusedError,
    UnreachableError,
)
from clusterctl.hosts.fabric import FabricPort
from clusterctl.hosts.gpus import Driver, Gpu
from clusterctl.hosts.remote_probe import OwnFacts
from clusterctl.spec import distributions
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport, remote_program
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util import formatting
from clusterctl.util.progress import HostStep

PROGRAM: Final = remote_program("clusterctl.hosts.remote_probe").encode()
# The platform Python of Rocky 8 is not on the PATH.
START: Final = (
    "for python in /usr/bin/python3 /usr/libexec/platform-python; do "
    '[ -x "$python" ] && exec "$python" -I -S - "$1"; done; echo "no Python 3 is installed" >&2; exit 127'
)
_STOPPING: Final = "stopping"
_LEAST_FREE: Final = 16 << 20  # bytes

# Hash, mode and owner of "file /etc/munge/munge.key", "running" for "unit munge", and so on.
Checksums = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The items that a probe reports about a host. The key of an item's checksum is its kind and
    name.

    openmpi: names of files beside Open MPI's parameters. key_end: end of the spec's lines in
        authorized_keys.
    blocks: file -> first and last line of a block. alone: files that must be the only *.conf in
        their folder.
    readable: patterns of files and folders that every user must be able to use.
    rivals: file -> pattern that no line of a later file in the folder may match. numbers: account
        -> uid.
    far_homes: homes that only the controller checks. units: unit -> files that the unit reads at
        its start.
    accounting: arguments of `sacctmgr show`. host: facts for a host that is to join
        (``host_facts_request``).
    node: report checksums and hardware. hardware: "gpus": only nodes with GPUs report it, as that of
        others is known already.
    """

    files: tuple[str, ...] = ()
    blocks: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    openmpi: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    users: tuple[str, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)
    far_homes: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    key_end: str = ""
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    accounting: tuple[tuple[str, ...], ...] = ()
    space: tuple[str, ...] = ("/",)
    host: Mapping[str, Sequence[str | int]] | None = None
    node: bool = True
    hardware: Literal["all", "gpus", "none"] = "all"

    def argv(self) -> tuple[str, ...]:
        node_argv = {"all": NODE_ARGV, "gpus": (*NODE_ARGV, "sh", "known"), "none": ()}
        request = json.dumps({"node_argv": node_argv[self.hardware], **asdict(self)})
        return ("sh", "-c", START, "sh", request)


class _Answer(BaseModel):
    # The program on the host comes from this version, so a fact without a field is an error in it.
    model_config = ConfigDict(frozen=True, extra="forbid")


class System(_Answer):
    """The operating system and the machine."""

    id: str
    version: str
    name: str
    machine: str
    python: tuple[int, int]
    systemd: bool
    cpus: int
    memory_mib: int
    hostname: str

    @property
    def release(self) -> str:
        """The distribution's name in clusterctl's table of distributions, such as `rocky-9.6`."""
        return f"{self.id}-{self.version}".rstrip("-")


class DiskSpace(_Answer):
    """A file system's free space and size in bytes. ``inodes``: free inodes, if limited."""

    paths: tuple[str, ...]
    free: int
    size: int
    inodes: int | None

    @property
    def is_full(self) -> bool:
        return self.free < _LEAST_FREE or self.inodes == 0

    def __str__(self) -> str:
        room = f"{formatting.size(self.free)} of {formatting.size(self.size)} free"
        remaining = "no inodes free" if self.inodes == 0 else room
        return f"{self.paths[0]} is full ({remaining})"


class GpuFacts(_Answer):
    """The NVIDIA GPUs of a host.

    cards, switches: numbers of GPUs and NVSwitches on the PCI bus. shown: names of the GPUs with a
        driver.
    driver, installed, manager: versions of the running driver, the kernel module on disk, the
        fabric manager.
    fault: the error of nvidia-smi.
    oldest: the lowest PCI device ID among the GPUs. Older models have lower IDs.
    """

    cards: int
    shown: tuple[str, ...]
    driver: str | None
    nouveau: bool
    secure_boot: bool
    switches: int = 0
    installed: str = ""
    fault: str = ""
    manager: str = ""
    oldest: int | None = None


NO_FIREWALL: Final = "none"


class Firewall(_Answer):
    """The first firewall of a host that is active or has rules. ``zone``: firewalld's default
    zone.
    """

    name: Literal["firewalld", "ufw", "iptables", "nftables", "none"] = NO_FIREWALL
    zone: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.zone})" if self.zone else self.name


class HostFacts(OwnFacts, _Answer):
    """The facts of a host that decide whether it can join a cluster. fabric_ports: those of InfiniBand
    and RoCE that are up.
    """

    system: System
    space: tuple[DiskSpace, ...]
    gpus: GpuFacts
    firewall: Firewall = Firewall()
    fabric_ports: tuple[FabricPort, ...] = ()


class Wanted(BaseModel):
    """The record on a host of what `up` wants there (``clusterctl.util.remote_wanted``).

    marks: key of a file -> its mark. cluster: what the controller keeps for all hosts, as
    ``clusterctl.cluster.converge`` writes it. Both are empty before the host is configured.
    """

    # Another version of clusterctl may have written it.
    model_config = ConfigDict(frozen=True, extra="ignore")

    marks: Checksums = {}
    cluster: Mapping[str, Any] = {}


class NodeAnswer(_Answer):
    """The facts of a node.

    said: output of the command ``NODE_ARGV``. None: no hardware was requested. cards: number of
        GPUs on the PCI bus.
    wanted: the host's record of what `up` wants there.
    openmpi: folder of Open MPI's parameters. Empty without Open MPI.
    """

    system: System
    said: str | None
    checksums: Checksums
    wanted: Wanted
    space: tuple[DiskSpace, ...]
    cards: int
    openmpi: str = ""
    cgroup_plugin: bool | None = None
    accounts: Mapping[str, int] = {}
    groups: Mapping[str, int] = {}


class _ProbeAnswer(_Answer):
    state: str
    host: HostFacts | None = None
    node: NodeAnswer | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    """The answer of a host to a probe.

    facts: the hardware; None without slurmd, or if not requested. full: file systems without free
        space.
    wanted: the host's record of what `up` wants there.
    cards: number of NVIDIA GPUs on the PCI bus. openmpi: folder of Open MPI's parameters; "" if not
        known.
    """

    facts: NodeFacts | None
    checksums: Checksums
    full: tuple[DiskSpace, ...] = ()
    distribution: str = ""
    driver: Driver = field(default_factory=Driver)
    cards: int = 0
    host: HostFacts | None = None
    accounts: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    openmpi: str = ""
    wanted: Wanted = field(default_factory=Wanted)


class StoppingError(TransportError, code="unreachable", about="stopping"):
    """The host answers, but is shutting down."""


def parse_report(text: str) -> HostReport:
    """Parse the answer to a ``ProbeRequest``.

    Raises:
        StoppingError: the host is shutting down.
        UnreachableError: the host was too busy to collect its facts.
        SlurmError: slurmd is installed but does not report the hardware.
        TransportError: the answer is malformed.
    """
    try:
        answer = _ProbeAnswer.model_validate_json(text)
    except ValidationError as exc:
        message = "the host did not return valid JSON"
        raise TransportError(message, code="internal", about="answer", why=text[:500]) from exc
    if answer.state == _STOPPING:
        raise StoppingError("the host is shutting down")
    host = answer.host
    node = answer.node
    if node is None:
        if host is None:
            raise TransportError(
                "the host's answer contains no facts",
                code="internal",
                about="answer",
                why=text[:500],
            )
        return HostReport(None, {}, host=host)
    # The program failed or took too long, because the host is too busy or still booting.
    if node.said == "":
        message = "the host did not report its facts in time"
        fix = "check the host's load, then run the same command again"
        raise UnreachableError(message, why="the host is busy or still booting", fix=fix)
    facts, driver = read_node(node.said) if node.said else (None, Driver())
    facts = facts and replace(facts, cgroups=node.cgroup_plugin is not False)
    full = tuple(disk for disk in node.space if disk.is_full)
    release = node.system.release
    others = (node.accounts, node.groups, node.openmpi, node.wanted)
    return HostReport(facts, node.checksums, full, release, driver, node.cards, host, *others)


NODE_ARGV = ("sh", "-c", Path(__file__).with_name("data").joinpath("node.sh").read_text())

_SECTION = re.compile(r"^@(\w+)$", re.MULTILINE)
_PAIR = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The hardware of a node. ``cpus`` counts threads. ``cgroups``: Slurm has the control groups
    plugin.
    """

    cpus: int
    boards: int
    sockets: int
    cores_per_socket: int
    threads_per_core: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    mpi: tuple[str, ...] = ()
    cgroups: bool = True


def read_node(text: str) -> tuple[NodeFacts | None, Driver]:
    """Return (hardware, driver) from ``NODE_ARGV``'s output. The hardware is None without slurmd.

    Raise SlurmError if slurmd does not print the hardware.
    """
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    driver = Driver.read(sections)
    node = sections.get("node", "")
    if node.strip() == "absent":
        return None, driver
    pairs = dict(_PAIR.findall(node))
    try:
        facts = NodeFacts(
            cpus=int(pairs["CPUs"]),
            boards=int(pairs.get("Boards", "1")),
            sockets=int(pairs["SocketsPerBoard"]),
            cores_per_socket=int(pairs["CoresPerSocket"]),
            threads_per_core=int(pairs["ThreadsPerCore"]),
            memory_mib=int(pairs["RealMemory"]),
            gpus=driver.gpus,
            mpi=tuple(
                sorted(line.removeprefix("mpi_") for line in sections.get("mpi", "").split())
            ),
        )
    except (KeyError, ValueError) as exc:
        raise SlurmError(
            "`slurmd -C` did not describe the node",
            code="internal",
            about="slurmd-answer",
            why=f"no usable {exc.args[0]!r} in: {text.strip()[:500]}",
            fix="check that slurmd is installed on the host, and that it starts",
        ) from exc
    return facts, driver


TIMEOUT_S = 90.0
# A machine with 8 GPUs and 2 TB of memory needs this for its first boot.
NEW_TIMEOUT_S = 600.0
AWAY_S = 5.0
_MAX_PARALLEL = 32
_ANSWER_S = 60.0
_PAUSE_S = 0.1
# IAP, and sshd from 9.8 on (PerSourcePenalties), block clients that retry too often.
_REFUSED_PAUSE_S = 5.0
# How long Google may need to know a new host, a new grant or a new firewall rule, and sshd to
# start.
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The ``result`` of a host's probe, a report or an error. ``of``: the number of all probed
    hosts.
    """

    host: str
    result: HostReport | ClusterctlError
    of: int = 0

    @property
    def step(self) -> HostStep:
        return HostStep(
            self.host, "answers", self.of, failed=isinstance(self.result, ClusterctlError)
        )


def ask_hosts(
    requests: Mapping[str, ProbeRequest],
    to: Connect,
    *,
    timeout_s: float = TIMEOUT_S,
    away_s: float = AWAY_S,
    new: bool = False,
) -> Generator[HostAnswer | None, None, None]:
    """Yield each host's answer on arrival, and ``None`` every ``away_s`` seconds while a host is
    unreachable.

    to: called with a host's name. Returns the transport to the host.
    new: the hosts are new and may reject the SSH key until they have created the account.
    """
    deadline = time.monotonic() + timeout_s
    given_up = threading.Event()
    away: set[str] = set()

    def ask(name: str) -> HostReport | ClusterctlError:
        patience = _Patience(new)
        while (pause_s := patience.pause_s(answer := _ask(to(name), requests[name]))) is not None:
            away.add(name)
            if time.monotonic() > deadline or given_up.wait(pause_s):
                break
        return answer

    with ThreadPoolExecutor(max_workers=max(1, min(_MAX_PARALLEL, len(requests)))) as pool:
        pending = {pool.submit(ask, name): name for name in requests}
        next_tick = time.monotonic() + away_s
        try:
            while pending:
                done = wait(
                    pending, max(0.0, next_tick - time.monotonic()), return_when=FIRST_COMPLETED
                ).done
                for future in done:
                    yield HostAnswer(pending.pop(future), future.result(), len(requests))
                if time.monotonic() >= next_tick:
                    if not away.isdisjoint(pending.values()):
                        yield None
                    next_tick = time.monotonic() + away_s
        except BaseException:
            # The pool waits for its threads, so Ctrl-C must end them even if a host hangs.
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for name in requests:
                to(name).leave()
            raise


def reports_of(
    hosts: Iterable[str], answers: Iterable[HostAnswer], *, are_local: bool = False
) -> Mapping[str, HostReport]:
    """Return host -> report, in the order of ``hosts``. Raises a TransportError that lists failed
    hosts.

    are_local: whether the hosts are local nodes, which `up` has just started and connected.
    """
    result_of = {answer.host: answer.result for answer in answers}
    results = {host: result_of[host] for host in hosts}
    failed = {
        host: result for host, result in results.items() if isinstance(result, ClusterctlError)
    }
    if failed:
        problem = f"{len(failed)} of {len(results)} hosts can't be reached"
        failures = tuple(exc.on(host, "reach") for host, exc in failed.items())
        error, *_ = failed.values()
        fix = (
            "check the connection with `clusterctl ssh --admin HOST`, then run `clusterctl up` "
            "again"
        )
        if are_local:
            fix = (
                "recreate the nodes: `clusterctl node replace HOST`; a controller by `clusterctl "
                "down`, then `clusterctl up`"
            )
        if (
            isinstance(error, TunnelError | TunnelRefusedError)
            and len({exc.fix for exc in failures}) == 1
        ):
            fix = error.fix
            # The tunnel that all hosts share is broken.
            if len({exc.cause for exc in failures}) == 1 < len(failed) == len(results):
                raise TransportError(
                    problem,
                    about="hosts",
                    why=error.why,
                    fix=fix,
                    failures=failures,
                )
        raise TransportError.of_hosts(problem, failures, about="hosts", fix=fix)
    return {host: result for host, result in results.items() if isinstance(result, HostReport)}


def probe_hosts(
    requests: Mapping[str, ProbeRequest], to: Connect, *, timeout_s: float = TIMEOUT_S
) -> Mapping[str, HostReport]:
    """Probe hosts. Return host -> report. Raise TransportError, with a failure per host without an
    answer.
    """
    return reports_of(requests, filter(None, ask_hosts(requests, to, timeout_s=timeout_s)))


def _ask(transport: Transport, request: ProbeRequest) -> HostReport | ClusterctlError:
    try:
        answer = transport.run(("sudo", "-n", *request.argv()), stdin=PROGRAM, timeout_s=_ANSWER_S)
        return parse_report(answer.stdout)
    except ClusterctlError as exc:
        return exc


@dataclass(slots=True)
class _Patience:
    """How long a host is probed again. _since: the start, or the last answer that is no tunnel's
    error.
    """

    new: bool
    _since: float = field(default_factory=time.monotonic)

    def pause_s(self, answer: HostReport | ClusterctlError) -> float | None:
        """Return the seconds to wait before the host is probed again; None if that would not
        help.
        """
        if isinstance(answer, TunnelError | TunnelRefusedError):
            in_grace = time.monotonic() - self._since < _GRACE_S
            may_help = (
                in_grace if self.new and answer.has_grace else isinstance(answer, TunnelError)
            )
            return _REFUSED_PAUSE_S if may_help else None
        self._since = time.monotonic()
        # The host may be booting or about to boot.
        if isinstance(answer, UnreachableError | StoppingError):
            return _PAUSE_S
        return _REFUSED_PAUSE_S if self.new and isinstance(answer, KeyRefusedError) else None


_DISTRIBUTION = ProbeRequest(space=())


def with_distributions(
    inventory: Inventory, workspace: Workspace, to: Connect, *, timeout_s: float = NEW_TIMEOUT_S
) -> Generator[HostStep, None, Inventory]:
    """Ask hosts with an unknown Linux distribution for it. Yield progress; return the updated
    inventory.
    """
    unknown = [host.name for host in inventory.hosts if host.distribution == distributions.UNSEEN]
    if not unknown:
        return inventory
    write_ssh_files(inventory, workspace)
    try:
        requests = dict.fromkeys(unknown, _DISTRIBUTION)
        # A new host may publish its host key before it creates the account.
        is_new = bool(inventory.traits.late_account_fix)
        limit_s = timeout_s if is_new else TIMEOUT_S
        answers = []
        for answer in filter(None, ask_hosts(requests, to, timeout_s=limit_s, new=is_new)):
            answers.append(answer)
            yield answer.step
        reports = reports_of(requests, answers)
    except TransportError as exc:
        if all(failure.fix == exc.fix for failure in exc.failures):
            raise
        by_hand = f"ssh -F {shlex.quote(str(workspace.ssh_config))} HOST"
        fix = f"check the connection with `{by_hand}`, then run `clusterctl up` again"
        if is_new and any(failure.about == KeyRefusedError.about for failure in exc.failures):
            fix = inventory.traits.late_account_fix
        raise TransportError(
            exc.what,
            code=exc.code,
            about=exc.about,
            why=exc.why,
            fix=fix,
            failures=exc.failures,
        ) from exc
    releases = {host.name: host.distribution for host in inventory.hosts}
    releases |= {name: report.distribution for name, report in reports.items()}
    distributions.common_distribution(releases)
    hosts = (replace(host, distribution=releases[host.name]) for host in inventory.hosts)
    return replace(inventory, hosts=tuple(hosts))
