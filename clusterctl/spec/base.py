"""What all models of user files share: their base class, values of one line, messages about what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, core_schema

from clusterctl.errors import BadValueError, Notice
from clusterctl.spec.names import DATA
from clusterctl.spec.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration_s,
    parse_size_mib,
    parse_slurm_memory_mib,
    parse_slurm_time_s,
)
from clusterctl.util.assets import table

Loc = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

INCONSISTENT: Final = "inconsistent"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong: at ``loc``, on its key rather than on its value where ``at_key``."""

    code: str
    loc: Loc
    message: str
    hint: str = ""
    at_key: bool = False

    @property
    def key(self) -> str:
        return dotted(self.loc)


def repeated(values: Iterable[object]) -> Iterator[tuple[int, int]]:
    """Where a value stands again, and where it stood first."""
    first: dict[object, int] = {}
    for index, value in enumerate(values):
        if value is not UNKNOWN and first.setdefault(value, index) != index:
            yield index, first[value]


def dotted(loc: Loc) -> str:
    """``("partitions", 1, "nodes")`` is ``partitions[1].nodes``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


_TEXTS: Final[Mapping[str, Notice]] = {
    "missing": Notice("missing-key", "{name} is missing"),
    "extra_forbidden": Notice("unknown-key", "unknown key {name}"),
    "string_type": Notice("wrong-type", "{name} must be text, not {shown}"),
    "path_type": Notice("wrong-type", "{name} must be text, not {shown}"),
    "string_unicode": Notice("not-utf8", "{name} must be text in UTF-8"),
    "pattern": Notice("bad-format", "{name} must be {asks_for}, not {shown}"),
    "greater_than_equal": Notice("out-of-range", "{name} must be at least {ge}, not {shown}"),
    "less_than_equal": Notice("out-of-range", "{name} must be at most {le}, not {shown}"),
    "literal_error": Notice("unknown-value", "{name} must be {expected}, not {shown}"),
    "enum": Notice("unknown-value", "{name} must be {expected}, not {shown}"),
    "too_short": Notice("list-empty", "{name} needs at least {min_length} entry"),
    "bool_type": Notice("wrong-type", "{name} must be true or false, not {shown}"),
    "int": Notice("wrong-type", "{name} must be a whole number, not {shown}"),
    "float_type": Notice("wrong-type", "{name} must be a number, not {shown}"),
    "finite_number": Notice("wrong-type", "{name} must be a number, not {shown}"),
    "dict_type": Notice("wrong-type", "{name} must be a mapping of keys, not {shown}"),
    "model_attributes_type": Notice("wrong-type", "{name} must be a mapping of keys, not {shown}"),
    "tuple_type": Notice("wrong-type", "{name} must be a list, not {shown}"),
    "model_type": Notice("wrong-type", "{name} must be a mapping of keys, not {shown}"),
    "ip_v4_network": Notice("not-a-network", "{name} must be a network such as 10.77.0.0/24, not {shown}"),
    "invalid_key": Notice("wrong-type", "the key {name} must be text"),
    "value_error": Notice("bad-value", "{error}"),
}
_ANY_OTHER: Final = Notice("bad-value", "{name} can't be {shown}")


def explain(kind: str, context: Mapping[str, object], name: str, value: str) -> Notice:
    """A pydantic error in plain words, with its code.

    ``kind`` and ``context`` are the error's ``type`` and ``ctx``; ``name`` is what the user calls the field,
    ``value`` what stands there, as ``shown``.
    """
    template = _TEXTS.get("int" if kind.startswith("int_") else kind, _ANY_OTHER)
    expected = str(context.get("expected", "")).replace("'", "")  # pydantic quotes what may stand there
    plain = {key: f"{word:g}" if isinstance(word, float) else word for key, word in context.items()}
    code = getattr(context.get("error"), "code", template.code)
    return Notice(code, template.format(**{**plain, "expected": expected, "name": name, "shown": value}))


def either(words: Iterable[object]) -> str:
    """``1, 2 or 4``."""
    *first, last = (str(word) for word in words)
    return f"{', '.join(first)} or {last}" if first else last


class _Unknown:
    """What stands for a wrong value in a partial model: false, empty, and whatever is asked of it is too."""

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object) -> Any:
        return self


UNKNOWN: Final[Any] = _Unknown()
_PARTIAL: Final = "partial"  # in the validation context


class Model(BaseModel):
    """Base of all spec models: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def partial_model(model: type[M], values: object, context: Mapping[str, Any]) -> M:
    """The model of any values, where UNKNOWN stands for those that are wrong or missing.

    So what does not hold between fields is reported together with what is wrong with single ones.
    """
    found: M = _forgiving_validator(model).validate_python(values, context={**context, _PARTIAL: True})
    return found


@cache
def _forgiving_validator(model: type[BaseModel]) -> SchemaValidator:
    # Prebuilt ones are the models' own, which forgive nothing.
    return SchemaValidator(_forgiving(model.__pydantic_core_schema__), _use_prebuilt=False)


