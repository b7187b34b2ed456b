"""Hold every answer of `-o json` that a test sees to docs/json.md.

An answer with a key that the page lacks, with a value of another type, or without a key that the page
says is always there, fails the test that sees it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final

from clusterctl.cli import output
from clusterctl.cli.verbs import GROUPS, VERBS

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "json.md"
# Stands for the keys of an object, which may also be outside it: "...submitted".
_OTHERS: Final = "..."
_OPTIONS_WITH_VALUE: Final = {"-f", "--file", "--cluster", "-o", "--output"}


def verb_of(words: Sequence[str]) -> str:
    """Return the verb of a command line without the program's name. "": it has none."""
    words = list(words)
    while words:
        word = words.pop(0)
        if word in GROUPS:
            named = f"{word} {words[0]}" if words else ""
            return next((name for name in (named, f"{word} list") if name in VERBS), "")
        if word in VERBS:
            return word
        if word in _OPTIONS_WITH_VALUE and words:
            words.pop(0)
    return ""


@cache
def _functions() -> Mapping[tuple[str, str], str]:
    """Return (module, name) of the function of each verb -> the verb."""
    return {(verb.module, verb.function.partition(":")[2]): name for name, verb in VERBS.items()}


def _verb_of_caller() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("clusterctl.cli."):
            function = frame.f_locals.get("function")
            keys = [(module, frame.f_code.co_name)]
            keys += [(function.__module__, function.__name__)] if callable(function) else []
            for key in keys:
                if key in _functions():
                    return _functions()[key]
        frame = frame.f_back
    return ""


def watch_this_process() -> None:
    """Hold the answers of verbs that tests call as functions."""
    plain = output._json

    def held(answer: dict[str, Any]) -> bytes:
        text = plain(answer)
        hold(_verb_of_caller(), json.loads(text))
        return text

    output._json = held


def hold_output(argv: Sequence[str], stdout: str) -> None:
    """Hold the answer that a command has printed, if it has printed one."""
    words = argv[: argv.index("--")] if "--" in argv else argv
    if re.search("(^| )(-o ?|--output[ =])json( |$)", " ".join(words)) and stdout.startswith("{"):
        # Then a bundled program answers.
        verb = "" if "--local" in words else verb_of(words[1:])
        hold(verb, json.loads(stdout))


def hold(verb: str, answer: Mapping[str, Any]) -> None:
    """Fail if docs/json.md does not describe an answer of a verb. Without a verb, only `ok` and
    `failures` are held to it.
    """
    faults = [*faults_of(verb, answer)]
    assert not faults, f"docs/json.md does not describe this answer of {verb!r}: {faults}"


def faults_of(verb: str, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield each key of an answer that docs/json.md does not describe so."""
    page = read_page()
    yield from _faults(page, page.common, answer, "", is_open=True, are_needed=True)
    if verb:
        rest = {key: value for key, value in answer.items() if key not in page.common}
        are_needed = answer.get("ok") is True
        yield from _faults(page, page.verbs[verb], rest, "", are_needed=are_needed)


@dataclass(frozen=True)
class Type:
    """The type of a key: the names of the types that a value may have.

    of: the types of the entries of an array.
    """

    names: tuple[str, ...]
    of: tuple[str, ...] = ()
    is_optional: bool = False

    @classmethod
    def read(cls, text: str, *, is_optional: bool = False) -> Type:
        """Read a type such as ``job[] | null``."""
        names = text.split(" | ")
        of = tuple(name.removesuffix("[]") for name in names if name.endswith("[]"))
        return cls(
            tuple("array" if name.endswith("[]") else name for name in names), of, is_optional
        )


Keys = Mapping[str, Type]


@dataclass(frozen=True)
class Page:
    """docs/json.md: the keys of all answers, of the named objects, and of each verb's answers."""

    common: Keys
    objects: Mapping[str, Keys]
    verbs: Mapping[str, Keys]


@cache
def read_page() -> Page:
    parts = re.split(r"^##+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    objects: dict[str, Keys] = {}
    verbs_of: dict[str, Keys] = {}
    for part in parts[1:]:
        title = part.partition("\n")[0]
        names = re.findall("`([^`]+)`", title)
        for name in names:
            verbs_of[name] = _keys(part)
        if not names and "```ts" in part:
            objects[title] = _keys(part)
    return Page(_keys(parts[0]), objects, verbs_of)


def _keys(text: str) -> Keys:
    block = text.partition("```ts\n")[2].partition("```")[0]
    lines = re.findall(r"^(?:(\.\.\.)|(\w+)(\??): )(.+)$", block, flags=re.MULTILINE)
    assert len(lines) == block.count("\n"), block
    return {
        others or key: Type.read(kind, is_optional=optional != "")
        for others, key, optional, kind in lines
    }


_PLAIN: Final[Mapping[str, Callable[[Any], bool]]] = {
    "any": lambda _: True,
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
}


def _faults(
    page: Page,
    keys: Keys,
    values: Mapping[str, Any],
    at: str,
    *,
    are_needed: bool,
    is_open: bool = False,
) -> Iterator[str]:
    """Yield the faults of an object. is_open: whether it may have other keys.

    are_needed: whether keys that are not optional must be there.
    """
    keys = dict(keys)
    if others := keys.pop(_OTHERS, None):
        keys = {
            **{k: replace(t, is_optional=True) for k, t in page.objects[others.names[0]].items()},
            **keys,
        }
    if are_needed:
        missing = [key for key, kind in keys.items() if not kind.is_optional and key not in values]
        yield from (f"{at}{key} is missing" for key in missing)
    for key, value in values.items():
        if key in keys:
            yield from _faults_of_value(page, keys[key], value, f"{at}{key}")
        elif not is_open:
            yield f"{at}{key} is unknown"


def _faults_of_value(page: Page, kind: Type, value: Any, at: str) -> Iterator[str]:
    if isinstance(value, list) and "array" in kind.names:
        for entry in value:
            yield from _faults_of_value(page, Type(kind.of), entry, f"{at}[]")
        return
    if any(_PLAIN[name](value) for name in kind.names if name in _PLAIN):
        return
    named = [name for name in kind.names if name in page.objects]
    if isinstance(value, dict) and named:
        yield from _faults(page, page.objects[named[0]], value, f"{at}.", are_needed=True)
        return
    yield f"{at} is {value!r:.80}, not {' or '.join(kind.names)}"
