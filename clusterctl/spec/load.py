"""Spec files: loaded with every problem and its place, dumped, compared, and those that `init` writes.

The defaults that depend on the current user are filled in here.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from clusterctl.errors import Notice, SpecError, UsageError
from clusterctl.spec.base import HERE, PATTERNS, RECORDED, SCHEMA_DIALECT
from clusterctl.spec.common import Partition, User
from clusterctl.spec.models import PROVIDERS, ClusterSpec, faults
from clusterctl.spec.names import DEFAULT_CLUSTER, did_you_mean
from clusterctl.spec.parse import Document, Filetype, read_text
from clusterctl.spec.units import shown
from clusterctl.util.assets import yaml_text

SPEC: Final = Filetype(
    name="spec",
    model=ClusterSpec,
    faults=faults,
    missing="name another with -f, or write one with clusterctl init",
    empty="clusterctl init writes one to start from",
)
# A line that names the cluster, in a text that may be no YAML.
_NAME_LINE: Final = re.compile(
    rf"""^name:[ \t]+["']?({PATTERNS["label"].regex[1:-1]})["']?[ \t]*(?:#.*)?$""", re.MULTILINE
)


def read_spec(path: Path | None, *, recorded: bool = False) -> ClusterSpec:
    """The spec of a file, not resolved. None: the default, `local` with partition `train` of 2 nodes.

    recorded: the spec is that of hosts that are there: newer rules do not hold for it, or nothing could take
        the hosts down.

    Raises:
        UsageError: the file can't be read.
        SpecError: its content is wrong.
    """
    if path is None:
        return default_spec()
    document = Document(read_text(path, SPEC), str(path), SPEC)
    return document.model({HERE: path.parent.absolute(), RECORDED: recorded})


def resolve_spec(
    spec: ClusterSpec, raised: ClusterSpec | None = None, current_user: CurrentUser | None = None
) -> ClusterSpec:
    """The spec with the defaults that depend on the caller and on the cluster.

    raised: the spec of the cluster of this name as it is up: what ``spec`` leaves to a default stays as it is
        there, so that a new version changes no host. None: the cluster is not up.
    """
    provider = spec.provider.with_images(spec, raised)
    spec = spec.model_copy(update={"provider": provider})
    return resolve_users(spec, current_user or CurrentUser.current(), raised)


def load_spec(
    path: Path | None, *, current_user: CurrentUser | None = None, recorded: bool = False
) -> ClusterSpec:
    """Read the spec of a file, and resolve it."""
    return resolve_spec(read_spec(path, recorded=recorded), current_user=current_user)


def default_spec() -> ClusterSpec:
    """What there is without a file, not resolved."""
    return ClusterSpec(version=1, name=DEFAULT_CLUSTER, partitions=(Partition(name="train", nodes=2),))


def parse_spec(text: str, file: str) -> ClusterSpec:
    """The spec that a text describes, not resolved; ``file`` is named in the problems.

    Raises:
        SpecError: the text is no YAML, or no spec.
    """
    return Document(text, file, SPEC).model()


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
        found = {*_NAME_LINE.findall(text)}
        if len(found) != 1:
            raise
        return found.pop(), exc


def dump_spec(spec: ClusterSpec) -> str:
    """YAML that loads back to the same spec. Fields without a value are left out."""
    return yaml_text(spec.model_dump(mode="json", exclude_none=True), offset=2)


def starter_spec(provider: str) -> str:
    """A commented `cluster.yaml` for a provider, which is valid as it stands.

    Raises:
        UsageError: there is no such provider.
    """
    if provider not in PROVIDERS:
        built = f"built in this version: {', '.join(PROVIDERS)}"
        raise UsageError(
            f"there is no provider {shown(provider)}",
            code="unknown-provider",
            why=built,
            fix=did_you_mean(provider, PROVIDERS),
        )
    folder = resources.files("clusterctl.spec").joinpath("starter")
    machines = () if PROVIDERS[provider].shares_kernel else ("machines",)
    parts = (folder.joinpath(f"{part}.yaml") for part in (provider, *machines, "common"))
    return "".join(part.read_text(encoding="utf-8") for part in parts)


