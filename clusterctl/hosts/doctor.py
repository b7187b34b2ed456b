"""Looks at hosts that are, or are to become, part of a cluster: what is wrong, why, and how to mend it.

All hosts are asked at once, and each says everything in one round trip; nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from clusterctl.errors import ClusterctlError, Failure
from clusterctl.hosts.checks import Expected, Finding, Seen, judge
from clusterctl.hosts.facts import PROGRAM, Asked, Facts, parse_facts
from clusterctl.util.parallel import parallel_map

__all__ = ["Asked", "Expected", "Facts", "Finding", "Report", "Root", "examine", "failures"]

# Runs a command as root on a host, with bytes on its standard input; its standard output.
Root = Callable[[str, Sequence[str], bytes], str]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found; ``facts`` are those of the hosts that answered."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, Facts]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What keeps hosts out of the cluster."""
        return tuple(finding for finding in self.findings if finding.level == "error")


def examine(
    asked: Asked,
    expected: Mapping[str, Expected],
    root: Root,
    *,
    leader: str,
    only: Collection[str] = (),
) -> Report:
    """Look at every host of ``expected``, or at those of ``only``.

    One that can't be reached is a finding, like all else.
    """
    hosts = [host for host in expected if not only or host in only]
    answers = dict(zip(hosts, parallel_map(hosts, lambda host: _look(host, asked, root)), strict=True))
    silent = [
        _unreached(host, answer) for host, answer in answers.items() if isinstance(answer, ClusterctlError)
    ]
    seen = {host: answer for host, answer in answers.items() if isinstance(answer, Seen)}
    found = judge(seen, expected, leader=leader)
    return Report((*silent, *found), {host: one.facts for host, one in seen.items()})


def failures(findings: Sequence[Finding], *, phase: str) -> tuple[Failure, ...]:
    """The findings as the failures of an error."""
    return tuple(Failure(f.code, f"{f.what}: {f.why}", f.host, phase, f.fix) for f in findings)


def _look(host: str, asked: Asked, root: Root) -> Seen | ClusterctlError:
    begun = time.time()
    try:
        facts = parse_facts(root(host, asked.argv(), PROGRAM))
    except ClusterctlError as exc:
        return exc
    ended = time.time()
    # Its clock was read between the two; what lies in between is not skew.
    skew_s = facts.time - min(max(facts.time, begun), ended)
    return Seen(facts, skew_s)


def _unreached(host: str, error: ClusterctlError) -> Finding:
    (failure, *_) = error.failures  # of one host, which may say more than the error's own code
    return Finding(host, "error", failure.code, error.what, error.why or "it gave no reason", error.fix)
