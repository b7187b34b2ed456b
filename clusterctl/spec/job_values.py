"""The types of the values of a job's options, which accept a text or say why it is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
)

from clusterctl.errors import BadValueError
from clusterctl.spec.base import PATTERNS, folder_of
from clusterctl.spec.names import MAX_COUNT
from clusterctl.spec.remote_reference import Reference
from clusterctl.spec.sbatch import plain_array
from clusterctl.spec.units import parse_duration_s, shown
from clusterctl.util.confine import reject_read

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_RESERVED: Final = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX)_")

# The word for a folder or a file that is not wanted. A folder of this name is ./none.
NONE: Final = "none"
_SHORTEST_ALARM_S: Final = 10
# Linux takes 128 KiB for a variable.
_MOST_SECRET: Final = 64 << 10  # bytes


def _can_travel(value: str) -> str:
    """Return the text. Reject null bytes and text that is not UTF-8, which no process can
    receive.
    """
    if "\0" in value:
        raise BadValueError(
            "null-byte", f"{shown(value)} contains a null byte, which no process can receive"
        )
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise BadValueError("not-utf8", f"{shown(value)} is not UTF-8 text") from exc
    return value


def _as_mapping(value: object) -> object:
    """Turn ``["A=1", "B"]`` into a mapping. The value of ``B`` is taken from clusterctl's
    environment.
    """
    if isinstance(value, list | tuple):
        pairs = [entry.partition("=") for entry in value if isinstance(entry, str)]
        if len(pairs) < len(value):
            raise BadValueError("not-text", "each entry must be text of the form NAME=value")
        value = {name: text if given else None for name, given, text in pairs}
    if not isinstance(value, Mapping):
        return value
    for name, text in value.items():
        if text is None and name not in os.environ:
            raise BadValueError(
                "variable-without-value",
                f"{shown(name)} is not set in your environment; write NAME=value",
            )
    return {name: os.environ[name] if text is None else text for name, text in value.items()}


def _secrets(value: object, info: ValidationInfo) -> object:
    """Read the values of ``["A=FILE", "B"]``, or of a mapping. The value of ``B`` is taken from
    clusterctl's environment.

    Messages contain neither a value nor FILE, for which users may have written the value.
    """
    if isinstance(value, list | tuple):
        if not all(isinstance(entry, str) for entry in value):
            raise BadValueError("not-text", "each entry must be text of the form NAME or NAME=FILE")
        value = {name: file or None for name, _, file in (entry.partition("=") for entry in value)}
    if not isinstance(value, Mapping):
        return value
    return {name: _secret(name, source, info) for name, source in value.items()}


def _secret(name: str, source: object, info: ValidationInfo) -> SecretStr:
    """Return the content of a file, or the value of a variable of clusterctl's environment.

    source: path of the file. None or "": the variable ``name``. A value that was read is returned.
    """
    if isinstance(source, SecretStr):
        return source
    if source is None or source == "":
        if name not in os.environ:
            raise BadValueError(
                "secret-without-value",
                f"{shown(name)} is not set in your environment: set it, or write NAME=FILE",
            )
        data = os.fsencode(os.environ[name])
    else:
        reject_read(folder_of(info) / str(source))
        try:
            with open((folder_of(info) / str(source)).expanduser(), "rb") as file:
                data = file.read(_MOST_SECRET + 1)
        except (OSError, ValueError, RuntimeError) as exc:
            reason = getattr(exc, "strerror", None) or "not a valid path"
            raise BadValueError(
                "secret-without-value",
                f"the file with the value of {shown(name)} can't be read ({reason}): after = comes "
                "the path of a file, not the value, which other users could see in the list of "
                "processes",
            ) from exc
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    fault = (
        "is empty"
        if not data
        else f"has more than {_MOST_SECRET >> 10} KiB"
        if len(data) > _MOST_SECRET
        else "has a null byte"
        if b"\0" in data
        else "has several lines"
        if b"\n" in data or b"\r" in data
        else ""
    )
    try:
        text = data.decode()
    except UnicodeDecodeError:
        fault = fault or "is not UTF-8 text"
    if fault:
        raise BadValueError("bad-secret", f"the value of {shown(name)} {fault}")
    return SecretStr(text)


def _variable(name: str) -> str:
    if not re.fullmatch(_VARIABLE, name):
        raise BadValueError(
            "not-a-variable-name",
            f"{shown(name)} is not a variable name: use letters, digits and underscores",
        )
    if _RESERVED.match(name):
        raise BadValueError("variable-reserved", f"{name} can't be set, because Slurm sets {name}")
    if name == "PATH":
        raise BadValueError(
            "variable-reserved",
            "PATH can't be set: clusterctl puts the job's Python first; change PATH in your script",
        )
    return name


def _alarm(text: str) -> str:
    """Check the time of an alarm, a duration such as 1h."""
    _, _, time = text.partition("@")
    if time:
        try:
            seconds = parse_duration_s(time)
        except ValueError as exc:
            raise BadValueError("bad-value", f"the time of the alarm, {exc}") from exc
        if seconds < _SHORTEST_ALARM_S:
            text = f"{shown(time)} is shorter than {_SHORTEST_ALARM_S}s, in which nothing can be judged"
            raise BadValueError("bad-value", text)
    return text


def _image(value: str, info: ValidationInfo) -> str:
    """Return an absolute path if the container image is a file on this machine, or else the
    reference to a registry or the cluster path.
    """
    scheme, separator, name = value.partition("://")
    if separator:
        if scheme != "docker":
            raise BadValueError(
                "not-an-image",
                f"{shown(value)} can't be fetched: write docker://NAME:TAG, or a path",
            )
        try:
            Reference.parse(name)
        except ValueError as exc:
            raise BadValueError("not-an-image", f"{shown(value)}: {exc}") from exc
        return value
    try:
        local = (folder_of(info) / value).expanduser().absolute()
        is_file = local.is_file()
        is_folder = local.is_dir()
    except (OSError, ValueError, RuntimeError):
        # No file can have this name, or the user of ~user does not exist.
        is_file = is_folder = False
    if is_file:
        reject_read(local)
        return str(local)
    if value.startswith(("/", "~/")):
        return value
    if is_folder:
        raise BadValueError(
            "not-an-image",
            f"{shown(value)} is a folder of this machine: send it as a file, of `tar -C "
            f"{shown(value)} -cf IMAGE.tar .`, or name one on the cluster, with / or ~/",
        )
    raise BadValueError(
        "no-such-file",
        f"this machine has no file {shown(value)}; an image in a registry begins with docker://, a "
        "path on the cluster with / or ~/",
    )


def _mount(text: str) -> str:
    """Check a value of --mount, such as ``/shared/data:/data:ro``."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    is_right = _PLACE.fullmatch(source) and (not rest or re.fullmatch(r"/[^:,\s]*", target))
    if not is_right or "," in text or mode not in ("", "ro", "rw"):
        raise BadValueError(
            "mount-form",
            f"{shown(text)} does not have the form SOURCE:TARGET or SOURCE:TARGET:ro, with a path "
            "on the nodes (/, ~/ or $VARIABLE/ first) and a path in the container",
        )
    return text


