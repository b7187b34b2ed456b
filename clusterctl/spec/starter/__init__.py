"""The commented spec files that `init` writes, one a provider type."""

from __future__ import annotations

from importlib import resources

from clusterctl.errors import UsageError
from clusterctl.spec.models import PROVIDER_TYPES
from clusterctl.spec.words import did_you_mean, shown


def init_text(provider: str) -> str:
    """A commented `cluster.yaml` for a provider, which is valid as it stands.

    Raises:
        UsageError: there is no such provider.
    """
    if provider not in PROVIDER_TYPES:
        built = f"built in this version: {', '.join(PROVIDER_TYPES)}"
        raise UsageError(
            f"there is no provider {shown(provider)}", why=built, fix=did_you_mean(provider, PROVIDER_TYPES)
        )
    return resources.files(__package__).joinpath(f"{provider}.yaml").read_text(encoding="utf-8")
