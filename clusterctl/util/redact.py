"""Takes secrets out of text that leaves this machine: keys, tokens, passwords, credentials in URLs.

What is known to be secret is taken out wherever it stands and however it is written; else what looks like a
secret is: what a pattern of data/secrets.toml finds, and long random words.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any, Final
from urllib.parse import quote

from clusterctl.util.assets import table

HIDDEN: Final = "[redacted]"
LEAST: Final = 6  # letters of a secret that is taken out wherever it stands: shorter ones are words, too
_TABLE: Final = Path(__file__).with_name("data") / "secrets.toml"
_WRAPPED_AT: Final = (60, 64, 70, 76)  # columns of xxd -p, PEM, OpenSSH and base64
# A word that may be a key; not a public key of SSH, nor a digest that is called one.
_LONG: Final = re.compile(
    r"(?<![\w+/-])(?<!SHA256:)(?<!h1:)(?<!sha256[=:-])(?<!sha384[=:-])(?<!sha512[=:-])"
    r"(?!AAAA(?:[BC]3NzaC1|E2VjZHNh|[GI]nNr))[A-Za-z0-9+/_-]{40,}={0,2}"
)
_KINDS: Final = {letter: kind for kind in (ascii_lowercase, ascii_uppercase, digits) for letter in kind}
_ANY: Final = 100  # letters of a word that is a secret whatever it looks like
_ORDINARY: Final = re.compile(r"[0-9a-f]{128}|.*[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # SHA512, UUID
_SECRET: Final = ("secret", "several", "items", "heredoc", "json")  # groups of patterns: what is replaced
_CHANGES: Final = 0.3  # of these kinds in a word: in base64 0.6, in a path 0.1
_LEAST_LINE: Final = 16  # letters


@cache
def patterns() -> Mapping[str, re.Pattern[str]]:
    """The patterns of data/secrets.toml by their names, in the order in which they are applied."""
    return {name: re.compile(_filled(text)) for name, text in _data()["patterns"].items()}


@cache
def is_secret_name(name: str) -> bool:
    """Whether the value of an environment variable or a key that is called so is secret."""
    return re.match(_filled("(?!PWD$).*(?i:@word@)"), name) is not None


def _data() -> Mapping[str, Mapping[str, Any]]:
    return table(_TABLE, dict[str, dict[str, Any]])


def _filled(text: str) -> str:
    """A pattern with the pieces that it names."""

    def piece(found: re.Match[str]) -> str:
        one = _data()["pieces"][found[1]]
        return _filled(one if isinstance(one, str) else f"(?:{'|'.join(one)})")

    return re.sub(r"@([a-z_]+)@", piece, text)


def redactor(
    secrets: Iterable[str | bytes], looks: Iterable[re.Pattern[str]] | None = None
) -> Callable[[str], str]:
    """What takes these secrets, in all spellings, and all that looks like one, out of a text."""
    looking = tuple(patterns().values() if looks is None else looks)
    known: set[str] = set()
    for secret in secrets:
        raw = secret.encode() if isinstance(secret, str) else secret
        if len(raw.strip()) >= LEAST:
            known |= {form for one in (raw, raw.strip()) for form in _spellings(one)}
    words = sorted(known, key=len, reverse=True)

    def redact(text: str) -> str:
        for word in words:
            text = text.replace(word, HIDDEN)
        for pattern in looking:
            text = pattern.sub(_hidden, text)
        return _LONG.sub(lambda found: HIDDEN if _is_random(found[0]) else found[0], text)

    return redact


def _hidden(found: re.Match[str]) -> str:
    """What stands for a match: only its group that says so is replaced, if it has one."""
    group = next((name for name in _SECRET if found.groupdict().get(name) is not None), 0)
    (start, end), (first, last) = found.span(), found.span(group)
    return found.string[start:first] + HIDDEN + found.string[last:end]


def _is_random(word: str) -> bool:
    """Whether it has small and capital letters and digits that alternate as in base64, not as in a path."""
    if _ORDINARY.fullmatch(word) is not None:
        return False
    kinds = [_KINDS.get(letter) for letter in word]
    changes = sum(one != other and None not in (one, other) for one, other in pairwise(kinds))
    mixed = {*_KINDS.values()} <= {*kinds} and changes > _CHANGES * len(word)
    return mixed or len(word) >= _ANY


def _spellings(raw: bytes) -> Iterator[str]:
    """A secret as text, as JSON and URLs write it, in base64 and in hexadecimal digits, also in lines."""
    for form in (base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode(), raw.hex()):
        yield form
        for width in _WRAPPED_AT:
            lines = (form[at : at + width] for at in range(0, len(form), width))
            yield from (line for line in lines if len(line) >= _LEAST_LINE)
    with suppress(UnicodeDecodeError):
        text = raw.decode()
        yield from (text, text.replace("\n", "\\n"), quote(text, safe=""), quote(text))