FALLBACK_USER: Final = User(name="hpc", uid=10_000)


@dataclass(frozen=True, slots=True)
class CurrentUser:
    """The account that runs clusterctl. ``name`` is empty for a uid without an account."""

    name: str
    uid: int

    @classmethod
    def current(cls) -> CurrentUser:
        """Whom this process runs as. Under sudo that is root, not the one who called sudo."""
        uid = os.geteuid()
        try:
            return cls(pwd.getpwuid(uid).pw_name, uid)
        except KeyError:
            return cls("", uid)


def resolve_users(
    spec: ClusterSpec, current_user: CurrentUser, raised: ClusterSpec | None = None
) -> ClusterSpec:
    """The spec with its caller-dependent default filled in: ``users``.

    That is the caller, with the provider's number where it has one, or `hpc` when the caller is root or can't
    be an account of the nodes; with the number that this account has in the cluster as it was ``raised``.
    """
    if spec.users:
        return spec
    user = _as_user(current_user, spec) or FALLBACK_USER
    numbers = {one.name: one.uid for one in raised.users} if raised else {}
    user = user.model_copy(update={"uid": numbers.get(user.name, user.uid)})
    return spec.model_copy(update={"users": (user,)})


def job_user_notes(spec: ClusterSpec, current_user: CurrentUser) -> tuple[Notice, ...]:
    """What the user should know about a resolved spec: that jobs don't run under the caller's own name."""
    if current_user.uid == 0 or _as_user(current_user, spec) or spec.users != (FALLBACK_USER,):
        return ()
    who = (
        f"{current_user.name!r} (uid {current_user.uid})" if current_user.name else f"uid {current_user.uid}"
    )
    name, uid = FALLBACK_USER.name, FALLBACK_USER.uid
    text = f"{who} can't be an account of the nodes: jobs run as {name} (uid {uid}); name others under users"
    return (Notice("caller-unfit-for-nodes", text),)


def _as_user(current_user: CurrentUser, spec: ClusterSpec) -> User | None:
    """The caller as an account of the nodes, if that can be: neither root nor any other odd one can."""
    try:
        return User(name=current_user.name, uid=spec.provider.default_uid or current_user.uid)
    except ValidationError:
        return None


_OF_THE_HOSTS: Final = {"version", "name", "provider"}
_OF_A_NODE: Final = frozenset({"nodes", "cpus", "memory", "disk", "gpus"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting, by its dotted key, and what becomes of it."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def differences(before: ClusterSpec, after: ClusterSpec) -> tuple[Difference, ...]:
    """The settings that differ, but for what the hosts are, which the provider compares."""
    was, will = ({key: value for key, value in _settings(spec) if value} for spec in (before, after))
    return tuple(
        Difference(key, f"{will.get(key, 'not set')}, it was {was.get(key, 'not set')}")
        for key in dict.fromkeys((*was, *will))
        if was.get(key) != will.get(key)
    )


def _settings(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Each setting, by its dotted key. A list of mappings is the list of their names, and each by its own."""
    for key, value in spec.model_dump(mode="json", exclude_none=True, exclude=_OF_THE_HOSTS).items():
        yield from _flat(key, value, {"name", *(_OF_A_NODE if key == "partitions" else ())})


def _flat(key: str, value: Any, left_out: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """``left_out``: keys of the mappings in a list."""
    if isinstance(value, list):
        yield key, ", ".join(one["name"] if isinstance(one, Mapping) else one for one in value)
        for one in value:
            if isinstance(one, Mapping):
                kept = {name: part for name, part in one.items() if name not in left_out}
                yield from _flat(f"{key}.{one['name']}", kept)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(f"{key}.{name}", part, {"name"})
    else:
        yield key, str(value).lower() if isinstance(value, bool) else str(value)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec file. What it can't express, `validate` still refuses."""
    return {
        "$schema": SCHEMA_DIALECT,
        **ClusterSpec.model_json_schema(),
        "title": "clusterctl cluster spec",
        "description": "One typed file describes a cluster.",
    }
