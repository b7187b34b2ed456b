"""Reach every host over SSH, in parallel, and learn its hardware facts in the same round trip."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from clusterctl.errors import ClusterctlError, Failure, TransportError, UnreachableError
from clusterctl.inventory import Host, Inventory
from clusterctl.slurm.facts import FACTS_ARGV, NodeFacts, parse_facts
from clusterctl.transport.ssh import SSHTransport
from clusterctl.workspace import Workspace

TIMEOUT_S = 60.0
_AT_ONCE = 32
_PAUSE_S = 0.1


def reach(
    inventory: Inventory, workspace: Workspace, *, timeout_s: float = TIMEOUT_S
) -> Mapping[str, NodeFacts]:
    """Host name -> facts, once every host answers.

    Raises:
        TransportError: some hosts did not answer in time; one failure a host.
    """
    deadline = time.monotonic() + timeout_s
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(inventory.hosts))) as pool:
        answers = list(pool.map(lambda host: _ask(host, workspace, deadline), inventory.hosts))
    facts = {
        host.name: a for host, a in zip(inventory.hosts, answers, strict=True) if isinstance(a, NodeFacts)
    }
    failures = tuple(failure for a in answers if isinstance(a, ClusterctlError) for failure in a.failures)
    if failures:
        raise TransportError(
            f"{len(failures)} of {len(answers)} hosts can't be reached",
            why="; ".join(f"{f.host}: {f.cause}" for f in failures),
            fix=f"see what `ssh -F {workspace.ssh_config} HOST` says, then run `clusterctl up` again",
            failures=failures,
        )
    return facts


def _ask(host: Host, workspace: Workspace, deadline: float) -> NodeFacts | ClusterctlError:
    while True:
        transport = SSHTransport(host.name, workspace.ssh_config)
        try:
            return parse_facts(transport.run(FACTS_ARGV, timeout_s=30).stdout)
        except UnreachableError as exc:  # still booting, perhaps
            if time.monotonic() > deadline:
                return _of(host, exc)
            time.sleep(_PAUSE_S)
        except ClusterctlError as exc:
            return _of(host, exc)
        finally:
            transport.close()


def _of(host: Host, exc: ClusterctlError) -> TransportError:
    failure = Failure(exc.code, exc.why or exc.what, host.name, "reach", exc.fix, exc.retryable)
    return TransportError(exc.what, host=host.name, failures=(failure,))
