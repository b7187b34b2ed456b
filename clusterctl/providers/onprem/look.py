"""A look at the machines before anything is done to them: which are ours already, and what each is."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from pydantic import ValidationError

from clusterctl.errors import ClusterctlError, Failure, UnreachableError
from clusterctl.hosts import checks
from clusterctl.hosts.checks import DoctorReport, Finding
from clusterctl.hosts.cluster_checks import expected, host_facts_request
from clusterctl.hosts.report import HostFacts
from clusterctl.providers.onprem.access import Access, each
from clusterctl.providers.onprem.account import Root
from clusterctl.providers.onprem.members import Member
from clusterctl.providers.onprem.refusals import NO_WAY_IN
from clusterctl.providers.onprem.this_machine import connect
from clusterctl.spec import ClusterSpec
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport

_ANSWER_S: Final = 60.0
_FIX_CLAIMED: Final = "take that cluster down first (`clusterctl down`), or take this machine out of the spec"


def known_hosts(workspace: Workspace) -> Mapping[str, Host]:
    """The machines of the cluster as it was raised last; those that an `up` was about to take, too."""
    found: dict[str, Host] = {}
    for path in (workspace.joining, workspace.hosts):
        try:
            hosts = Inventory.model_validate_json(path.read_bytes()).hosts
        except (FileNotFoundError, ValidationError):
            continue
        found |= {host.name: host for host in hosts}
    return found


def admin(workspace: Workspace) -> Callable[[str], Transport]:
    """The way to a machine through our own account."""
    return lambda host: connect(host, workspace.ssh_config)


def still_ours(
    asked: Sequence[Member], before: Mapping[str, Host], workspace: Workspace
) -> tuple[Mapping[str, Host], Mapping[str, Host]]:
    """Of the machines that were ours: those that let our account in, and those that do not answer at all."""
    same = [one.name for one in asked if one.name in before and _is_where_it_was(one, before[one.name])]
    found, failed = each(same, lambda host: _ask_in(admin(workspace)(host)))
    silent = {host: before[host] for host, exc in failed.items() if isinstance(exc, UnreachableError)}
    return {host: before[host] for host in found}, silent


def look(
    spec: ClusterSpec,
    asked: Sequence[Member],
    access: Access,
    workspace: Workspace,
    ours: Collection[str],
    *,
    only: Collection[str],
    lost: Mapping[str, ClusterctlError],
) -> DoctorReport:
    """The machines of ``only`` as they are, and what is wrong with them.

    Those that are ``ours`` are asked by our own account, ``lost`` ones are not asked.
    """
    every = expected(spec, asked, installed=ours)
    wanted = {one.name: every[one.name] for one in asked if one.name in only and one.name not in lost}
    with ExitStack() as stack:
        root = _roots(access, workspace, ours, stack)
        report = checks.examine(host_facts_request(spec, asked), wanted, root, leader=asked[0].name)
    unseen = [
        Finding(host, "error", failure.code, NO_WAY_IN, failure.cause, failure.fix)
        for host, exc in lost.items()
        for failure in exc.failures
    ]
    return replace(report, findings=(*unseen, *report.findings))


def claimed(facts: Mapping[str, HostFacts], cluster_id: str) -> tuple[Finding, ...]:
    """The machines that belong to other clusters."""
    found = []
    for host, one in facts.items():
        claim = _claim(one)
        if claim.get("id", cluster_id) != cluster_id:
            why = f"it belongs to cluster {claim.get('name')!r} ({claim['id']})"
            found.append(Finding(host, "error", "claimed", "it is taken", why, _FIX_CLAIMED))
    return tuple(found)


def cluster_of(facts: HostFacts) -> tuple[str, str] | None:
    """Id and name of the cluster that a machine belongs to."""
    claim = _claim(facts)
    return (claim["id"], claim.get("name", "")) if "id" in claim else None


def failures(findings: Sequence[Finding]) -> tuple[Failure, ...]:
    """What keeps machines out of the cluster, as failures of the phase `plan`."""
    return checks.failures([one for one in findings if one.level == "error"], phase="plan")


def _claim(facts: HostFacts) -> Mapping[str, str]:
    try:
        said = json.loads(facts.claim or "{}")
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in said.items()} if isinstance(said, dict) else {}


def _is_where_it_was(one: Member, host: Host) -> bool:
    address = (one.machine.address or one.name).strip("[]")
    same_key = one.machine.host_key in (None, host.host_key)
    return same_key and (host.ssh_address or host.address, host.port) == (address, one.machine.port or 22)


def _ask_in(transport: Transport) -> None:
    try:
        transport.run(("sudo", "-n", "true"), timeout_s=_ANSWER_S)
    finally:
        transport.close()


def _roots(access: Access, workspace: Workspace, ours: Collection[str], stack: ExitStack) -> Root:
    connect = admin(workspace)

    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        if host not in ours:
            return access.root(host, argv, stdin)
        transport = connect(host)
        stack.callback(transport.close)
        return transport.run(("sudo", "-n", *argv), stdin=stdin, timeout_s=_ANSWER_S).stdout

    return root


def as_failures(failed: Mapping[str, ClusterctlError]) -> tuple[Failure, ...]:
    """One failure a machine and cause."""
    return tuple(
        Failure(f.code, f.cause, f.host or host, f.phase or "plan", f.fix, f.retryable)
        for host, exc in failed.items()
        for f in exc.failures
    )
