"""Hosts in a spec: ranges of their names, the way to machines of the user's own, the switches they are at."""

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

MOST = 1000  # names of one range

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """Every name of a range, of several separated by commas, or of none.

    Raises:
        ValueError: it is no range; the message says what is wrong with it.
    """
    names = tuple(name for part in _split(text) for name in _names(part))
    if len(names) > MOST:
        raise BadValueError("too-many-names", f"{text!r} has more than {MOST} names")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadValueError("host-named-twice", f"{text!r} has {twice!r} twice")
    return names


def _split(text: str) -> Iterator[str]:
    for part in re.split(r",(?![^\[]*\])", text):
        if not part.strip():
            raise BadValueError("name-empty", f"{text!r} has an empty name")
        yield part.strip()


def _names(part: str) -> Iterator[str]:
    *pairs, tail = _RANGE.split(part)
    if any(bracket in plain for plain in (*pairs[::2], tail) for bracket in "[]"):
        raise BadValueError("hostlist-bracket", f"{part!r} has a bracket without its other")
    heads, choices = pairs[::2], [list(_numbers(inner, part)) for inner in pairs[1::2]]
    for chosen in product(*choices):
        yield "".join(head + number for head, number in zip(heads, chosen, strict=True)) + tail


def _numbers(inner: str, part: str) -> Iterator[str]:
    for piece in inner.split(","):
        found = _PART.fullmatch(piece.strip())
        if found is None:
            raise BadValueError(
                "hostlist-range", f"{part!r}: {piece!r} is neither a number nor a range such as 01-08"
            )
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise BadValueError(
                "hostlist-range",
                f"{part!r}: {piece!r} is no range of at most {MOST} numbers, the smaller first",
            )
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _is_range(text: str) -> str:
    expand(text)
    return text


HostRange = Annotated[str, AfterValidator(_is_range)]


class Switch(Model):
    """One switch, and what is plugged into it."""

    hosts: HostRange | None = Field(None, description="the nodes at this switch, such as gpu[01-08]")
    switches: HostRange | None = Field(None, description="the switches at this one, such as leaf[1-4]")


_KEY_FIELDS: Final = {"ssh-ed25519": 2}  # others have three
_HERE: Final = ("localhost", "localhost.localdomain")


def _are_addresses(text: str) -> str:
    for one in expand(text):
        if re.fullmatch(r"[0-9.]+|.*:.*", one):  # what no name looks like
            try:
                ip_address(one)
            except ValueError as exc:
                raise BadValueError(
                    "not-an-address-range",
                    f"{shown(one)} is not an address, such as 10.0.0.11; `port` is a key of its own",
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
        if fields and not left and fields[0] == kind.encode() and len(fields) == _KEY_FIELDS.get(kind, 3):
            return text
    raise BadValueError(
        "not-a-host-key", f"{shown(text)} is no whole key of that type: copy it as `ssh-keyscan` prints it"
    )


HostName = Annotated[str, PATTERNS["host_name"]]
Address = Annotated[str, PATTERNS["address"]]
Login = Annotated[str, PATTERNS["login"]]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Jump = Annotated[str, PATTERNS["jump"]]
HostKey = Annotated[str, PATTERNS["host_key"], AfterValidator(_is_whole_key)]


class Access(Model):
    """The first login to a host; after it clusterctl uses an admin account of its own."""

    user: Login | None = Field(None, description="login name; by default the caller's")
    port: Port = Field(22, description="sshd's port")
    key: KeyFile | None = Field(
        None, description="private key, relative to this file or from ~; by default ssh's own and the agent's"
    )
    jump: tuple[Jump, ...] = Field((), description="hosts to jump through, the first one first")
    become: Literal["sudo", "none"] = Field("sudo", description="how to become root; none: the user is root")


class OnpremHost(Model):
    """One machine, or a range of machines. Fields that are left out are as under `provider`."""

    address: Annotated[Address, AfterValidator(_are_addresses)] | None = Field(
        None,
        description="address, or a range of as many as there are names; by default the host's name; "
        "localhost: the machine that clusterctl runs on",
    )
    user: Login | None = Field(None, description="login name")
    port: Port | None = Field(None, description="sshd's port")
    key: KeyFile | None = Field(None, description="private key")
    jump: tuple[Jump, ...] | None = Field(None, description="hosts to jump through; [] for none")
    become: Literal["sudo", "none"] | None = Field(None, description="how to become root")
    host_key: HostKey | None = Field(
        None, description="its public host key; by default it is shown once, to be confirmed"
    )

    @property
    def is_here(self) -> bool:
        return self.address is not None and is_this_machine(self.address)


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
