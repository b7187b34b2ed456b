"""Find pairs of hosts that can't connect: each host tries the daemons of all others."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from clusterctl.errors import ClusterctlError, TransportError
from clusterctl.hosts.checks import Finding
from clusterctl.hosts.roles import role_ports
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import remote_argv
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import NO_LIMIT, Deadline

NFS_PORT: Final = 2049
# A page of the manual has the commands that admit the cluster's hosts.
_FIREWALLS: Final = "docs/onprem-network.md#firewall"

# Host -> its address, and the ports that other hosts need.
Targets = dict[str, tuple[str, Sequence[int]]]
# Runs a command on a host. Arguments: host, command. Returns its standard output.
RunOnHost = Callable[[str, Sequence[str]], str]


def targets_of(spec: ClusterSpec, inventory: Inventory, hosts: Collection[str]) -> Targets:
    """Return what these hosts must reach of each other: Slurm's daemons, or sshd where it starts
    ranks, and the file server.
    """
    by_ssh = spec.scheduler_needs.starts_by_ssh
    folder = inventory.shared_folder
    found: Targets = {}
    for host in inventory.hosts:
        if host.name in hosts:
            exports = host.is_controller and folder.kind == "nfs"
            ports = (
                *role_ports(spec, host.roles),
                *((host.port,) if by_ssh else ()),
                *((NFS_PORT,) if exports else ()),
            )
            found[host.name] = (host.address, ports)
    return found | (server_target(folder.server) if folder.kind == "server" else {})


def server_target(server: str | None) -> Targets:
    """Return the file server of the owner's network, which is no host of the cluster."""
    return {server: (server, (NFS_PORT,))} if server else {}


def examine_pairs(
    targets: Targets, near: Collection[str], run: RunOnHost, limit: Deadline = NO_LIMIT
) -> Iterator[Finding]:
    """Make the hosts in ``near`` connect to all targets. Yield a finding for each port that can't be
    reached, with the names of all hosts that do not reach it for the same cause.

    A port that its own host does not reach is left out: no daemon listens there. A host whose test
    fails has a warning.
    """

    def ask(host: str) -> dict[str, dict[int, str]]:
        text = run(host, remote_argv("clusterctl.hosts.remote_pairs", json.dumps(targets)))
        try:
            # The account's shell may print other lines before.
            answer = json.loads(text.splitlines()[-1])
            return {
                far: {int(port): str(cause) for port, cause in ports.items()}
                for far, ports in answer.items()
            }
        except (ValueError, IndexError, AttributeError) as exc:
            message = f"{host} did not return valid JSON"
            raise TransportError(
                message, code="internal", about="answer", why=text[:500], host=host
            ) from exc

    answers, silent = call_on_hosts(near, ask, most=len(near), limit=limit)
    yield from _untested(silent)
    closed: dict[tuple[str, str, str], list[str]] = {}
    for name, unreached in answers.items():
        for far, causes in unreached.items():
            if far in silent:
                continue
            own = answers.get(far, {}).get(far, {})
            causes_of_others = {port: cause for port, cause in causes.items() if port not in own}
            for cause in dict.fromkeys(causes_of_others.values()):
                ports = ", ".join(str(p) for p, c in causes_of_others.items() if c == cause)
                closed.setdefault((far, ports, cause), []).append(name)
    for (far, ports, cause), names in closed.items():
        yield from _closed(far, f"{targets[far][0]}, port {ports}: {cause}", names, near)


def _closed(
    far: str, problem: str, names: Sequence[str], hosts: Collection[str]
) -> Iterator[Finding]:
    if far not in hosts:
        fix = f"start the server, or open its firewall: `showmount -e {far}` lists the export"
        for name in names:
            yield Finding(name, "error", "nfs", "the NFS server can't be reached", problem, fix)
        return
    fix = (
        "`clusterctl doctor` shows the firewall of each host; let these hosts through "
        f"({_FIREWALLS}), or correct their routes"
    )
    cause = f"{', '.join(names)} can't reach {problem}"
    yield Finding(far, "error", "network", "other hosts can't reach this host", cause, fix)


def _untested(failed: Mapping[str, ClusterctlError]) -> Iterator[Finding]:
    what = "the host's connections to other hosts were not tested"
    for host, error in failed.items():
        # Other checks report other errors.
        if isinstance(error, TransportError):
            fix = error.fix or "run the same command again"
            yield Finding(host, "warning", "not-looked-at", what, error.cause, fix)
