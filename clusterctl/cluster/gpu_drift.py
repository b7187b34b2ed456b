"""NVIDIA's GPUs on the nodes: who gets CuPy, and what to say where they are not as the spec says."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from clusterctl.errors import Failure, VerifyError
from clusterctl.hosts.checks import Finding
from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.report import HostReport
from clusterctl.packages.wheels import Node, is_there, wheelhouse
from clusterctl.spec import ClusterSpec
from clusterctl.spec.distributions import Distribution
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import gpu_lock, job_lock
from clusterctl.util.lifetime import temporary_folder
from clusterctl.util.progress import Reporter

Views = Mapping[str, HostReport]


def gpus_file(spec: ClusterSpec, inventory: Inventory, workspace: Workspace, views: Views) -> str:
    """JSON: compute host -> whether it gets CuPy; the UUIDs of GPUs that Slurm and CUDA count differently."""
    cupy = spec.software.cupy and _can_bring(inventory, workspace)
    shown = {host.name: views[host.name].driver for host in inventory.compute if host.name in views}
    of_each = {
        host: {"cupy": cupy and driver.cards > 0, "uuids": driver.uuids} for host, driver in shown.items()
    }
    return json.dumps(of_each, indent=1, sort_keys=True) + "\n"


def fetch_gpu_wheels(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, views: Views, report: Reporter
) -> tuple[str, ...]:
    """Have CuPy here for the hosts that show GPUs; what is to be said of those that can't get it."""
    hosts = [host.name for host in inventory.compute if host.name in views and views[host.name].driver.cards]
    if not hosts or not spec.software.cupy:
        return ()
    if not _can_bring(inventory, workspace):
        why = "the bundle has no CuPy: say `gpus` in the partition, and make it anew"
        return (f"without CuPy, though they have GPUs: {', '.join(hosts)}; {why}",)
    report("downloading CuPy and CUDA's libraries")
    link_wheels(gpu_lock(), workspace.gpu_wheels, inventory.distribution)
    return ()


def fetch_wheels(inventory: Inventory, workspace: Workspace, report: Reporter) -> None:
    """Have the wheels of the job environment here, for hosts that need not reach an index."""
    if inventory.baked:
        return
    report("downloading the wheels of the job environment")
    link_wheels(job_lock(), workspace.wheels, inventory.distribution)


def link_wheels(lock: Path, link: Path, distribution: Distribution) -> None:
    """Have the wheels of a lock where ``link`` leads."""
    wheels = wheelhouse(lock, Node.of(distribution))
    with temporary_folder(link.parent) as folder:  # so that there is one at any time
        new = folder / link.name
        new.symlink_to(wheels)
        new.replace(link)


def _can_bring(inventory: Inventory, workspace: Workspace) -> bool:
    """A bundle may have none, and then no index can be reached."""
    return not workspace.bundle.exists() or is_there(gpu_lock(), Node.of(inventory.distribution))


def refuse_missing_gpus(
    spec: ClusterSpec,
    inventory: Inventory,
    views: Views,
    limit: Collection[str] = (),
    *,
    needs: Iterable[Finding] = (),
) -> None:
    """The last word of `up`: nodes whose partition has GPUs must show them.

    ``needs``: what drivers are known to lack, such as a reboot; said in place of what nvidia-smi says.

    Raises:
        VerifyError: some don't; one failure a host. All else was done, and the others are at work.
    """
    failures = tuple(_missing(spec, inventory, views, limit, {one.host: one for one in needs}))
    if failures:
        raise VerifyError(
            f"GPUs are missing on {', '.join(str(one.host) for one in failures)}",
            why="; ".join(f"{one.host}: {one.cause}" for one in failures),
            fix=f"{failures[0].fix}; the other nodes are at work",
            failures=failures,
        )


def _missing(
    spec: ClusterSpec,
    inventory: Inventory,
    views: Views,
    limit: Collection[str],
    needs: Mapping[str | None, Finding],
) -> Iterator[Failure]:
    wanted = {partition.name: partition.gpus for partition in spec.partitions}
    for host in inventory.compute:
        gpus = wanted.get(host.partition or "")
        if gpus is None or host.name not in views or (limit and host.name not in limit):
            continue
        driver = views[host.name].driver
        if driver.cards < gpus.count:
            known = needs.get(host.name)
            said, fix = (known.why, known.fix) if known else (_said(driver), _FIXES[bool(driver.cards)])
            cause = f"partition {host.partition} has gpus: {gpus.count} x {gpus.type}, and {said}"
            yield Failure("gpus-missing", cause, host.name, "verify", fix)


_FIXES = {
    False: "see that NVIDIA's driver runs there (`clusterctl ssh HOST -- nvidia-smi`), then run "
    "`clusterctl up` again",
    True: "look for a lost card (`clusterctl ssh HOST -- sudo dmesg | grep -i xid`) or correct gpus in the "
    "spec, then run `clusterctl up` again",
}


def _said(driver: Driver) -> str:
    if driver.fault:
        return f"nvidia-smi says: {driver.fault}"
    if not driver.cards:
        return "there is no nvidia-smi there that shows any"
    return f"nvidia-smi shows {driver.cards}"
