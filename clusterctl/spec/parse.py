"""Parse specs and job files into models, or report all problems with line and column."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.base import (
    INCONSISTENT,
    RECORDED,
    Loc,
    M,
    SpecFault,
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
    """A type of user file: spec or job file.

    name: the type's name in messages.
    faults: called with a model, in which wrong values are UNKNOWN; returns contradictions between
        its fields.
    missing: the fix if the file does not exist.
    empty: the fix if the file is empty, or another tool's.
    may_be_empty: whether an empty file stands for the model's defaults.
    as_text: keys below which numbers and booleans are read as text.
    """

    name: str
    model: type[M]
    faults: Callable[[M], Iterable[SpecFault]]
    missing: str
    empty: str
    may_be_empty: bool = False
    as_text: frozenset[str] = frozenset()


MAX_BYTES: Final = 1024 * 1024
# Keys of other tools' files. A file with two of them, and without the own keys, is such a file.
_OTHER_TOOLS: Final = {
    "a task of SkyPilot": {
        "resources",
        "run",
        "setup",
        "num_nodes",
        "workdir",
        "envs",
        "file_mounts",
    },
    "a configuration of dstack": {
        "type",
        "commands",
        "resources",
        "ide",
        "python",
        "backends",
        "fleets",
    },
    "an object of Kubernetes": {"apiVersion", "kind", "metadata", "spec"},
    "a Compose file": {"services", "networks", "volumes"},
    "an environment of conda": {"channels", "dependencies", "prefix"},
}
_OWN_KEYS: Final = frozenset({"job", "variants", "partitions", "provider"})


def read_text(path: Path, filetype: Filetype[M]) -> str:
    """Read the text of a spec or a job file.

    Raises:
        UsageError: the file can't be read, is larger than MAX_BYTES, or is not UTF-8.
    """
    title = f"{filetype.name.removesuffix(' file')} file"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError("the file is larger than 1 MiB")
        return raw.decode()
    except FileNotFoundError as exc:
        raise UsageError(
            f"there is no {title} {path}", code="not-found", about="file", fix=filetype.missing
        ) from exc
    except (OSError, ValueError) as exc:
        # A ValueError means that the text is not UTF-8, or that the path has a null byte.
        raise UsageError(
            f"the {title} can't be read",
            code="file-unreadable",
            where=str(path),
            why=getattr(exc, "strerror", None) or str(exc),
            fix="use a readable text file in UTF-8",
        ) from exc


# A spec nests four levels deep.
MAX_DEPTH: Final = 32
_TAG: Final = "tag:yaml.org,2002:"
_TEXT_TAG: Final = f"{_TAG}str"
_SPELLED: Final = frozenset({f"{_TAG}int", f"{_TAG}float", f"{_TAG}bool"})


class _Constructor(SafeConstructor):
    """Builds Python values from YAML 1.2. Dates become text."""


_Constructor.add_constructor(f"{_TAG}timestamp", SafeConstructor.construct_yaml_str)


class Document(Generic[M]):
    """A parsed YAML text: its values, and the line and column of each value."""

    def __init__(self, text: str, file: str, filetype: Filetype[M]) -> None:
        """Read the text. ``file``: the file's name in messages.

        Raises:
            SpecError: the text is not YAML, or is empty and may not be.
        """
        self.file = file
        self.filetype = filetype
        yaml = YAML(typ="safe", pure=True)
        yaml.max_depth = MAX_DEPTH
        yaml.composer.warn_double_anchors = False
        yaml.Constructor = _Constructor
        try:
            self._root = yaml.compose(text)
            _make_text(self._root, filetype.as_text)
            self.values = yaml.constructor.construct_document(self._root) if self._root else None
        except (YAMLError, ValueError, LookupError, TypeError) as exc:
            # Texts such as `!!bool ""` and `? [[]]` raise other errors than YAMLError.
            raise SpecError(file, (_syntax_problem(exc, file),), kind=filetype.name) from exc
        if self.values is None and filetype.may_be_empty:
            self.values = {}
        elif self._root is None:
            nothing = Problem(file, 1, 1, "spec", "file-empty", "the file is empty", filetype.empty)
            raise SpecError(file, (nothing,), kind=filetype.name)

    def model(self, context: Mapping[str, Any] | None = None) -> M:
        """Validate the document and return its model. ``context``: for pydantic's validators.

        Raises:
            SpecError: the document has mistakes; ``problems`` has all of them.
        """
        kind = self.filetype.model
        if not isinstance(self.values, dict):
            message = f"a {self.filetype.name} must be a mapping of keys, not {shown(self.values)}"
            problem = Problem(self.file, *self.place(()), "spec", "not-a-mapping", message)
            raise SpecError(self.file, (problem,), kind=self.filetype.name)
        errors: list[ErrorDetails] = []
        try:
            # Another version of clusterctl may have recorded keys that this one does not know.
            extra: Literal["ignore"] | None = "ignore" if (context or {}).get(RECORDED) else None
            model = kind.model_validate(self.values, context=dict(context or {}), extra=extra)
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False)
            model = partial_model(kind, self.values, context or {})
        faults = () if (context or {}).get(RECORDED) else self.filetype.faults(model)
        if problems := {*_Errors(self, errors).problems(faults)}:
            self._reject_other_tool()
            in_order = sorted(problems, key=lambda p: (p.line, p.column, p.key, p.message))
            raise SpecError(
                self.file, (*_without_repeated_hints(in_order),), kind=self.filetype.name
            )
        return model

    def _reject_other_tool(self) -> None:
        """Raise UsageError if the keys of the document are those of another tool's file."""
        keys = {*self.keys(())}
        for title, others in _OTHER_TOOLS.items():
            if len(keys & others) > 1 and not keys & _OWN_KEYS:
                raise UsageError(
                    f"{self.file} is {title}, not a {self.filetype.name}",
                    code="file-invalid",
                    about="other-tool",
                    fix=self.filetype.empty,
                )

    def node(self, loc: Loc) -> Node | None:
        here: Node | None = self._root
        for part in loc:
            here = _child(here, part)[1]
        return here

    def keys(self, loc: Loc) -> tuple[str, ...]:
        node = self.node(loc)
        return (
            tuple(str(key.value) for key, _ in node.value) if isinstance(node, MappingNode) else ()
        )

    def text(self, loc: Loc) -> str:
        """Return the value at a location as the user wrote it. Empty for a list, a mapping or no
        value.
        """
        node = self.node(loc)
        return node.value if isinstance(node, ScalarNode) else ""

    def value(self, loc: Loc) -> object:
        """Return the value at a location, or ``None`` if there is no value."""
        here: Any = self.values
        for part in loc:
            try:
                here = here[part]
            except (LookupError, TypeError):
                return None
        return here

    def place(self, loc: Loc, *, at_key: bool = False) -> tuple[int, int]:
        """Return line and column of a value, or of its key if ``at_key`` is set or the value is
        empty.

        For a missing value, return line and column of the mapping that lacks the value.
        """
        here = self._root
        key = None
        for part in loc:
            key, child = _child(here, part)
            if child is None:
                return _from_one(here.start_mark)
            here = child
        if key is not None and (at_key or (self.value(loc) is None and not self.text(loc))):
            return _from_one(key.start_mark)
        return _from_one(here.start_mark)


