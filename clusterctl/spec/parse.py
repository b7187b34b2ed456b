"""User files of a type (a spec, a job file): from text to model, or all problems with their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.base import (
    INCONSISTENT,
    RECORDED,
    Fault,
    Loc,
    M,
    dotted,
    either,
    explain,
    partial_model,
)
from clusterctl.spec.models import PROVIDERS, ClusterSpec
from clusterctl.spec.names import did_you_mean
from clusterctl.spec.units import shown


@dataclass(frozen=True, slots=True)
class Filetype(Generic[M]):
    """``name`` is what messages call it.

    ``faults`` tells what does not hold between the fields of a model, which may be partial. Below the keys
    ``as_text``, numbers and booleans are text. ``missing`` helps who has no such file, ``empty`` who has
    nothing in it.
    """

    name: str
    model: type[M]
    faults: Callable[[M], Iterable[Fault]]
    missing: str
    empty: str
    as_text: frozenset[str] = frozenset()


MAX_BYTES: Final = 1024 * 1024


def read_text(path: Path, filetype: Filetype[M]) -> str:
    """The text of a file.

    Raises:
        UsageError: it can't be read, is huge, or is not UTF-8.
    """
    title = f"{filetype.name.removesuffix(' file')} file"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as exc:
        raise UsageError(f"there is no {title} {path}", code="no-such-file", fix=filetype.missing) from exc
    except (OSError, ValueError) as exc:  # ValueError: a path with a null byte
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"the {title} can't be read",
            code="file-unreadable",
            where=str(path),
            why=why,
            fix="name a readable file",
        ) from exc
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"the {title} is larger than 1 MiB",
            code="file-too-large",
            where=str(path),
            fix="is this the right file?",
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise UsageError(
            f"the {title} is not UTF-8 text",
            code="not-utf8",
            where=f"{path}:{line}",
            why=f"byte 0x{raw[exc.start]:02x}",
            fix="save it as UTF-8",
        ) from exc


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


class Document(Generic[M]):
    """A YAML text: its plain values, the places of all of them, and what is wrong with it as YAML.

    ``flawed`` nodes have been reported already; nothing more needs saying about them.
    """

    def __init__(self, text: str, file: str, filetype: Filetype[M]) -> None:
        """Read the text.

        Raises:
            SpecError: it is no YAML, or empty.
        """
        self.file, self.filetype = file, filetype
        self.problems: list[Problem] = []
        self._pairs: dict[int, dict[str, tuple[Node, Node]]] = {}  # of a mapping: key and value
        self._values: dict[int, object] = {}  # an anchored node is read once, and shared by its aliases
        self._flawed: set[int | Loc] = set()
        self._open: set[int] = set()
        yaml = YAML(typ="safe", pure=True)
        yaml.max_depth = MAX_DEPTH
        yaml.composer.warn_double_anchors = False
        self._scalars: dict[str, Callable[[Any], object]] = {
            "null": lambda _: None,
            "bool": yaml.constructor.construct_yaml_bool,
            "int": yaml.constructor.construct_yaml_int,
            "float": yaml.constructor.construct_yaml_float,
            "str": lambda node: node.value,
            "timestamp": lambda node: node.value,  # YAML 1.2 has none; a date is text
        }
        try:
            self._root = yaml.compose(text)
        except YAMLError as exc:
            raise SpecError(file, (_syntax_problem(exc, text, file),), kind=filetype.name) from exc
        if self._root is None:
            nothing = Problem(file, 1, 1, "spec", "file-empty", "the file is empty", filetype.empty)
            raise SpecError(file, (nothing,), kind=filetype.name)
        self.values = self._read(self._root, ())

    def model(self, context: Mapping[str, Any] | None = None) -> M:
        """What it describes.

        Raises:
            SpecError: it is not of this type.
        """
        kind = self.filetype.model
        if not isinstance(self.values, dict):
            message = f"a {self.filetype.name} is a mapping of keys, not {shown(self.values)}"
            self.problems = self.problems or [
                Problem(self.file, *self.place(()), "spec", "not-a-mapping", message)
            ]
            raise SpecError(self.file, tuple(self.problems), kind=self.filetype.name)
        errors: list[ErrorDetails] = []
        try:
            model = kind.model_validate(self.values, context=dict(context or {}))
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False)
            model = partial_model(kind, self.values, context or {})
        faults = () if (context or {}).get(RECORDED) else self.filetype.faults(model)
        found = {*self.problems, *_Errors(self, errors).problems(faults)}
        if found:
            in_order = sorted(found, key=lambda p: (p.line, p.column, p.key, p.message))
            raise SpecError(self.file, tuple(in_order), kind=self.filetype.name)
        return model

    def node(self, loc: Loc) -> Node | None:
        here: Node | None = self._root
        for part in loc:
            here = self._child(here, part)[1]
        return here

    def keys(self, loc: Loc) -> tuple[str, ...]:
        return tuple(self._pairs.get(id(self.node(loc)), ()))

    def text(self, loc: Loc) -> str:
        """The text of the value at a location, as the user spelled it; "" of all but single values."""
        node = self.node(loc)
        return node.value if isinstance(node, ScalarNode) else ""

    def value(self, loc: Loc) -> object:
        """The value at a location; None where nothing stands."""
        return self._values.get(id(self.node(loc)))

    def is_flawed(self, loc: Loc) -> bool:
        """Whether what stands there has been reported already."""
        return loc in self._flawed or id(self.node(loc)) in self._flawed

    def place(self, loc: Loc, *, at_key: bool = False) -> tuple[int, int]:
        """Line and column of a value, or of its key where ``at_key`` or where the value is empty.

        A value that is not there has the place of the mapping that lacks it.
        """
        here, key = self._root, None
        for part in loc:
            key, child = self._child(here, part)
            if child is None:
                return _from_one(here.start_mark)
            here = child
        if key is not None and (at_key or (self.value(loc) is None and not self.text(loc))):
            return _from_one(key.start_mark)
        return _from_one(here.start_mark)

    def _child(self, node: Node | None, part: str | int) -> tuple[Node | None, Node | None]:
        if isinstance(part, str):
            return self._pairs.get(id(node), {}).get(part, (None, None))
        entries = node.value if isinstance(node, SequenceNode) else ()
        return None, entries[part] if part < len(entries) else None

    def _read(self, node: Node, loc: Loc) -> object:
        if id(node) in self._open:
            self._flawed.add(loc)  # the entry, not the value it stands in
            return self._report(node, loc, "this alias refers to the value it stands in")
        if id(node) not in self._values:
            self._open.add(id(node))
            self._values[id(node)] = self._value(node, loc)
            self._open.remove(id(node))
        return self._values[id(node)]

    def _value(self, node: Node, loc: Loc) -> object:
        tag = str(node.tag).removeprefix(_TAG)
        if isinstance(node, MappingNode) and tag == "map":
            return self._mapping(node, loc)
        if isinstance(node, SequenceNode) and tag == "seq":
            return [self._read(child, (*loc, index)) for index, child in enumerate(node.value)]
        if isinstance(node, ScalarNode) and tag in self._scalars:
            return self._scalar(node, tag, loc)
        return self._flaw(node, loc, f"the tag {shown(str(node.tag))} is not supported here", "remove it")

    def _scalar(self, node: ScalarNode, tag: str, loc: Loc) -> object:
        if tag in {"int", "float", "bool"} and not self.filetype.as_text.isdisjoint(loc):
            return node.value
        digits = node.value.lstrip("+-")
        if tag == "int" and len(digits) > 1 and digits.isdecimal() and digits[0] == "0":
            message = f"{shown(node.value)} starts with a zero, which some YAML readers read as octal"
            return self._flaw(node, loc, message, f"write {digits.lstrip('0') or '0'}")
        try:
            return self._scalars[tag](node)
        except (ValueError, LookupError):  # how ruamel.yaml meets such text as `!!int ""`
            return self._flaw(node, loc, f"{shown(node.value)} can't be read as a YAML {tag}")

    def _mapping(self, node: MappingNode, loc: Loc) -> dict[str, object]:
        merged: dict[str, tuple[Node, Node]] = {}
        own: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if str(key.tag) == f"{_TAG}merge":
                merged = {**self._merged(value, (*loc, "<<")), **merged}
            elif not isinstance(key, ScalarNode) or str(key.tag) != f"{_TAG}str":
                self._report(key, loc, "a key must be text", "put it in quotes")
            elif key.value in own:
                line, column = _from_one(own[key.value][0].start_mark)
                message = f"{shown(key.value)} stands here twice; first on line {line}, column {column}"
                self._report(key, (*loc, key.value), message, "remove one of the two")
            else:
                own[key.value] = key, value
                self._read(value, (*loc, key.value))
        pairs = self._pairs[id(node)] = {**merged, **own}
        return {name: self._values.get(id(value)) for name, (_, value) in pairs.items()}

    def _merged(self, node: Node, loc: Loc) -> dict[str, tuple[Node, Node]]:
        """The keys that ``<<`` brings: those of a mapping, or of several, of which the first wins."""
        value = self._read(node, loc)
        values, sources = (value, node.value) if isinstance(value, list) else ([value], [node])
        if id(node) not in self._flawed and not all(isinstance(one, Mapping) for one in values):
            self._flaw(node, loc, "<< takes a mapping or a list of mappings")
        return {
            name: pair
            for source in reversed(sources)
            for name, pair in self._pairs.get(id(source), {}).items()
        }

    def _flaw(self, node: Node, loc: Loc, message: str, hint: str = "") -> object:
        self._flawed.add(id(node))
        return self._report(node, loc, message, hint)

    def _report(self, node: Node, loc: Loc, message: str, hint: str = "") -> object:
        """A value that is none: None stands for it."""
        place = _from_one(node.start_mark)
        self.problems.append(Problem(self.file, *place, path_text(loc), "bad-yaml", message, hint))
        return None


def _syntax_problem(exc: YAMLError, text: str, file: str) -> Problem:
    if isinstance(exc, ReaderError):
        before = text[: exc.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        refused = f"the character U+{exc.character:04X} is not allowed in YAML"
        return Problem(file, line, column, "yaml", "bad-yaml", refused)
    said = str(getattr(exc, "problem", None) or exc).splitlines()[0]
    mark = getattr(exc, "problem_mark", None)
    opened = getattr(exc, "context_mark", None)
    for fragment, message, hint in _SYNTAX:
        if fragment in said:
            if message in _SEEN_LATE:
                mark = opened or mark
            return Problem(file, *_from_one(mark), "yaml", "bad-yaml", message, hint)
    return Problem(file, *_from_one(mark or opened), "yaml", "bad-yaml", f"this is not YAML: {said}")


def _from_one(mark: Any) -> tuple[int, int]:
    """Line and column of a mark of ruamel.yaml, counted from 1."""
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


_KEY: Final = "[key]"  # pydantic's word for the name of an entry, at the end of a location
_HINTS_BY_KEY: Final[Mapping[Loc, str]] = {
    ("version",): "write version: 1",
    ("provider",): "write it as provider: {type: local}",
}
_HINTS_BY_KIND: Final[Mapping[str, str]] = {
    "tuple_type": "write each entry on a line of its own, after a dash",
}


class _Errors:
    """The errors that the values of a document ran into, as problems with their places."""

    def __init__(self, document: Document[Any], errors: Iterable[ErrorDetails]) -> None:
        self._document = document
        self._model = document.filetype.model
        self._fields = [
            error
            for error in map(self._placed, errors)
            if error["type"] != INCONSISTENT and not self._is_noise(error)
        ]

    def problems(self, faults: Iterable[Fault]) -> Iterator[Problem]:
        # A misspelt key is one mistake: the key it was meant to be is not missing on top of that.
        misspelt = {(*e["loc"][:-1], near) for e in self._fields if (near := self._near_key(e))}
        for error in self._fields:
            if error["type"] != "missing" or error["loc"] not in misspelt:
                yield self._field_problem(error)
        known = {e["loc"] for e in self._fields} | misspelt
        for fault in faults:
            if fault.loc not in known and not self._document.is_flawed(fault.loc):
                place = self._document.place(fault.loc, at_key=fault.at_key)
                key = path_text(fault.loc)
                yield Problem(self._document.file, *place, key, fault.code, fault.message, fault.hint)

    def _is_noise(self, error: ErrorDetails) -> bool:
        """Whether it was said already; pydantic counts only the entries that are valid."""
        is_short = error["type"] == "too_short" and bool(self._document.value(error["loc"]))
        return is_short or self._document.is_flawed(error["loc"])

    def _placed(self, error: ErrorDetails) -> ErrorDetails:
        """The error where the file has it: pydantic puts the chosen provider's type into the location."""
        loc, kind = error["loc"], error["type"]
        if kind == "union_tag_invalid":
            return {**error, "loc": (*loc, "type"), "type": "literal_error"}
        if kind == "union_tag_not_found":
            misspelt = next((key for key in self._document.keys(loc) if did_you_mean(key, ("type",))), "")
            as_field = "extra_forbidden" if misspelt else "missing"
            return {**error, "loc": (*loc, misspelt or "type"), "type": as_field}
        if self._model is ClusterSpec and loc[:1] == ("provider",) and loc[1:2]:
            return {**error, "loc": (loc[0], *loc[2:])}
        return error

    def _near_key(self, error: ErrorDetails) -> str:
        if error["type"] != "extra_forbidden":
            return ""
        near = did_you_mean(str(error["loc"][-1]), self._known_keys(error["loc"][:-1]))
        return near.removeprefix("did you mean ").removesuffix("?")

    def _known_keys(self, loc: Loc) -> tuple[str, ...]:
        here: Any = self._model
        if here is ClusterSpec and loc[:1] == ("provider",) and self._document.keys(loc[:1]):
            here, loc = PROVIDERS.get(self._document.text(("provider", "type"))), loc[1:]
            if here is None:
                return ("type",)
        for part in loc:
            if isinstance(part, str):
                fields = getattr(here, "model_fields", None)
                here = _mapping_in(fields[part].annotation if fields else get_args(here)[1])
        return tuple(field.alias or name for name, field in here.model_fields.items())

    def _elsewhere(self, loc: Loc) -> str:
        """Where an unknown key is known: at the top level, or with another provider."""
        key = loc[-1]
        if loc[:-1] and key in self._model.model_fields:
            return f"{key} belongs at the top level"
        if self._model is not ClusterSpec or loc[:-1] != ("provider",):
            return ""
        owners = (name for name, model in PROVIDERS.items() if key in model.model_fields)
        return next((f"remove it; it is for type: {owner}" for owner in owners), "")

    def _field_problem(self, error: ErrorDetails) -> Problem:
        loc, kind = error["loc"], error["type"]
        is_key = loc[-1] == _KEY
        loc = loc[:-1] if is_key else loc
        place = self._document.place(loc, at_key=is_key or kind == "extra_forbidden")
        context: dict[str, Any] = dict(error.get("ctx", {}))
        if loc == ("provider", "type"):
            context["expected"] = either(PROVIDERS)
        value = shown(loc[-1]) if is_key else self._shown(loc)
        last_key = max((i for i, part in enumerate(loc) if isinstance(part, str)), default=0)
        name = "a name here" if is_key else path_text(loc[last_key:])
        message = explain(kind, context, name, value)
        return Problem(self._document.file, *place, path_text(loc), message.code, message, self._hint(error))

    def _shown(self, loc: Loc) -> str:
        value, text = self._document.value(loc), self._document.text(loc)
        if self._document.node(loc) is None:
            above = self._document.value(loc[:-1])  # a text that stands for a mapping: `gpu01: 10.0.0.11`
            return shown(above) if isinstance(above, str) else "empty"
        if isinstance(value, str) or not text:
            return shown(value)
        return shown(text).strip("'")  # numbers and booleans as the user spelled them

    def _hint(self, error: ErrorDetails) -> str:
        loc, kind = error["loc"], error["type"]
        value = self._document.value(loc)
        if kind == "extra_forbidden":
            known = self._known_keys(loc[:-1])
            near = did_you_mean(str(loc[-1]), known)
            return near or self._elsewhere(loc) or f"known keys: {', '.join(known)}"
        if loc == ("provider", "type"):
            if self._document.node(loc) is None:
                return f"write {either(f'type: {name}' for name in PROVIDERS)}"
            near = did_you_mean(value, PROVIDERS) if isinstance(value, str) else ""
            return near or f"built in this version: {', '.join(PROVIDERS)}"
        if kind in {"string_type", "path_type"} and isinstance(value, bool | int | float):
            return "put it in quotes"
        return _HINTS_BY_KEY.get(loc) or _HINTS_BY_KIND.get(kind, "")


def _mapping_in(annotation: Any) -> Any:
    """The model, or the mapping of names, that an annotation such as ``tuple[Partition, ...]`` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is Mapping:
        return annotation
    return next((found for part in get_args(annotation) if (found := _mapping_in(part))), None)


def path_text(loc: Loc) -> str:
    """A dotted path fit for one line of a message, even where a key is not."""
    is_plain = [isinstance(part, int) or (part.isprintable() and len(part) <= 40) for part in loc]  # noqa: PLR2004
    return dotted(tuple(p if plain else shown(p) for p, plain in zip(loc, is_plain, strict=True))) or "spec"
