"""Messages about a spec: a fault and its place, pydantic's errors in plain words, near misses named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

Loc = tuple[str | int, ...]

INCONSISTENT: Final = "inconsistent"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: at ``loc``, on its key rather than on its value where ``at_key``."""

    loc: Loc
    message: str
    hint: str = ""
    at_key: bool = False

    @property
    def key(self) -> str:
        """``loc`` as a dotted path."""
        return dotted(self.loc)


def dotted(loc: Loc) -> str:
    """``("partitions", 1, "nodes")`` is ``partitions[1].nodes``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


_SHOWN_LENGTH: Final = 60

_TEXTS: Final[Mapping[str, str]] = {
    "missing": "{name} is missing",
    "extra_forbidden": "unknown key {name}",
    "string_type": "{name} must be text, not {shown}",
    "path_type": "{name} must be text, not {shown}",
    "string_unicode": "{name} must be text in UTF-8",
    "string_pattern_mismatch": "{name} must be {pattern_text}, not {shown}",
    "greater_than_equal": "{name} must be at least {ge}, not {shown}",
    "less_than_equal": "{name} must be at most {le}, not {shown}",
    "literal_error": "{name} must be {expected}, not {shown}",
    "enum": "{name} must be {expected}, not {shown}",
    "too_short": "{name} needs at least {min_length} entry",
    "bool_type": "{name} must be true or false, not {shown}",
    "float_type": "{name} must be a number, not {shown}",
    "finite_number": "{name} must be a number, not {shown}",
    "dict_type": "{name} must be a mapping of keys, not {shown}",
    "model_attributes_type": "{name} must be a mapping of keys, not {shown}",
    "tuple_type": "{name} must be a list, not {shown}",
    "model_type": "{name} must be a mapping of keys, not {shown}",
    "ip_v4_network": "{name} must be a network such as 10.77.0.0/24, not {shown}",
    "value_error": "{error}",
}
_WHOLE_NUMBER = "{name} must be a whole number, not {shown}"


def shown(value: object) -> str:
    """A value as a message quotes it: short, on one line, in YAML's words rather than Python's."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = value if isinstance(value, str) else str(value)
    if len(text) > _SHOWN_LENGTH:
        text = text[: _SHOWN_LENGTH - 3] + "..."
    return repr(text) if isinstance(value, str) else text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean nodes?`` when a known word is near, else an empty text."""
    candidates = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), candidates, n=1, cutoff=0.6)
    return f"did you mean {candidates[near[0]]}?" if near else ""


def explain(kind: str, context: Mapping[str, object], name: str, value: str) -> str:
    """A pydantic error in plain words.

    ``kind`` and ``context`` are the error's ``type`` and ``ctx``; ``name`` is what the user calls the field,
    ``value`` what stands there, as ``shown``. ``context["pattern_text"]`` says what a pattern asks for.
    """
    if kind.startswith("int_"):
        return _WHOLE_NUMBER.format(name=name, shown=value)
    template = _TEXTS.get(kind, "{name} can't be {shown}")
    expected = str(context.get("expected", "")).replace("'", "")  # pydantic quotes what may stand there
    plain = {key: f"{word:g}" if isinstance(word, float) else word for key, word in context.items()}
    return template.format(**{**plain, "expected": expected, "name": name, "shown": value})


def either(words: Iterable[object]) -> str:
    """``1, 2 or 4``."""
    *first, last = (str(word) for word in words)
    return f"{', '.join(first)} or {last}" if first else last
