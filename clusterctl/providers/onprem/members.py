"""What a spec makes of the user's machines, and where on its network each of them is."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from typing import Final

from clusterctl.errors import Failure
from clusterctl.hosts.report import HostFacts
from clusterctl.providers.onprem.access import refused
from clusterctl.providers.onprem.ssh_files import last_hop
from clusterctl.spec.distributions import common
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.onprem import OnpremHost
from clusterctl.spec.onprem import OnpremProvider as Settings
from clusterctl.state.inventory import COMPUTE, CONTROLLER, LOGIN, Host, Inventory, SharedFolder

_NO_PLACE: Final = "network"
_HERE: Final = "127.0.0.1"  # whatever other addresses this machine has, now or tomorrow
_THEN: Final = "then run the same command again"
# What else their network has, a host's own InfiniBand among it, Ansible finds out.
_JOBS_TALK_OVER: Final = {"NCCL_SOCKET_IFNAME": "={interface}", "GLOO_SOCKET_IFNAME": "{interface}"}


@dataclass(frozen=True, slots=True)
class Member:
    """A machine and what it is to the cluster; ``address`` is an IPv4 address where that can be told here."""

    name: str
    machine: OnpremHost
    address: str
    roles: tuple[str, ...]
    partition: str | None


def members(spec: ClusterSpec, settings: Settings) -> tuple[Member, ...]:
    """Every machine that has a part in the cluster, the controller first."""
    partitions = {name: p.name for p in spec.partitions for name in spec.node_names(p)}
    machines = settings.machines
    found = []
    for name in dict.fromkeys([settings.controller, *partitions, *settings.login]):
        roles = [CONTROLLER] if name == settings.controller else []
        roles += [COMPUTE] if name in partitions else []
        roles += [LOGIN] if name in settings.login else []
        machine = machines[name]
        found.append(Member(name, machine, _resolved(machine, name), tuple(roles), partitions.get(name)))
    return tuple(found)


def inventory(
    spec: ClusterSpec,
    settings: Settings,
    asked: Sequence[Member],
    facts: Mapping[str, HostFacts],
    keys: Mapping[str, str],
    *,
    cluster_id: str,
    proxies: Mapping[str, tuple[str, ...]],
    silent: Mapping[str, Host],
) -> Inventory:
    """The cluster that these machines become. ``keys`` are their host keys, ``proxies`` lead to those that
    have no route from here; ``silent`` ones do not answer, and are taken as they were known last.

    Raises:
        ProvisionError: some can't be part of it; one failure a host.
    """
    releases = {name: distribution(one) for name, one in facts.items()}
    releases |= {name: host.distribution for name, host in silent.items()}
    common({one.name: releases[one.name] for one in asked})
    network = settings.network or _network(asked[0], facts[asked[0].name])
    answering = [one for one in asked if one.name not in silent]
    places = {**_places(answering, facts, network), **{name: host.address for name, host in silent.items()}}
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
        shared_folder=_shared(settings, places, alone=len(asked) == 1),
        baked=False,
    )


def distribution(facts: HostFacts) -> str:
    """What it is called in the table of distributions."""
    return f"{facts.system.id}-{facts.system.version}"


def _host(one: Member, facts: HostFacts, place: str, key: str, proxy: tuple[str, ...]) -> Host:
    address = (one.machine.address or one.name).strip("[]")
    hostname = facts.system.hostname.partition(".")[0]
    return Host(
        name=one.name,
        address=place,
        ssh_address=address if address != place else None,
        port=one.machine.port or 22,
        roles=one.roles,
        partition=one.partition,
        host_key=key,
        distribution=distribution(facts),
        cgroups=facts.cgroups,
        hostname=hostname if hostname != one.name else None,
        proxy_command=proxy,
        job_environment=_JOBS_TALK_OVER,
    )


def _shared(settings: Settings, places: Mapping[str, str], *, alone: bool) -> SharedFolder:
    shared = settings.shared
    if shared.kind != "nfs":
        return SharedFolder(kind=shared.kind)
    if shared.server is not None:
        return SharedFolder(kind="server", server=shared.server, path=shared.export)
    if alone:  # nobody else to export it to
        return SharedFolder(kind="existing")
    return SharedFolder(kind="nfs", server=places[settings.controller], path=shared.path)


def _resolved(machine: OnpremHost, name: str) -> str:
    """The machine's address, looked up if it is a name; behind a jump host it may be known there alone."""
    if machine.is_here:
        return _HERE
    address = (machine.address or name).strip("[]")
    if last_hop(machine) is None:
        try:
            found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return address  # ssh will say it
        return str(found[0][4][0])
    return address


def _network(leader: Member, facts: HostFacts) -> IPv4Network:
    """The network of the address that the controller is reached under.

    Raises:
        ProvisionError: it is under none of those that it has.
    """
    interfaces = _interfaces(facts)
    for one in interfaces:
        if str(one.ip) == leader.address:
            return one.network
    outward = [one for one in interfaces if not one.ip.is_loopback]
    if len(outward) == 1:
        return outward[0].network
    has = ", ".join(map(str, interfaces)) or "none"
    cause = (
        f"it is not clear on which network the cluster is: {leader.address} is no address of its own ({has})"
    )
    fix = "write provider.network, such as 10.0.0.0/24"
    raise refused([Failure(_NO_PLACE, cause, leader.name, "plan", fix)], what="no network", then=_THEN)


def _places(
    asked: Sequence[Member], facts: Mapping[str, HostFacts], network: IPv4Network
) -> Mapping[str, str]:
    """Host -> its address on the cluster's network.

    Raises:
        ProvisionError: some have none there; one failure each.
    """
    found: dict[str, str] = {}
    failures: list[Failure] = []
    for one in asked:
        interfaces = _interfaces(facts[one.name])
        there = [str(each.ip) for each in interfaces if each.ip in network]
        if there:
            found[one.name] = one.address if one.address in there else there[0]
            continue
        has = ", ".join(map(str, interfaces)) or "none"
        cause = f"it has no address on the cluster's network {network}, but {has}"
        fix = "write provider.network: the network that all of them are on"
        failures.append(Failure(_NO_PLACE, cause, one.name, "plan", fix))
    if failures:
        raise refused(failures, what="not on the cluster's network", then=_THEN)
    return found


def _interfaces(facts: HostFacts) -> tuple[IPv4Interface, ...]:
    return tuple(map(IPv4Interface, facts.addresses))
