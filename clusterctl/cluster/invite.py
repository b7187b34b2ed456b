"""The command that a colleague types to use a cluster of `up` with an account of their own."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final

from clusterctl.errors import Notice, UsageError
from clusterctl.scheduler.session import site_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import LOGIN, Host, Inventory

_FOLDER: Final = "~/clusterctl-attached"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The text that a colleague needs to attach the cluster. There is no secret in it.

    login: for `attach`. known_hosts: the line with the host's key. command: for a shell: it adds
        the line to the colleague's known_hosts, and attaches the cluster.
    notes: messages for the operator.
    """

    cluster: str
    user: str
    login: str
    known_hosts: str
    command: str
    notes: tuple[Notice, ...] = ()


def invite(spec: ClusterSpec, inventory: Inventory, user: str) -> Invitation:
    """Return the invitation of a user. spec: that of the last `up`.

    Raises:
        UsageError: the cluster has no such user, or no Slurm, the user has no SSH key, or the way
            to the cluster needs more than an address.
    """
    site_of(inventory).reject_without_slurm()
    _reject_without_key(spec, user)
    host = next((host for host in inventory.hosts if LOGIN in host.roles), inventory.controller)
    if host.jump or host.proxy_command:
        raise UsageError(
            f"colleagues can't reach {host.name} by its address alone",
            code="invite-behind-proxy",
            why="SSH to it goes through another machine or program",
            fix=f"send its entry of ssh_config and its line of known_hosts, as in "
            f"docs/howto/colleagues.md; then the colleague runs `clusterctl attach {host.name}`",
        )
    login, known_host = _names(host, user)
    known_hosts = f"{known_host} {host.host_key}"
    # The usual folder of this user has the jobs of the operator.
    folder = f" --folder '{_FOLDER}'" if user == inventory.job_user else ""
    command = (
        f"mkdir -p -m 700 ~/.ssh && echo {shlex.quote(known_hosts)} >>~/.ssh/known_hosts && "
        f"clusterctl attach {shlex.quote(login)} --name {inventory.cluster}{folder}"
    )
    notes = []
    if spec.provider.shares_kernel:
        text = "note: local nodes can be reached only from this machine"
        notes.append(Notice("invite-local", text))
    return Invitation(inventory.cluster, user, login, known_hosts, command, tuple(notes))


def _reject_without_key(spec: ClusterSpec, name: str) -> None:
    users = {user.name: user for user in spec.users}
    if name not in users:
        raise UsageError(
            f"the cluster has no user {name!r}",
            code="unknown-user",
            why=f"`users` of the last `up` has {', '.join(users) or 'none'}",
            fix=f"add {name} with a uid and ssh_keys to `users` in the spec, then run `clusterctl "
            "up`",
        )
    if not users[name].ssh_keys:
        raise UsageError(
            f"user {name} has no SSH key",
            code="user-without-key",
            fix=f"add the colleague's public key to ssh_keys of {name} in the spec, then run "
            "`clusterctl up`",
        )


def _names(host: Host, user: str) -> tuple[str, str]:
    """Return the login for `attach`, and the host's name in known_hosts."""
    address = host.ssh_address or host.address
    is_plain = host.port == 22 and ":" not in address  # noqa: PLR2004 - ssh's port
    if is_plain:
        return f"{user}@{address}", address
    in_url = f"[{address}]" if ":" in address else address
    known = address if host.port == 22 else f"[{address}]:{host.port}"  # noqa: PLR2004
    return f"ssh://{user}@{in_url}:{host.port}", known
