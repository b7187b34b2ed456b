"""Upgrade Slurm in place, or take an upgrade back, as `slurm.version` of the spec asks for it.

The packages are fetched here, and what they lack is found, before anything is changed. On each host a program
then exchanges them and starts the daemons (the role slurm_upgrade): on the controller first, slurmdbd before
slurmctld, with a copy of the accounting and of slurmctld's state; then on the nodes, which serve the newer
controller meanwhile. Waiting and running jobs are kept. Where a step fails, the former Slurm runs again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.cluster.session import ClusterSession, write_inventory
from clusterctl.configure import ansible, inventory_file
from clusterctl.errors import ConfigureError, UsageError
from clusterctl.packages.repository import fetch_slurm
from clusterctl.packages.wheelhouse import cache_of_downloads
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.session import SHORT_PATIENCE_S, scheduler_of
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import WAIT_S, hold, write_atomic
from clusterctl.util.assets import digest
from clusterctl.util.process import parallel_map

# In their order. Each takes over jobs, accounting and nodes of the three before it; 24.05 and older, of two.
# Source: https://slurm.schedmd.com/upgrades.html
RELEASES: Final = ("21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05")
_WINDOW: Final = 3
_WINDOW_BEFORE: Final = ("24.11", 2)
_WHERE: Final = "slurm.version"
# Keys of slurm.conf that a release does not know any more. Source: its RELEASE_NOTES and CHANGELOG.
_GONE: Final[Mapping[str, frozenset[str]]] = {
    "26.05": frozenset(
        "controlmachine backupcontroller controladdr backupaddr frontendname frontendaddr "
        "accountingstorageuser getenvtimeout jobcontainertype".split()
    )
}
_CONF_KEY: Final = re.compile(r"^(\w+)=", re.MULTILINE)
_PMIX: Final = "mpi_pmix"
_STARTS_BY_PMIX: Final = re.compile(r"--mpi[= ]pmix|SLURM_MPI_TYPE=pmix")
_PLUGIN: Final = re.compile(r"=(\w+)/(\w+)$", re.MULTILINE)
_RUN_AGAIN: Final = "squeue -aht running,suspended -o %A | xargs -rn1 scontrol requeue"
_HAS_PMIX: Final = "ls /usr/lib*/slurm*/mpi_pmix*.so /usr/lib/*/slurm*/mpi_pmix*.so"
# The release of the packages, and whether a daemon runs a program that was exchanged since.
_LOOK: Final = """\
dpkg-query --show --showformat '${Version}\\n' slurm-client
for unit in slurmdbd slurmctld slurmd; do
    pid=$(systemctl show --property MainPID --value "$unit")
    case $(readlink "/proc/$pid/exe") in *deleted*) echo "stale $unit" ;; esac
done
[ ! -e /var/lib/clusterctl-slurm/going ] || echo "an exchange has not ended"
"""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A change of Slurm's release. ``old`` and ``new`` may be the same: hosts that join are brought to it."""

    old: str
    new: str
    distribution: Distribution

    @property
    def is_back(self) -> bool:
        return RELEASES.index(self.new) < RELEASES.index(self.old)

    @property
    def steps(self) -> tuple[str, ...]:
        """What `up` does, for people to read before; none where no release changes."""
        if self.new == self.old:
            return ()
        if self.is_back:
            return (
                f"Slurm {self.old} is taken back to {self.new}, with accounting and queue as at the upgrade",
                "jobs submitted since are forgotten; jobs that ended since, and running ones, run again",
                f"controller: stop slurmctld and slurmdbd, install {self.new}, copy both back, start them",
                f"each node: install {self.new}, restart slurmd",
            )
        return (
            f"Slurm {self.old} is upgraded to {self.new} in place: waiting and running jobs are kept",
            f"here: fetch the packages of {self.new}, and look for what they lack that this cluster uses",
            "controller: install them; stop slurmctld and slurmdbd; copy accounting and state; start "
            "slurmdbd, which converts its tables, then slurmctld",
            "nodes, one at first, then a quarter at a time: install them, restart slurmd; running jobs go on",
            f"where a step fails, {self.old} runs again on that host",
        )


