"""Probe every host over SSH, in parallel: one round trip tells all facts of it that are requested."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from clusterctl.errors import ClusterctlError, ConfigureError, Failure, TransportError, UnreachableError
from clusterctl.hosts.report import PROGRAM, HostReport, ProbeRequest, StoppingError, parse_report
from clusterctl.spec import distributions
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.local import write_ssh_files
from clusterctl.util.progress import HostStep, Reporter

TIMEOUT_S = 90.0
REVIVE_AFTER_S = 5.0  # so long a host may take to boot, or to say good-bye
_MAX_PARALLEL = 32
_ANSWER_S = 60.0
_PAUSE_S = 0.1


def probe_hosts(
    requests: Mapping[str, ProbeRequest],
    to: Callable[[str], Transport],
    *,
    timeout_s: float = TIMEOUT_S,
    revive: Callable[[], None] = lambda: None,
    revive_after_s: float = REVIVE_AFTER_S,
    report: Reporter = lambda _: None,
) -> Mapping[str, HostReport]:
    """Host name -> its report, once every host answers.

    ``to`` connects to a host. ``revive`` is called every few seconds while some give no answer: it starts
    hosts that have been powered off. ``report`` is told, from threads, of each host's answer.

    Raises:
        TransportError: some hosts did not answer in time; one failure a host.
        ClusterctlError: what ``revive`` raises.
    """
    deadline = time.monotonic() + timeout_s
    given_up = threading.Event()

    def ask(name: str) -> HostReport | ClusterctlError:
        answer = _ask(to(name), requests[name], deadline, given_up)
        report(HostStep(name, "answers", len(requests), failed=isinstance(answer, ClusterctlError)))
        return answer

    with ThreadPoolExecutor(max_workers=max(1, min(_MAX_PARALLEL, len(requests)))) as pool:
        asking = {name: pool.submit(ask, name) for name in requests}
        try:
            while wait(asking.values(), timeout=revive_after_s).not_done:
                revive()
        except BaseException:  # the pool waits for its threads: Ctrl-C must reach them, also in a frozen host
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for name in requests:
                to(name).close()
            raise
        given_up.set()
    answers = {name: future.result() for name, future in asking.items()}
    failed = {name: a for name, a in answers.items() if isinstance(a, ClusterctlError)}
    if failed:
        raise _unreached(failed, of=len(answers))
    return {name: view for name, view in answers.items() if isinstance(view, HostReport)}


def reject_full_disks(views: Mapping[str, HostReport]) -> None:
    """Nothing can be configured, and no job started, where nothing can be written.

    Raises:
        ConfigureError: a file system of some host is full; one failure each.
    """
    failures = tuple(
        Failure("disk-full", str(disk), name, "reach", "remove what is not needed there")
        for name, view in views.items()
        for disk in view.full
    )
    if failures:
        raise ConfigureError(
            f"no room left on {', '.join(dict.fromkeys(str(f.host) for f in failures))}",
            why="; ".join(f"{f.host}: {f.cause}" for f in failures),
            fix="remove what is not needed there (`clusterctl ssh HOST`), then run `clusterctl up` again",
            failures=failures,
        )


def _ask(
    transport: Transport, request: ProbeRequest, deadline: float, given_up: threading.Event
) -> HostReport | ClusterctlError:
    while True:
        try:
            answer = transport.run(("sudo", "-n", *request.argv()), stdin=PROGRAM, timeout_s=_ANSWER_S)
            return parse_report(answer.stdout)
        except (UnreachableError, StoppingError) as exc:  # still booting, perhaps, or about to
            if time.monotonic() > deadline or given_up.wait(_PAUSE_S):
                return exc
        except ClusterctlError as exc:
            return exc


def _unreached(failed: Mapping[str, ClusterctlError], *, of: int) -> TransportError:
    failures = tuple(
        Failure(exc.code, exc.why or exc.what, name, "reach", exc.fix, exc.retryable)
        for name, exc in failed.items()
    )
    return TransportError(
        f"{len(failed)} of {of} hosts can't be reached",
        why="; ".join(f"{f.host}: {f.cause}" for f in failures),
        fix="see what `clusterctl ssh HOST` says, then run `clusterctl up` again",
        failures=failures,
    )


_DISTRIBUTION = ProbeRequest(space=())


def with_distributions(
    inventory: Inventory,
    workspace: Workspace,
    to: Callable[[str], Transport],
    *,
    report: Reporter = lambda _: None,
) -> Inventory:
    """The inventory, with the distribution of every host in it: those without one are probed.

    Raises:
        TransportError: some hosts did not answer in time.
        ProvisionError: some can't be configured, or differ from the others; one failure a host.
    """
    unseen = [host.name for host in inventory.hosts if host.distribution == distributions.UNSEEN]
    if not unseen:
        return inventory
    write_ssh_files(inventory, workspace)
    try:
        views = probe_hosts(dict.fromkeys(unseen, _DISTRIBUTION), to, report=report)
    except TransportError as exc:
        by_hand = f"ssh -F {shlex.quote(str(workspace.ssh_config))} HOST"
        fix = f"see what `{by_hand}` says, then run `clusterctl up` again"
        raise TransportError(exc.what, why=exc.why, fix=fix, failures=exc.failures) from exc
    found = {host.name: host.distribution for host in inventory.hosts}
    found |= {name: view.distribution for name, view in views.items()}
    distributions.common(found)
    hosts = (host.model_copy(update={"distribution": found[host.name]}) for host in inventory.hosts)
    return inventory.model_copy(update={"hosts": tuple(hosts)})
