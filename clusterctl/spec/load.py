"""Spec files: loaded with every problem and its place, dumped, and the commented ones that `init` writes."""

from __future__ import annotations

import io
import re
from importlib import resources
from pathlib import Path
from typing import Final

from ruamel.yaml import YAML

from clusterctl.errors import SpecError, UsageError
from clusterctl.spec.base import HERE
from clusterctl.spec.checks import findings
from clusterctl.spec.current_user import CurrentUser, resolve_users
from clusterctl.spec.messages import did_you_mean, shown
from clusterctl.spec.models import LABEL, PATTERN_TEXTS, PROVIDER_TYPES, ClusterSpec, Partition
from clusterctl.spec.parse import Filetype, parse, read_text
from clusterctl.spec.source import Source, read_source

SPEC_NAME: Final = "cluster.yaml"
SPEC: Final = Filetype(
    name="spec",
    model=ClusterSpec,
    words=PATTERN_TEXTS,
    findings=findings,
    missing="name another with -f, or write one with clusterctl init",
    empty="clusterctl init writes one to start from",
)
# A line that names the cluster, in a text that may be no YAML.
_NAME_LINE: Final = re.compile(rf"""^name:[ \t]+["']?({LABEL[1:-1]})["']?[ \t]*(?:#.*)?$""", re.MULTILINE)


def load_spec(path: Path | None, *, caller: CurrentUser | None = None) -> ClusterSpec:
    """The resolved spec of a file, or the built-in default: `local`, with partition `train` of 2 nodes.

    Raises:
        UsageError: the file can't be read.
        SpecError: its content is wrong.
    """
    if path is None:
        spec = default_spec()
    else:
        spec = parse(read_text(path, SPEC), str(path), SPEC, context={HERE: path.parent.absolute()})
    return resolve_users(spec, caller or CurrentUser.current())


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
    return parse(text, file, SPEC)


def read_name(path: Path) -> tuple[str, SpecError | None]:
    """The name of a file's cluster, whatever else is wrong with the file; and what is.

    Raises:
        UsageError: the file can't be read.
        SpecError: not even the name can be read.
    """
    text = read_text(path, SPEC)
    try:
        return parse_spec(text, str(path)).name, None
    except SpecError as exc:
        found = {name for name in (_given_name(text), *_NAME_LINE.findall(text)) if name}
        if len(found) != 1:
            raise
        return found.pop(), exc


def _given_name(text: str) -> str:
    """The name in a text that is YAML, though no spec; else ""."""
    source = read_source(text, "", empty="")
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


def starter_spec(provider: str) -> str:
    """A commented `cluster.yaml` for a provider, which is valid as it stands.

    Raises:
        UsageError: there is no such provider.
    """
    if provider not in PROVIDER_TYPES:
        built = f"built in this version: {', '.join(PROVIDER_TYPES)}"
        raise UsageError(
            f"there is no provider {shown(provider)}", why=built, fix=did_you_mean(provider, PROVIDER_TYPES)
        )
    return resources.files("clusterctl.spec").joinpath(f"starter/{provider}.yaml").read_text(encoding="utf-8")
