"""From a spec file to a ClusterSpec and back. All problems of a file come out together, with their places."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.caller import Caller, resolved
from clusterctl.spec.models import LABEL, ClusterSpec, Partition
from clusterctl.spec.problems import Places
from clusterctl.spec.source import Source, read_source
from clusterctl.spec.words import shown

SPEC_NAME: Final = "cluster.yaml"
MAX_BYTES: Final = 1024 * 1024
# A line that names the cluster, in a text that may be no YAML.
_NAME_LINE: Final = re.compile(rf"""^name:[ \t]+["']?({LABEL[1:-1]})["']?[ \t]*(?:#.*)?$""", re.MULTILINE)


def load_spec(path: Path | None, *, caller: Caller | None = None) -> ClusterSpec:
    """The resolved spec of a file, or the built-in default: `local`, with partition `train` of 2 nodes.

    Raises:
        UsageError: the file can't be read.
        SpecError: its content is wrong.
    """
    spec = default_spec() if path is None else parse_spec(_read(path), str(path))
    return resolved(spec, caller or Caller.current())


def default_spec() -> ClusterSpec:
    """What there is without a file, not resolved."""
    return ClusterSpec(version=1, name="local", partitions=(Partition(name="train", nodes=2),))


def find_spec(start: Path) -> Path | None:
    """The spec file of a folder, if it has one. Whether it can be read is seen on reading."""
    path = start / SPEC_NAME
    return path if path.exists() or path.is_symlink() else None


def parse_spec(text: str, file: str) -> ClusterSpec:
    """The spec that a text describes, not resolved; ``file`` is named in the problems.

    Raises:
        SpecError: the text is no YAML, or no spec.
    """
    source = read_source(text, file)
    if not isinstance(source, Source):
        raise SpecError(file, source)
    values = source.root.value
    if not isinstance(values, dict):
        if source.problems:
            raise SpecError(file, source.problems)
        message = f"a spec is a mapping of keys, not {shown(values)}"
        raise SpecError(file, (Problem(file, source.root.line, source.root.column, "spec", message),))
    spec: ClusterSpec | None = None
    errors: list[ErrorDetails] = []
    try:
        spec = ClusterSpec.model_validate(values)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    problems = (*source.problems, *Places(source, file, values).problems(errors))
    if problems or spec is None:
        raise SpecError(file, tuple(sorted(set(problems), key=lambda p: (p.line, p.column, p.key))))
    return spec


def read_name(path: Path) -> tuple[str, SpecError | None]:
    """The name of a file's cluster, whatever else is wrong with the file; and what is.

    Raises:
        UsageError: the file can't be read.
        SpecError: not even the name can be read.
    """
    text = _read(path)
    try:
        return parse_spec(text, str(path)).name, None
    except SpecError as exc:
        found = {name for name in (_given_name(text), *_NAME_LINE.findall(text)) if name}
        if len(found) != 1:
            raise
        return found.pop(), exc


def _given_name(text: str) -> str:
    """The name in a text that is YAML, though no spec; else ""."""
    source = read_source(text, "")
    item = source.root.child("name") if isinstance(source, Source) else None
    return item.text if item is not None and re.fullmatch(LABEL, item.text) else ""


def dump_spec(spec: ClusterSpec) -> str:
    """YAML that loads back to the same spec. Fields without a value are left out."""
    yaml = YAML()
    yaml.width = 2**16  # folded lines are hard to diff
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(spec.model_dump(mode="json", exclude_none=True), stream)
    return stream.getvalue()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as exc:
        raise UsageError(
            f"there is no spec file {path}", fix="name another with -f, or write one with clusterctl init"
        ) from exc
    except (OSError, ValueError) as exc:  # ValueError: a path with a null byte
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            "the spec file can't be read", where=str(path), why=why, fix="name a readable file with -f"
        ) from exc
    if len(raw) > MAX_BYTES:
        raise UsageError("the spec file is larger than 1 MiB", where=str(path), fix="is this the right file?")
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise UsageError(
            "the spec file is not UTF-8 text",
            where=f"{path}:{line}",
            why=f"byte 0x{raw[exc.start]:02x}",
            fix="save it as UTF-8",
        ) from exc
