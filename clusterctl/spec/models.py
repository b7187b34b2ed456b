"""ClusterSpec, the model of a spec file; the providers of this version; checks between fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, ClassVar, Final, Self, get_args

from pydantic import Discriminator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from clusterctl.errors import Notice, ProvisionError
from clusterctl.spec import distributions
from clusterctl.spec.base import (
    INCONSISTENT,
    PATTERNS,
    RECORDED,
    UNKNOWN,
    Loc,
    SpecFault,
    dotted,
    is_partial,
    repeated,
)
from clusterctl.spec.common import RESERVED_PARTITIONS, ClusterBase, ProviderSettings, Refusal
from clusterctl.spec.distributions import Distribution, SoftwareRefusal
from clusterctl.spec.hosts import public_part
from clusterctl.spec.names import MAX_COUNT
from clusterctl.spec.providers.existing import ExistingSettings
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.spec.slurm_lines import faults_of
from clusterctl.spec.software import SlurmSource
from clusterctl.spec.units import shown

_OF_SLURM: Final = {
    "slurm.accounts": "accounts need Slurm, but scheduler is none",
    "slurm.qos": "qualities of service need Slurm, but scheduler is none",
    "slurm.extra": "scheduler is none, so there is no slurm.conf",
    "software.slurm": "scheduler is none, so Slurm is not installed",
    "provider.auto_down": "only Slurm can tell that a cluster is idle, but scheduler is none",
    "users.accounts": "accounts need Slurm, but scheduler is none",
    "users.limits": "limits need Slurm, but scheduler is none",
}


# The settings of each provider. The order is that of messages that list the providers.
AnyProvider = LocalSettings | GcpSettings | OnpremSettings | ExistingSettings
PROVIDERS: Final[Mapping[str, type[ProviderSettings]]] = {
    get_args(settings.model_fields["type"].annotation)[0]: settings
    for settings in get_args(AnyProvider)
}
DEFAULT_PROVIDER: Final = LocalSettings()


def settings_of_project(project: str) -> AnyProvider:
    """Return settings for a search of a whole cloud project."""
    return _first(kind.of_project(project) for kind in get_args(AnyProvider))


def settings_of_login(login: str) -> AnyProvider:
    """Return the settings of a cluster that other people operate. ``login`` is not checked yet."""
    return _first(kind.of_login(login) for kind in get_args(AnyProvider))


def _first(settings: Iterable[AnyProvider | None]) -> AnyProvider:
    return next(one for one in settings if one is not None)


class UnknownProvider(ProviderSettings):
    """A provider that only another version has."""

    refuses: ClassVar[tuple[Refusal, ...]] = ()
    foreign: ClassVar[bool] = False
    adopts_hosts: ClassVar[bool] = False
    may_have_fabric: ClassVar[bool] = False
    shares_kernel: ClassVar[bool] = False
    is_cloud: ClassVar[bool] = False
    late_account_fix: ClassVar[str] = ""
    first_verb: ClassVar[str] = "up"
    default_uid: ClassVar[int | None] = None


def traits_of(provider: str) -> type[ProviderSettings]:
    """Return the settings of a provider by its name."""
    return PROVIDERS.get(provider, UnknownProvider)


class ClusterSpec(ClusterBase):
    """A cluster."""

    provider: Annotated[AnyProvider, Discriminator("type")] = Field(
        DEFAULT_PROVIDER, description="the provider of the hosts, with its settings"
    )

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        skips = is_partial(info) or (info.context or {}).get(RECORDED)
        messages = [] if skips else [f"{fault.key}: {fault.message}" for fault in faults(self)]
        if messages:
            raise PydanticCustomError(INCONSISTENT, "{found}", {"found": "; ".join(messages)})
        return self


def faults(spec: ClusterSpec) -> Iterator[SpecFault]:
    """Yield all contradictions between the fields of a spec. A field with a wrong value may be
    UNKNOWN.
    """
    yield from spec.provider.faults(spec)
    yield from spec.refused(spec.provider.refuses)
    yield from _partition_name_faults(spec)
    if spec.scheduler == "none":
        fix = "remove {}, or write scheduler: slurm"
        rows = ((key, reason, fix.format(key.split(".")[-1])) for key, reason in _OF_SLURM.items())
        yield from spec.refused(rows)
    yield from _distribution_faults(spec)
    fields = (
        ("partitions", "name", [partition.name for partition in spec.partitions]),
        ("users", "name", [user.name for user in spec.users]),
        ("users", "uid", [user.uid for user in spec.users]),
        ("slurm.accounts", "name", [account.name for account in spec.slurm.accounts]),
        ("slurm.qos", "name", [qos.name for qos in spec.slurm.qos]),
    )
    for where, field, values in fields:
        at = tuple(where.split("."))
        for index, first in repeated(values):
            message = f"{shown(values[index])} is already the {field} of {dotted((*at, first))}"
            yield SpecFault(
                "value-twice", (*at, index, field), message, f"every {field} must be unique"
            )
    yield from _slurm_line_faults(spec)
    for index, user in enumerate(spec.users):
        keys = [key and public_part(key) for key in user.ssh_keys]
        for field, entries in (("accounts", user.accounts), ("ssh_keys", keys)):
            for number, _ in repeated(entries):
                message = f"{shown(entries[number])} is already in this list"
                yield SpecFault(
                    "value-twice", ("users", index, field, number), message, "list it once"
                )


def _partition_name_faults(spec: ClusterSpec) -> Iterator[SpecFault]:
    """Yield a fault for each name of a partition that can't be part of the names of hosts."""
    label = PATTERNS["label"]
    for index, name in enumerate(partition.name for partition in spec.partitions):
        loc = ("partitions", index, "name")
        if spec.provider.foreign or not isinstance(name, str):
            continue
        if not label.matches(name):
            yield SpecFault("bad-format", loc, f"name must be {label.asks_for}, not {shown(name)}")
        elif name in RESERVED_PARTITIONS:
            message = f"{name!r} is reserved: it is a name that clusterctl or Slurm uses"
            yield SpecFault("name-reserved", loc, message)