def planned_upgrade(
    spec: ClusterSpec, before: Inventory | None, distribution: Distribution
) -> Upgrade | None:
    """The upgrade that a spec asks for, of a cluster with this inventory or of new hosts; None: none.

    Raises:
        UsageError: Slurm of that release can't be had, or does not take over from the one that runs.
    """
    own, asked = distribution.slurm, spec.slurm.version
    has = (before.slurm if before else "") or own
    if asked is None:
        return Upgrade(has, has, distribution) if has and has != own else None
    if own is None or asked not in (own, *distribution.newer_slurm):
        raise _not_to_be_had(distribution, asked)
    if asked != own and not spec.provider.shares_kernel:
        raise UsageError(
            "Slurm is upgraded in place on local nodes alone",
            where=_WHERE,
            why="on other machines nobody has tried it yet",
            fix="remove slurm.version",
        )
    _reject_gone([line.partition("=")[0].strip() for line in spec.slurm.extra], asked)
    return None if asked == own == has else Upgrade(has or own, asked, distribution)


def _not_to_be_had(distribution: Distribution, wanted: str) -> UsageError:
    own = distribution.slurm
    there = f"its packages are of {own}" if own else "its packages are of another release"
    outside = own is not None and own not in taken_over(wanted)
    those = f"{wanted} takes over jobs and accounting of {', '.join(taken_over(wanted))} alone"
    return UsageError(
        f"{distribution.title} can't have Slurm {wanted}",
        where=_WHERE,
        why=f"{there}; {those}" if outside else there,
        fix="remove slurm.version; or raise a cluster of its own with it, such as of `distribution: "
        "debian-13`: what `collect` brought home stays, accounts come from the spec, waiting jobs are "
        "submitted again, and the accounting's history stays behind",
    )


def taken_over(release: str) -> tuple[str, ...]:
    """The releases that one takes over jobs and accounting from, the oldest first."""
    at = RELEASES.index(release)
    before, fewer = _WINDOW_BEFORE
    return RELEASES[max(0, at - (fewer if at < RELEASES.index(before) else _WINDOW)) : at]


def prepare_slurm(
    session: ClusterSession, upgrade: Upgrade, before: Inventory, *, limit: Collection[str], force: bool
) -> None:
    """Fetch the packages, and refuse what the upgrade would break. Nothing is changed on a host.

    Raises:
        UsageError: the configuration or waiting jobs need what the new release lacks; or going back would
            lose jobs, without ``force``.
    """
    if limit and upgrade.steps:
        raise UsageError(
            "a part of a cluster can't have another release of Slurm", where=_WHERE, fix="leave out --limit"
        )
    if upgrade.is_back:
        if not force:
            raise UsageError(
                f"Slurm {upgrade.old} is taken back to {upgrade.new} only under --force",
                where=_WHERE,
                why="; ".join(upgrade.steps[:2]),
                fix=f"leave slurm.version at {upgrade.old}; or go ahead: `clusterctl up --force`",
            )
        return
    if not upgrade.steps or not _to_exchange(session, upgrade, [before.controller]):
        return
    applied = (session.workspace.rendered / "slurm.conf").read_text()
    _reject_gone(_CONF_KEY.findall(applied), upgrade.new)
    plugins = _fetch(session, upgrade, [before.controller])
    session.note = f"{upgrade.old} to {upgrade.new}"
    lacking = sorted(_plugins_used(session.workspace.rendered) - plugins - {_PMIX})
    if lacking:
        raise UsageError(
            f"Slurm {upgrade.new} lacks plugins that slurm.conf names: {', '.join(lacking)}",
            where=_WHERE,
            why=f"they are not in {upgrade.distribution.title}'s packages of it",
            fix="take what needs them out of slurm.extra and run `clusterctl up`, then set slurm.version",
        )
    if _PMIX in plugins:
        return
    session.notes.append(
        f"Slurm {upgrade.new} has no plugin for PMIx here: `submit` starts ranks by mpirun instead of srun"
    )
    waiting = [*_waiting_for_pmix(session, before)] if not force else []
    if waiting:
        raise UsageError(
            f"waiting jobs start their ranks by PMIx: {', '.join(waiting)}",
            where=_WHERE,
            why=f"the packages of Slurm {upgrade.new} have no plugin for PMIx, so they would fail",
            fix="wait until they have run; or cancel them, and submit them again after the upgrade, when "
            "mpirun starts ranks; or let them fail: `clusterctl up --force`",
        )


