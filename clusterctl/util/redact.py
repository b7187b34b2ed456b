"""Takes secrets out of text that leaves this machine: keys, tokens, passwords, credentials in URLs.

What is known to be secret is taken out wherever it stands and however it is written; else what looks like a
secret is: a value beside a name such as `password`, a well-known form of token, a long run of random letters.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import quote

HIDDEN: Final = "[redacted]"
LEAST: Final = 6  # letters of a secret that is taken out wherever it stands: shorter ones are words, too
# Parts of a name that say that its value is secret.
_WORDS: Final = (
    r"passw(?:or)?d|passwd|passphrase|storagepass|sshpass|mysql_pwd|secret|token"
    r"|(?:api|access|private|auth|munge|encryption)[-_]?key|credentials?|cookie|webhook"
)
SECRET_NAME: Final = re.compile(rf"{_WORDS}|_pass$|_pat$|_psk$", re.IGNORECASE)
_OPTION: Final = rf"[\w.-]{{0,60}}?(?:{_WORDS}|_pass|_pat|_psk)[\w.-]{{0,60}}"  # behind dashes
_NAME: Final = rf"(?<![\w.-]){_OPTION}"
_BARE: Final = r"(?:[^\s,;}\])'\"]|,(?=[^\s'\"}\]]))+(?: +[^\s,;:=}\])'\"-][^\s,;:=}\])'\"]*)*"
_VALUE: Final = rf"(?:(\\?[\"'])(?:(?!\3)[^\\\n]|\\.)*?\3|{_BARE})"  # quoted, or not
# A list or a mapping in one line of YAML, in JSON or Python; one that is not closed, to the end of its line.
_PART: Final = r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|\\.|\[[^\[\]]*\]|\{[^{}]*\}|[^\[\]{}\"'\\]"
_SEVERAL: Final = rf"(?:\[(?:{_PART})*\]|\{{(?:{_PART})*\}}|[\[{{][^\n]*)"
_BAR: Final = r"[|>][-+0-9]{0,2}[ \t]*"  # what a block of YAML begins with; its lines follow
_PATTERNS: Final = tuple(
    (re.compile(pattern, flags), into)
    for pattern, flags, into in (
        # A block is one whether its lines are its own, or written as \n in JSON.
        (r"-----BEGIN [A-Z ]*(?:PRIVATE|PGP)[A-Z ]*-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL, HIDDEN),
        (r"(?<![\w+/-])(?!AAAA[BCE]3Nz)[A-Za-z0-9+/_-]{100,}={0,2}", 0, HIDDEN),
        (r"\b([a-z][a-z0-9+.-]{0,20}://)[^\s?#'\"<>]{0,500}@", re.IGNORECASE, rf"\1{HIDDEN}@"),
        (r"(proxy\s*[:=]\s*\\?[\"']?)[^\s:/@'\"]+:[^\s'\"]{1,200}@", re.IGNORECASE, rf"\1{HIDDEN}@"),
        (r"(\bsshpass\s+-p\s*|\bIDENTIFIED BY )\S+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"(\bcurl\b[^\n]{0,200}? (?:-u|--user)[ =]?)\S+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"(\bmachine\s+\S+\s+login\s+\S+\s+password\s+)\S+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"(hooks\.slack\.com/services/)\S+", 0, rf"\1{HIDDEN}"),
        (r"([?&](?:sig|X-Amz-Signature|X-Goog-Signature)=)[^\s&'\"]+", re.IGNORECASE, rf"\1{HIDDEN}"),
        (r"\b((?:proxy-)?authorization)(\\?[\"']?\s*[:=]\s*)[^\n\"']+", re.IGNORECASE, rf"\1\2{HIDDEN}"),
        (r"\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE, rf"\1 {HIDDEN}"),
        (rf"(--{_OPTION})([ =]+){_VALUE}", re.IGNORECASE, rf"\1\2\3{HIDDEN}\3"),
        (  # a block of YAML, also of a diff; then one that JSON has in a string
            rf"^([-+ \t]*)([\"']?{_OPTION}[\"']?[ \t]*:[ \t]+{_BAR}(?:#[^\n]*)?\n(?:[ \t]*\n)*)"
            r"(?!\1[^ \t])([+-]?[ \t]+)[^\n]*(?:\n\3[^\n]*|\n[ \t]*(?=\n))*",
            re.IGNORECASE | re.MULTILINE,
            rf"\1\2\3{HIDDEN}",
        ),
        (
            rf"({_NAME}\\?[\"']?[ \t]*:[ \t]+){_BAR}(?:\\n[ \t]+(?:(?!\\n)(?:\\.|[^\n\"\\]))*|\\n(?=\\n))+",
            re.IGNORECASE,
            rf"\1{HIDDEN}",
        ),
        (rf"({_NAME}[\"']?[ \t]*:)(?:[ \t]*\n[-+ \t]*- [^\n]*)+", re.IGNORECASE, rf"\1 {HIDDEN}"),
        (rf"({_NAME})(\\?[\"']?\s*[:=]\s*){_SEVERAL}", re.IGNORECASE, rf"\1\2{HIDDEN}"),
        (
            rf"({_NAME})(\\?[\"']?\s*[:=]\s*)(?!\s|{_BAR}\n|{re.escape(HIDDEN)}){_VALUE}",
            re.IGNORECASE,
            rf"\1\2\3{HIDDEN}\3",
        ),
        (r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|npm_|pypi-)[\w.-]{12,}", 0, HIDDEN),
        (r"\b(?:ya29\.|AIza|AKIA|ASIA)[\w.-]{12,}", 0, HIDDEN),
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", 0, HIDDEN),
        (r"\$(?:1|2[aby]?|5|6|y|7)\$[\w./$=,-]{16,}", 0, HIDDEN),  # hashes of passwords
    )
)  # fmt: skip


def redactor(secrets: Iterable[str | bytes]) -> Callable[[str], str]:
    """What takes these secrets, in all spellings, and all that looks like one, out of a text."""
    known: set[str] = set()
    for secret in secrets:
        raw = secret.encode() if isinstance(secret, str) else secret
        if len(raw.strip()) >= LEAST:
            known |= {form for one in (raw, raw.strip()) for form in _spellings(one)}
    words = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    literal = re.compile(words) if words else None

    def redact(text: str) -> str:
        if literal is not None:
            text = literal.sub(HIDDEN, text)
        for pattern, into in _PATTERNS:
            text = pattern.sub(into, text)
        return text

    return redact


def _spellings(raw: bytes) -> set[str]:
    """A secret as text, as JSON and URLs write it, in base64 and in hexadecimal digits."""
    found = {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode(), raw.hex()}
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return found
    return found | {text, text.replace("\n", "\\n"), quote(text, safe=""), quote(text)}
