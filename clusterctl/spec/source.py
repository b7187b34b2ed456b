"""The text of a spec as plain values, each knowing its line and column.

YAML is composed into nodes by ruamel.yaml; what the nodes mean is decided here, so that nothing is lost that
a message needs. What YAML leaves to taste is refused: duplicate keys, keys that are no text, integers with a
leading zero, tags.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from clusterctl.errors import Problem
from clusterctl.spec.messages import Loc, dotted, shown

MAX_DEPTH: Final = 32  # a spec nests four levels deep
_TAG: Final = "tag:yaml.org,2002:"

_UNCLOSED: Final = "this quote is opened but never closed"
_NO_COLON: Final = "this line has no ':' after its key"
_SEEN_LATE: Final = frozenset({_UNCLOSED, _NO_COLON})  # to be shown where they begin

# What ruamel.yaml says, what we say, and what helps. The first fragment that fits wins.
_SYNTAX: Final = (
    ("found character '\\t'", "a tab where YAML allows only spaces", "indent with spaces"),
    ("cannot start any token", "a value can't start with this character", "put the value in quotes"),
    (
        "mapping values are not allowed",
        "a ':' that is not allowed here",
        "check the indentation, or quote the value",
    ),
    ("could not find expected ':'", _NO_COLON, "write it as key: value"),
    ("unexpected end of stream", _UNCLOSED, "close it"),
    (
        "found undefined alias",
        "an alias (*name) without its anchor (&name)",
        "quote the value if * belongs to it",
    ),
    ("another document", "a second YAML document starts here", "keep one document a file"),
    (
        "expected <block end>",
        "this line's indentation fits none of the lines above",
        "align it with its siblings",
    ),
    ("expected ',' or", "a bracket opened above is not closed here", "close it, or add a comma"),
    ("maximum depth", f"nested more than {MAX_DEPTH} levels deep", ""),
)


@dataclass(slots=True)
class Item:
    """One value of the file with its place (from 1) and the places of what it holds.

    ``flawed`` items have been reported already; nothing more needs saying about them.
    """

    line: int
    column: int
    value: object = None
    text: str = ""
    flawed: bool = False
    keys: dict[str, Key] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)

    def child(self, part: str | int) -> Item | None:
        """What stands under a key or an index, if anything does."""
        if isinstance(part, int):
            return self.items[part] if part < len(self.items) else None
        key = self.keys.get(part)
        return key.item if key else None


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a mapping, with its place, and its value."""

    line: int
    column: int
    item: Item


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a location of the model lies in the file. ``item`` is None where the file has no such value."""

    line: int
    column: int
    item: Item | None


@dataclass(frozen=True, slots=True)
class Source:
    """A file read: its root, and what is wrong with it as YAML."""

    root: Item
    problems: tuple[Problem, ...]

    def spot(self, loc: Loc, *, at_key: bool = False) -> Spot:
        """The place of a value, or of its key where ``at_key`` or where the value is empty.

        A value that is not there has the place of the mapping that lacks it.
        """
        item = self.root
        key: Key | None = None
        for part in loc:
            key = item.keys.get(part) if isinstance(part, str) else None
            child = item.child(part)
            if child is None:
                return Spot(item.line, item.column, None)
            item = child
        if key is not None and (at_key or (item.value is None and not item.text)):
            return Spot(key.line, key.column, item)
        return Spot(item.line, item.column, item)


def read_source(
    text: str, file: str, *, empty: str, as_text: Collection[str] = ()
) -> Source | tuple[Problem, ...]:
    """The values of a YAML text with their places, or why it is no YAML document.

    ``empty`` helps who has nothing in the file. Below the keys ``as_text``, numbers and booleans are the text
    that stands there.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    yaml.composer.warn_double_anchors = False
    try:
        node = yaml.compose(text)
    except YAMLError as exc:
        return (_syntax_problem(exc, text, file),)
    if node is None:
        return (Problem(file, 1, 1, "spec", "the file is empty", empty),)
    reader = _Reader(file, yaml, as_text)
    return Source(reader.read(node, ()), tuple(reader.problems))


