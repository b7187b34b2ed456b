"""Load spec files, resolve their defaults, dump and compare specs, and write the files of
`init`.
"""

from __future__ import annotations

import io
import os
import pwd
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from ruamel.yaml import YAML

from clusterctl.errors import Notice, SpecError, UsageError
from clusterctl.spec.base import HERE, PATTERNS, RECORDED, SCHEMA_DIALECT
from clusterctl.spec.common import Partition, User
from clusterctl.spec.models import PROVIDERS, ClusterSpec, faults
from clusterctl.spec.names import DEFAULT_CLUSTER, did_you_mean
from clusterctl.spec.parse import Document, Filetype, read_text
from clusterctl.spec.units import shown

SPEC: Final = Filetype(
    name="spec",
    model=ClusterSpec,
    faults=faults,
    missing="name a spec file with -f, or create a spec with `clusterctl init`",
    empty="create a spec to start from with `clusterctl init`",
)
# Matches the line with the cluster's name, even in a text that is not valid YAML.
_NAME_LINE: Final = re.compile(
    rf"""^name:[ \t]+["']?({PATTERNS["label"].regex[1:-1]})["']?[ \t]*(?:#.*)?$""", re.MULTILINE
)


def read_spec(path: Path | None, *, recorded: bool = False) -> ClusterSpec:
    """Read a spec file. ``resolve_spec`` must still fill in its defaults.

    path: the spec file. None: return the default spec, with 2 local nodes in the partition `train`.
    recorded: whether the hosts of the spec exist already. Then contradictions between fields are
        allowed.

    Raises:
        UsageError: the file can't be read.
        SpecError: the content of the file is wrong.
    """
    if path is None:
        return default_spec()
    return _model(read_text(path, SPEC), path, recorded=recorded)


def _model(text: str, path: Path, *, recorded: bool = False) -> ClusterSpec:
    return Document(text, str(path), SPEC).model({HERE: path.parent.absolute(), RECORDED: recorded})


def resolve_spec(
    spec: ClusterSpec, raised: ClusterSpec | None = None, current_user: CurrentUser | None = None
) -> ClusterSpec:
    """Fill in the defaults that depend on the caller's account and on the running cluster.

    raised: the spec of the running cluster with this name, if any. The defaults are taken from this
        spec, so that a new version of clusterctl, with other defaults, changes no host.
    """
    provider = spec.provider.with_images(spec, raised)
    spec = spec.model_copy(update={"provider": provider})
    return resolve_users(spec, current_user or CurrentUser.current(), raised)


def load_spec(
    path: Path | None, *, current_user: CurrentUser | None = None, recorded: bool = False
) -> ClusterSpec:
    """Read a spec file as ``read_spec`` does, and fill in its defaults as ``resolve_spec`` does."""
    return resolve_spec(read_spec(path, recorded=recorded), current_user=current_user)


def default_spec() -> ClusterSpec:
    """Return the spec for commands without a spec file. ``resolve_spec`` must still fill in its
    defaults.
    """
    return ClusterSpec(
        version=1, name=DEFAULT_CLUSTER, partitions=(Partition(name="train", nodes=2),)
    )


def parse_spec(text: str, file: str) -> ClusterSpec:
    """Parse the text of a spec. ``resolve_spec`` must still fill in its defaults.

    file: the name of the file in error messages.

    Raises:
        SpecError: the text is not YAML, or not a valid spec.
    """
    return Document(text, file, SPEC).model()


def read_name(path: Path) -> tuple[str, SpecError | None]:
    """Return (name of the cluster in a spec file, error if the rest of the file is wrong).

    Raises:
        UsageError: the file can't be read.
        SpecError: the file is wrong, and the cluster's name can't be found.
    """
    text = read_text(path, SPEC)
    try:
        return _model(text, path).name, None
    except SpecError as exc:
        names = {*_NAME_LINE.findall(text)}
        if len(names) != 1:
            raise
        return names.pop(), exc


def dump_spec(spec: ClusterSpec) -> str:
    """Return YAML that loads to the same spec. Fields without a value are omitted.

    If others operate the cluster, defaults are omitted too: most of them are about software on its
    hosts.
    """
    short = spec.provider.foreign
    values = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=short)
    return yaml_text(values)


def yaml_text(document: Mapping[str, Any]) -> str:
    """Return a document as YAML with indented lists. Lines are not folded."""
    yaml = YAML()
    stream = io.StringIO()
    yaml.width = 2**16
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(document, stream)
    return stream.getvalue()


