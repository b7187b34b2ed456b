"""Probe hosts over SSH, in parallel: one round trip tells all requested facts of a host (HostReport)."""

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
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.errors import (
    ClusterctlError,
    KeyRefusedError,
    SlurmError,
    TransportError,
    UnreachableError,
)
from clusterctl.hosts.gpus import Driver, Gpu
from clusterctl.spec import distributions
from clusterctl.spec.units import format_size
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport, remote_program
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.progress import HostStep

PROGRAM: Final = remote_program("clusterctl.hosts.remote_probe").encode()
# Rocky 8's own Python is nowhere on the PATH. What prints it also says so where there is none.
START: Final = (
    "for python in /usr/bin/python3 /usr/libexec/platform-python; do "
    '[ -x "$python" ] && exec "$python" -I -S - "$1"; done; echo "no Python 3 is installed" >&2; exit 127'
)
_STOPPING: Final = "stopping"
_LEAST_FREE: Final = 16 << 20  # bytes

# "file /etc/munge/munge.key" -> its hash, mode and owner; "unit munge" -> "running"
Checksums = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What the probe is to tell of a host. Kinds and names become the keys of its checksums.

    ``host``: also what decides whether it can be part of a cluster (``host_facts_request``). ``node``:
    what it is as a node, with its checksums, once it has booted; before a host is part of a cluster nobody
    needs them.
    """

    files: tuple[str, ...] = ()
    blocks: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # file -> first and last line
    paths: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()  # files that are the only *.conf of their folders
    rivals: Mapping[str, str] = field(default_factory=dict)  # file -> line that none after it there has
    users: tuple[str, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)  # account -> uid and gid: has another one these?
    homes: Mapping[str, str] = field(default_factory=dict)  # user -> folder
    far_homes: Mapping[str, str] = field(default_factory=dict)  # user -> folder that another host checks
    keys: Mapping[str, str] = field(default_factory=dict)  # user -> public key; unless the home is far
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # unit -> files it reads at its start
    packages: tuple[str, ...] = ()
    accounting: tuple[tuple[str, ...], ...] = ()  # words for `sacctmgr show`
    space: tuple[str, ...] = ("/",)
    host: Mapping[str, Sequence[str | int]] | None = None
    node: bool = True
    sized: bool = False  # its size is known: there are no facts in the report if it has no GPUs either

    def argv(self) -> tuple[str, ...]:
        node_argv = (*NODE_ARGV, "sh", "known") if self.sized else NODE_ARGV
        request = json.dumps({"node_argv": node_argv, **asdict(self)})
        return ("sh", "-c", START, "sh", request)


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class System(_Answer):
    """The operating system and the machine; ``machine_id`` is a hash that two clones share."""

    id: str
    version: str
    name: str
    machine: str
    python: tuple[int, int]
    systemd: bool
    cpus: int
    memory_mib: int
    hostname: str
    machine_id: str

    @property
    def release(self) -> str:
        """What it is called in the table of distributions: `rocky-9.6`."""
        return f"{self.id}-{self.version}".rstrip("-")


class Space(_Answer):
    """The room of the file system of some paths, in bytes; ``inodes`` is None if it does not count them."""

    paths: tuple[str, ...]
    free: int
    size: int
    inodes: int | None
    read_only: bool
    noexec: bool = False

    @property
    def is_full(self) -> bool:
        return self.free < _LEAST_FREE or self.inodes == 0

    def __str__(self) -> str:
        size = format_size(max(1, self.size >> 20))
        left = "no inodes free" if self.inodes == 0 else f"{self.free} bytes of {size} free"
        return f"{self.paths[0]} is full ({left})"


class GpuFacts(_Answer):
    """NVIDIA's cards on the PCI bus, and those that the driver shows, by name.

    ``driver`` is the version of the one that answers, ``installed`` that of the kernel module on disk,
    ``manager`` that of the fabric manager, ``fault`` what nvidia-smi says in place of an answer, ``states``
    the fields of each card that tell of its NVLinks, its memory and its parts (MIG). ``oldest`` is the lowest
    number of a card's model.
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
    states: tuple[Mapping[str, str], ...] = ()
    oldest: int | None = None


NO_FIREWALL: Final = "none"


class Firewall(_Answer):
    """The firewall in force: the first that is active, or has any rules; the rules are not read.

    zone: firewalld's default.
    """

    name: Literal["firewalld", "ufw", "iptables", "nftables", "none"] = NO_FIREWALL
    zone: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.zone})" if self.zone else self.name


class HostFacts(_Answer):
    """What a host said of itself; ``time`` is its clock, in seconds since 1970."""

    time: float
    uid: int
    system: System
    addresses: tuple[str, ...]
    resolved: Mapping[str, tuple[str, ...]]
    space: tuple[Space, ...]
    listeners: Mapping[int, str]
    selinux: str
    units: frozenset[str]
    gpus: GpuFacts
    accounts: Mapping[str, int]
    groups: Mapping[str, int] = {}
    firewall: Firewall = Firewall()
    mtus: Mapping[str, int] = {}  # address with its prefix length -> of its interface
    cgroups: bool = True  # root can make control groups there
    cgroup_plugin: bool | None = None  # its Slurm has the plugin for them; None: there is no Slurm
    databases: tuple[str, ...] = ()  # of MariaDB or MySQL, but for its own
    slurm_state: tuple[str, ...] = ()  # what a slurmctld keeps for its next start
    files: tuple[str, ...] = ()  # of those that were asked for
    packages: frozenset[str] = frozenset()  # likewise
    texts: Mapping[str, str] = {}  # likewise: their first bytes, "" without