def _syntax_problem(exc: YAMLError, text: str, file: str) -> Problem:
    if isinstance(exc, ReaderError):
        before = text[: exc.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return Problem(
            file, line, column, "yaml", f"the character U+{exc.character:04X} is not allowed in YAML"
        )
    said = str(getattr(exc, "problem", None) or exc).splitlines()[0]
    mark = getattr(exc, "problem_mark", None)
    opened = getattr(exc, "context_mark", None)
    for fragment, message, hint in _SYNTAX:
        if fragment in said:
            if message in _SEEN_LATE:
                mark = opened or mark
            return Problem(file, *_from_one(mark), "yaml", message, hint)
    return Problem(file, *_from_one(mark or opened), "yaml", f"this is not YAML: {said}")


def _from_one(mark: Any) -> tuple[int, int]:
    """Line and column of a mark of ruamel.yaml, counted from 1."""
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


class _Reader:
    """Turns nodes into items. An anchored node is read once and its item shared by its aliases."""

    def __init__(self, file: str, yaml: YAML, as_text: Collection[str]) -> None:
        self.problems: list[Problem] = []
        self._as_text = frozenset(as_text)
        self._file = file
        self._done: dict[int, Item] = {}
        self._open: set[int] = set()
        constructor = yaml.constructor
        self._scalars: dict[str, Callable[[Any], object]] = {
            "null": lambda _: None,
            "bool": constructor.construct_yaml_bool,
            "int": constructor.construct_yaml_int,
            "float": constructor.construct_yaml_float,
            "str": lambda node: node.value,
            "timestamp": lambda node: node.value,  # YAML 1.2 has none; a date is text
        }

    def read(self, node: Node, loc: Loc) -> Item:
        if id(node) in self._done:
            return self._done[id(node)]
        item = Item(node.start_mark.line + 1, node.start_mark.column + 1)
        if id(node) in self._open:
            return self._flaw(item, loc, "this alias refers to the value it stands in", "")
        self._open.add(id(node))
        self._fill(item, node, loc)
        self._open.remove(id(node))
        self._done[id(node)] = item
        return item

    def _fill(self, item: Item, node: Node, loc: Loc) -> None:
        tag = str(node.tag).removeprefix(_TAG)
        if isinstance(node, MappingNode) and tag == "map":
            self._mapping(item, node, loc)
        elif isinstance(node, SequenceNode) and tag == "seq":
            item.items = [self.read(child, (*loc, index)) for index, child in enumerate(node.value)]
            item.value = [child.value for child in item.items]
        elif isinstance(node, ScalarNode) and tag in self._scalars:
            self._scalar(item, node, tag, loc)
        else:
            self._flaw(item, loc, f"the tag {shown(str(node.tag))} is not supported here", "remove it")

    def _scalar(self, item: Item, node: ScalarNode, tag: str, loc: Loc) -> None:
        item.text = node.value
        if tag in {"int", "float", "bool"} and not self._as_text.isdisjoint(loc):
            item.value = node.value
            return
        digits = node.value.lstrip("+-")
        if tag == "int" and len(digits) > 1 and digits.isdecimal() and digits[0] == "0":
            decimal = digits.lstrip("0") or "0"
            message = f"{shown(node.value)} starts with a zero, which some YAML readers read as octal"
            self._flaw(item, loc, message, f"write {decimal}")
            return
        try:
            item.value = self._scalars[tag](node)
        except (ValueError, LookupError):  # how ruamel.yaml meets such text as `!!int ""`
            self._flaw(item, loc, f"{shown(node.value)} can't be read as a YAML {tag}", "")

    def _mapping(self, item: Item, node: MappingNode, loc: Loc) -> None:
        merged: dict[str, Key] = {}
        for key_node, value_node in node.value:
            line, column = key_node.start_mark.line + 1, key_node.start_mark.column + 1
            if str(key_node.tag) == f"{_TAG}merge":
                merged = {**self._merge(value_node, loc), **merged}
                continue
            if not isinstance(key_node, ScalarNode) or str(key_node.tag) != f"{_TAG}str":
                self._report(line, column, loc, "a key must be text", "put it in quotes")
                continue
            name = key_node.value
            if name in item.keys:
                first = item.keys[name]
                message = (
                    f"{shown(name)} stands here twice; first on line {first.line}, column {first.column}"
                )
                self._report(line, column, (*loc, name), message, "remove one of the two")
                continue
            item.keys[name] = Key(line, column, self.read(value_node, (*loc, name)))
        item.keys = {**merged, **item.keys}
        item.value = {name: key.item.value for name, key in item.keys.items()}

    def _merge(self, node: Node, loc: Loc) -> dict[str, Key]:
        """The keys that ``<<`` brings: those of a mapping, or of several, of which the first wins."""
        item = self.read(node, (*loc, "<<"))
        sources = item.items if isinstance(item.value, list) else [item]
        if not item.flawed and not all(isinstance(source.value, Mapping) for source in sources):
            self._flaw(item, (*loc, "<<"), "<< takes a mapping or a list of mappings", "")
        return dict(pair for source in reversed(sources) for pair in source.keys.items())

    def _flaw(self, item: Item, loc: Loc, message: str, hint: str) -> Item:
        item.flawed = True
        self._report(item.line, item.column, loc, message, hint)
        return item

    def _report(self, line: int, column: int, loc: Loc, message: str, hint: str) -> None:
        self.problems.append(Problem(self._file, line, column, path_text(loc), message, hint))


def path_text(loc: Loc) -> str:
    """A dotted path fit for one line of a message, even where a key is not."""
    return dotted(tuple(_tame(loc))) or "spec"


def _tame(loc: Loc) -> Iterator[str | int]:
    for part in loc:
        plain = isinstance(part, int) or (part.isprintable() and len(part) <= 40)  # noqa: PLR2004
        yield part if plain else shown(part)