def starter_spec(provider: str) -> str:
    """Return the text of a commented `cluster.yaml` for a provider. The text is valid without
    edits.

    Raises:
        UsageError: there is no such provider.
    """
    if provider not in PROVIDERS:
        raise UsageError(
            f"there is no provider {shown(provider)}",
            code="not-found",
            about="provider",
            why=f"the providers of this version: {', '.join(PROVIDERS)}",
            fix=did_you_mean(provider, PROVIDERS) or "use one of these providers",
        )
    package = resources.files("clusterctl.spec")
    traits = PROVIDERS[provider]
    more = () if traits.foreign else ("common",) if traits.shares_kernel else ("machines", "common")
    parts = (
        package.joinpath("providers", f"{provider}.yaml"),
        *(package.joinpath("starter", f"{part}.yaml") for part in more),
    )
    text = "".join(part.read_text(encoding="utf-8") for part in parts)
    if traits.foreign or traits.adopts_hosts:
        return text
    storage = package.joinpath("starter", "storage.yaml").read_text(encoding="utf-8")
    return f"{text}\n{storage}"


FALLBACK_USER: Final = User(name="hpc", uid=10_000)


@dataclass(frozen=True, slots=True)
class CurrentUser:
    """The account that runs clusterctl. ``name`` is empty if the uid has no account."""

    name: str
    uid: int

    @classmethod
    def current(cls) -> CurrentUser:
        """Return the account of this process. Under sudo, this is root rather than the caller of
        sudo.
        """
        uid = os.geteuid()
        try:
            return cls(pwd.getpwuid(uid).pw_name, uid)
        except KeyError:
            return cls("", uid)


def resolve_users(
    spec: ClusterSpec, current_user: CurrentUser, raised: ClusterSpec | None = None
) -> ClusterSpec:
    """Fill in ``users`` if it is empty: with the caller's account, or with `hpc` if the nodes can't
    have it.

    The nodes can't have root, for example. The uid is the account's uid in the running cluster
    (``raised``), or else the provider's default uid, or else the caller's uid. Others' clusters
    have no users.
    """
    if spec.users or spec.provider.foreign:
        return spec
    user = _as_user(current_user, spec) or FALLBACK_USER
    uids = {account.name: account.uid for account in raised.users} if raised else {}
    user = user.model_copy(update={"uid": uids.get(user.name, user.uid)})
    return spec.model_copy(update={"users": (user,)})


def job_user_notes(spec: ClusterSpec, current_user: CurrentUser) -> tuple[Notice, ...]:
    """Return a note if jobs run as `hpc` because the nodes can't have the caller's account; else
    nothing.
    """
    if current_user.uid == 0 or _as_user(current_user, spec) or spec.users != (FALLBACK_USER,):
        return ()
    caller = (
        f"{current_user.name!r} (uid {current_user.uid})"
        if current_user.name
        else f"uid {current_user.uid}"
    )
    name = FALLBACK_USER.name
    uid = FALLBACK_USER.uid
    text = (
        f"the nodes can't have the account {caller}: jobs run as {name} (uid {uid}); see the key "
        "`users`"
    )
    return (Notice("caller-unfit-for-nodes", text),)


def _as_user(current_user: CurrentUser, spec: ClusterSpec) -> User | None:
    """Return the caller's account as a user of the spec. ``None`` if nodes can't have it, as with
    root.
    """
    try:
        return User(name=current_user.name, uid=spec.provider.default_uid or current_user.uid)
    except ValidationError:
        return None


# A public SSH key: its constant first characters, and those at its end, which tell it from other
# keys.
_KEY: Final = re.compile(r"\b(AAAA)[A-Za-z0-9+/]{48,}([A-Za-z0-9+/]{12}=*)")
_OF_THE_HOSTS: Final = {"version", "name", "provider"}
_OF_A_NODE: Final = frozenset({"nodes", "cpus", "memory", "gpus"})


@dataclass(frozen=True, slots=True)
class SpecDifference:
    """A changed setting. ``key``: such as ``storage.name``. ``what``: text with the old and the new
    value.
    """

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def differences(before: ClusterSpec, after: ClusterSpec) -> tuple[SpecDifference, ...]:
    """Return the settings that differ between two specs, except the provider's and the nodes'
    resources.
    """
    old, new = ({key: value for key, value in _settings(spec) if value} for spec in (before, after))
    return tuple(
        SpecDifference(key, f"{old.get(key, 'not set')} -> {new.get(key, 'not set')}")
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    )


def _settings(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of each setting that is not about hosts, such as
    ``storage.name``.
    """
    values = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_OF_THE_HOSTS)
    for key, value in values.items():
        yield from _flat(key, value, {"name", *(_OF_A_NODE if key == "partitions" else ())})


def _flat(key: str, value: Any, left_out: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        names = (
            entry["name"] if isinstance(entry, Mapping) else _KEY.sub(r"\1...\2", entry)
            for entry in value
        )
        yield key, ", ".join(names)
        for entry in value:
            if isinstance(entry, Mapping):
                fields = {name: part for name, part in entry.items() if name not in left_out}
                yield from _flat(f"{key}.{entry['name']}", fields)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(f"{key}.{name}", part, {"name"})
    else:
        yield key, str(value).lower() if isinstance(value, bool) else str(value)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec file. `validate` also finds mistakes that the schema can't
    express.
    """
    return {
        "$schema": SCHEMA_DIALECT,
        **ClusterSpec.model_json_schema(),
        "title": "clusterctl cluster spec",
        "description": "A typed description of a cluster.",
    }
