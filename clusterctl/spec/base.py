"""The base class of the models of specs and job files, field types, and messages about wrong
values.
"""

from __future__ import annotations

import os
import re
import tomllib
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
    parse_duration_s,
    parse_size_mib,
    parse_slurm_memory_mib,
    parse_slurm_time_s,
    parse_time_limit_s,
)
from clusterctl.util import formatting

Loc = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

INCONSISTENT: Final = "inconsistent"


@dataclass(frozen=True, slots=True)
class SpecFault:
    """A mistake in a spec or a job file.

    loc: keys and indices that lead to the value, such as ``("partitions", 1, "nodes")``.
    at_key: whether the message shows the line of the key instead of the line of the value.
    """

    code: str
    loc: Loc
    message: str
    hint: str = ""
    at_key: bool = False

    @property
    def key(self) -> str:
        return dotted(self.loc)


def repeated(values: Iterable[object]) -> Iterator[tuple[int, int]]:
    """For each value that occurred before, yield the value's index and the index of the first
    occurrence.
    """
    first: dict[object, int] = {}
    for index, value in enumerate(values):
        if value is not UNKNOWN and first.setdefault(value, index) != index:
            yield index, first[value]


def dotted(loc: Loc) -> str:
    """Return a location in a file as text: ``("partitions", 1, "nodes")`` is
    ``partitions[1].nodes``.
    """
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
    "ip_v4_network": Notice(
        "not-a-network", "{name} must be a network such as 10.77.0.0/24, not {shown}"
    ),
    "invalid_key": Notice("wrong-type", "the key {name} must be text"),
    "value_error": Notice("bad-value", "{error}"),
}
_ANY_OTHER: Final = Notice("bad-value", "{name} can't be {shown}")


def explain(kind: str, context: Mapping[str, object], name: str, value: str) -> Notice:
    """Return clusterctl's message and error code for an error of pydantic.

    kind, context: the fields ``type`` and ``ctx`` of pydantic's error.
    name: the field in the user's notation, such as ``--nodes``.
    value: the wrong value, formatted by ``units.shown``.
    """
    template = _TEXTS.get("int" if kind.startswith("int_") else kind, _ANY_OTHER)
    # Pydantic puts the allowed values into quotes.
    expected = str(context.get("expected", "")).replace("'", "")
    plain = {key: f"{word:g}" if isinstance(word, float) else word for key, word in context.items()}
    code = getattr(context.get("error"), "code", template.code)
    return Notice(
        code, template.format(**{**plain, "expected": expected, "name": name, "shown": value})
    )


def either(words: Iterable[object]) -> str:
    """Join values as alternatives: ``[1, 2, 4]`` becomes ``1, 2 or 4``."""
    *first, last = (str(word) for word in words)
    return f"{', '.join(first)} or {last}" if first else last


class _Unknown:
    """The type of UNKNOWN, which replaces wrong values in ``partial_model``. Its attributes are
    UNKNOWN.
    """

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
# A key of the validation context.
_PARTIAL: Final = "partial"


class SpecModel(BaseModel):
    """The base class of all spec models. They are immutable and reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def partial_model(model: type[M], values: object, context: Mapping[str, Any]) -> M:
    """Build a model from values that may be wrong. UNKNOWN replaces each wrong or missing value.

    So clusterctl can check the model for contradictions between fields although some fields are
    wrong.
    """
    result: M = _tolerant_validator(model).validate_python(
        values, context={**context, _PARTIAL: True}
    )
    return result


@cache
def _tolerant_validator(model: type[BaseModel]) -> SchemaValidator:
    # Prebuilt validators come from the strict models.
    return SchemaValidator(_tolerant_schema(model.__pydantic_core_schema__), _use_prebuilt=False)


def is_partial(info: ValidationInfo) -> bool:
    return _PARTIAL in (info.context or {})


def _tolerant_schema(schema: Any) -> Any:
    """Return a copy of a pydantic schema in which models accept wrong values and replace them by
    UNKNOWN.
    """
    if isinstance(schema, list):
        return [_tolerant_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {
        key: part if key == "metadata" else _tolerant_schema(part) for key, part in schema.items()
    }
    if schema.get("type") == "model-fields":
        for field in schema["fields"].values():
            parent = field["schema"] if field["schema"]["type"] == "default" else field
            strict = parent["schema"]
            parent["schema"] = core_schema.no_info_wrap_validator_function(
                _value_or_unknown, strict
            )
    if schema.get("type") == "model":
        select_fields = partial(_given_or_required, schema["cls"])
        ref = schema.pop("ref", None)
        return core_schema.no_info_before_validator_function(select_fields, schema, ref=ref)
    return schema


def _value_or_unknown(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError as exc:
        wrong = {error["loc"][0] for error in exc.errors(include_url=False) if error["loc"]}
        if isinstance(value, Mapping) and not wrong.isdisjoint(value):
            return _value_or_unknown(
                {key: part for key, part in value.items() if key not in wrong}, handler
            )
        return UNKNOWN


def _given_or_required(model: type[BaseModel], value: object) -> dict[str, object]:
    values = value if isinstance(value, Mapping) else {}
    fields = model.model_fields.items()
    keys = ((info.alias or name, info) for name, info in fields)
    return {
        key: values.get(key, UNKNOWN) for key, info in keys if key in values or info.is_required()
    }


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression that a whole text must match.

    asks_for: a phrase for messages, which describes the allowed texts.
    """

    regex: str
    asks_for: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.regex}

    def matches(self, text: str) -> bool:
        return re.fullmatch(self.regex, text) is not None

    def _checked(self, text: str, info: ValidationInfo) -> str:
        # This mistake was reported before the partial model was built. The text still serves as a
        # name.
        if not self.matches(text) and not is_partial(info):
            raise PydanticCustomError("pattern", "not {asks_for}", {"asks_for": self.asks_for})
        return text


