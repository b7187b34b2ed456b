"""Who a host of an `ssh_config` is: how to reach it, and the key that it must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.errors import HostKeyError, TransportError
from clusterctl.transport.lean import paramiko


@dataclass(frozen=True, slots=True)
class Target:
    """What the `ssh_config` says about one host."""

    address: str
    port: int
    alias: str
    user: str
    key: str
    known_hosts: Path
    proxy_command: str | None = None  # instead of a TCP connection
    connect_timeout_s: float | None = None

    @classmethod
    def read(cls, config: Path, host: str, user: str | None) -> Target:
        """Raises TransportError if the file can't be read or leaves out what we need."""
        try:
            options: dict[str, Any] = dict(paramiko.SSHConfig.from_path(str(config)).lookup(host))
            return cls(
                address=options["hostname"],
                port=int(options.get("port", "22")),
                alias=options.get("hostkeyalias", host),
                user=user or options["user"],
                key=options["identityfile"][0],
                known_hosts=Path(options["userknownhostsfile"]),
                proxy_command=options.get("proxycommand"),
                connect_timeout_s=float(timeout) if (timeout := options.get("connecttimeout")) else None,
            )
        except (OSError, ValueError, KeyError, paramiko.ConfigParseError) as exc:
            raise TransportError(
                f"the SSH configuration does not say how to reach {host}",
                where=str(config),
                why=f"it has no {exc}" if isinstance(exc, KeyError) else str(exc),
                fix="run `clusterctl up`, which writes it",
                host=host,
            ) from exc


class Reject(paramiko.MissingHostKeyPolicy):
    """A host whose key we don't know is refused, whatever the user's own known_hosts says."""

    def __init__(self, known_hosts: Path) -> None:
        self._known_hosts = known_hosts

    def missing_host_key(self, _client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise HostKeyError(
            f"{hostname} has no known host key",
            where=str(self._known_hosts),
            why=f"it offered {key.get_name()} {key.fingerprint}",
            fix="run `clusterctl up`, which writes its hosts' keys; none is trusted on first use",
            host=hostname,
        )


def wrong_key(host: str, known_hosts: Path, exc: paramiko.BadHostKeyException) -> HostKeyError:
    """The error for a host that offered another key than the known one."""
    return HostKeyError(
        f"{host} is not the host it should be",
        where=str(known_hosts),
        why=f"it offered {exc.key.get_name()} {exc.key.fingerprint}, expected {exc.expected_key.fingerprint}",
        fix="if the host was made anew on purpose, run `clusterctl up`; otherwise somebody is in between",
        host=host,
    )