class NodeAnswer(_Answer):
    """What a host said of itself as a node: ``said`` by ``NODE_ARGV``, ``cards`` on the PCI bus."""

    system: System
    said: str
    checksums: Checksums
    space: tuple[Space, ...]
    cards: int
    cgroup_plugin: bool | None = None
    accounts: Mapping[str, int] = {}
    groups: Mapping[str, int] = {}


class _ProbeAnswer(_Answer):
    state: str
    host: HostFacts | None = None
    node: NodeAnswer | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    facts: NodeFacts | None  # None: it has no slurmd, or was not asked for them
    checksums: Checksums
    full: tuple[Space, ...] = ()  # file systems without room
    distribution: str = ""  # ID and VERSION_ID of its os-release
    driver: Driver = field(default_factory=Driver)  # NVIDIA's
    cards: int = 0  # NVIDIA's, on the PCI bus
    host: HostFacts | None = None  # where that was requested
    accounts: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)


class StoppingError(TransportError):
    """The host answers, but is on its way down."""

    code = "host-stopping"


def parse_report(text: str) -> HostReport:
    """The answer to a ``ProbeRequest``.

    Raises:
        StoppingError: the host is being powered off.
        UnreachableError: it was too busy to say what it has.
        SlurmError: slurmd is there, and does not say what the node is.
        TransportError: that is no answer.
    """
    try:
        answer = _ProbeAnswer.model_validate_json(text)
    except ValidationError as exc:
        raise TransportError("the host gave no usable answer", code="answer-garbled", why=text[:500]) from exc
    if answer.state == _STOPPING:
        raise StoppingError("the host is being powered off")
    host, node = answer.host, answer.node
    if node is None:
        if host is None:
            raise TransportError("the host gave no usable answer", code="answer-garbled", why=text[:500])
        return HostReport(None, {}, host=host)
    if not node.said:  # it could not start what tells them, or not in time: it is too busy, or still booting
        what = "the host did not report its facts in time"
        raise UnreachableError(what, why="it is busy", fix="look at its load, then try again")
    facts, driver = read_node(node.said)
    facts = facts and replace(facts, cgroups=node.cgroup_plugin is not False)
    full = tuple(one for one in node.space if one.is_full)
    release, numbers = node.system.release, (node.accounts, node.groups)
    return HostReport(facts, node.checksums, full, release, driver, node.cards, host, *numbers)


NODE_ARGV = ("sh", "-c", Path(__file__).with_name("data").joinpath("node.sh").read_text())

_SECTION = re.compile(r"^@(\w+)$", re.MULTILINE)
_PAIR = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Hardware of one node; ``cpus`` counts threads, ``memory_mib`` is what the kernel sees.

    ``cgroups``: its Slurm has the plugin for this kernel's control groups.
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
    """What ``NODE_ARGV`` printed; lines that are not understood are passed over. No facts: it has no slurmd.

    Raises:
        SlurmError: `slurmd -C` said nothing usable, so Slurm is not installed there, or broken.
    """
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    driver, node = Driver.read(sections), sections.get("node", "")
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
            mpi=tuple(sorted(line.removeprefix("mpi_") for line in sections.get("mpi", "").split())),
        )
    except (KeyError, ValueError) as exc:
        raise SlurmError(
            "`slurmd -C` did not describe the node",
            code="slurmd-answer-garbled",
            why=f"no usable {exc.args[0]!r} in: {text.strip()[:500]}",
            fix="see that slurmd is installed there and runs",
        ) from exc
    return facts, driver


