"""Hosts in a spec: ranges of host names, SSH access to the user's own machines, and switches."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from itertools import product
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from clusterctl.errors import BadValueError
from clusterctl.spec.base import PATTERNS, KeyFile, Model
from clusterctl.spec.units import shown

# The maximum number of names in a range.
MOST = 1000

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """Return every name of a host list such as ``gpu[01-08],head``.

    Raises:
        ValueError: the text is not a host list, has a name twice, or more than ``MOST`` names.
    """
    names = tuple(name for part in _split(text) for name in _names(part))
    if len(names) > MOST:
        raise BadValueError("too-many-names", f"{text!r} contains more than {MOST} host names")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadValueError("host-named-twice", f"{text!r} contains {twice!r} twice")
    return names


def _split(text: str) -> Iterator[str]:
    for part in re.split(r",(?![^\[]*\])", text):
        if not part.strip():
            raise BadValueError("name-empty", f"{text!r} contains an empty name")
        yield part.strip()


def _names(part: str) -> Iterator[str]:
    *pairs, tail = _RANGE.split(part)
    if any(bracket in plain for plain in (*pairs[::2], tail) for bracket in "[]"):
        raise BadValueError("hostlist-bracket", f"{part!r} has an unmatched bracket")
    heads, choices = pairs[::2], [list(_numbers(inner, part)) for inner in pairs[1::2]]
    for chosen in product(*choices):
        yield "".join(head + number for head, number in zip(heads, chosen, strict=True)) + tail


def _numbers(inner: str, part: str) -> Iterator[str]:
    for piece in inner.split(","):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise BadValueError("hostlist-range", f"{part!r}: {piece!r} is not a number or range like 01-08")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise BadValueError(
                "hostlist-range", f"{part!r}: {piece!r} is not an ascending range of at most {MOST} numbers"
            )
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _is_range(text: str) -> str:
    expand(text)
    return text


HostRange = Annotated[str, AfterValidator(_is_range)]


class Switch(Model):
    """A network switch, with the nodes or the lower switches connected to it."""

    hosts: HostRange | None = Field(None, description="the nodes at this switch, such as gpu[01-08]")
    switches: HostRange | None = Field(None, description="the switches below it, such as leaf[1-4]")


# Type of a public key -> number of fields in the key. Default: 3.
_KEY_FIELDS: Final = {"ssh-ed25519": 2}
_HERE: Final = ("localhost", "localhost.localdomain")


def _are_addresses(text: str) -> str:
    for address in expand(text):
        # A text of this form can't be a host name, so it must be an IP address.
        if re.fullmatch(r"[0-9.]+|.*:.*", address):
            try:
                ip_address(address)
            except ValueError as exc:
                raise BadValueError(
                    "not-an-address-range",
                    f"{shown(address)} is not an address such as 10.0.0.11; a port belongs in the key `port`",
                ) from exc
    return text


def _is_whole_key(text: str) -> str:
    """Return a public key unchanged. Reject a key that is truncated, as the lengths of its fields show."""
    kind, _, encoded = text.partition(" ")
    with suppress(ValueError):
        rest, fields = b64decode(encoded, validate=True), []
        while rest:
            length = int.from_bytes(rest[:4], "big")
            fields.append(rest[4 : 4 + length])
            if len(rest) < 4 + length:
                break
            rest = rest[4 + length :]
        if fields and not rest and fields[0] == kind.encode() and len(fields) == _KEY_FIELDS.get(kind, 3):
            return text
    raise BadValueError("not-a-host-key", f"{shown(text)} is not a complete key: copy it from `ssh-keyscan`")


HostName = Annotated[str, PATTERNS["host_name"]]
Address = Annotated[str, PATTERNS["address"]]
Login = Annotated[str, PATTERNS["login"]]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Jump = Annotated[str, PATTERNS["jump"]]
HostKey = Annotated[str, PATTERNS["host_key"], AfterValidator(_is_whole_key)]


class Access(Model):
    """The first login to a host. Afterwards clusterctl uses its own admin account."""

    user: Login | None = Field(None, description="login name; by default yours")
    port: Port = Field(22, description="sshd's port")
    key: KeyFile | None = Field(
        None, description="private key, relative to this file or to ~; by default ssh's keys and the agent's"
    )
    jump: tuple[Jump, ...] = Field((), description="hosts to jump through, in order")
    become: Literal["sudo", "none"] = Field("sudo", description="how to become root; none: the user is root")


class OnpremHost(Model):
    """A machine, or a range of machines. Omitted fields are taken from `provider.access`."""

    address: Annotated[Address, AfterValidator(_are_addresses)] | None = Field(
        None,
        description="address, or a range with an address for each name; by default the host's name; "
        "localhost: the machine that runs clusterctl",
    )
    user: Login | None = Field(None, description="login name")
    port: Port | None = Field(None, description="sshd's port")
    key: KeyFile | None = Field(None, description="private key")
    jump: tuple[Jump, ...] | None = Field(None, description="hosts to jump through; []: connect directly")
    become: Literal["sudo", "none"] | None = Field(None, description="how to become root")
    host_key: HostKey | None = Field(
        None, description="its public host key; by default you confirm the key that the host shows first"
    )

    @property
    def is_here(self) -> bool:
        return self.address is not None and is_this_machine(self.address)


def is_this_machine(address: str) -> bool:
    """Return whether an address is localhost, a loopback address such as 127.0.0.1, or 0.0.0.0 or ``::``."""
    bare = address.strip("[]").lower()
    if bare in _HERE:
        return True
    try:
        ip = ip_address(bare)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified
