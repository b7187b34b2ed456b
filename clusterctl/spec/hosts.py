"""Hosts in a spec: ranges of host names, SSH access and public keys, and switches."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from itertools import product
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, ValidationInfo, WithJsonSchema

from clusterctl.errors import BadValueError
from clusterctl.spec.base import PATTERNS, KeyFile, SpecModel, expanded
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
    heads = pairs[::2]
    choices = [list(_numbers(inner, part)) for inner in pairs[1::2]]
    for chosen in product(*choices):
        yield "".join(head + number for head, number in zip(heads, chosen, strict=True)) + tail


def _numbers(inner: str, part: str) -> Iterator[str]:
    for piece in inner.split(","):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise BadValueError(
                "hostlist-range", f"{part!r}: {piece!r} is not a number or range like 01-08"
            )
        first = match[1]
        last = match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise BadValueError(
                "hostlist-range",
                f"{part!r}: {piece!r} is not an ascending range of at most {MOST} numbers",
            )
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _is_range(text: str) -> str:
    expand(text)
    return text


HostRange = Annotated[str, AfterValidator(_is_range)]


class Switch(SpecModel):
    """A network switch, with the nodes or the lower switches connected to it."""

    hosts: HostRange | None = Field(
        None, description="the nodes at this switch, such as gpu[01-08]"
    )
    switches: HostRange | None = Field(None, description="the switches below it, such as leaf[1-4]")


_HERE: Final = ("localhost", "localhost.localdomain")


def _are_addresses(text: str) -> str:
    if text.startswith("[") and ":" in text:
        raise BadValueError(
            "not-an-address-range",
            f"{shown(text)} is in brackets: write an IPv6 address without them, such as fd00::11",
        )
    for address in expand(text):
        # A text of this form can't be a host name, so it must be an IP address.
        if re.fullmatch(r"[0-9.]+|.*:.*", address):
            try:
                ip_address(address)
            except ValueError as exc:
                raise BadValueError(
                    "not-an-address-range",
                    f"{shown(address)} is not an address such as 10.0.0.11; a port belongs in "
                    "the key `port`",
                ) from exc
    return text


def _is_host_key(text: str) -> str:
    if not key_fields(*text.split(" ", 1)):
        raise BadValueError(
            "not-a-host-key", f"{shown(text)} is not a complete key: copy it from `ssh-keyscan`"
        )
    return text


HostName = Annotated[str, PATTERNS["host_name"]]
Address = Annotated[str, PATTERNS["address"]]
Login = Annotated[str, PATTERNS["login"]]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
HostKey = Annotated[str, PATTERNS["host_key"], AfterValidator(_is_host_key)]


class Access(SpecModel):
    """Your login to the hosts, with sudo."""

    user: Login | None = Field(None, description="login name; by default yours")
    port: Port = Field(22, description="sshd's port")
    key: KeyFile | None = Field(
        None,
        description="private key, relative to this file or to ~; by default ssh's keys and the agent's",
    )
    become: Literal["sudo", "none"] = Field(
        "sudo", description="how to become root; none: the user is root"
    )


class OnpremHost(SpecModel):
    """A machine, or a range of machines. Omitted fields are taken from `provider.access`."""

    address: Annotated[Address, AfterValidator(_are_addresses)] | None = Field(
        None,
        description="address, or a range with an address for each name; by default the host's name; "
        "localhost: the machine that runs clusterctl",
    )
    user: Login | None = Field(None, description="login name")
    port: Port | None = Field(None, description="sshd's port")
    key: KeyFile | None = Field(None, description="private key")
    become: Literal["sudo", "none"] | None = Field(None, description="how to become root")
    host_key: HostKey | None = Field(
        None,
        description="its public host key; by default you confirm the key that the host shows first",
    )

    @property
    def is_here(self) -> bool:
        return self.address is not None and is_this_machine(self.address)


def is_this_machine(address: str) -> bool:
    """Return whether an address is localhost, a loopback address such as 127.0.0.1, or 0.0.0.0 or
    ``::``.
    """
    bare = address.strip("[]").lower()
    if bare in _HERE:
        return True
    try:
        ip = ip_address(bare)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified


# Kind of key that sshd accepts -> length in bytes of each field after the kind; 0: any length.
_LENGTHS: Final = {
    "ssh-ed25519": (32,),
    "ssh-rsa": (0, 0),
    "ecdsa-sha2-nistp256": (8, 65),
    "ecdsa-sha2-nistp384": (8, 97),
    "ecdsa-sha2-nistp521": (8, 133),
    "sk-ssh-ed25519@openssh.com": (32, 0),
    "sk-ecdsa-sha2-nistp256@openssh.com": (8, 65, 0),
}
# sshd on Rocky Linux refuses shorter RSA keys.
_LEAST_RSA_BITS: Final = 2048
_MOST_BYTES: Final = 64 << 10
_MAKE: Final = "make a key with `ssh-keygen -t ed25519`"
_PRIVATE: Final = re.compile("PRIVATE KEY|PuTTY-User-Key-File")

# The format of a line is that of authorized_keys in sshd(8). A backslash escapes only a quotation
# mark.
_VALUE: Final = r'"(?:[^"\\]|\\"|\\(?!"))*"'
_LINE: Final = re.compile(
    rf'(?:(?P<options>(?:{_VALUE}|[^\s"])+)\s+)?(?P<kind>{"|".join(map(re.escape, _LENGTHS))})\s+'
    r"(?P<key>\S+)(?:\s+(?P<comment>.*))?"
)


def key_fields(kind: str, encoded: str) -> tuple[bytes, ...]:
    """Return the fields of a public key after its kind; () if the key is incomplete or of another
    kind.
    """
    fields = []
    with suppress(ValueError):
        rest = b64decode(encoded, validate=True)
        while rest:
            end = 4 + int.from_bytes(rest[:4], "big")
            if end > len(rest):
                return ()
            fields.append(rest[4:end])
            rest = rest[end:]
    lengths = (len(kind), *_LENGTHS[kind])
    fits = len(fields) == len(lengths) and fields[0] == kind.encode()
    fits = fits and all(
        length in (0, len(field)) for field, length in zip(fields, lengths, strict=True)
    )
    return tuple(fields[1:]) if fits else ()


def public_part(line: str) -> str:
    """Return the kind and the key of a line of authorized_keys, without options and comment."""
    match = _LINE.fullmatch(line)
    return f"{match['kind']} {match['key']}" if match else line


def _read_key(text: str, info: ValidationInfo) -> str:
    """Return a person's public key as a line of authorized_keys. ``text``: the key, or its file."""
    if _PRIVATE.search(text):
        raise _private_key("this")
    words = text.split()
    if "ssh-dss" in words or not _LENGTHS.keys().isdisjoint(words):
        return _checked(text.strip().replace("\t", " "), shown(text))
    file = Path(expanded(text.strip(), info))
    lines = [line.strip().replace("\t", " ") for line in _content(file, text).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if len(keys) != 1:
        message = f"{file} has {len(keys)} keys instead of a single key: list each key by itself"
        raise BadValueError("key-file-unreadable", message)
    return _checked(keys[0], str(file))


def _content(file: Path, text: str) -> str:
    try:
        if not file.is_file():
            raise OSError("there is no such file")
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as exc:
        reason = (
            (exc.strerror or str(exc)) if isinstance(exc, OSError) else "it is not text in UTF-8"
        )
        raise BadValueError(
            "key-file-unreadable",
            f"{shown(text)} is neither a public key nor a readable file ({reason}): write a key "
            "such as `ssh-ed25519 AAAA... ada@laptop`, or the name of its file, such as "
            "keys/ada.pub",
        ) from exc
    if _PRIVATE.search(content):
        raise _private_key(str(file))
    return content


def _private_key(place: str) -> BadValueError:
    return BadValueError(
        "private-key",
        f"{place} is a private key, and only its owner may have it: use the file `.pub` beside it",
    )


def _checked(line: str, place: str) -> str:
    """Return a line of authorized_keys with single spaces between its parts, if sshd accepts the
    key. Its options are sshd's to judge.
    """
    match = _LINE.fullmatch(line)
    fields = key_fields(match["kind"], match["key"]) if match else ()
    if not (match and fields and line.isprintable()):
        problem = (
            "of the kind ssh-dss, which sshd refuses"
            if "ssh-dss" in line
            else "not a complete public key"
        )
        message = f"{place} is {problem}: copy the line of ~/.ssh/id_ed25519.pub, or {_MAKE}"
        raise BadValueError("not-a-public-key", message)
    bits = int.from_bytes(fields[-1], "big").bit_length()
    if match["kind"] == "ssh-rsa" and bits < _LEAST_RSA_BITS:
        message = (
            f"{place} is an RSA key of {bits} bits, and some hosts' sshd needs "
            f"{_LEAST_RSA_BITS}: {_MAKE}"
        )
        raise BadValueError("key-too-short", message)
    parts = (
        match["options"],
        match["kind"],
        match["key"],
        " ".join((match["comment"] or "").split()),
    )
    return " ".join(part for part in parts if part)


PublicKey = Annotated[
    str,
    AfterValidator(_read_key),
    WithJsonSchema(
        {"type": "string", "examples": ["ssh-ed25519 AAAA... ada@laptop", "keys/ada.pub"]}
    ),
]
