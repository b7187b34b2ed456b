"""What only machines of the user's own know of a spec: `provider: {type: onprem, ...}`."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator

from clusterctl.spec.base import Model, Network
from clusterctl.spec.fabric import Switch, SwitchName
from clusterctl.spec.host_range import expand
from clusterctl.spec.paths import KeyFile
from clusterctl.spec.words import shown

HOST_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
ADDRESS = r"^[A-Za-z0-9._:\[\],-]{1,255}$"
LOGIN = r"^[a-z_][a-z0-9_.-]{0,31}$"
JUMP = r"^([a-z_][a-z0-9_.-]{0,31}@)?[A-Za-z0-9][A-Za-z0-9._-]{0,252}(:[0-9]{1,5})?$"
HOST_KEY = r"^(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa) [A-Za-z0-9+/]+={0,2}$"
ABSOLUTE = r"^/[A-Za-z0-9._/-]{0,200}$"
_KEY_FIELDS: Final = {"ssh-ed25519": 2}  # others have three
_HERE: Final = ("localhost", "localhost.localdomain")

ONPREM_PATTERN_WORDS: Final[Mapping[str, str]] = {
    HOST_NAME: "a host's name: at most 63 lower-case letters, digits or dashes, none at its ends",
    ADDRESS: "an address or a name, such as 10.0.0.11",
    LOGIN: "a login name",
    JUMP: "a host to jump through, as user@gate.example.org:22",
    HOST_KEY: "a public host key, as `ssh-keyscan` prints it: ssh-ed25519 AAAA...",
    ABSOLUTE: "an absolute path",
}


def _is_range(text: str) -> str:
    expand(text)
    return text


def _are_addresses(text: str) -> str:
    for one in expand(text):
        if re.fullmatch(r"[0-9.]+|.*:.*", one):  # what no name looks like
            try:
                ip_address(one)
            except ValueError as exc:
                raise ValueError(
                    f"{shown(one)} is not an address, such as 10.0.0.11; `port` is apart"
                ) from exc
    return text


def _is_whole_key(text: str) -> str:
    """A key's fields, the first of which is its type again, are a length and as many bytes each."""
    kind, _, encoded = text.partition(" ")
    with suppress(ValueError):
        left, fields = b64decode(encoded, validate=True), []
        while left:
            length = int.from_bytes(left[:4], "big")
            fields.append(left[4 : 4 + length])
            if len(left) < 4 + length:
                break
            left = left[4 + length :]
        if not left and fields[0] == kind.encode() and len(fields) == _KEY_FIELDS.get(kind, 3):
            return text
    raise ValueError(f"{shown(text)} is no whole key of that type: copy it as `ssh-keyscan` prints it")


HostName = Annotated[str, StringConstraints(pattern=HOST_NAME)]
HostRange = Annotated[str, AfterValidator(_is_range)]
Login = Annotated[str, StringConstraints(pattern=LOGIN)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Jump = Annotated[str, StringConstraints(pattern=JUMP)]
AbsolutePath = Annotated[str, StringConstraints(pattern=ABSOLUTE)]


class Access(Model):
    """How a host is first logged in to; after that clusterctl uses an account of its own."""

    user: Login | None = Field(None, description="login name; by default the caller's")
    port: Port = Field(22, description="sshd's port")
    key: KeyFile | None = Field(
        None, description="private key, relative to this file or from ~; by default ssh's own and the agent's"
    )
    jump: tuple[Jump, ...] = Field((), description="hosts to jump through, the first one first")
    become: Literal["sudo", "none"] = Field("sudo", description="how to become root; none: the user is root")


class OnpremHost(Model):
    """One machine, or a range of them. What is not said here is as under `provider`."""

    address: Annotated[str, StringConstraints(pattern=ADDRESS), AfterValidator(_are_addresses)] | None = (
        Field(
            None,
            description="address, or a range of as many as there are names; by default the host's name; "
            "localhost: the machine that clusterctl runs on",
        )
    )
    user: Login | None = Field(None, description="login name")
    port: Port | None = Field(None, description="sshd's port")
    key: KeyFile | None = Field(None, description="private key")
    jump: tuple[Jump, ...] | None = Field(None, description="hosts to jump through; [] for none")
    become: Literal["sudo", "none"] | None = Field(None, description="how to become root")
    host_key: Annotated[str, StringConstraints(pattern=HOST_KEY), AfterValidator(_is_whole_key)] | None = (
        Field(None, description="its public host key; by default it is shown once, to be confirmed")
    )

    @property
    def is_here(self) -> bool:
        """Whether it is the machine that clusterctl runs on."""
        return self.address is not None and is_this_machine(self.address)


class OnpremShared(Model):
    """The folder that all hosts see."""

    kind: Literal["nfs", "existing", "none"] = Field(
        "nfs",
        description="nfs: `server`, or else the controller, exports it; existing: it is mounted on all hosts "
        "already; none: jobs have the folders of their own nodes alone",
    )
    path: AbsolutePath = Field("/shared", description="where the hosts have it")
    server: Annotated[str, StringConstraints(pattern=ADDRESS)] | None = Field(
        None, description="an NFS server that is there already"
    )
    export: AbsolutePath | None = Field(None, description="what that server exports")


class OnpremProvider(Model):
    """Machines that you have: Rocky Linux, Debian or Ubuntu. See docs/onprem.md."""

    type: Literal["onprem"] = Field(description="which provider makes the hosts")
    controller: HostName = Field(description="the host that leads; it may compute, too")
    login: tuple[HostName, ...] = Field((), description="hosts that users log in to, beside the controller")
    hosts: Mapping[HostRange, OnpremHost] = Field(
        min_length=1, description="the machines by name or range of names, such as gpu[01-08]"
    )
    access: Access = Field(Access(), description="how they are first logged in to")
    network: Network | None = Field(
        None, description="addresses that MPI and Slurm use; by default the network of the controller's"
    )
    shared: OnpremShared = Field(OnpremShared(), description="the folder that all hosts see")
    fabric: Mapping[SwitchName, Switch] = Field(
        {}, description="the switches of the fast network by name, for jobs to be kept close together"
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _bare_addresses(cls, value: object) -> object:
        """``gpu01: 10.0.0.11`` says the address alone, ``gpu01:`` nothing."""
        if not isinstance(value, Mapping):
            return value
        return {name: _host(said) for name, said in value.items()}

    @property
    def machines(self) -> Mapping[str, OnpremHost]:
        """Every host by its own name, with its own address, and the access of ``access`` where it has none.

        ``key``, ``jump`` and the rest are resolved; ``user`` stays None for the caller's.
        """
        return {name: host for names, said in self.hosts.items() for name, host in self._each(names, said)}

    def _each(self, names: str, said: OnpremHost) -> tuple[tuple[str, OnpremHost], ...]:
        every = expand(names)
        addresses = expand(said.address) if said.address else every
        common = {
            field: getattr(self.access, field) if getattr(said, field) is None else getattr(said, field)
            for field in ("user", "port", "key", "jump", "become")
        }
        return tuple(
            (name, OnpremHost(address=address, host_key=said.host_key, **common))
            for name, address in zip(every, addresses, strict=True)
        )


def is_this_machine(address: str) -> bool:
    """Whether an address leads to where one is already: localhost, 127.0.0.1, ::1, or any of its own."""
    bare = address.strip("[]").lower()
    if bare in _HERE:
        return True
    try:
        found = ip_address(bare)
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return found.is_loopback or found.is_unspecified


def _host(said: object) -> object:
    if said is None:
        return {}
    return {"address": said} if isinstance(said, str) else said
