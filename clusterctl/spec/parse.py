"""From a file's text to its model. All problems of a file come out together, with their places."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.kind import Kind, M
from clusterctl.spec.problems import Places
from clusterctl.spec.source import Source, read_source
from clusterctl.spec.words import shown

MAX_BYTES: Final = 1024 * 1024


def parse(text: str, file: str, kind: Kind[M], *, context: Mapping[str, Any] | None = None) -> M:
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


def read_text(path: Path, kind: Kind[M]) -> str:
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