def is_partial(info: ValidationInfo) -> bool:
    return _PARTIAL in (info.context or {})


def _forgiving(schema: Any) -> Any:
    """A pydantic schema whose models take anything."""
    if isinstance(schema, list):
        return [_forgiving(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: part if key == "metadata" else _forgiving(part) for key, part in schema.items()}
    if schema.get("type") == "model-fields":
        for field in schema["fields"].values():
            place = field["schema"] if field["schema"]["type"] == "default" else field
            place["schema"] = core_schema.no_info_wrap_validator_function(_unless_wrong, place["schema"])
    if schema.get("type") == "model":
        known, ref = partial(_known_or_needed, schema["cls"]), schema.pop("ref", None)
        return core_schema.no_info_before_validator_function(known, schema, ref=ref)
    return schema


def _unless_wrong(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError as exc:
        wrong = {error["loc"][0] for error in exc.errors(include_url=False) if error["loc"]}
        if isinstance(value, Mapping) and not wrong.isdisjoint(value):
            return _unless_wrong({key: one for key, one in value.items() if key not in wrong}, handler)
        return UNKNOWN


def _known_or_needed(model: type[BaseModel], value: object) -> dict[str, object]:
    given, fields = value if isinstance(value, Mapping) else {}, model.model_fields.items()
    return {name: given.get(name, UNKNOWN) for name, field in fields if name in given or field.is_required()}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text must match ``regex`` whole; ``asks_for`` says what that is, in the words of a message."""

    regex: str
    asks_for: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.regex}

    def matches(self, text: str) -> bool:
        return re.fullmatch(self.regex, text) is not None

    def _checked(self, text: str, info: ValidationInfo) -> str:
        if not self.matches(text) and not is_partial(info):  # there it is said already, and still a name
            raise PydanticCustomError("pattern", "not {asks_for}", {"asks_for": self.asks_for})
        return text


PATTERNS: Final = {
    name: Pattern(*row) for name, row in table(DATA / "patterns.toml", dict[str, tuple[str, str]]).items()
}
SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
PRIVATE_NETWORKS: Final = tuple(IPv4Network(n) for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))

Url = Annotated[str, PATTERNS["url"]]
Toggle = Annotated[bool, Field(strict=True)]  # `yes` in quotes and 1 are neither true nor false
# Numbers are addresses to ``ipaddress``.
Network = Annotated[
    IPv4Network, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)
]
Usd = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


RECORDED: Final = "recorded"  # in the validation context: of hosts that are there, by the rules of its day
HERE: Final = "folder"  # in the validation context: the folder that paths are relative to


def folder_of(info: ValidationInfo) -> Path:
    here: Path = (info.context or {}).get(HERE, Path())
    return here


def _located(path: Path, info: ValidationInfo) -> Path:
    if not path.name:
        raise BadValueError("file-name-missing", "the name of a file is missing here")
    return folder_of(info) / path


def _expanded(text: str, info: ValidationInfo) -> str:
    if not text.strip():
        raise BadValueError("file-name-missing", "the name of a file is missing here")
    return str(folder_of(info) / os.path.expanduser(text))  # noqa: PTH111 - it never raises


FileName = Annotated[
    Path, AfterValidator(_located), WithJsonSchema({"type": "string", "examples": ["requirements.txt"]})
]

# As text: it is written into an ssh_config.
KeyFile = Annotated[
    str, AfterValidator(_expanded), WithJsonSchema({"type": "string", "examples": ["~/.ssh/id_ed25519"]})
]


_SIZE_TEXT = PlainSerializer(format_size, return_type=str)
_DURATION_TEXT = PlainSerializer(format_duration, return_type=str)


def _schema(example: str, **what: object) -> WithJsonSchema:
    return WithJsonSchema({**(what or {"type": ["string", "integer"], "minimum": 1}), "examples": [example]})


_SIZE_SCHEMA = _schema("50GiB", type="string", pattern=SIZE_PATTERN)
_DURATION_SCHEMA = _schema("1h30m", type="string", pattern=DURATION_PATTERN)
SizeMib = Annotated[int, BeforeValidator(parse_size_mib), _SIZE_TEXT, _SIZE_SCHEMA]
DurationS = Annotated[int, BeforeValidator(parse_duration_s), _DURATION_TEXT, _DURATION_SCHEMA]
JobMemoryMib = Annotated[int, BeforeValidator(parse_slurm_memory_mib), _SIZE_TEXT, _schema("4GiB")]
JobTimeS = Annotated[int, BeforeValidator(parse_slurm_time_s), _DURATION_TEXT, _schema("1h30m")]


def at_least(text: str) -> AfterValidator:
    """The least duration or size that a field takes, as a file spells it."""
    least = parse_size_mib(text) if text.endswith("B") else parse_duration_s(text)

    def check(value: int) -> int:
        if value < least:
            raise BadValueError("value-too-small", f"{text} is the least here")
        return value

    return AfterValidator(check)


def spelled(text: str, description: str) -> Any:
    """A field whose default is a duration, or a size, as a file spells it."""
    return Field(text, validate_default=True, description=description)
