"""Values of a job that need more than a type: an environment, an image."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, WithJsonSchema

from clusterctl.spec.paths import HERE
from clusterctl.spec.words import shown

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_SLURMS: Final = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX)_")


def can_travel(value: str) -> str:
    """Text that can be written into a script and passed to a process.

    Raises:
        ValueError: it has a null byte, or is not UTF-8.
    """
    if "\0" in value:
        raise ValueError(f"{shown(value)} has a null byte, which no process can get")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"{shown(value)} is not UTF-8 text") from exc
    return value


def _as_mapping(value: object) -> object:
    """``["A=1", "B"]``, as flags say it, as a mapping; a name alone takes the caller's value."""
    if isinstance(value, list | tuple):
        pairs = [entry.partition("=") for entry in value if isinstance(entry, str)]
        if len(pairs) < len(value):
            raise ValueError("each entry must be text such as NAME=value")
        value = {name: text if given else None for name, given, text in pairs}
    if not isinstance(value, Mapping):
        return value
    return {name: _callers(name) if text is None else text for name, text in value.items()}


def _callers(name: str) -> str:
    if name in os.environ:
        return os.environ[name]
    raise ValueError(f"{shown(name)} has no value, nor one here to take; write one")


def _variable(name: str) -> str:
    if not re.fullmatch(_VARIABLE, name):
        raise ValueError(f"{shown(name)} is no name of a variable: letters, digits and underscores")
    if _SLURMS.match(name):
        raise ValueError(f"{name} is Slurm's to set; a value from outside would mislead its steps")
    if name == "PATH":
        raise ValueError("PATH is clusterctl's: the job's Python comes first; change it in your script")
    return name


def _image(value: str, info: ValidationInfo) -> str:
    """An image file that is here, as an absolute path; or a path on the cluster as it was written."""
    if "://" in value:
        raise ValueError(f"{shown(value)} is no file: make one of it with `apptainer pull image.sif ...`")
    here: Path = (info.context or {}).get(HERE, Path())
    try:
        local = (here / value).expanduser().absolute()
        if local.is_file():
            return str(local)
    except (OSError, ValueError, RuntimeError):  # a name that no file here can have, or no such user
        pass
    if value.startswith(("/", "~/")):
        return value
    raise ValueError(f"there is no file {shown(value)} here; a path on the cluster begins with / or ~/")


def _pattern(value: str) -> str:
    """A pattern that can match something."""
    names = [name for name in value.removeprefix("!").strip().split("/") if name]
    if not names or value.startswith("#") or not {".", ".."}.isdisjoint(names):
        raise ValueError(
            f"{shown(value)} can match nothing: write a path from the folder on, without . and .., such as "
            "'results/**'; a # at its beginning as \\#"
        )
    return value


Text = Annotated[str, AfterValidator(can_travel)]
Argument = Annotated[Text, WithJsonSchema({"type": ["string", "number", "boolean"]})]
Environment = Annotated[
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
Image = Annotated[Text, AfterValidator(_image)]
Pattern = Annotated[Text, AfterValidator(_pattern)]  # as in a .gitignore file