def upgrade_first(
    session: ClusterSession, upgrade: Upgrade | None, inventory: Inventory, limit: Collection[str]
) -> Inventory:
    """What is upgraded before hosts are configured: the controller, and on the way back all hosts.

    An older controller does not serve newer nodes.
    """
    if upgrade is None:
        return inventory
    inventory = session.phase(upgrade_controller, upgrade, inventory)
    return session.phase(upgrade_nodes, upgrade, inventory, limit) if upgrade.is_back else inventory


def upgrade_then(
    session: ClusterSession, upgrade: Upgrade | None, inventory: Inventory, limit: Collection[str]
) -> Inventory:
    """What is upgraded once hosts are configured for what the newer Slurm lacks: the nodes.

    On the way back, the state from before the upgrade takes jobs for running that were ended: they run again.
    """
    if upgrade is None:
        return inventory
    if upgrade.is_back:
        # Not before: a slurmctld that is restarted forgets to start what is in its prologue.
        session.connections.to(inventory.controller.name).run(["sh", "-c", _RUN_AGAIN], check=False)
        return _recorded(session, inventory, slurm=upgrade.new)
    return session.phase(upgrade_nodes, upgrade, inventory, limit)


def upgrade_controller(session: ClusterSession, upgrade: Upgrade, inventory: Inventory) -> Inventory:
    controller = inventory.controller
    if _to_exchange(session, upgrade, [controller]):
        if not upgrade.is_back:  # killed from here on, it is upgraded, or about to be
            inventory = _recorded(session, inventory, slurm=upgrade.new)
        try:
            _exchange(session, upgrade, inventory, [controller])
        except ConfigureError:
            _recorded(session, inventory, slurm=upgrade.old)
            raise
        session.note = f"{upgrade.new} on {controller.name}"
    else:
        session.note = "unchanged"
    plugins = session.connections.to(controller.name).run(["sh", "-c", _HAS_PMIX], check=False).stdout
    known = upgrade.old if upgrade.is_back else upgrade.new
    return _recorded(session, inventory, slurm=known, pmix=bool(plugins))


def upgrade_nodes(
    session: ClusterSession, upgrade: Upgrade, inventory: Inventory, limit: Collection[str]
) -> Inventory:
    others = [host for host in inventory.hosts if not host.is_controller]
    if hosts := _to_exchange(session, upgrade, others, limit):
        _exchange(session, upgrade, inventory, hosts)
    session.note = f"{upgrade.new} on {len(hosts)} hosts" if hosts else "unchanged"
    # The end of the way back is recorded once jobs run again, too.
    return inventory if upgrade.is_back else _recorded(session, inventory, slurm=upgrade.new)


def _recorded(session: ClusterSession, inventory: Inventory, **values: object) -> Inventory:
    done = inventory.model_copy(update=values)
    write_inventory(session.spec, done, session.workspace)
    return done


def _reject_gone(keys: Iterable[str], release: str) -> None:
    if gone := sorted({key for key in keys if key.lower() in _GONE.get(release, ())}):
        raise UsageError(
            f"Slurm {release} does not know {', '.join(gone)}",
            where="slurm.extra",
            why="that release has removed what they set, and its daemons would not start",
            fix="remove them and run `clusterctl up`, then set slurm.version",
        )