def _pattern(value: str) -> str:
    names = [name for name in value.removeprefix("!").strip().split("/") if name]
    if not names or value.startswith("#") or not {".", ".."}.isdisjoint(names):
        raise BadValueError(
            "pattern-matches-nothing",
            f"{shown(value)} can't match any file: write a path relative to the folder, without "
            ". and .., such as 'results/**'; write \\# for a leading #",
        )
    return value


def _folder(value: object, info: ValidationInfo) -> object:
    if isinstance(value, bool) or str(value) == NONE:
        return value is True
    if isinstance(value, str | Path) and str(value):
        return folder_of(info) / value
    raise BadValueError(
        "wrong-type", f"must be true, false or the path of a folder, not {shown(value)}"
    )


def _has_words(value: str) -> str:
    if not value.strip():
        raise BadValueError("bad-value", "must be a command, not an empty text")
    return value


def _environment_there(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise BadValueError(
            "bad-value",
            f"{shown(value)} is neither a folder on the cluster nor the name of an environment",
        )
    return value.rstrip("/") or value


def _packages(value: object, info: ValidationInfo) -> object:
    if value is False or str(value) == NONE:
        return False
    if isinstance(value, str | Path) and Path(value).name:
        return folder_of(info) / value
    raise BadValueError(
        "wrong-type", f"must be false or the path of a file that lists packages, not {shown(value)}"
    )


def _run(value: str, info: ValidationInfo) -> str:
    """Return the absolute path of a folder. Other texts, such as a job's id, stay."""
    folder = folder_of(info) / value
    # Unlike Path, this takes any name.
    return str(folder.absolute()) if os.path.isdir(folder) else value


Text = Annotated[str, AfterValidator(_can_travel)]
Command = Annotated[
    Text, AfterValidator(_has_words), WithJsonSchema({"type": "string", "minLength": 1})
]
# The folder to send with a script.
Folder = Annotated[
    bool | Path,
    BeforeValidator(_folder),
    WithJsonSchema({"type": ["boolean", "string"], "minLength": 1}),
]
# The file that lists a program's packages; with extras and groups in brackets after its name.
PackageFile = Annotated[
    Path | Literal[False],
    BeforeValidator(_packages),
    WithJsonSchema({"type": ["boolean", "string"], "minLength": 1}),
]
Argument = Annotated[Text, WithJsonSchema({"type": ["string", "number", "boolean"]})]
Variables = Annotated[
    Mapping[Annotated[str, AfterValidator(_variable)], Text],
    BeforeValidator(_as_mapping),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_VARIABLE}$"},
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
        }
    ),
]
# Variables that only the ranks of a job get. In texts and records, their values are hidden.
Secrets = Annotated[
    Mapping[Annotated[str, AfterValidator(_variable)], SecretStr],
    BeforeValidator(_secrets),
    WithJsonSchema(
        {
            "type": ["object", "array"],
            "propertyNames": {"pattern": f"^{_VARIABLE}$"},
            "additionalProperties": {"type": ["string", "null"]},
            "items": {"type": "string"},
        }
    ),
]
EnvironmentModule = Annotated[str, PATTERNS["module"]]
EnvironmentThere = Annotated[Text, AfterValidator(_environment_there)]
Image = Annotated[Text, AfterValidator(_image)]
Mount = Annotated[Text, AfterValidator(_mount)]


