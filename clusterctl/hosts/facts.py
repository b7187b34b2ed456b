"""What a host is asked before it becomes part of a cluster, and what it answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.errors import TransportError

PROGRAM: Final = (Path(__file__).parent / "remote_examine.py").read_bytes()
# Rocky 8's own Python is nowhere on the PATH. What prints it also says so where there is none.
_START: Final = (
    "for python in /usr/bin/python3 /usr/libexec/platform-python; do "
    '[ -x "$python" ] && exec "$python" -I -S - "$1"; done; echo "no Python 3 is installed" >&2; exit 127'
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a host is looked at: names to resolve, ports, folders, units, accounts and their numbers.

    ``files`` are patterns of those that the roles may change; ``packages`` what they may install.
    """

    names: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    paths: tuple[str, ...] = ("/",)
    units: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    uids: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def argv(self) -> tuple[str, ...]:
        """The command that answers it, as root, with ``PROGRAM`` on its standard input."""
        return ("sh", "-c", _START, "sh", json.dumps(asdict(self)))


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


class Space(_Answer):
    """The room of the file system of some paths; ``inodes`` is None where it does not count them."""

    paths: tuple[str, ...]
    free_mib: int
    inodes: int | None
    read_only: bool


class LockHolder(_Answer):
    """Who installs packages right now."""

    pid: int
    command: str


class Gpus(_Answer):
    """NVIDIA's cards on the PCI bus, and those that the driver shows, by name.

    ``driver`` is the version of the one that answers, ``installed`` that of the kernel module on disk.
    """

    cards: int
    shown: tuple[str, ...]
    driver: str | None
    nouveau: bool
    secure_boot: bool
    switches: int = 0
    installed: str = ""


class FirewallSaid(_Answer):
    """What the firewalls' own commands say: `ufw status verbose`, `iptables-save`, `nft -j list ruleset`.

    ``firewalld`` is `running`, or `stopped` where it starts with the next boot and has no policy of ours.
    While it runs nothing else is asked.
    """

    firewalld: Literal["running", "stopped", ""] = ""
    zone: str = ""  # its default
    ufw: str = ""
    iptables: str = ""
    nft: str = ""


class Facts(_Answer):
    """What a host said of itself; ``time`` is its clock, in seconds since 1970."""

    time: float
    uid: int
    system: System
    addresses: tuple[str, ...]
    resolved: Mapping[str, tuple[str, ...]]
    space: tuple[Space, ...]
    listeners: Mapping[int, str]
    lock_holders: tuple[LockHolder, ...]
    selinux: str
    units: frozenset[str]
    gpus: Gpus
    accounts: Mapping[str, int]
    clock_alone: bool = False  # no time service that runs there follows anybody
    firewall: FirewallSaid = FirewallSaid()
    interfaces: Mapping[str, tuple[str, ...]] = {}  # -> its addresses
    cgroups: bool = True  # root can make control groups there
    databases: tuple[str, ...] = ()  # of MariaDB or MySQL, but for its own
    slurm_state: tuple[str, ...] = ()  # what a slurmctld keeps for its next start
    files: tuple[str, ...] = ()  # of those that were asked for
    packages: frozenset[str] = frozenset()  # likewise
    claim: str = ""  # what clusterctl noted there of the cluster that it belongs to; JSON


def parse_facts(text: str) -> Facts:
    """The answer to ``Asked``.

    Raises:
        TransportError: that is no answer.
    """
    try:
        return Facts.model_validate_json(text)
    except ValidationError as exc:
        raise TransportError("the host gave no usable answer", why=text[:500]) from exc
