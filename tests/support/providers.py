"""A provider for tests that replace only the methods they are about."""

from __future__ import annotations

from typing import NoReturn

from clusterctl.providers.base import Provider


class BareProvider(Provider):
    """Has every required method. A call of one that the test has not replaced is an error."""

    takes_single_hosts = False
    recreates_hosts = True

    def _unexpected(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the test expects no such call of the provider")

    check = plan = apply = alive = destroy = _unexpected
    leftovers = orphans = kept_storage = remove_storage = _unexpected
