"""User files of a type (a spec, a job file): from text to model, or all problems with their places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.messages import INCONSISTENT, Finding, Loc, did_you_mean, dotted, either, explain, shown
from clusterctl.spec.models import PROVIDER_TYPES, PROVIDERS, ClusterSpec

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Filetype(Generic[M]):
    """``name`` is what messages call it, ``pattern_texts`` say what each pattern of its model asks for.

    ``findings`` tells what does not hold between the fields of plain values. Below the keys ``as_text``,
    numbers and booleans are text. ``missing`` helps who has no such file, ``empty`` who has nothing in it.
    """

    name: str
    model: type[M]
    pattern_texts: Mapping[str, str]
    findings: Callable[[Mapping[str, object]], Iterable[Finding]]
    missing: str
    empty: str
    as_text: frozenset[str] = frozenset()


MAX_BYTES: Final = 1024 * 1024


def parse(text: str, file: str, filetype: Filetype[M], *, context: Mapping[str, Any] | None = None) -> M:
    """What a text describes; ``file`` is named in the problems.

    Raises:
        SpecError: the text is no YAML, or not of this type.
    """
    source = read_source(text, file, empty=filetype.empty, as_text=filetype.as_text)
    if not isinstance(source, Source):
        raise SpecError(file, source, kind=filetype.name)
    values = source.root.value
    if not isinstance(values, dict):
        message = f"a {filetype.name} is a mapping of keys, not {shown(values)}"
        no_mapping = Problem(file, source.root.line, source.root.column, "spec", message)
        raise SpecError(file, source.problems or (no_mapping,), kind=filetype.name)
    model: M | None = None
    errors: list[ErrorDetails] = []
    try:
        model = filetype.model.model_validate(values, context=dict(context or {}))
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    problems = (*source.problems, *Places(source, file, values, filetype).problems(errors))
    if problems or model is None:
        in_order = sorted(set(problems), key=lambda p: (p.line, p.column, p.key, p.message))
        raise SpecError(file, tuple(in_order), kind=filetype.name)
    return model


def read_text(path: Path, filetype: Filetype[M]) -> str:
    """The text of a file.

    Raises:
        UsageError: it can't be read, is huge, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as exc:
        raise UsageError(f"there is no {filetype.name} file {path}", fix=filetype.missing) from exc
    except (OSError, ValueError) as exc:  # ValueError: a path with a null byte
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"the {filetype.name} file can't be read", where=str(path), why=why, fix="name a readable file"
        ) from exc
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"the {filetype.name} file is larger than 1 MiB", where=str(path), fix="is this the right file?"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise UsageError(
            f"the {filetype.name} file is not UTF-8 text",
            where=f"{path}:{line}",
            why=f"byte 0x{raw[exc.start]:02x}",
            fix="save it as UTF-8",
        ) from exc


_KEY: Final = "[key]"  # pydantic's word for the name of an entry, at the end of a location
_HINTS_BY_KEY: Final[Mapping[Loc, str]] = {
    ("version",): "write version: 1",
    ("provider",): "write it as provider: {type: local}",
}
_HINTS_BY_KIND: Final[Mapping[str, str]] = {
    "tuple_type": "write each entry on a line of its own, after a dash",
}


