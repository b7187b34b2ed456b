"""Paths in files that a user writes: relative to the file's own folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, ValidationInfo, WithJsonSchema

HERE: Final = "folder"  # in the validation context: the folder that paths are relative to


def _located(path: Path, info: ValidationInfo) -> Path:
    if not path.name:
        raise ValueError("the name of a file is missing here")
    here: Path = (info.context or {}).get(HERE, Path())
    return here / path


def _expanded(text: str, info: ValidationInfo) -> str:
    if not text.strip():
        raise ValueError("the name of a file is missing here")
    here: Path = (info.context or {}).get(HERE, Path())
    return str(here / os.path.expanduser(text))  # noqa: PTH111 - it never raises


FileName = Annotated[
    Path, AfterValidator(_located), WithJsonSchema({"type": "string", "examples": ["requirements.txt"]})
]

# As text: it is written into an ssh_config.
KeyFile = Annotated[
    str, AfterValidator(_expanded), WithJsonSchema({"type": "string", "examples": ["~/.ssh/id_ed25519"]})
]
