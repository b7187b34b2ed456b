"""The machines of an on-prem cluster and their roles, from the spec and from data read on the
hosts.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from ipaddress import IPv4Interface, IPv4Network
from typing import Any, Final

from clusterctl.errors import ClusterctlError, Failure, UnreachableError
from clusterctl.hosts import checks
from clusterctl.hosts.checks import DoctorReport, Finding
from clusterctl.hosts.fabric import job_variables
from clusterctl.hosts.pairs import examine_pairs, server_target
from clusterctl.hosts.probe import HostFacts
from clusterctl.hosts.roles import (
    CLAIM,
    host_facts_request,
    requirements_of_hosts,
    role_files,
    role_packages,
)
from clusterctl.providers.base import address_of
from clusterctl.providers.onprem import remote_claim
from clusterctl.providers.onprem.access import NO_LOGIN, AccessError, ssh_host
from clusterctl.providers.onprem.login import Login
from clusterctl.spec.distributions import differing, distribution_of
from clusterctl.spec.models import ClusterSpec, software_refusals
from clusterctl.spec.names import ROOT
from clusterctl.spec.providers.onprem import OnpremSettings, OnpremShared
from clusterctl.state.inventory import COMPUTE, CONTROLLER, LOGIN, Host, Inventory, SharedFolder
from clusterctl.transport.sudo import NO_ROOT, SudoError
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import NO_LIMIT, Deadline

# Codes of findings that stop `up` for all machines, also for those already in the cluster.
UNFIT: Final = frozenset(
    {
        *("release-differs", "address", "slurm-source", "cuda-toolkit"),
        # Accounts of the spec that a machine can't have: `up` would fail when others have them.
        *("uid-differs", "uid-taken", "gid-differs", "gid-taken"),
    }
)
# Codes of errors that `up` repairs on hosts of the cluster, where an unfinished `up` may have left
# them. What it can't repair, it reports.
_REPAIRED: Final = frozenset(
    {
        *("health-silent", "shared-folder-away", "nfs-server-failed"),
        *("unit-failed", "database-failed", "slurmd-unfit", "slurmd-restarts", "gpu-devices"),
        *("slurmctld-restarts", "slurmdbd-restarts", "job-python", "account-differs"),
        "home-missing",
    }
)
# Address of this machine, if it is a host. It stays the same if other addresses of the machine
# change.
_HERE: Final = "127.0.0.1"
_JOB_NETWORK: Final = {"NCCL_SOCKET_IFNAME": "={interface}", "GLOO_SOCKET_IFNAME": "{interface}"}


def members(
    spec: ClusterSpec, settings: OnpremSettings, behind: Collection[str] = ()
) -> tuple[Host, ...]:
    """Return the cluster's machines as the spec describes them, the controller first.

    behind: names of the machines behind a jump host, whose names need not be known here.
    Each ``address`` is IPv4, or a name if its lookup fails. ``host_key`` is "" if the spec has no
    key.
    """
    partitions = {name: p.name for p in spec.partitions for name in spec.node_names(p)}
    hosts = []
    for name in dict.fromkeys([settings.controller, *partitions, *settings.login]):
        roles = [CONTROLLER] if name == settings.controller else []
        if name in partitions:
            roles.append(COMPUTE)
        if name in settings.login:
            roles.append(LOGIN)
        target = ssh_host(name, settings.machines[name])
        address = target.host if name in behind else _resolved(target.host)
        host = Host(
            name=name,
            address=_HERE if settings.machines[name].is_here else address,
            ssh_address=target.host,
            port=target.port,
            user=target.user or getpass.getuser(),
            key_file=target.key,
            roles=tuple(roles),
            partition=partitions.get(name),
            host_key=target.host_key or "",
        )
        hosts.append(host)
    return tuple(hosts)


def inventory(
    spec: ClusterSpec,
    settings: OnpremSettings,
    hosts: Sequence[Host],
    facts: Mapping[str, HostFacts],
    keys: Mapping[str, str],
    *,
    cluster_id: str,
    proxies: Mapping[str, tuple[str, ...]],
    silent: Mapping[str, Host],
) -> Inventory:
    """Return the inventory of the cluster that these machines form.

    facts: data read on each host that answers. keys: host keys. Both are by host name.
    proxies: ProxyCommand of each host without a direct route from this machine.
    silent: hosts that do not answer, as the previous inventory describes them.
    """
    answering = [host for host in hosts if host.name not in silent]
    network = settings.network or network_of(facts[hosts[0].name], hosts[0].address)
    addresses = {name: host.address for name, host in silent.items()}
    addresses |= {
        host.name: address_in(network, facts[host.name], host.address) for host in answering
    }
    return Inventory(
        cluster=spec.name,
        cluster_id=cluster_id,
        provider=settings.type,
        hosts=tuple(
            replace(silent[host.name], roles=host.roles, partition=host.partition)
            if host.name in silent
            else _host(
                host,
                facts[host.name],
                addresses[host.name],
                keys[host.name],
                proxies.get(host.name, ()),
            )
            for host in hosts
        ),
        network=str(network),
        shared=settings.shared.path,
        shared_folder=shared_folder(settings, addresses, alone=len(hosts) == 1),
        baked=False,
    )


def _host(host: Host, facts: HostFacts, address: str, key: str, proxy: tuple[str, ...]) -> Host:
    hostname = facts.system.hostname.partition(".")[0]
    interfaces = {own.partition("/")[0]: name for own, name in facts.interfaces.items()}
    return replace(
        host,
        address=address,
        ssh_address=host.ssh_address if host.ssh_address != address else None,
        host_key=key,
        distribution=facts.system.release,
        cgroups=facts.cgroups,
        hostname=hostname if hostname != host.name else None,
        proxy_command=proxy,
        job_environment={
            **job_variables(facts.fabric_ports, interfaces.get(address, "")),
            **_JOB_NETWORK,
        },
    )


def shared_folder(
    settings: OnpremSettings, addresses: Mapping[str, str], *, alone: bool
) -> SharedFolder:
    shared = settings.shared
    if shared.kind != "nfs":
        return SharedFolder(kind=shared.kind)
    if shared.server is not None:
        return SharedFolder(kind="server", server=shared.server, path=shared.export)
    # A single node exports to no other host.
    if alone:
        return SharedFolder(kind="existing")
    return SharedFolder(kind="nfs", server=addresses[settings.controller], path=shared.path)


def _resolved(name: str) -> str:
    # If the lookup fails, ssh reports it.
    with suppress(OSError):
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    return name


def network_of(facts: HostFacts, address: str) -> IPv4Network | None:
    """Return the network of the host's interface with ``address``, or else of the host's only
    interface.
    """
    interfaces = _interfaces(facts)
    named = [interface.network for interface in interfaces if str(interface.ip) == address]
    outward = [interface.network for interface in interfaces if not interface.ip.is_loopback]
    return (named or outward)[0] if named or len(outward) == 1 else None


def address_in(network: IPv4Network | None, facts: HostFacts, address: str) -> str:
    """Return a host's address in ``network``, preferably ``address``, or "" if it has no such
    address.
    """
    addresses = [
        str(interface.ip) for interface in _interfaces(facts) if network and interface.ip in network
    ]
    return address if address in addresses else next(iter(addresses), "")


def address_failures(
    hosts: Sequence[Host], facts: Mapping[str, HostFacts], network: IPv4Network | None, leader: Host
) -> list[Failure]:
    """Return a failure for each host outside ``network``. If it is None, return a failure of
    ``leader``.
    """
    interfaces = {
        host.name: ", ".join(map(str, _interfaces(facts[host.name]))) or "no IPv4 address"
        for host in hosts
    }
    if network is None:
        reason = f"{leader.address} is not an address of {leader.name} ({interfaces[leader.name]})"
        cause = f"clusterctl can't tell which network the cluster uses: {reason}"
        fix = "write provider.network, the IPv4 network that all hosts share, such as 10.0.0.0/24"
        return [Failure("host-unfit", cause, leader.name, "plan", fix, about="address")]
    missing = [
        host.name for host in hosts if not address_in(network, facts[host.name], host.address)
    ]
    cause = f"no address of the host is on the cluster's network {network}; the host has "
    fix = "write provider.network: the IPv4 network that all hosts share"
    return [
        Failure("host-unfit", cause + interfaces[name], name, "plan", fix, about="address")
        for name in missing
    ]


def _interfaces(facts: HostFacts) -> tuple[IPv4Interface, ...]:
    return tuple(map(IPv4Interface, facts.addresses))


def joined_members(
    hosts: Sequence[Host], previous: Mapping[str, Host], login: Login, limit: Deadline = NO_LIMIT
) -> tuple[Mapping[str, Host], Mapping[str, Host], Mapping[str, ClusterctlError]]:
    """Ask the hosts in ``previous`` for their cluster, except hosts with a new address or host key.

    Return (hosts of the cluster, hosts that do not answer, other host -> error), the first two name
    -> host in ``previous``.
    """
    pairs = [(host, previous[host.name]) for host in hosts if host.name in previous]
    unchanged = [
        host.name
        for host, before in pairs
        if host.host_key in ("", before.host_key) and address_of(host) == address_of(before)
    ]
    claims, failed = call_on_hosts(unchanged, lambda host: claim_on(host, login), limit=limit)
    cluster_id = login.workspace.known_id()
    joined = {name: previous[name] for name in claims if claims[name].get("id") == cluster_id}
    silent = {name: previous[name] for name, exc in failed.items() if is_silent(exc)}
    return joined, silent, {name: exc for name, exc in failed.items() if name not in silent}


def is_silent_in(host: str, lost: Mapping[str, ClusterctlError]) -> bool:
    return host in lost and is_silent(lost[host])


def is_silent(error: ClusterctlError) -> bool:
    """Return whether an error of a login tells that the host does not answer."""
    return any(
        failure.code == UnreachableError.code and not failure.about for failure in error.failures
    )


# Prints a new line after the file, so that an empty file differs from a missing one.
_READ_CLAIM: Final = ("sh", "-c", '[ ! -e "$1" ] || { cat "$1" && echo; }', "sh", CLAIM)


def claim_on(host: str, login: Login) -> Mapping[str, Any]:
    """Read a host's claim file, which names the host's cluster. Empty if the file does not exist.
    Raise an AccessError if it is damaged.
    """
    text = login.run(host, _READ_CLAIM)
    try:
        return remote_claim.parse_claim(text) if text else {}
    except remote_claim.RefusedError as exc:
        raise AccessError.of(host, exc.code, exc.cause, exc.fix, about=exc.about) from exc


def examine(
    spec: ClusterSpec,
    hosts: Sequence[Host],
    login: Login,
    ours: Collection[str],
    *,
    only: Collection[str],
    lost: Mapping[str, ClusterctlError],
    limit: Deadline = NO_LIMIT,
) -> DoctorReport:
    """Collect data about the hosts, and return it with all findings.

    ours: names of hosts that belong to the cluster already.
    only: names of the hosts to examine; ``hosts`` has all hosts of the cluster.
    lost: host -> error, for hosts where the login failed. Each error becomes a finding.
    limit: time limit. A host that has not answered by then gets a finding.
    """
    all_checks = requirements_of_hosts(spec, hosts, installed=ours)
    examined = [host.name for host in hosts if host.name in only and host.name not in lost]
    expectations = {name: all_checks[name] for name in examined}
    shared = spec.provider.shared if isinstance(spec.provider, OnpremSettings) else OnpremShared()
    request = host_facts_request(spec, hosts, folders=[shared.path])
    requests = dict.fromkeys(examined, request)
    leader = hosts[0].name
    report = checks.examine(requests, expectations, login.root, leader=leader, limit=limit)
    new = [name for name in expectations if name not in ours]
    answering = [name for name in new if name in report.facts]
    server = server_target(shared.server)
    unreached = examine_pairs(server, answering, login.run, limit) if server else ()
    missing = _folder_findings(shared, report.facts, new)
    login_findings = [
        Finding(
            host,
            "error",
            failure.about or failure.code,
            NO_ROOT if isinstance(exc, SudoError) else NO_LOGIN,
            failure.cause,
            failure.fix,
            failure.code,
        )
        for host, exc in lost.items()
        for failure in exc.failures
    ]
    group_findings = cluster_findings(spec, hosts, report)
    return replace(
        report,
        findings=(*login_findings, *report.findings, *group_findings, *unreached, *missing),
    )


def _folder_findings(
    shared: OnpremShared, facts: Mapping[str, HostFacts], new: Collection[str]
) -> Iterator[Finding]:
    if shared.kind != "existing":
        return
    for name in new:
        if name in facts and shared.path not in facts[name].files:
            reason = f"{shared.path} does not exist, and shared.kind is existing"
            fix = f"mount it on this host: `mount {shared.path}`"
            what = "the shared folder is missing"
            yield Finding(name, "error", "shared-folder", what, reason, fix)


def cluster_findings(
    spec: ClusterSpec, hosts: Sequence[Host], report: DoctorReport
) -> Iterator[Finding]:
    """Compare the hosts that answered. Yield a finding for each conflict, such as different
    distributions.
    """
    facts = report.facts
    leader = hosts[0]
    supported = facts.keys() - {
        finding.host for finding in report.findings if finding.code == "distribution"
    }
    candidates = [host for host in hosts if host.name in supported]
    if not candidates:
        return
    distributions = {
        host.name: distribution_of(facts[host.name].system.release) for host in candidates
    }
    for failure in differing(distributions):
        yield Finding(
            str(failure.host),
            "error",
            "release-differs",
            "its release differs",
            failure.cause,
            failure.fix,
        )
    for name, distribution in distributions.items():
        for _, refusal in software_refusals(spec, distribution):
            yield Finding(name, "error", *refusal)
    network = spec.provider.known_network
    if network is None and leader.name in facts:
        network = network_of(facts[leader.name], leader.address)
    if network is not None or leader.name in supported:
        for failure in address_failures(candidates, facts, network, leader):
            cause = failure.cause
            fix = failure.fix
            yield Finding(str(failure.host), "error", "address", "not on the network", cause, fix)


def claim_findings(facts: Mapping[str, HostFacts], cluster_id: str) -> tuple[Finding, ...]:
    """Return an error for each machine that belongs to a cluster with another id, or may belong to
    one.
    """
    findings = []
    for host, host_facts in facts.items():
        text = host_facts.texts.get(CLAIM, "")
        try:
            claim = remote_claim.parse_claim(text) if text else {}
            remote_claim.reject_other_cluster(claim, cluster_id)
        except remote_claim.RefusedError as exc:
            summary = "the machine is not free"
            findings.append(
                Finding(host, "error", exc.about or exc.code, summary, exc.cause, exc.fix, exc.code)
            )
    return tuple(findings)


def notes(
    spec: ClusterSpec, findings: Sequence[Finding], *, joined: Collection[str]
) -> tuple[str, ...]:
    """Return findings as lines for a plan, except problems that `up` solves or other checks
    report.

    joined: names of the cluster's hosts, which `up` repairs.
    """
    later = set()
    if spec.software.nvidia.has_driver:
        later.add("no-driver")
    if joined:
        later.add(checks.NO_CGROUPS)
    return tuple(
        str(finding)
        for finding in findings
        if finding.code not in later and not (finding.host in joined and finding.code in _REPAIRED)
    )


def preview(
    spec: ClusterSpec, hosts: Sequence[Host], facts: Mapping[str, HostFacts], new: Collection[str]
) -> tuple[str, ...]:
    """Return lines about `up`'s changes on ``new`` hosts. Hosts with the same change share a
    line.
    """
    lines: dict[str, list[str]] = {}
    for host in hosts:
        if host.name in new:
            for text in _preview_of(spec, host, facts[host.name]):
                lines.setdefault(text, []).append(host.name)
    return tuple(f"{', '.join(names)}: {text}" for text, names in lines.items())


def _preview_of(spec: ClusterSpec, host: Host, facts: HostFacts) -> Iterator[str]:
    yield (
        f"to create as root, by sudo of {host.user}: {ROOT}, {CLAIM} and files named clusterctl, such "
        "as units of systemd and settings of sysctl"
    )
    packages = role_packages(spec, host.roles, distribution_of(facts.system.release))
    if missing := [name for name in packages if name not in facts.packages]:
        yield f"packages to install, with dependencies: {', '.join(missing)}"
    if missing := [user.name for user in spec.users if user.name not in facts.accounts]:
        yield f"users to create: {', '.join(missing)}"
    patterns = role_files(spec, host.roles)
    theirs = [
        file for file in facts.files if any(fnmatchcase(file, pattern) for pattern in patterns)
    ]
    # The role users adds the cluster's keys to accounts that are there.
    theirs += [
        f"~{user.name}/.ssh/authorized_keys" for user in spec.users if user.name in facts.accounts
    ]
    if theirs:
        yield (
            "files that may change (kept as NAME.before-clusterctl, or by marked lines; `down` undoes both): "
            f"{', '.join(theirs)}"
        )