TIMEOUT_S = 90.0
NEW_TIMEOUT_S = 600.0  # of a machine with 8 GPUs and 2 TB of memory, which boots for the first time
AWAY_S = 5.0  # so long a host may take to boot, or to say good-bye
_MAX_PARALLEL = 32
_ANSWER_S = 60.0
_PAUSE_S = 0.1
_REFUSED_PAUSE_S = 5.0  # a refusal costs whoever asks too often: sshd's PerSourcePenalties, from 9.8 on


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The report of one of ``of`` hosts that are asked, or why there is none."""

    host: str
    result: HostReport | ClusterctlError
    of: int = 0

    @property
    def step(self) -> HostStep:
        return HostStep(self.host, "answers", self.of, failed=isinstance(self.result, ClusterctlError))


def ask_hosts(
    requests: Mapping[str, ProbeRequest],
    to: Connect,
    *,
    timeout_s: float = TIMEOUT_S,
    away_s: float = AWAY_S,
    new: bool = False,
) -> Generator[HostAnswer | None, None, None]:
    """Yield the answer of each host as it comes, and None each ``away_s`` while some can't be reached.

    to: connects to a host.
    new: hosts may refuse our key until they have made our account.
    """
    deadline = time.monotonic() + timeout_s
    given_up = threading.Event()
    away: set[str] = set()

    def ask(name: str) -> HostReport | ClusterctlError:
        while (pause_s := _pause_s(answer := _ask(to(name), requests[name]), new=new)) is not None:
            away.add(name)
            if time.monotonic() > deadline or given_up.wait(pause_s):
                break
        return answer

    with ThreadPoolExecutor(max_workers=max(1, min(_MAX_PARALLEL, len(requests)))) as pool:
        asking = {pool.submit(ask, name): name for name in requests}
        look = time.monotonic() + away_s
        try:
            while asking:
                done = wait(asking, max(0.0, look - time.monotonic()), return_when=FIRST_COMPLETED).done
                for future in done:
                    yield HostAnswer(asking.pop(future), future.result(), len(requests))
                if time.monotonic() >= look:
                    if not away.isdisjoint(asking.values()):
                        yield None
                    look = time.monotonic() + away_s  # who starts them gives them this time to boot
        except BaseException:  # the pool waits for its threads: Ctrl-C must reach them, also in a frozen host
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for name in requests:
                to(name).close()
            raise


def reports_of(hosts: Iterable[str], answers: Iterable[HostAnswer]) -> Mapping[str, HostReport]:
    """The report of each of these hosts, in their order.

    Raises:
        TransportError: some hosts did not answer in time; one failure a host.
    """
    result_of = {answer.host: answer.result for answer in answers}
    results = {host: result_of[host] for host in hosts}
    failed = {host: result for host, result in results.items() if isinstance(result, ClusterctlError)}
    if failed:
        raise TransportError.of_hosts(
            f"{len(failed)} of {len(results)} hosts can't be reached",
            [exc.on(host, "reach") for host, exc in failed.items()],
            code="hosts-unreachable",
            fix="see what `clusterctl ssh --admin HOST` says, then run `clusterctl up` again",
        )
    return {host: result for host, result in results.items() if isinstance(result, HostReport)}


def probe_hosts(
    requests: Mapping[str, ProbeRequest], to: Connect, *, timeout_s: float = TIMEOUT_S
) -> Mapping[str, HostReport]:
    """Host name -> its report, once every host answers; as ``ask_hosts`` and ``reports_of``."""
    return reports_of(requests, filter(None, ask_hosts(requests, to, timeout_s=timeout_s)))


def _ask(transport: Transport, request: ProbeRequest) -> HostReport | ClusterctlError:
    try:
        answer = transport.run(("sudo", "-n", *request.argv()), stdin=PROGRAM, timeout_s=_ANSWER_S)
        return parse_report(answer.stdout)
    except ClusterctlError as exc:
        return exc


def _pause_s(answer: HostReport | ClusterctlError, *, new: bool) -> float | None:
    """How long to wait before the host is asked again; None: that does not help."""
    if isinstance(answer, UnreachableError | StoppingError):  # still booting, perhaps, or about to
        return _PAUSE_S
    return _REFUSED_PAUSE_S if new and isinstance(answer, KeyRefusedError) else None


_DISTRIBUTION = ProbeRequest(space=())


def with_distributions(
    inventory: Inventory,
    workspace: Workspace,
    to: Connect,
    *,
    timeout_s: float = NEW_TIMEOUT_S,
) -> Generator[HostStep, None, Inventory]:
    """The inventory, with the distribution of every host in it: those without one are probed, step by step.

    Rented ones may not have our account yet: Google's publish their host keys before they make it.
    """
    unseen = [host.name for host in inventory.hosts if host.distribution == distributions.UNSEEN]
    if not unseen:
        return inventory
    write_ssh_files(inventory, workspace)
    try:
        asked = dict.fromkeys(unseen, _DISTRIBUTION)
        is_new = inventory.traits.is_cloud
        limit_s = timeout_s if is_new else TIMEOUT_S
        answers = []
        for answer in filter(None, ask_hosts(asked, to, timeout_s=limit_s, new=is_new)):
            answers.append(answer)
            yield answer.step
        reports = reports_of(asked, answers)
    except TransportError as exc:
        by_hand = f"ssh -F {shlex.quote(str(workspace.ssh_config))} HOST"
        fix = f"see what `{by_hand}` says, then run `clusterctl up` again"
        if is_new and any(failure.code == KeyRefusedError.code for failure in exc.failures):
            fix = "see what the host said as it started: it makes our account itself (docs/gcp.md, OS Login)"
        raise TransportError(exc.what, code=exc.code, why=exc.why, fix=fix, failures=exc.failures) from exc
    found = {host.name: host.distribution for host in inventory.hosts}
    found |= {name: one.distribution for name, one in reports.items()}
    distributions.common(found)
    hosts = (host.model_copy(update={"distribution": found[host.name]}) for host in inventory.hosts)
    return inventory.model_copy(update={"hosts": tuple(hosts)})
