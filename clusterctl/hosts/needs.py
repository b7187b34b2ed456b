"""The unmet needs of hosts, as their health check reports them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from clusterctl.state.inventory import HEALTH_PROGRAM
from clusterctl.transport.base import Connect
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import Deadline

# The code of a check that could not look, in the report of the health check.
NOT_LOOKED = "not-looked-at"
REPORT = ("sudo", "-n", HEALTH_PROGRAM, "report")


@dataclass(frozen=True, slots=True)
class UnmetNeed:
    """A need of a host that is not met: `needs` of a role's touches.yml."""

    code: str
    what: str
    why: str
    fix: str


def lacks_of(
    hosts: Collection[str], to: Connect, *, within_s: float
) -> Mapping[str, list[UnmetNeed]]:
    """Return host -> its unmet needs, without those that were not checked. Hosts that lack nothing, or
    don't answer in time, are left out.
    """

    def ask(host: str) -> list[UnmetNeed]:
        try:
            needs = json.loads(to(host).run(REPORT).stdout)
            return [UnmetNeed(**need) for need in needs if need["code"] != NOT_LOOKED]
        except (ValueError, TypeError, LookupError):
            # The program is of an earlier version.
            return []

    answers, _ = call_on_hosts(hosts, ask, limit=Deadline.within(within_s))
    return {host: lacks for host, lacks in answers.items() if lacks}


def text_of(lacks: Collection[UnmetNeed]) -> str:
    return "; ".join(lack.why for lack in lacks)
