"""The members of an on-prem cluster: its machines and their roles, by the spec, their facts and `up`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from ipaddress import IPv4Interface, IPv4Network
from typing import Any, Final

from clusterctl.errors import ClusterctlError, Failure, UnreachableError
from clusterctl.hosts import checks
from clusterctl.hosts.checks import DoctorReport, Finding, RunAsRoot
from clusterctl.hosts.pairs import NFS_PORT, Peer, StartOnHost, examine_ports, needed_ports, not_looked_at
from clusterctl.hosts.probe import START, HostFacts
from clusterctl.hosts.roles import CLAIM, expected, host_facts_request, role_files, role_packages
from clusterctl.providers.base import address_of
from clusterctl.providers.onprem.access import NO_LOGIN, SshHost, ssh_host
from clusterctl.providers.onprem.login import Login, check_sudo, connect
from clusterctl.spec.distributions import differing, distribution_of, refuse_slurm
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.onprem import OnpremSettings, OnpremShared
from clusterctl.state.inventory import COMPUTE, CONTROLLER, LOGIN, Host, Inventory, SharedFolder
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Conversation, Transport, remote_program
from clusterctl.util.process import on_each, parallel_map
from clusterctl.util.progress import NO_LIMIT, Limit

_NO_PLACE: Final = "network"
_REACH: Final = remote_program("clusterctl.hosts.remote_reach").encode()
# What keeps machines from being one cluster, those that are in it already, too.
UNFIT: Final = ("release-differs", "address", "slurm-release")
_HERE: Final = "127.0.0.1"  # whatever other addresses this machine has, now or tomorrow
# What else their network has, a host's own InfiniBand among it, Ansible finds out.
_JOBS_TALK_OVER: Final = {"NCCL_SOCKET_IFNAME": "={interface}", "GLOO_SOCKET_IFNAME": "{interface}"}


def members(spec: ClusterSpec, settings: OnpremSettings) -> tuple[Host, ...]:
    """Every machine that has a part in the cluster, the controller first, as far as the spec tells.

    ``address`` is an IPv4 address where that can be told here, ``host_key`` empty unless the spec has it.
    """
    partitions = {name: p.name for p in spec.partitions for name in spec.node_names(p)}
    found = []
    for name in dict.fromkeys([settings.controller, *partitions, *settings.login]):
        roles = [CONTROLLER] if name == settings.controller else []
        roles += [COMPUTE] if name in partitions else []
        roles += [LOGIN] if name in settings.login else []
        to = ssh_host(name, settings.machines[name])
        one = Host(
            name=name,
            address=_HERE if settings.machines[name].is_here else _resolved(to),
            ssh_address=to.host,
            port=to.port,
            roles=tuple(roles),
            partition=partitions.get(name),
            host_key=to.host_key or "",
        )
        found.append(one)
    return tuple(found)


def inventory(
    spec: ClusterSpec,
    settings: OnpremSettings,
    asked: Sequence[Host],
    facts: Mapping[str, HostFacts],
    keys: Mapping[str, str],
    *,
    cluster_id: str,
    proxies: Mapping[str, tuple[str, ...]],
    silent: Mapping[str, Host],
) -> Inventory:
    """The cluster that these machines become. ``keys`` are their host keys, ``proxies`` lead to those that
    have no route from here; ``silent`` ones do not answer, and are taken as they were known last.
    """
    answering = [one for one in asked if one.name not in silent]
    network = settings.network or network_of(facts[asked[0].name], asked[0].address)
    places = {name: host.address for name, host in silent.items()}
    places |= {one.name: address_in(network, facts[one.name], one.address) for one in answering}
    return Inventory(
        cluster=spec.name,
        cluster_id=cluster_id,
        provider=settings.type,
        hosts=tuple(
            silent[one.name].model_copy(update={"roles": one.roles, "partition": one.partition})
            if one.name in silent
            else _host(one, facts[one.name], places[one.name], keys[one.name], proxies.get(one.name, ()))
            for one in asked
        ),
        network=str(network),
        shared=settings.shared.path,
        shared_folder=shared_folder(settings, places, alone=len(asked) == 1),
        baked=False,
    )


def _host(one: Host, facts: HostFacts, place: str, key: str, proxy: tuple[str, ...]) -> Host:
    hostname = facts.system.hostname.partition(".")[0]
    told = {
        "address": place,
        "ssh_address": one.ssh_address if one.ssh_address != place else None,
        "host_key": key,
        "distribution": facts.system.release,
        "cgroups": facts.cgroups,
        "hostname": hostname if hostname != one.name else None,
        "proxy_command": proxy,
        "job_environment": _JOBS_TALK_OVER,
    }
    return one.model_copy(update=told)


def shared_folder(settings: OnpremSettings, places: Mapping[str, str], *, alone: bool) -> SharedFolder:
    shared = settings.shared
    if shared.kind != "nfs":
        return SharedFolder(kind=shared.kind)
    if shared.server is not None:
        return SharedFolder(kind="server", server=shared.server, path=shared.export)
    if alone:  # nobody else to export it to
        return SharedFolder(kind="existing")
    return SharedFolder(kind="nfs", server=places[settings.controller], path=shared.path)


def _resolved(to: SshHost) -> str:
    """The machine's address, looked up if it is a name; behind a jump host it may be known there alone."""
    if to.before is None:
        with suppress(OSError):  # ssh will say it
            return str(socket.getaddrinfo(to.host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    return to.host


def network_of(facts: HostFacts, address: str) -> IPv4Network | None:
    """Return the network of the address that a machine is reached under; None if that is not clear."""
    interfaces = _interfaces(facts)
    named = [one.network for one in interfaces if str(one.ip) == address]
    outward = [one.network for one in interfaces if not one.ip.is_loopback]
    return (named or outward)[0] if named or len(outward) == 1 else None


def address_in(network: IPv4Network | None, facts: HostFacts, address: str) -> str:
    """Return the machine's address on the network, the given one if it is there; "" if it has none."""
    found = [str(one.ip) for one in _interfaces(facts) if network and one.ip in network]
    return address if address in found else next(iter(found), "")


def address_failures(
    asked: Sequence[Host], facts: Mapping[str, HostFacts], network: IPv4Network | None, leader: Host
) -> list[Failure]:
    """Return why machines have no address on the cluster's network; or why that network is not known."""
    has = {one.name: ", ".join(map(str, _interfaces(facts[one.name]))) or "none" for one in asked}
    if network is None:
        what = f"{leader.address} is no address of its own ({has[leader.name]})"
        cause = f"it is not clear on which network the cluster is: {what}"
        return [Failure(_NO_PLACE, cause, leader.name, "plan", "write provider.network, such as 10.0.0.0/24")]
    away = [one.name for one in asked if not address_in(network, facts[one.name], one.address)]
    cause = f"it has no address on the cluster's network {network}, but "
    fix = "write provider.network: the network that all of them are on"
    return [Failure(_NO_PLACE, cause + has[name], name, "plan", fix) for name in away]


def _interfaces(facts: HostFacts) -> tuple[IPv4Interface, ...]:
    return tuple(map(IPv4Interface, facts.addresses))


_FIX_CLAIMED: Final = "take that cluster down first (`clusterctl down`), or take this machine out of the spec"


def admin_login(workspace: Workspace) -> Connect:
    """The way to a machine through our own account."""
    return lambda host: connect(host, workspace.ssh_config)


def log_in(
    hosts: Sequence[str], workspace: Workspace, limit: Limit = NO_LIMIT
) -> tuple[Collection[str], Mapping[str, ClusterctlError]]:
    """The hosts that let our account in, and to root; and how the others did not."""
    return on_each(hosts, lambda host: check_sudo(admin_login(workspace)(host)), limit=limit)


def joined_members(
    asked: Sequence[Host], before: Mapping[str, Host], workspace: Workspace, limit: Limit = NO_LIMIT
) -> tuple[Mapping[str, Host], Mapping[str, Host]]:
    """Of the machines that were ours: those that let our account in, and those that do not answer at all."""
    known = {one.name: (one, before[one.name]) for one in asked if one.name in before}
    same = [
        name
        for name, (one, host) in known.items()
        if one.host_key in ("", host.host_key) and address_of(one) == address_of(host)
    ]
    found, failed = log_in(same, workspace, limit)
    silent = {host: before[host] for host, exc in failed.items() if isinstance(exc, UnreachableError)}
    return {host: before[host] for host in found}, silent


def examine(
    spec: ClusterSpec,
    asked: Sequence[Host],
    login: Login,
    ours: Collection[str],
    *,
    only: Collection[str],
    lost: Mapping[str, ClusterctlError],
    limit: Limit = NO_LIMIT,
) -> DoctorReport:
    """The machines of ``only`` as they are, what is wrong with them, and what new ones do not reach.

    Those that are ``ours`` are asked by our own account, ``lost`` ones are not asked. What does not answer
    within ``limit`` is a finding.
    """
    every = expected(spec, asked, installed=ours)
    wanted = {one.name: every[one.name] for one in asked if one.name in only and one.name not in lost}
    with ExitStack() as stack:

        def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
            if host not in ours:
                return login.root(host, argv, stdin)
            return own(host).run(("sudo", "-n", *argv), stdin=stdin, timeout_s=login.answer_s).stdout

        def own(host: str) -> Transport:
            transport = connect(host, login.workspace.ssh_config)
            stack.callback(transport.close)
            return transport

        def start(host: str, argv: Sequence[str]) -> AbstractContextManager[Conversation]:
            return own(host).converse(argv) if host in ours else login.converse(host, argv)

        request, leader = host_facts_request(spec, asked), asked[0].name
        report = checks.examine(request, wanted, root, leader=leader, limit=limit)
        new = [name for name in wanted if name not in ours]
        shared = spec.provider.shared if isinstance(spec.provider, OnpremSettings) else OnpremShared()
        asks = _Wanted(spec, shared, asked, new, offline=login.workspace.bundle.exists())
        unreached = _examine_network(asks, report.facts, root, start, limit)
    unseen = [
        Finding(host, "error", failure.code, NO_LOGIN, failure.cause, failure.fix)
        for host, exc in lost.items()
        for failure in exc.failures
    ]
    together = cluster_findings(spec, asked, report)
    return replace(report, findings=(*unseen, *report.findings, *together, *unreached))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The hosts that are to reach each other. ``new`` ones are no part of the cluster yet.

    offline: packages come from a bundle.
    """

    spec: ClusterSpec
    shared: OnpremShared
    asked: Sequence[Host]
    new: Collection[str]
    offline: bool


def _examine_network(
    wanted: _Wanted,
    facts: Mapping[str, HostFacts],
    root: RunAsRoot,
    start: StartOnHost,
    limit: Limit = NO_LIMIT,
) -> tuple[Finding, ...]:
    """Have every host that answered try what new ones need: each other, repositories, an NFS server."""
    hosts = {one.name: one for one in wanted.asked if one.name in facts}
    new = [name for name in hosts if name in wanted.new]
    if not new:
        return ()
    network, controller = wanted.spec.provider.known_network, wanted.asked[0].name
    places = {name: _address(one, facts[name], network) for name, one in hosts.items()}
    there = {name: address for name, address in places.items() if address}
    mtus = {name: _mtu_of(facts[name], address) for name, address in there.items()}

    def ask(name: str) -> tuple[Finding, ...]:
        ping = {"ping": there.get(controller), "mtu": mtus.get(name, 0) if name != controller in there else 0}
        request = _request(wanted, hosts[name], facts[name]) | ping
        said = json.loads(root(name, ("sh", "-c", START, "sh", json.dumps(request)), _REACH))
        return tuple(_findings(wanted, name, said))

    def ask_all() -> Iterator[Finding]:
        found, failed = on_each(new, ask, limit=limit)
        yield from (one for some in found.values() for one in some)
        yield from not_looked_at(failed)

    peers = {name: _peer(wanted, hosts[name], address, facts[name]) for name, address in there.items()}
    members = {one.name: one.address for one in wanted.asked} | there
    ask_ports = partial(examine_ports, peers, members, facts, start, limit)
    parts: tuple[Callable[[], Iterator[Finding]], ...] = (ask_all, ask_ports)
    found = (one for some in parallel_map(parts, lambda part: tuple(part())) for one in some)
    return (*_different_mtus(wanted, mtus), *dict.fromkeys(found))


def _mtu_of(facts: HostFacts, address: str) -> int:
    """The MTU of the interface that has an address; 0 if it is not known."""
    return next((mtu for known, mtu in facts.mtus.items() if known.startswith(f"{address}/")), 0)


def _different_mtus(wanted: _Wanted, mtus: Mapping[str, int]) -> Iterator[Finding]:
    """Warn of new hosts whose MTU differs from the controller's: large messages between them may be lost."""
    controller = mtus.get(wanted.asked[0].name)
    for name in wanted.new:
        if controller and mtus.get(name, controller) not in {0, controller}:
            why = f"its interface on the cluster's network has {mtus[name]}, the controller's {controller}"
            fix = f"`ip link set dev DEVICE mtu {controller}` there, and the same in its configuration"
            yield Finding(name, "warning", "mtu", "the hosts have different MTUs", why, fix)


def _address(host: Host, facts: HostFacts, network: IPv4Network | None) -> str:
    """The address of a host on the cluster's network; "" if it can't be told yet, or there is no network."""
    own = [one.ip for one in map(IPv4Interface, facts.addresses) if not one.ip.is_loopback]
    return next((str(ip) for ip in own if (ip in network if network else str(ip) == host.address)), "")


def _request(wanted: _Wanted, host: Host, facts: HostFacts) -> dict[str, object]:
    packages = role_packages(wanted.spec, host.roles, distribution_of(facts.system.release))
    return {
        "nfs": wanted.shared.server,
        "nfs_port": NFS_PORT,
        "folders": [wanted.shared.path] if wanted.shared.kind == "existing" else [],
        "repositories": not (wanted.offline or set(packages) <= facts.packages),
    }


def _peer(wanted: _Wanted, host: Host, address: str, facts: HostFacts) -> Peer:
    """A host that the others try, unless its firewalld drops what `up` will let through."""
    exports = wanted.shared.kind == "nfs" and wanted.shared.server is None
    ports = needed_ports(wanted.spec, host, exports=exports and host.name == wanted.asked[0].name)
    is_new, tried = host.name in wanted.new, facts.firewall.name != "firewalld"
    return Peer(address, ports, opens=is_new, tried=tried)


def _findings(wanted: _Wanted, name: str, said: Mapping[str, Any]) -> Iterator[Finding]:
    if said["loses_large_packets"]:
        why = f"packets of its MTU's size do not get to {wanted.asked[0].name} and back, smaller packets do"
        fix = "`ip link set dev DEVICE mtu 1500` there, or let the switches pass what its interface sends"
        yield Finding(name, "error", "mtu", "large packets are lost", why, fix)
    for url, why in said["repositories"].items():
        fix = (
            f"`sudo curl -sSI {url}` there must answer: open the firewall, or write the proxy into the "
            "package manager's configuration (sudo may drop one of the environment); or install from a file: "
            "`clusterctl bundle create`, `clusterctl up --bundle`"
        )
        what = "a package repository is out of reach"
        if not url:
            what = "there is no package repository"
            fix = (
                "write the distribution's into /etc/apt/sources.list.d there, so that `sudo apt-get update` "
                "reads one; or install from a file: `clusterctl bundle create`, `clusterctl up --bundle`"
            )
        yield Finding(name, "error", "repository", what, str(why), fix)
    if said["nfs"]:
        server = wanted.shared.server
        why = f"{server}, port {NFS_PORT}: {said['nfs']}"
        fix = f"`showmount -e {server}` there must list the export: start the server, or open its firewall"
        yield Finding(name, "error", "nfs", "the NFS server is out of reach", why, fix)
    for path in said["missing"]:
        why, fix = f"there is no {path}, and shared.kind is existing", f"mount it there: `mount {path}`"
        yield Finding(name, "error", "shared-folder", "the shared folder is missing", why, fix)


def cluster_findings(spec: ClusterSpec, asked: Sequence[Host], report: DoctorReport) -> Iterator[Finding]:
    """Find what is wrong with the machines as a group: the reasons for which ``inventory`` would refuse them.

    Machines that did not answer, and those of a release that is not supported, are left out.
    """
    facts, leader = report.facts, asked[0]
    known = facts.keys() - {one.host for one in report.findings if one.code == "distribution"}
    there = [one for one in asked if one.name in known]
    if not there:
        return
    release, address, slurm_release = UNFIT
    of = {one.name: distribution_of(facts[one.name].system.release) for one in there}
    for one in differing(of):
        yield Finding(str(one.host), "error", release, "its release differs", one.cause, one.fix)
    for host, distribution in of.items():
        if spec.slurm.version and (why := refuse_slurm(spec.slurm.version, distribution, makes_image=False)):
            yield Finding(host, "error", slurm_release, why.what, why.why, why.fix)
    network = spec.provider.known_network
    if network is None and leader.name in facts:
        network = network_of(facts[leader.name], leader.address)
    if network is not None or leader.name in known:
        for one in address_failures(there, facts, network, leader):
            yield Finding(str(one.host), "error", address, "not on the network", one.cause, one.fix)


def claim_findings(facts: Mapping[str, HostFacts], cluster_id: str) -> tuple[Finding, ...]:
    """The machines that belong to other clusters."""
    found = []
    for host, one in facts.items():
        claim = parse_claim(one.texts.get(CLAIM, ""))
        if claim.get("id", cluster_id) != cluster_id:
            why = f"it belongs to cluster {claim.get('name')!r} ({claim['id']})"
            found.append(Finding(host, "error", "claimed", "it is taken", why, _FIX_CLAIMED))
    return tuple(found)


def parse_claim(text: str) -> Mapping[str, str]:
    """Which cluster a machine belongs to, by the file that says so there; empty if it is in none."""
    try:
        said = json.loads(text or "{}")
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in said.items()} if isinstance(said, dict) else {}


def notes(spec: ClusterSpec, findings: Sequence[Finding], *, known: bool) -> tuple[str, ...]:
    """What of the findings a plan says; where a cluster is ``known``, all of it is looked at for the rest."""
    later = {"no-driver"} if spec.software.nvidia.has_driver else set()  # said once one is installed
    later |= {checks.NO_CGROUPS} if known else set()
    return tuple(str(one) for one in findings if one.code not in later)


def preview(
    spec: ClusterSpec, asked: Sequence[Host], facts: Mapping[str, HostFacts], new: Collection[str]
) -> tuple[str, ...]:
    """A line for all machines that it is the same for."""
    said: dict[str, list[str]] = {}
    for one in asked:
        if one.name in new:
            for text in _preview_of(spec, one, facts[one.name]):
                said.setdefault(text, []).append(one.name)
    return tuple(f"{', '.join(names)}: {text}" for text, names in said.items())


def _preview_of(spec: ClusterSpec, one: Host, facts: HostFacts) -> Iterator[str]:
    packages = role_packages(spec, one.roles, distribution_of(facts.system.release))
    if missing := [name for name in packages if name not in facts.packages]:
        yield f"to be installed, with what they need: {', '.join(missing)}"
    if missing := [user.name for user in spec.users if user.name not in facts.accounts]:
        yield f"users to be made: {', '.join(missing)}"
    patterns = role_files(spec, one.roles)
    if theirs := [file for file in facts.files if any(fnmatchcase(file, pattern) for pattern in patterns)]:
        yield f"may be changed, kept aside, and put back by `down`: {', '.join(theirs)}"