class Places:
    """The places of one file, for the errors that its values ran into."""

    def __init__(
        self, source: Source, file: str, values: Mapping[str, object], filetype: Filetype[M]
    ) -> None:
        self._source = source
        self._file = file
        self._values = values
        self._filetype = filetype

    def problems(self, errors: Iterable[ErrorDetails]) -> Iterator[Problem]:
        fields = [
            error
            for error in map(self._placed, errors)
            if error["type"] != INCONSISTENT and not self._is_noise(error)
        ]
        # A misspelt key is one mistake: the key it was meant to be is not missing on top of that.
        misspelt = {(*e["loc"][:-1], near) for e in fields if (near := self._near_key(e))}
        for error in fields:
            if error["type"] != "missing" or error["loc"] not in misspelt:
                yield self._field_problem(error)
        said = {e["loc"] for e in fields} | misspelt
        for finding in self._filetype.findings(self._values):
            if finding.loc not in said and not self._is_flawed(finding.loc):
                spot = self._source.spot(finding.loc, at_key=finding.at_key)
                key = path_text(finding.loc)
                yield Problem(self._file, spot.line, spot.column, key, finding.message, finding.hint)

    def _is_flawed(self, loc: Loc) -> bool:
        item = self._source.spot(loc).item
        return item is not None and item.flawed

    def _is_noise(self, error: ErrorDetails) -> bool:
        """Whether it was said already."""
        if self._is_flawed(error["loc"]):
            return True
        if error["type"] == "too_short":  # pydantic counts only the entries that are valid
            item = self._source.spot(error["loc"]).item
            return item is not None and bool(item.items)
        return False

    def _placed(self, error: ErrorDetails) -> ErrorDetails:
        """The error where the file has it: pydantic puts the chosen provider's type into the location."""
        loc, kind = error["loc"], error["type"]
        if kind == "union_tag_invalid":
            return {**error, "loc": (*loc, "type"), "type": "literal_error"}
        if kind == "union_tag_not_found":
            item = self._source.spot(loc).item
            misspelt = next((key for key in item.keys if did_you_mean(key, ("type",))), "") if item else ""
            as_field = "extra_forbidden" if misspelt else "missing"
            return {**error, "loc": (*loc, misspelt or "type"), "type": as_field}
        if self._filetype.model is ClusterSpec and loc[:1] == ("provider",) and loc[1:2]:
            return {**error, "loc": (loc[0], *loc[2:])}
        return error

    def _near_key(self, error: ErrorDetails) -> str:
        if error["type"] != "extra_forbidden":
            return ""
        near = did_you_mean(str(error["loc"][-1]), self._known_keys(error["loc"][:-1]))
        return near.removeprefix("did you mean ").removesuffix("?")

    def _known_keys(self, loc: Loc) -> tuple[str, ...]:
        """The keys that the mapping at ``loc`` may have."""
        here: Any = self._filetype.model
        provider = self._values.get("provider")
        if here is ClusterSpec and loc[:1] == ("provider",) and isinstance(provider, dict):
            here, loc = PROVIDERS.get(provider.get("type", "")), loc[1:]
            if here is None:
                return ("type",)
        for part in loc:
            if isinstance(part, str):
                fields = getattr(here, "model_fields", None)
                here = _mapping_in(fields[part].annotation if fields else get_args(here)[1])
        return tuple(here.model_fields)

    def _elsewhere(self, loc: Loc) -> str:
        """Where an unknown key is known: at the top level, or with another provider."""
        key = loc[-1]
        if loc[:-1] and key in self._filetype.model.model_fields:
            return f"{key} belongs at the top level"
        if self._filetype.model is not ClusterSpec or loc[:-1] != ("provider",):
            return ""
        owners = (name for name, model in PROVIDERS.items() if key in model.model_fields)
        return next((f"remove it; it is for type: {owner}" for owner in owners), "")

    def _field_problem(self, error: ErrorDetails) -> Problem:
        loc, kind = error["loc"], error["type"]
        is_key = loc[-1] == _KEY
        loc = loc[:-1] if is_key else loc
        spot = self._source.spot(loc, at_key=is_key or kind == "extra_forbidden")
        context: dict[str, Any] = dict(error.get("ctx", {}))
        if kind == "string_pattern_mismatch":
            context["pattern_text"] = self._filetype.pattern_texts[context["pattern"]]
        if loc == ("provider", "type"):
            context["expected"] = either(PROVIDER_TYPES)
        value = shown(loc[-1]) if is_key else self._shown(loc)
        message = explain(kind, context, "a name here" if is_key else _name(loc), value)
        return Problem(self._file, spot.line, spot.column, path_text(loc), message, self._hint(error))

    def _shown(self, loc: Loc) -> str:
        item = self._source.spot(loc).item
        if item is None:
            above = self._source.spot(loc[:-1]).item  # a text that stands for a mapping: `gpu01: 10.0.0.11`
            return shown(above.value) if above is not None and isinstance(above.value, str) else "empty"
        if isinstance(item.value, str) or not item.text:
            return shown(item.value)
        return shown(item.text).strip("'")  # numbers and booleans as the user spelled them

    def _hint(self, error: ErrorDetails) -> str:
        loc, kind = error["loc"], error["type"]
        item = self._source.spot(loc).item
        if kind == "extra_forbidden":
            known = self._known_keys(loc[:-1])
            near = did_you_mean(str(loc[-1]), known)
            return near or self._elsewhere(loc) or f"known keys: {', '.join(known)}"
        if loc == ("provider", "type"):
            if item is None:
                return f"write {either(f'type: {name}' for name in PROVIDER_TYPES)}"
            near = did_you_mean(item.value, PROVIDER_TYPES) if isinstance(item.value, str) else ""
            return near or f"built in this version: {', '.join(PROVIDER_TYPES)}"
        if (
            kind in {"string_type", "path_type"}
            and item is not None
            and isinstance(item.value, bool | int | float)
        ):
            return "put it in quotes"
        return _HINTS_BY_KEY.get(loc) or _HINTS_BY_KIND.get(kind, "")


def _name(loc: Loc) -> str:
    """What a message calls the field: its key, with the index where it is an entry of a list."""
    start = max((i for i, part in enumerate(loc) if isinstance(part, str)), default=0)
    return path_text(loc[start:])


def _mapping_in(annotation: Any) -> Any:
    """The model, or the mapping of names, that an annotation such as ``tuple[Partition, ...]`` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is Mapping:
        return annotation
    return next((found for part in get_args(annotation) if (found := _mapping_in(part))), None)


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
    is_plain = [isinstance(part, int) or (part.isprintable() and len(part) <= 40) for part in loc]  # noqa: PLR2004
    return dotted(tuple(p if plain else shown(p) for p, plain in zip(loc, is_plain, strict=True))) or "spec"
