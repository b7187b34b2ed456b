"""The diagnosis of a failed verification job: the hosts at fault, and why."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from clusterctl.errors import Failure, NotUpError, TransportError, VerifyError
from clusterctl.hosts import checks
from clusterctl.hosts.checks import DoctorReport, Finding, expected, host_facts_request, reject_unknown_hosts
from clusterctl.providers.base import Provider, pending_releases
from clusterctl.scheduler.session import inventory_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Result, Transport, remote_argv
from clusterctl.transport.ssh import Connections
from clusterctl.util.process import parallel_map

Probe = Callable[[tuple[str, ...]], Result]  # runs the bundled probe, one rank on each of these hosts
TIMED_OUT = 124  # timeout(1)'s exit code
_ADVICE: Final = re.compile(
    r"^-{40,}\n.*?^-{40,}$\n?", re.MULTILINE | re.DOTALL
)  # Open MPI's, of what may be wrong
_DENIED: Final = re.compile(r"\S+@\S+: Permission denied \(.*\)")  # what ssh says
_LET_IN: Final = (
    "let job users log in there with their keys (AllowUsers, AllowGroups, AuthorizedKeysFile in sshd_config;"
    " `clusterctl up --reconfigure` puts back a key that somebody removed)"
)


def is_right(result: Result, hosts: tuple[str, ...]) -> bool:
    """Whether as many ranks agreed as there are hosts."""
    try:
        answer = json.loads(result.stdout)
        return result.rc == 0 and answer["ok"] is True and answer["world_size"] == len(hosts)
    except (ValueError, KeyError, TypeError):
        return False


def verification_error(
    result: Result,
    hosts: tuple[str, ...],
    inventory: Inventory,
    to: Connect,
    probe: Probe,
    *,
    alike: bool = False,
) -> VerifyError:
    """The hosts at fault and why; smaller jobs tell where the job itself does not.

    ``alike``: it is known to be no single host's fault.
    """
    said = _words(result)
    failures: tuple[Failure, ...] = ()
    if not alike:
        failures = _failures_of_probe(result) or _failures_of_parts(hosts, inventory, to, probe)
    if not failures:
        fix = _LET_IN if _DENIED.search(said) and not alike else ""
        named = hosts if alike else tuple(_named(said, hosts, inventory)) or hosts
        failures = tuple(Failure("verify", said, host, "verify", fix) for host in named)
    hosts_of = {failure.cause: str(failure.host) for failure in reversed(failures)}
    told = (cause if host in cause else f"{host}: {cause}" for cause, host in hosts_of.items())
    fixes = "; ".join(dict.fromkeys(failure.fix for failure in failures if failure.fix))
    return VerifyError(
        f"the verification job failed on {', '.join(str(f.host) for f in failures)}",
        why="; ".join(told),
        fix=f"{fixes or 'correct the cause on these hosts'}, then run `clusterctl up` again",
        failures=failures,
    )


def _named(said: str, hosts: tuple[str, ...], inventory: Inventory) -> Iterator[str]:
    """The hosts that are spoken of, by name or by address."""
    for host in inventory.hosts:
        words = "|".join(map(re.escape, (host.name, host.address)))
        if host.name in hosts and re.search(rf"(?<![\w.-])({words})(?![\w-]|\.\w)", said):
            yield host.name


def _failures_of_probe(result: Result) -> tuple[Failure, ...]:
    """The hosts of which the probe itself says what is wrong."""
    try:
        found = json.loads(result.stdout)["failures"]
        return tuple(Failure("verify", str(one["cause"]), str(one["host"]), "verify") for one in found)
    except (ValueError, KeyError, TypeError):
        return ()


def _failures_of_parts(
    hosts: tuple[str, ...], inventory: Inventory, to: Connect, probe: Probe
) -> tuple[Failure, ...]:
    """The hosts that TCP does not join; else those on which even a job of their own fails."""
    if (found := cut_off(inventory, hosts, to)) or len(hosts) == 1:
        return found
    results = zip(hosts, parallel_map(hosts, lambda host: probe((host,))), strict=True)
    return tuple(
        Failure("verify", _words(result), host, "verify")
        for host, result in results
        if not is_right(result, (host,))
    )


def _words(result: Result) -> str:
    said = result.stderr.strip() or result.stdout.strip()
    said = (_ADVICE.sub("", f"{said}\n").strip() or said)[-2000:]
    if result.rc == TIMED_OUT:
        said = f"it did not end in time\n{said}".strip()
    return said or f"it ended with exit code {result.rc} and said nothing"


_PORTS = range(40_000, 60_000)
_LISTEN_S = 6.0
_LISTEN_PER_NODE_S = 0.1
_SHOWN = 3  # pairs in the failure of one host

Connect = Callable[[str], Transport]
Unreached = Mapping[str, Mapping[str, str]]  # node -> the ones it did not reach, and why


def cut_off(inventory: Inventory, hosts: Sequence[str], to: Connect) -> tuple[Failure, ...]:
    """The hosts that TCP does not join with each other, one failure each; none when all reach all."""
    unreached = _unreached(inventory, hosts, to) if len(hosts) > 1 else {}
    causes: dict[str, list[str]] = {}
    for one, other in itertools.combinations(hosts, 2):
        there, back = unreached.get(one, {}).get(other), unreached.get(other, {}).get(one)
        if there and back:
            cause = f"{one} and {other} can't reach each other: {one}: {there}; {other}: {back}"
        elif there or back:
            near, far = (one, other) if there else (other, one)
            cause = f"{near} can't reach {far}: {there or back}"
        else:
            continue
        for host in (one, other):
            causes.setdefault(host, []).append(cause)
    fix = "see what drops their traffic: firewalls, routes, cables"
    for host, said in causes.items():  # of 64 nodes that reach none, there would be 2,016 pairs
        if (more := len(said) - _SHOWN) > 0:
            causes[host] = [*said[:_SHOWN], f"and {more} more such pairs"]
    return tuple(Failure("network", "; ".join(said), host, "verify", fix) for host, said in causes.items())


def _unreached(inventory: Inventory, hosts: Sequence[str], to: Connect) -> Unreached:
    port = random.choice(_PORTS)  # noqa: S311
    seconds = _LISTEN_S + _LISTEN_PER_NODE_S * len(hosts)
    addresses = {host.name: host.address for host in inventory.hosts if host.name in hosts}

    def ask(name: str) -> Mapping[str, str]:
        peers = {other: address for other, address in addresses.items() if other != name}
        request = json.dumps({"port": port, "seconds": seconds, "peers": peers})
        argv = remote_argv("clusterctl.cluster.remote_pairs", request)
        try:
            return dict(json.loads(to(name).run(argv, timeout_s=seconds + 30).stdout))
        except (TransportError, ValueError):  # what it can't say, the others see
            return {}

    return dict(zip(hosts, parallel_map(hosts, ask, most=len(hosts)), strict=True))


_TIMEOUT_S = 60.0
_OF_DRIVER = frozenset({"no-driver", "reboot-needed", "secure-boot", "fabric-manager"})


def checkup(
    spec: ClusterSpec, workspace: Workspace, provider: Provider, *, hosts: Collection[str] = ()
) -> DoctorReport:
    """What is wrong with the hosts, or with those of ``hosts``; nothing is changed.

    Raises:
        NotUpError: there is nothing to look at yet.
        UsageError: the cluster has no such host.
    """
    try:
        inventory = inventory_of(workspace)
    except NotUpError:
        before = provider.examine(spec, workspace, hosts=hosts)
        if before is None:
            raise
        return _with_left(before, workspace, hosts)
    with Connections(workspace.ssh_config) as connections:
        return _with_left(_of_cluster(spec, inventory, connections, hosts), workspace, hosts)


def _with_left(report: DoctorReport, workspace: Workspace, hosts: Collection[str]) -> DoctorReport:
    """The report with the pending releases."""
    about = "the release of {} is pending"
    found = tuple(
        Finding(one.host.name, "warning", "pending-release", about.format(one.address), one.why, one.fix)
        for one in pending_releases(workspace)
        if not hosts or one.host.name in hosts
    )
    return replace(report, findings=(*report.findings, *found))


def driver_findings(spec: ClusterSpec, inventory: Inventory, connections: Connections) -> tuple[Finding, ...]:
    """What a driver of NVIDIA that the spec asks for still needs on some nodes, such as a reboot."""
    if not spec.software.nvidia.has_driver:
        return ()
    report = _of_cluster(spec, inventory, connections, [host.name for host in inventory.compute])
    return tuple(finding for finding in report.findings if finding.code in _OF_DRIVER)


def _of_cluster(
    spec: ClusterSpec, inventory: Inventory, connections: Connections, hosts: Collection[str]
) -> DoctorReport:
    """Through the account that every host of a cluster has."""
    reject_unknown_hosts(hosts, inventory.hosts)

    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        return connections.to(host).run(("sudo", "-n", *argv), stdin=stdin, timeout_s=_TIMEOUT_S).stdout

    return checks.examine(
        host_facts_request(spec, inventory.hosts),
        expected(spec, inventory.hosts, installed=[host.name for host in inventory.hosts]),
        root,
        leader=inventory.controller.name,
        only=hosts,
    )
