"""The settings of a cluster on Google Cloud that stay as they were at its first `up`.

Google can't change them in place, and a change by Terraform would delete hosts before it is known
whether the rest can be created. So `up` refuses it: the user takes the cluster down first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    "image": "image",
    "boot_disk.type": "boot_disk.type",
    "nic_type": "gvnic",
    "tier_1": "tier_1",
    "reservation": "reservation",
}


def reject_changes(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a UsageError that names the changed settings.

    recorded: Terraform's variables at the last `up`. Empty: nothing was created.
    wanted: Terraform's variables for the spec.
    """
    if not recorded:
        return
    changes = {
        setting: (was, now)
        for path, setting in _OF_CLUSTER.items()
        if (was := _value(recorded, path)) != (now := _value(wanted, path))
    }
    if not _contains(_value(wanted, "network.cidr"), _value(recorded, "network.cidr")):
        ranges = (_value(recorded, "network.cidr"), _value(wanted, "network.cidr"))
        changes["provider.network.cidr"] = ranges
    before = _controller(recorded)
    after = _controller(wanted)
    for path, setting in _OF_CONTROLLER.items():
        if (was := _value(before, path)) != (now := _value(after, path)):
            changes[f"provider.controller.{setting}"] = (was, now)
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
