"""Removal of secrets (keys, tokens, passwords, credentials in URLs) from text that leaves this
machine.

Known secrets are removed in every place and spelling. Unknown secrets are recognized by the
patterns of secret_forms.py, or as long random words.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Final
from urllib.parse import quote

from clusterctl.util.secret_forms import FORMS

HIDDEN: Final = "[redacted]"
# Shortest known secret that is removed, in letters: shorter secrets may be ordinary words.
LEAST: Final = 6
_WRAPPED_AT: Final = (60, 64, 70, 76)  # columns
# Words that may be keys, but no public SSH keys and no labelled digests.
_LONG: Final = re.compile(
    r"(?<![\w+/-])(?<!SHA256:)(?<!h1:)(?<!sha256[=:-])(?<!sha384[=:-])(?<!sha512[=:-])"
    r"(?!AAAA(?:[BC]3NzaC1|E2VjZHNh|[GI]nNr))[A-Za-z0-9+/_-]{40,}={0,2}"
)
_KINDS: Final = {
    letter: kind for kind in (ascii_lowercase, ascii_uppercase, digits) for letter in kind
}
# From this length, in letters, a word counts as secret whatever its letters.
_ANY: Final = 100
# Names of variables with secrets: API_KEY, but neither TOKENIZERS_PARALLELISM nor MAX_TOKENS.
_SECRET_VARIABLE: Final = re.compile(
    r"(?i)(?:^|_)(?:token|key|secret|password|passwd|passphrase|credentials|pat)$"
)
# Forms that are secrets whatever the name of their variable.
_TOKENS: Final = tuple(
    "private_key url_login github gitlab hugging_face openai_anthropic slack npm pypi aws_id google "
    "nvidia docker vault terraform sendgrid jwt age".split()
)
_SWITCHES: Final = frozenset(("true", "false", "yes", "no", "on", "off", "none"))
# SHA512 sums and UUIDs are not secret.
_ORDINARY: Final = re.compile(r"[0-9a-f]{128}|.*[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SECRET: Final = ("secret", "several", "items", "heredoc", "json")  # groups of patterns
# Share of neighbouring characters that differ in kind (lower, upper, digit). Base64: 0.6; paths:
# 0.1.
_CHANGES: Final = 0.3
_LEAST_LINE: Final = 16  # letters


@cache
def patterns() -> Mapping[str, re.Pattern[str]]:
    """Return the patterns to apply, in this order: kind of secret -> pattern."""
    return {kind: re.compile(pattern) for kind, pattern in FORMS.items()}


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable with this name and value is probably a secret."""
    if any(patterns()[form].search(value) for form in _TOKENS):
        return True
    is_ordinary = not value or value.isdigit() or value[0] in "/~" or value.lower() in _SWITCHES
    return _SECRET_VARIABLE.search(name) is not None and not is_ordinary


def redactor(
    secrets: Iterable[str | bytes], looks: Iterable[re.Pattern[str]] | None = None
) -> Callable[[str], str]:
    """Return a function that hides these secrets, in all spellings, and text that looks like a
    secret.

    looks: patterns for such text. Default: ``patterns``.
    """
    looking = tuple(patterns().values() if looks is None else looks)
    spellings: set[str] = set()
    for secret in secrets:
        raw = secret.encode() if isinstance(secret, str) else secret
        if len(raw.strip()) >= LEAST:
            spellings |= {form for value in (raw, raw.strip()) for form in _spellings(value)}
    words = sorted(spellings, key=len, reverse=True)

    def redact(text: str) -> str:
        for word in words:
            text = text.replace(word, HIDDEN)
        for pattern in looking:
            text = pattern.sub(_hidden, text)
        return _LONG.sub(lambda match: HIDDEN if _is_random(match[0]) else match[0], text)

    return redact


def _hidden(match: re.Match[str]) -> str:
    """Return the match's text with the secret hidden: a group of the pattern, or the whole text."""
    group = next((name for name in _SECRET if match.groupdict().get(name) is not None), 0)
    start, end = match.span()
    first, last = match.span(group)
    return match.string[start:first] + HIDDEN + match.string[last:end]


def _is_random(word: str) -> bool:
    """Return whether a word mixes small and capital letters and digits as often as base64 does."""
    if _ORDINARY.fullmatch(word) is not None:
        return False
    kinds = [_KINDS.get(letter) for letter in word]
    changes = sum(
        kind != next_kind and None not in (kind, next_kind) for kind, next_kind in pairwise(kinds)
    )
    mixed = {*_KINDS.values()} <= {*kinds} and changes > _CHANGES * len(word)
    return mixed or len(word) >= _ANY


def _spellings(raw: bytes) -> Iterator[str]:
    """Yield a secret's spellings: text, JSON, URL, base64, hexadecimal, and wrapped lines of the
    last two.
    """
    for form in (base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode(), raw.hex()):
        yield form
        for width in _WRAPPED_AT:
            lines = (form[at : at + width] for at in range(0, len(form), width))
            yield from (line for line in lines if len(line) >= _LEAST_LINE)
    with suppress(UnicodeDecodeError):
        text = raw.decode()
        yield from (text, text.replace("\n", "\\n"), quote(text, safe=""), quote(text))
