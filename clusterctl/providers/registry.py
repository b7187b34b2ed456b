"""The providers: a case for each. This is the only place outside their folders that imports them.

A provider is imported when it is needed, because each takes a tenth of a second or more.
"""

from __future__ import annotations

from typing import assert_never

from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.spec.models import AnyProvider
from clusterctl.state.workspace import Workspace


def may_have_hosts(workspace: Workspace) -> bool:
    """Return whether files of any provider in a workspace say that it may have hosts, for a cluster
    whose recorded spec is missing or damaged.
    """
    from clusterctl.providers.existing.provider import ExistingProvider  # noqa: PLC0415
    from clusterctl.providers.gcp.provider import GcpProvider  # noqa: PLC0415
    from clusterctl.providers.local.provider import LocalProvider  # noqa: PLC0415
    from clusterctl.providers.onprem.provider import OnpremProvider  # noqa: PLC0415

    providers = (ExistingProvider, GcpProvider, LocalProvider, OnpremProvider)
    return any(provider.may_have_hosts(workspace) for provider in providers)


def provider_of(settings: AnyProvider, prompts: Prompts = NO_PROMPTS) -> Provider:
    """Return the provider for these settings. ``prompts``: callbacks that ask the user."""
    match settings.type:
        case "local":
            from clusterctl.providers.local.provider import LocalProvider  # noqa: PLC0415

            return LocalProvider(settings, prompts)
        case "gcp":
            from clusterctl.providers.gcp.provider import GcpProvider  # noqa: PLC0415

            return GcpProvider(settings, prompts)
        case "onprem":
            from clusterctl.providers.onprem.provider import OnpremProvider  # noqa: PLC0415

            return OnpremProvider(settings, prompts)
        case "existing":
            from clusterctl.providers.existing.provider import ExistingProvider  # noqa: PLC0415

            return ExistingProvider(settings, prompts)
        case _:
            assert_never(settings.type)