def _to_exchange(
    session: ClusterSession, upgrade: Upgrade, hosts: Collection[Host], limit: Collection[str] = ()
) -> list[Host]:
    """Of these hosts, or those of the limit, the ones with another release or daemons of another."""

    def differs(host: Host) -> bool:
        argv = ["sudo", "-n", "sh", "-c", _LOOK]
        version, *stale = session.connections.to(host.name).run(argv).stdout.splitlines() or [""]
        return bool(stale) or not version.startswith(f"{upgrade.new}.")

    hosts = [host for host in hosts if not limit or host.name in limit]
    return [host for host, does in zip(hosts, parallel_map(hosts, differs), strict=True) if does]


def _exchange(
    session: ClusterSession, upgrade: Upgrade, inventory: Inventory, hosts: Collection[Host]
) -> None:
    if not upgrade.is_back:
        _fetch(session, upgrade, hosts)
    inventory_file.write_ansible_inventory(session.spec, inventory, session.workspace)
    ansible.run(
        "upgrade_slurm",
        inventory,
        session.workspace,
        limit=[host.name for host in hosts],
        progress=lambda task: session.report(task.step(len(hosts))),
    )


def _fetch(session: ClusterSession, upgrade: Upgrade, hosts: Collection[Host]) -> frozenset[str]:
    """Have the packages for these hosts in the workspace; the plugins that they have."""
    argv = ["cat", "/var/lib/dpkg/status"]
    states = parallel_map(list(hosts), lambda host: session.connections.to(host.name).run(argv).stdout)
    mirror = session.spec.provider.debian_mirror
    target = session.workspace.slurm_packages
    record, inputs = target / "plugins.json", digest(upgrade.new, *sorted(set(states)))
    with suppress(FileNotFoundError, ValueError):
        known = json.loads(record.read_text())
        if known["inputs"] == inputs:
            return frozenset(known["plugins"])
    fetched = target.with_name(f"{target.name}.new")
    shutil.rmtree(fetched, ignore_errors=True)
    plugins: set[str] = set()
    with cache_of_downloads(f"slurm/{upgrade.distribution.release}-{upgrade.new}") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        lock, what = folder / ".lock", "the cache of packages"
        with hold(lock, "up", what=what, wait_s=WAIT_S, waiting=session.report):
            for status in set(states):
                found = fetch_slurm(
                    upgrade.distribution, upgrade.new, status, folder, mirror=mirror, report=session.report
                )
                plugins |= found.plugins
                for name, paths in (("new", found.new), ("old", found.old)):
                    _copy(paths, fetched / name)
    shutil.rmtree(target, ignore_errors=True)
    fetched.rename(target)
    write_atomic(record, json.dumps({"inputs": inputs, "plugins": sorted(plugins)}))
    return frozenset(plugins)


def _copy(paths: Collection[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copy(path, folder)


def _plugins_used(rendered: Path) -> frozenset[str]:
    """The plugins that the configuration names, such as ``select_cons_tres``."""
    texts = (rendered / name for name in ("slurm.conf", "slurmdbd.conf"))
    said = "\n".join(path.read_text().replace(",", "\n=") for path in texts if path.exists())
    return frozenset(f"{kind}_{name}" for kind, name in _PLUGIN.findall(said)) - {"task_none"}


def _waiting_for_pmix(session: ClusterSession, before: Inventory) -> Iterator[str]:
    """Waiting jobs whose scripts start ranks by PMIx, each as ``12 (train)``."""
    scheduler = scheduler_of(before, session.connections.to, patience_s=SHORT_PATIENCE_S)
    controller = session.connections.to(before.controller.name)
    for job in scheduler.all_jobs():
        if job.state is not JobState.PENDING:
            continue
        argv = ["scontrol", "write", "batch_script", job.id, "-"]
        if _STARTS_BY_PMIX.search(controller.run(argv, check=False).stdout):
            yield f"{job.id} ({job.name})"


def carried_over(inventory: Inventory, recorded: Inventory | None) -> Inventory:
    """The inventory of a provider, which knows nothing of upgrades, with what is recorded of them."""
    if recorded is None:
        return inventory
    return inventory.model_copy(update={"slurm": recorded.slurm, "pmix": recorded.pmix})
