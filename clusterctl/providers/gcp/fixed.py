"""The settings of a cluster on Google Cloud that stay as they were at its first `up`.

Google can't change them in place, and a change by Terraform would delete hosts before it is known
whether the rest can be created. So `up` refuses it: the user takes the cluster down first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Network
from typing import Any, Final

from clusterctl.errors import UsageError

# Path in Terraform's variables -> setting of the spec.
_OF_CLUSTER: Final = {
    "project": "provider.project",
    "zone": "provider.zone",
    "network.network": "provider.network.network",
    "network.subnetwork": "provider.network.subnetwork",
    "network.host_project": "provider.network.host_project",
    "kms_key": "provider.kms_key",
    "filestore.tier": "provider.filestore",
}
# The same in the controller's variables. The rest of them is changed in place.
_OF_CONTROLLER: Final = {
    "machine_type": "machine_type",
    "image": "image",
    "boot_disk.type": "boot_disk.type",
    "nic_type": "gvnic",
    "tier_1": "tier_1",
    "reservation": "reservation",
}
# The defaults of these depend on the machine type, which is changed in place unless they change.
_BY_MACHINE_TYPE: Final = {"image", "boot_disk.type", "nic_type"}


def reject_changes(applied: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a UsageError that names the changed settings.

    applied: Terraform's variables at the last `up`. wanted: those for the spec.
    """
    differing = _differing(_OF_CLUSTER, applied, wanted)
    changes = {_OF_CLUSTER[path]: values for path, values in differing.items()}
    ranges = (_value(applied, "network.cidr"), _value(wanted, "network.cidr"))
    if not _contains(ranges[1], ranges[0]):
        changes["provider.network.cidr"] = ranges
    differing = _differing(_OF_CONTROLLER, _controller(applied), _controller(wanted))
    if not differing.keys() & _BY_MACHINE_TYPE:
        differing.pop("machine_type", None)
    for path, values in differing.items():
        changes[f"provider.controller.{_OF_CONTROLLER[path]}"] = values
    if changes:
        raise error(
            changes,
            "; ".join(
                f"{name} was {_text(a)}, and is {_text(b)}" for name, (a, b) in changes.items()
            ),
        )


def error(settings: Collection[str], why: str) -> UsageError:
    """Return the refusal of a change of these settings."""
    return UsageError(
        f"can't be changed while the cluster is up: {', '.join(settings)}",
        code="fixed-while-up",
        where=", ".join(settings),
        why=why,
        fix="restore it; or take the cluster down first: `clusterctl down`",
    )


def _controller(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    hosts = variables["hosts"].values()
    return next(host for host in hosts if host["role"] == "controller")


def _differing(paths: Iterable[str], before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Return path -> (value before, value after) of variables that differ."""
    values = {path: (_value(before, path), _value(after, path)) for path in paths}
    return {path: (was, now) for path, (was, now) in values.items() if was != now}


def _value(variables: Any, path: str) -> Any:
    for name in path.split("."):
        variables = (variables or {}).get(name)
    return variables


def _contains(wider: str | None, narrower: str | None) -> bool:
    """Return whether an address range is another one, or was enlarged from it."""
    if wider is None or narrower is None:
        return wider == narrower
    return IPv4Network(narrower).subnet_of(IPv4Network(wider))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "/".join(str(part) for part in value.values() if part is not None)
    return (
        "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