# A pattern as in a .gitignore file.
def _stage(text: str) -> str:
    """Check a value of `stage`, such as ``/shared/x:$TMPDIR/x`` or ``/shared/*.tar:/x:by-node``."""
    source, _, target = text.removesuffix(":by-node").partition(":")
    if not all(_PLACE.fullmatch(path) for path in (source, target)):
        raise BadValueError(
            "stage-form",
            f"{shown(text)} does not have the form SOURCE:TARGET or SOURCE:TARGET:by-node, with two "
            "paths on the nodes that begin with /, ~/ or a variable such as $TMPDIR/",
        )
    return text


# A path on a node.
_PLACE = re.compile(r"(?:/|~/|\$[A-Za-z_]\w*/)[^:\0\n]*[^:\0\n/]")


def _with_own_targets(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Reject values of `stage` if one of their paths is another's target, or is in it."""
    for text in texts:
        source, target, *_ = map(os.path.normpath, text.split(":"))
        if f"{target}/".startswith(f"{source}/"):
            raise BadValueError("stage-inside", f"{shown(text)}: the target is in the source")
        for other in texts:
            above = os.path.normpath(other.split(":")[1])
            if other is not text and f"{target}/".startswith(f"{above}/"):
                raise BadValueError(
                    "stage-twice",
                    f"{shown(text)} and {shown(other)} have the same target, or one is in the other",
                )
    return texts


Stages = Annotated[
    tuple[Annotated[Text, AfterValidator(_stage)], ...], AfterValidator(_with_own_targets)
]
FilePattern = Annotated[Text, AfterValidator(_pattern)]
Dependency = Annotated[
    str,
    PATTERNS["after"],
    WithJsonSchema({"type": ["string", "integer"], "pattern": PATTERNS["after"].regex}),
]

_MAX_SIGNAL_S = 65_535
_ARRAY_RANGE = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?")


def _runnable_array(value: str) -> str:
    indices, _, limit = value.partition("%")
    if limit and int(limit) == 0:
        raise BadValueError(
            "array-runs-nothing", f"{shown(value)} allows no task to run: use %1 or more"
        )
    for first, last, stride in _ARRAY_RANGE.findall(indices):
        if int(last) < int(first):
            raise BadValueError(
                "array-range", f"{first}-{last} is not an ascending range: use {last}-{first}"
            )
        if stride and int(stride) == 0:
            raise BadValueError(
                "array-range", f"{first}-{last}:{stride} has a stride of 0: use 1 or more"
            )
    return value


def _timely_signal(value: str) -> str:
    if int(value.partition("@")[2]) > _MAX_SIGNAL_S:
        raise BadValueError(
            "signal-too-early",
            f"{shown(value)} is earlier than {_MAX_SIGNAL_S} s before the time limit",
        )
    return value


Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]
JobName = Annotated[str, PATTERNS["job_name"]]
Tag = Annotated[str, PATTERNS["job_name"]]
Signal = Annotated[str, PATTERNS["signal"], AfterValidator(_timely_signal)]
Array = Annotated[
    str, BeforeValidator(plain_array), PATTERNS["array"], AfterValidator(_runnable_array)
]
Hang = Annotated[str, PATTERNS["hang"]]
Alarm = Annotated[str, PATTERNS["alarm"], AfterValidator(_alarm)]
Features = Annotated[str, PATTERNS["constraint"]]
Licenses = Annotated[str, PATTERNS["licenses"]]
Gpus = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
Run = Annotated[Text, Field(min_length=1), AfterValidator(_run)]
