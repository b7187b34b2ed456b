"""A provider of which a test writes only the methods that it is about, and its use by `up` and `down`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from clusterctl.providers import registry
from clusterctl.providers.base import Prompts, Provider


class BareProvider(Provider):
    """Has every required method. A call of one that the test has not replaced is an error."""

    takes_single_hosts = False
    recreates_hosts = True

    def _unexpected(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the test expects no such call of the provider")

    check = plan = apply = alive = destroy = _unexpected
    leftovers = orphans = storages = remove_storage = _unexpected


def use_provider(
    monkeypatch: pytest.MonkeyPatch, provider_of: Callable[[Any, Prompts], Provider]
) -> None:
    """Let every spec have this provider, so that no cloud and no machine is asked.

    provider_of: called with the settings of the spec. Returns the provider.
    """
    monkeypatch.setattr(registry, "provider_of", provider_of)