def _slurm_line_faults(spec: ClusterSpec) -> Iterator[SpecFault]:
    """Yield a fault for each line of ``slurm.extra`` that contradicts another line or the
    partitions.
    """
    values = (
        *spec.slurm.extra,
        *(value for part in spec.partitions for value in (part.name, part.nodes, part.hosts)),
    )
    if UNKNOWN in values:
        return
    lines = spec.slurm.lines
    names_nodes = any(line.defines for line in lines)
    if names_nodes and spec.node_count > MAX_COUNT:
        # Too many nodes are a fault of their own.
        return
    nodes = spec.nodes_by_partition if names_nodes else {}
    yield from faults_of(lines, nodes)


def _distribution_faults(spec: ClusterSpec) -> Iterator[SpecFault]:
    """Yield a fault for each key that names software which the hosts' distribution does not
    have.
    """
    # Wrong distributions, machine types and numbers of GPUs are reported at their own fields.
    with suppress(ProvisionError, LookupError, TypeError, ValueError):
        release = spec.provider.expected_release(spec)
        distribution = distributions.distribution_of(release) if release else None
        for loc, refusal in software_refusals(spec, distribution):
            yield SpecFault(refusal.code, loc, f"{refusal.what}: {refusal.why}", refusal.fix)


def software_refusals(
    spec: ClusterSpec, distribution: Distribution | None
) -> Iterator[tuple[Loc, SoftwareRefusal]]:
    """Yield (key, reason) for the software in a spec that hosts with this distribution can't have.

    distribution: None: unknown until the hosts are probed.
    """
    if distribution is None:
        return
    origin = spec.software.slurm.origin
    if spec.has_slurm and not spec.provider.shares_kernel:
        refusal = distributions.refuse_slurm_source(origin, distribution)
        if refusal:
            yield ("software", "slurm", "from"), refusal
    if refusal := distributions.refuse_toolkit(spec.software.nvidia.toolkit, distribution):
        yield ("software", "nvidia", "toolkit"), refusal


def software_notes(spec: ClusterSpec, distribution: Distribution | None) -> tuple[str, ...]:
    """Return a warning if the distribution's Slurm is used and has known vulnerabilities."""
    if distribution is None or not distribution.slurm_flaws:
        return ()
    # Local nodes can't have another Slurm, and only the user of this machine reaches them.
    if spec.provider.shares_kernel or not spec.has_slurm or spec.software.slurm != SlurmSource():
        return ()
    fix = "a new cluster with `software: {slurm: {from: openhpc}}` has a maintained release"
    return (
        Notice("slurm-vulnerable", f"{distribution.slurm_flaws}; {fix}: see docs/distributions.md"),
    )
