"""The unmet needs of hosts, as their health check reports them, and the last trial of the nodes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from clusterctl.errors import CommandError, TransportError
from clusterctl.state.inventory import HEALTH_PROGRAM
from clusterctl.transport.base import Connect, Transport
from clusterctl.util.formatting import moment
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import Deadline
from clusterctl.util.remote_wanted import WANTED

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


@dataclass(frozen=True, slots=True)
class Trial:
    """The last trial of nodes, by `up` or `doctor`. at: Unix seconds, by the administrator's clock.

    nodes: those that were tried. failed: node -> why what jobs do failed there.
    """

    at: float
    nodes: tuple[str, ...]
    failed: Mapping[str, str]

    def __str__(self) -> str:
        tried = f"{moment(self.at)}, on {counted(len(self.nodes), 'node')}"
        found = "; ".join(f"{node}: {why}" for node, why in self.failed.items())
        return f"{tried}: {found or 'what jobs do works'}"


def last_trial(controller: Transport, *, within_s: float) -> Trial | None:
    """Return the last trial that a controller has recorded; None: there was none, or it does not
    answer.
    """
    with suppress(CommandError, TransportError, ValueError, LookupError, TypeError):
        answer = controller.run(("sudo", "-n", "cat", WANTED), timeout_s=within_s).stdout
        trial = json.loads(answer)["trial"]
        return Trial(float(trial["at"]), tuple(trial["nodes"]), dict(trial["failed"]))
    return None


def text_of(lacks: Collection[UnmetNeed]) -> str:
    return "; ".join(lack.why for lack in lacks)
