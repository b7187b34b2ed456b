"""User files of a type (a spec, a job file): from text to model, or all problems with their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.messages import INCONSISTENT, Finding, Loc, did_you_mean, either, explain, shown
from clusterctl.spec.models import PROVIDER_TYPES, PROVIDERS, ClusterSpec
from clusterctl.spec.source import Source, path_text, read_source

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Filetype(Generic[M]):
    """``name`` is what messages call it, ``words`` say what each pattern of its model asks for.

    ``findings`` tells what does not hold between the fields of plain values. Below the keys ``as_text``,
    numbers and booleans are text. ``missing`` helps who has no such file, ``empty`` who has nothing in it.
    """

    name: str
    model: type[M]
    words: Mapping[str, str]
    findings: Callable[[Mapping[str, object]], Iterable[Finding]]
    missing: str
    empty: str
    as_text: frozenset[str] = frozenset()


MAX_BYTES: Final = 1024 * 1024


def parse(text: str, file: str, kind: Filetype[M], *, context: Mapping[str, Any] | None = None) -> M:
    """What a text describes; ``file`` is named in the problems.

    Raises:
        SpecError: the text is no YAML, or not of this kind.
    """
    source = read_source(text, file, empty=kind.empty, as_text=kind.as_text)
    if not isinstance(source, Source):
        raise SpecError(file, source, kind=kind.name)
    values = source.root.value
    if not isinstance(values, dict):
        message = f"a {kind.name} is a mapping of keys, not {shown(values)}"
        no_mapping = Problem(file, source.root.line, source.root.column, "spec", message)
        raise SpecError(file, source.problems or (no_mapping,), kind=kind.name)
    model: M | None = None
    errors: list[ErrorDetails] = []
    try:
        model = kind.model.model_validate(values, context=dict(context or {}))
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    problems = (*source.problems, *Places(source, file, values, kind).problems(errors))
    if problems or model is None:
        in_order = sorted(set(problems), key=lambda p: (p.line, p.column, p.key, p.message))
        raise SpecError(file, tuple(in_order), kind=kind.name)
    return model


def read_text(path: Path, kind: Filetype[M]) -> str:
    """The text of a file.

    Raises:
        UsageError: it can't be read, is huge, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as exc:
        raise UsageError(f"there is no {kind.name} file {path}", fix=kind.missing) from exc
    except (OSError, ValueError) as exc:  # ValueError: a path with a null byte
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"the {kind.name} file can't be read", where=str(path), why=why, fix="name a readable file"
        ) from exc
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"the {kind.name} file is larger than 1 MiB", where=str(path), fix="is this the right file?"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise UsageError(
            f"the {kind.name} file is not UTF-8 text",
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

    def __init__(self, source: Source, file: str, values: Mapping[str, object], kind: Filetype[M]) -> None:
        self._source = source
        self._file = file
        self._values = values
        self._kind = kind

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
        for finding in self._kind.findings(self._values):
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
        if self._kind.model is ClusterSpec and loc[:1] == ("provider",) and loc[1:2]:
            return {**error, "loc": (loc[0], *loc[2:])}
        return error

    def _near_key(self, error: ErrorDetails) -> str:
        if error["type"] != "extra_forbidden":
            return ""
        near = did_you_mean(str(error["loc"][-1]), self._known_keys(error["loc"][:-1]))
        return near.removeprefix("did you mean ").removesuffix("?")

    def _known_keys(self, loc: Loc) -> tuple[str, ...]:
        """The keys that the mapping at ``loc`` may have."""
        provider = self._values.get("provider")
        if self._kind.model is ClusterSpec and loc[:1] == ("provider",) and isinstance(provider, dict):
            model = PROVIDERS.get(provider.get("type", ""))
            return _known_keys(model, loc[1:]) if model else ("type",)
        return _known_keys(self._kind.model, loc)

    def _elsewhere(self, loc: Loc) -> str:
        """Where an unknown key is known: at the top level, or with another provider."""
        key = loc[-1]
        if loc[:-1] and key in self._kind.model.model_fields:
            return f"{key} belongs at the top level"
        if self._kind.model is not ClusterSpec or loc[:-1] != ("provider",):
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
            context["words"] = self._kind.words[context["pattern"]]
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


def _known_keys(model: type[BaseModel], loc: Loc) -> tuple[str, ...]:
    """The keys that the mapping at ``loc`` may have."""
    here: Any = model
    for part in loc:
        if isinstance(part, str):
            fields = getattr(here, "model_fields", None)
            here = _mapping_in(fields[part].annotation if fields else get_args(here)[1])
    return tuple(here.model_fields)


def _mapping_in(annotation: Any) -> Any:
    """The model, or the mapping of names, that an annotation such as ``tuple[Partition, ...]`` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is Mapping:
        return annotation
    return next((found for part in get_args(annotation) if (found := _mapping_in(part))), None)