PATTERNS: Final = {
    name: Pattern(*row)
    # Each command about jobs needs them, and ``read_table`` makes a validator.
    for name, row in tomllib.loads((DATA / "patterns.toml").read_text(encoding="utf-8")).items()
}
SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
PRIVATE_NETWORKS: Final = tuple(
    IPv4Network(n) for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
)

Url = Annotated[str, PATTERNS["url"]]
UnixName = Annotated[str, PATTERNS["unix_name"]]
SlurmName = Annotated[str, PATTERNS["slurm_name"]]
# Strict: neither `yes` in quotes nor 1 is accepted as true.
Toggle = Annotated[bool, Field(strict=True)]
# ``ipaddress`` would accept a number as an address.
Network = Annotated[
    IPv4Network, BeforeValidator(lambda raw: str(raw) if isinstance(raw, int) else raw)
]
Usd = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]

# Keys of the validation context. RECORDED: true for the spec of existing hosts, which clusterctl wrote:
# newer rules do not apply to it, and keys of another version are dropped. HERE: the folder that paths
# are relative to.
RECORDED: Final = "recorded"
HERE: Final = "folder"


def folder_of(info: ValidationInfo) -> Path:
    here: Path = (info.context or {}).get(HERE, Path())
    return here


def _located(path: Path, info: ValidationInfo) -> Path:
    if not path.name:
        raise BadValueError("file-name-missing", "the file name is empty")
    return folder_of(info) / path


def expanded(text: str, info: ValidationInfo) -> str:
    """Return the path of a file that a spec names relative to its own folder, or to `~`."""
    if not text.strip():
        raise BadValueError("file-name-missing", "the file name is empty")
    # Unlike Path.expanduser, this never raises.
    return str(folder_of(info) / os.path.expanduser(text))


FileName = Annotated[
    Path,
    AfterValidator(_located),
    WithJsonSchema({"type": "string", "examples": ["requirements.txt"]}),
]

# A text instead of a Path, because it is written into an ssh_config.
KeyFile = Annotated[
    str,
    AfterValidator(expanded),
    WithJsonSchema({"type": "string", "examples": ["~/.ssh/id_ed25519"]}),
]

_SIZE_TEXT = PlainSerializer(formatting.exact_size, return_type=str)
_DURATION_TEXT = PlainSerializer(formatting.duration, return_type=str)


def _schema(example: str, **keys: object) -> WithJsonSchema:
    return WithJsonSchema(
        {**(keys or {"type": ["string", "integer"], "minimum": 1}), "examples": [example]}
    )


_SIZE_SCHEMA = _schema("50GiB", type="string", pattern=SIZE_PATTERN)
_DURATION_SCHEMA = _schema("1h30m", type="string", pattern=DURATION_PATTERN)
SizeMib = Annotated[int, BeforeValidator(parse_size_mib), _SIZE_TEXT, _SIZE_SCHEMA]
DurationS = Annotated[int, BeforeValidator(parse_duration_s), _DURATION_TEXT, _DURATION_SCHEMA]
JobMemoryMib = Annotated[int, BeforeValidator(parse_slurm_memory_mib), _SIZE_TEXT, _schema("4GiB")]
_JOB_TIME_SCHEMA = _schema("1h30m")
JobTimeS = Annotated[int, BeforeValidator(parse_slurm_time_s), _DURATION_TEXT, _JOB_TIME_SCHEMA]
TimeLimitS = Annotated[int, BeforeValidator(parse_time_limit_s), _DURATION_TEXT, _JOB_TIME_SCHEMA]


def at_least(text: str) -> AfterValidator:
    """Return a validator that rejects lower values. ``text``: the minimum, such as ``10m`` or
    ``64MiB``.
    """
    least = parse_size_mib(text) if text.endswith("B") else parse_duration_s(text)

    def check(value: int) -> int:
        if value < least:
            raise BadValueError("value-too-small", f"the value is below the minimum, {text}")
        return value

    return AfterValidator(check)


def at_most(text: str) -> AfterValidator:
    """Return a validator that rejects higher durations. ``text``: the maximum, such as ``7d``."""
    most = parse_duration_s(text)

    def check(value: int) -> int:
        if value > most:
            raise BadValueError("value-too-large", f"the value is above the maximum, {text}")
        return value

    return AfterValidator(check)


def spelled(text: str, description: str) -> Any:
    """Return a pydantic field. ``text``: its default, a duration or size such as ``10m`` or
    ``64MiB``.
    """
    return Field(text, validate_default=True, description=description)
