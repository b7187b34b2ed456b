"""Forms of secrets that redact.py removes: patterns, in the order in which they are applied.

The group `secret`, `json`, `items`, `several` or `heredoc` of a pattern is replaced; in a pattern
without such a group, the whole match. tests/unit/util/planted.py has an example of each pattern.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _any_of(*patterns: str) -> str:
    return f"(?:{'|'.join(patterns)})"


# A part of the name of a secret value.
_SECRET_WORD = _any_of(
    r"passw(?:or)?d",
    r"pass(?:phrase|code)",
    r"(?<!by)(?<!com)(?<!ask)pass(?![a-z])",
    r"""(?<!old)pwd(?!["']?\s*[:=]\s*["']?/)""",
    r"(?:(?<![a-z])|bind|root|user|db)pw(?![a-z])",
    r"secret",
    r"token",
    r"credentials?",
    r"cookie",
    r"webhook",
    r"_pat(?![a-z])",
    r"psk(?![a-z])",
    r"ssh[-_]?key(?!s)",
    r"(?:api|access|private|auth|munge|encryption|preshared|account|signing|licen[cs]e)[-_]?key",
)
# The name of a secret value, behind dashes or not.
_OPTION = r"[\w.-]{0,60}?(?i:" + _SECRET_WORD + r")[\w.-]{0,60}"
_NAME = r"(?<![\w.-])" + _OPTION
# This is between a name and its value.
_TO = r"""(?:\\*["'])?\]?\s*(?:=>|:=|[:=])\s*"""
# A value in quotes: escaped, doubled, or nested as in a shell; on several indented lines; or not
# closed.
_INNER = r"""(?P=quote)(?:\\*["'](?P=quote)\\*["']|\\+(?P=quote))?(?P=quote)"""
_QUOTED = r"(?:(?!(?P=quote))[^\\\n]|(?(escaped)\\++.|\\.)|" + _INNER + r"|\n[ \t]+)*?"
_CLOSED = r"(?:(?!" + _INNER + r")(?P=quote)|(?=\n(?![ \t])|\Z))"
_BARE = r"""(?:[^\s,;}\])'"]|[,;}\])'"](?=[^\s,;}\])'"\\]))+"""
# A value after an option: in quotes, or a word.
_ARGUMENT = (
    r"""(?P<quote>(?P<escaped>\\+)?["'])?(?P<secret>(?(quote)"""
    + _QUOTED
    + r"|"
    + _BARE
    + r"))(?(quote)"
    + _CLOSED
    + r")"
)
_LINE = (
    r"""(?:[^\s,;}\])'"]|[,;'"](?=[^\s,;}\])'"\\])|[}\])](?!\\*["']|[,;}\])]*"""
    + r"(?:[,;]|\n|\Z)))+"
)
_PLAIN = _BARE + r"(?(blank)(?: +" + _LINE + r""")*|(?: +[^\s,;:=}\])'"-][^\s,;:=}\])'"]*)*)"""
# A value after a name. Without quotes: the line after `name: `; after `NAME=`, words up to the next
# `NAME=`.
_VALUE = (
    r"""(?P<blank>(?<=[ \t]))?(?P<quote>(?P<escaped>\\+)?["'])?(?P<secret>(?(quote)"""
    + _QUOTED
    + r"|"
    + _PLAIN
    + r"))(?(quote)"
    + _CLOSED
    + r")"
)
# Between an option and its value: blanks, `=`, or the separator of list items in Python, JSON or
# YAML.
_GAP = r"""(?:(?:\\*["'])?\s*,\s*|["']?\s*\n[-+ \t]*-[ \t]+|[ \t]*=[ \t]*|[ \t]+)"""
# The words of a command line before an option.
_WORDS = r"""(?:[^\n]|,\n|\n[ \t]*-){0,300}?(?<=[\s"'])"""
_PART = _any_of(
    r'"(?:[^"\\\n]|\\.)*"',
    r"'[^'\n]*'",
    r"\\.",
    r"\[[^\[\]]*\]",
    r"\{[^{}]*\}",
    r"""[^\[\]{}"'\\]""",
)
# A list or mapping on one line of YAML, JSON or Python. If it is not closed: to the end of the line.
_SEVERAL = r"(?:\[" + _PART + r"*\]|\{" + _PART + r"*\}|[\[{][^\n]*)"
# The start of a YAML block.
_BAR = r"(?:![\w!./-]+[ \t]+)?[|>][-+0-9]{0,2}[ \t]*"
# A line of a key, or its end, and the start of the next line, which the journal prefixes with
# `...: `.
_KEY_LINE = (
    r"(?:(?<![\w+/])|(?<=\\n))[A-Za-z0-9+/]{1,76}={0,2}(?:[ \t]*(?:\\r|\\n"
    + r"|\r|\n)[ \t]*)+(?:[^\n]{0,120}?: )?"
)
# Commands that read a password from stdin.
_FROM_STDIN = r"(?:\bsudo\b[^|\n]{0,300} -\w*S\b|\bchpasswd\b|--(?:password-)?stdin\b)"
# First line of a YAML block, or a comment in its place.
_FIRST_LINE = r"(?:" + _BAR + r"(?:#[^\n]*)?|#[^\n]*)"
_DEEPER = r"(?:[ \t]*\n)*(?!(?P=lead)[^ \t])(?P<indent>[+-]?[ \t]+)"
_MORE_LINES = r"[^\n]*(?:\n(?P=indent)[^\n]*|\n[ \t]*(?=\n))*"
# A YAML block in a JSON string.
_JSON_BLOCK = (
    r"""\\?["']?[ \t]*:[ \t]+(?P<json>"""
    + _BAR
    + r'(?:\\n[ \t]+(?:(?!\\n)(?:\\.|[^\n"\\]))*|\\n(?=\\n))+)'
)
_ITEMS = r"""["']?[ \t]*:(?P<items>(?:[ \t]*\n[-+ \t]*- [^\n]*)+)"""
_HEREDOC = r"""<<[-~]?\s*["']?(?P<tag>\w+)[^\n]*\n(?P<heredoc>(?s:.*?))(?:\n[ \t]*(?P=tag)\b|\Z)"""
# Text that stays: earlier replacements and public keys.
_UNLIKE = r"(?!\s|" + _BAR + r"""\n|\\*["']?(?:\[redacted\]|(?:sk-)?(?:ssh|ecdsa)-))"""
# Programs with their options for secret values.
_PROGRAM = _any_of(
    r"sshpass\b" + _WORDS + r"-p",
    r"(?:mysql|mariadb)[\w-]*" + _WORDS + r"-p",
    r"curl\b" + _WORDS + r"(?:-u|--user(?![\w-]))",
    r"ipmitool\b" + _WORDS + r"-P",
    r"ldap\w+\b" + _WORDS + r"-w",
    r"redis-cli\b" + _WORDS + r"-a",
    r"""(?:docker|podman)[\s"',]+login\b""" + _WORDS + r"-p",
)

FORMS: Final[Mapping[str, str]] = {
    # Private keys, complete or without their end; the first and last line of a key without its
    # beginning (long random words are removed anyway). Line ends may be written as \n, as in JSON.
    "private_key": (
        r"(?s)-{4,5} ?BEGIN [A-Z0-9 ]*(?:PRIVATE|PGP)[A-Z0-9 ]*-{4,5}.*?(?:-{4,5} ?END "
        + r"[A-Z0-9 ]*-{4,5}|\Z)"
    ),
    "cut_key_first": (
        _KEY_LINE
        + r"(?![0-9a-f]{64})(?=(?:[A-Za-z0-9+/]{64}|[A-Za-z0-9+/]{70}|[A-Za-z0-9+/]{76})"
        + r"(?![\w+/=-]))"
    ),
    "cut_key_last": _KEY_LINE + r"-{4,5} ?END [A-Z0-9 ]*PRIVATE KEY-{4,5}",
    "putty_key": r"(?s)(?:PuTTY-User-Key-File-\d|Private-Lines): .*?(?:Private-MAC: ?\w+|\Z)",
    "ansible_vault": r"\$ANSIBLE_VAULT;[^\n]*(?:\n[ \t]*[0-9a-f]+)*",
    # URLs and headers.
    "url_login": r"""(?i)\b[a-z][a-z0-9+.-]{0,20}://(?P<secret>[^\s?#'"<>]{0,500})@""",
    "url_query": r"""(?i)[?&](?:key|sig|X-Amz-Signature|X-Goog-Signature)=(?P<secret>[^\s&'"]+)""",
    "proxy": r"""(?i)proxy\s*[:=]\s*\\?["']?(?P<secret>[^\s:/@'"]+:[^\s'"]{1,200})@""",
    "webhook": (
        r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks"
        + r'|webhook\.office\.com/webhookb2)/(?P<secret>[^\s"<>]+)'
    ),
    "authorization": r"""(?i)\b(?:proxy-)?authorization\\*["']?\s*[:=]\s*(?P<secret>[^\n"']+)""",
    "bearer": r"(?i)\b(?:bearer|basic)\s+(?P<secret>[A-Za-z0-9+/=._~-]{8,})",
    "registry_auth": (
        r"(?<![\w-])_?auth" + _TO + r'\\*"?(?P<secret>[A-Za-z0-9+/]{16,}={0,2})(?![\w.-])'
    ),
    # Commands: in a line, or as a list of words.
    "command": r"\b" + _PROGRAM + _GAP + r"?" + _ARGUMENT,
    "piped": (
        r"\b(?:echo|printf)[ \t]+(?P<secret>[^|\n]{1,300}?)[ \t]*\|[^|\n]{0,300}?" + _FROM_STDIN
    ),
    "here_string": r"\bchpasswd\b[^\n<]*<<<\s*" + _ARGUMENT,
    "login_hex": r"\blogin" + _GAP + r"""\\*["']?(?P<secret>[0-9a-f]{40})\b""",
    "sql": (
        r"(?i)\bIDENTIFIED\s+(?:BY|(?:VIA|WITH)\s+\S+)(?:\s+(?:BY|AS|USING))?"
        + r"(?:\s+PASSWORD)?[\s(]+"
        + _ARGUMENT
    ),
    "netrc": r"(?i)\bmachine\s+\S+\s+login\s+\S+\s+password\s+(?P<secret>\S+)",
    "keyword": r"(?i)\b(?:bindpw|rootpw|requirepass)[ \t]+" + _ARGUMENT,
    "option_value": r"--(?!ask)" + _OPTION + _GAP + r"""(?!\\*["']?--[a-z])""" + _ARGUMENT,
    # Names and their values.
    "xml": r"<[\w:.-]*(?i:" + _SECRET_WORD + r")[\w:.-]*(?:\s[^<>]*)?>(?P<secret>[^<]+)",
    "pair": (
        r"(?i)(?<![\w.-])(?:name|key)"
        + _TO
        + r"""\\*["']?"""
        + _OPTION
        + r"""(?:\\*["'])?(?:,|\\n|\s)+\\*["']?value"""
        + _TO
        + _VALUE
    ),
    "chpasswd": r"\bchpasswd\b[^\n<]*" + _HEREDOC,
    # A YAML block, also in a diff, or lines below a comment; then a YAML block in a JSON string.
    "block": (
        r"""(?m)^(?P<lead>[-+ \t]*)["']?"""
        + _OPTION
        + r"""["']?[ \t]*:[ \t]+"""
        + _FIRST_LINE
        + r"\n"
        + _DEEPER
        + r"(?P<secret>"
        + _MORE_LINES
        + r")"
    ),
    "named": (
        _NAME
        + r"(?:"
        + _JSON_BLOCK
        + r"|"
        + _ITEMS
        + r"|"
        + _TO
        + r"(?:"
        + _HEREDOC
        + r"|(?P<several>"
        + _SEVERAL
        + r")|"
        + _UNLIKE
        + _VALUE
        + r"))"
    ),
    # Forms of tokens, and hashes of passwords.
    "github": r"\b(?:gh[pousr]_|github_pat_)\w{12,}",
    "gitlab": r"\bgl(?:pat|rt|dt|cbt|ptt)-[\w.-]{12,}",
    "hugging_face": r"\bhf_[A-Za-z0-9]{20,}",
    "openai_anthropic": r"\bsk-[\w.-]{12,}",
    "slack": r"\bxox[abeprs]-[\w.-]{12,}",
    "npm": r"\bnpm_[A-Za-z0-9]{20,}",
    "pypi": r"\bpypi-Ag[\w-]{12,}",
    "aws_id": r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "google": r"\b(?:ya29\.|AIza|GOCSPX-|1//0)[\w.-]{12,}",
    "nvidia": r"\bnvapi-[\w-]{12,}",
    "docker": r"\bdckr_[op]at_[\w-]{12,}",
    "vault": r"\bhv[sbr]\.[\w.-]{12,}",
    "terraform": r"\b\w{14}\.atlasv1\.[\w=-]{8,}",
    "sendgrid": r"\bSG\.[\w-]{12,}\.[\w-]+",
    "jwt": r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    "age": r"\bAGE-SECRET-KEY-1\w+",
    "crypt": r"\$(?:1|2[aby]?|5|6|y|7|apr1)\$[\w./$=,-]{16,}",
    "ldap_hash": r"\{S?SHA(?:256|512)?\}[\w+/]{16,}={0,2}",
}