def _child(node: Node | None, part: str | int) -> tuple[Node | None, Node | None]:
    # Entries merged by ``<<`` come before a mapping's own entries, which override them.
    if isinstance(node, MappingNode):
        return next((pair for pair in reversed(node.value) if pair[0].value == part), (None, None))
    entries = node.value if isinstance(node, SequenceNode) and isinstance(part, int) else ()
    return None, entries[part] if isinstance(part, int) and part < len(entries) else None


def _make_text(root: Node | None, keys: Collection[str]) -> None:
    """Turn the numbers and booleans below these keys into text, exactly as the user wrote them."""
    # An alias may occur inside the value that it refers to.
    seen: set[tuple[int, bool]] = set()
    rest = [(root, False)] if keys else []
    while rest:
        node, is_below = rest.pop()
        if (id(node), is_below) in seen:
            continue
        seen.add((id(node), is_below))
        if isinstance(node, MappingNode):
            rest += [(value, is_below or str(key.value) in keys) for key, value in node.value]
        elif isinstance(node, SequenceNode):
            rest += [(entry, is_below) for entry in node.value]
        elif is_below and isinstance(node, ScalarNode) and str(node.tag) in _SPELLED:
            node.tag = _TEXT_TAG


def _without_repeated_hints(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems, with the same list of known keys only in the first that has it."""
    seen: set[str] = set()
    for problem in problems:
        is_again = problem.hint in seen and problem.hint.startswith(_KNOWN_KEYS)
        seen.add(problem.hint)
        yield replace(problem, hint="") if is_again else problem


def _syntax_problem(exc: Exception, file: str) -> Problem:
    """Turn an error of ruamel.yaml into a Problem with line and column."""
    message = getattr(exc, "problem", None) or str(exc)
    context = getattr(exc, "context", None)
    context_mark = getattr(exc, "context_mark", None)
    mark = getattr(exc, "problem_mark", None) or context_mark
    if context and context_mark:
        message = f"{message}, {context} that begins on line {context_mark.line + 1}"
    text = f"this is not YAML: {' '.join(message.split())}"
    return Problem(file, *_from_one(mark), "yaml", "bad-yaml", text)


def _from_one(mark: Any) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


# Pydantic appends this to a location to refer to the key of an entry.
_KEY: Final = "[key]"
_KNOWN_KEYS: Final = "known keys: "
_HINTS_BY_KEY: Final[Mapping[Loc, str]] = {
    ("version",): "write version: 1",
    ("provider",): "write it as provider: {type: local}",
}


class _Errors:
    """Converts pydantic's errors about a document into Problems with line and column."""

    def __init__(self, document: Document[Any], errors: Iterable[ErrorDetails]) -> None:
        self._document = document
        self._model = document.filetype.model
        self._fields = [
            error
            for error in map(self._placed, errors)
            if error["type"] != INCONSISTENT and not self._is_noise(error)
        ]

    def problems(self, faults: Iterable[SpecFault]) -> Iterator[Problem]:
        # A misspelt key is reported once: the intended key is not also reported as missing.
        misspelt = {(*e["loc"][:-1], near) for e in self._fields if (near := self._near_key(e))}
        for error in self._fields:
            if error["type"] != "missing" or error["loc"] not in misspelt:
                yield self._field_problem(error)
        reported = {e["loc"] for e in self._fields} | misspelt
        for fault in faults:
            if fault.loc not in reported:
                place = self._document.place(fault.loc, at_key=fault.at_key)
                key = path_text(fault.loc)
                yield Problem(
                    self._document.file, *place, key, fault.code, fault.message, fault.hint
                )

    def _is_noise(self, error: ErrorDetails) -> bool:
        """Return whether to drop an error: pydantic also calls a list with invalid entries too
        short.
        """
        return error["type"] == "too_short" and bool(self._document.value(error["loc"]))

    def _placed(self, error: ErrorDetails) -> ErrorDetails:
        """Return the error with its location in the file, without the provider's type that pydantic
        adds.
        """
        loc = error["loc"]
        kind = error["type"]
        if kind == "union_tag_invalid":
            return {**error, "loc": (*loc, "type"), "type": "literal_error"}
        if kind == "union_tag_not_found":
            return {**error, "loc": (*loc, "type"), "type": "missing"}
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
            here = PROVIDERS.get(self._document.text(("provider", "type")))
            loc = loc[1:]
            if here is None:
                return ("type",)
        for part in loc:
            if isinstance(part, str):
                fields = getattr(here, "model_fields", None)
                here = _mapping_in(fields[part].annotation if fields else get_args(here)[1])
        return tuple(field.alias or name for name, field in here.model_fields.items())

    def _field_problem(self, error: ErrorDetails) -> Problem:
        loc = error["loc"]
        kind = error["type"]
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
        return Problem(
            self._document.file, *place, path_text(loc), message.code, message, self._hint(error)
        )

    def _shown(self, loc: Loc) -> str:
        value = self._document.value(loc)
        text = self._document.text(loc)
        if self._document.node(loc) is None:
            # The file may have a text instead of a mapping: `gpu01: 10.0.0.11`.
            above = self._document.value(loc[:-1])
            return shown(above) if isinstance(above, str) else "empty"
        if isinstance(value, str) or not text:
            return shown(value)
        # Show numbers and booleans as the user wrote them.
        return shown(text).strip("'")

    def _hint(self, error: ErrorDetails) -> str:
        loc = error["loc"]
        kind = error["type"]
        value = self._document.value(loc)
        if kind == "extra_forbidden":
            keys = self._known_keys(loc[:-1])
            near = did_you_mean(str(loc[-1]), keys)
            return near or f"{_KNOWN_KEYS}{', '.join(keys)}"
        if loc == ("provider", "type"):
            if self._document.node(loc) is None:
                return f"write {either(f'type: {name}' for name in PROVIDERS)}"
            near = did_you_mean(value, PROVIDERS) if isinstance(value, str) else ""
            return near or f"the providers of this version: {', '.join(PROVIDERS)}"
        if kind in {"string_type", "path_type"} and isinstance(value, bool | int | float):
            return "put it in quotes"
        return _HINTS_BY_KEY.get(loc, "")


def _mapping_in(annotation: Any) -> Any:
    """Return the model or the mapping inside an annotation such as ``tuple[Partition, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is Mapping:
        return annotation
    return next((model for part in get_args(annotation) if (model := _mapping_in(part))), None)


def path_text(loc: Loc) -> str:
    """Return the dotted path of a location, with long or unprintable keys abbreviated."""
    is_plain = [isinstance(part, int) or (part.isprintable() and len(part) <= 40) for part in loc]  # noqa: PLR2004
    return (
        dotted(tuple(p if plain else shown(p) for p, plain in zip(loc, is_plain, strict=True)))
        or "spec"
    )
