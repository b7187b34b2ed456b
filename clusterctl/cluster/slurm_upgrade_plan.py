"""What an upgrade of Slurm takes, and what speaks against it: found out by looking alone.

The packages are fetched here, and what they lack is found, before anything is changed on a host.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.cluster.session import ClusterSession
from clusterctl.errors import UsageError
from clusterctl.packages.repository import fetch_slurm
from clusterctl.packages.wheelhouse import cache_of_downloads
from clusterctl.scheduler.base import JobInfo, JobState, active_jobs
from clusterctl.scheduler.script import may_start_by_pmix, starts_by_pmix
from clusterctl.scheduler.session import SHORT_PATIENCE_S, scheduler_of
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.slurm_releases import known_releases, refusal, removed_keys
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import WAIT_S, hold, write_atomic
from clusterctl.util.assets import digest
from clusterctl.util.process import parallel_map

_WHERE: Final = "slurm.version"
_CONF_KEY: Final = re.compile(r"^(\w+)=", re.MULTILINE)
_PMIX: Final = "mpi_pmix"
_PLUGIN: Final = re.compile(r"=(\w+)/(\w+)$", re.MULTILINE)
# JOB:FOLDER...: the script of each job, and the user's own beside it that a script of `submit` runs.
_SCRIPTS: Final = r"""
for one; do
    script=$(scontrol write batch_script "${one%%:*}" - 2>/dev/null)
    printf '\001%s\n%s\n' "${one%%:*}" "$script"
    own=$(printf '%s\n' "$script" | sed -n \
        -e "s|.*\"\$submit_dir\"/'\([^']*\)'.*|\1|p;t" \
        -e "s|.*\"\$submit_dir\"/\([^' ]*\).*|\1|p" | head -n 1)
    [ -z "$own" ] || [ ! -f "${one#*:}/$own" ] || head -c 1000000 "${one#*:}/$own"
done
"""
_NAMED: Final = 10  # jobs, in one message
_GOING: Final = "/var/lib/clusterctl-slurm/going"  # while an exchange has not ended well
# The release of the packages, and whether a daemon runs a program that was exchanged since.
_LOOK: Final = f"""\
dpkg-query --show --showformat '${{Version}}\\n' slurm-client
for unit in slurmdbd slurmctld slurmd; do
    pid=$(systemctl show --property MainPID --value "$unit")
    case $(readlink "/proc/$pid/exe") in *deleted*) echo "stale $unit" ;; esac
done
[ ! -e {_GOING} ] || echo "an exchange has not ended"
"""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A change of Slurm's release. ``old`` and ``new`` may be the same: hosts that join are brought to it."""

    old: str
    new: str
    distribution: Distribution

    @property
    def is_back(self) -> bool:
        return known_releases().index(self.new) < known_releases().index(self.old)

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
    if why := refusal(asked, distribution, upgrades=spec.provider.shares_kernel):
        raise UsageError(why.what, where=_WHERE, why=why.why, fix=why.fix)
    for one in _removed([line.partition("=")[0].strip() for line in spec.slurm.extra], asked):
        raise one
    return None if asked == own == has else Upgrade(has or asked, asked, distribution)


def prepare_slurm(
    session: ClusterSession, upgrade: Upgrade, before: Inventory, *, limit: Collection[str], force: bool
) -> None:
    """Fetch the packages, and refuse what the upgrade would break. Nothing is changed on a host.

    Raises:
        UsageError: the first of the ``objections``; with ``force`` only what can't be done at all counts.
    """
    if limit and upgrade.steps:
        raise UsageError(
            "a part of a cluster can't have another release of Slurm", where=_WHERE, fix="leave out --limit"
        )
    known = len(session.notes)
    found = [*objections(session, upgrade, before, session.workspace.rendered, force=force)]
    for note in session.notes[known:]:
        session.on_warning(note)
    if found:
        raise found[0]
    if upgrade.steps:
        session.note = f"{upgrade.old} to {upgrade.new}"


def objections(
    session: ClusterSession, upgrade: Upgrade, before: Inventory, rendered: Path, *, force: bool = False
) -> Iterator[UsageError]:
    """What speaks against the upgrade; ``rendered`` has the configuration that the cluster runs with.

    The packages come into the session's workspace. What the user should know besides is noted.
    """
    if upgrade.is_back:
        if not force:
            yield UsageError(
                f"Slurm {upgrade.old} is taken back to {upgrade.new} only under --force",
                where=_WHERE,
                why="; ".join(upgrade.steps[:2]),
                fix=f"leave slurm.version at {upgrade.old}; or go ahead: `clusterctl up --force`",
            )
        return
    if not upgrade.steps or not hosts_to_exchange(session, upgrade, [before.controller]):
        return
    yield from _removed(_CONF_KEY.findall((rendered / "slurm.conf").read_text()), upgrade.new)
    plugins = fetch_packages(session, upgrade, [before.controller])
    if lacking := sorted(_plugins_used(rendered) - plugins - {_PMIX}):
        yield UsageError(
            f"Slurm {upgrade.new} lacks plugins that slurm.conf names: {', '.join(lacking)}",
            where=_WHERE,
            why=f"they are not in {upgrade.distribution.title}'s packages of it",
            fix="take what needs them out of slurm.extra and run `clusterctl up`, then set slurm.version",
        )
    if _PMIX in plugins:
        return
    session.notes.append(_no_pmix(upgrade.new))
    by_pmix, by_srun = _jobs_by_srun(session, before)
    if by_srun:
        session.notes.append(
            f"these jobs call srun without --mpi, and fail if that starts MPI programs: {_first(by_srun)}"
        )
    if by_pmix and force:
        session.notes.append(f"steps that these jobs start by PMIx from now on fail: {_first(by_pmix)}")
    elif by_pmix:
        yield UsageError(
            f"jobs start ranks by PMIx: {_first(by_pmix)}",
            where=_WHERE,
            why=f"the packages of Slurm {upgrade.new} have no plugin for PMIx: a step that is running goes "
            "on, and all that start after the upgrade fail",
            fix="wait until they have ended; or cancel them, and submit them again after the upgrade, when "
            "mpirun starts ranks; or let those steps fail: `clusterctl up --force`",
        )


def notes_of_new(upgrade: Upgrade | None) -> tuple[str, ...]:
    """What the user should know of the Slurm that a cluster is made with."""
    lacks = upgrade and upgrade.new in upgrade.distribution.slurm_without_pmix
    return (_no_pmix(upgrade.new),) if upgrade and lacks else ()


def _no_pmix(release: str) -> str:
    return (
        f"Slurm {release} has no plugin for PMIx here: `submit` starts ranks by mpirun instead of srun and "
        "rejects `srun --mpi=pmix`, and an MPI program that a plain srun starts fails in MPI_Init"
    )


def _removed(keys: Iterable[str], release: str) -> Iterator[UsageError]:
    if gone := removed_keys(keys, release):
        yield UsageError(
            f"Slurm {release} does not know {', '.join(gone)}",
            where="slurm.extra",
            why="that release has removed what they set, and its daemons would not start",
            fix="remove them and run `clusterctl up`, then set slurm.version",
        )


def hosts_to_exchange(
    session: ClusterSession, upgrade: Upgrade, hosts: Collection[Host], limit: Collection[str] = ()
) -> list[Host]:
    """Of these hosts, or those of the limit, the ones with another release or daemons of another."""

    def differs(host: Host) -> bool:
        argv = ["sudo", "-n", "sh", "-c", _LOOK]
        version, *stale = session.connections.to(host.name).run(argv).stdout.splitlines() or [""]
        return bool(stale) or not version.startswith(f"{upgrade.new}.")

    hosts = [host for host in hosts if not limit or host.name in limit]
    return [host for host, does in zip(hosts, parallel_map(hosts, differs), strict=True) if does]


def going_on(session: ClusterSession, hosts: Collection[Host], limit: Collection[str] = ()) -> list[str]:
    """Those of these hosts, or of the limit, whose exchange was cut off, or failed and could not go back."""
    argv = ["sudo", "-n", "test", "-e", _GOING]
    asked = [host for host in hosts if not limit or host.name in limit]
    cut_off = parallel_map(
        asked, lambda host: session.connections.to(host.name).run(argv, check=False).rc == 0
    )
    return [host.name for host, is_cut in zip(asked, cut_off, strict=True) if is_cut]


def fetch_packages(session: ClusterSession, upgrade: Upgrade, hosts: Collection[Host]) -> frozenset[str]:
    """Have the packages for these hosts in the workspace; the plugins that they have."""
    argv = ["cat", "/var/lib/dpkg/status"]
    told = parallel_map(list(hosts), lambda host: session.connections.to(host.name).run(argv).stdout)
    states = {_installed(status): status for status in told}
    mirror = session.spec.provider.debian_mirror
    target = session.workspace.slurm_packages
    record, inputs = target / "plugins.json", digest(upgrade.new, *sorted(states))
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
            for status in states.values():
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


def _installed(status: str) -> str:
    """What of dpkg's status decides which packages a host needs; each run of dpkg orders it anew."""
    found = (
        re.findall(r"^(?:Package|Status|Version): (.*)$", one, re.MULTILINE) for one in status.split("\n\n")
    )
    return "\n".join(sorted(" ".join(fields) for fields in found))


def _copy(paths: Collection[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copy(path, folder)


def _plugins_used(rendered: Path) -> frozenset[str]:
    """The plugins that the configuration names, such as ``select_cons_tres``."""
    texts = (rendered / name for name in ("slurm.conf", "slurmdbd.conf"))
    said = "\n".join(path.read_text().replace(",", "\n=") for path in texts if path.exists())
    return frozenset(f"{kind}_{name}" for kind, name in _PLUGIN.findall(said)) - {"task_none"}


def _jobs_by_srun(session: ClusterSession, before: Inventory) -> tuple[list[JobInfo], list[JobInfo]]:
    """The jobs that wait or run whose scripts ask srun for PMIx, and those that call it without."""
    scheduler = scheduler_of(before, session.connections.to, patience_s=SHORT_PATIENCE_S)
    jobs: dict[str, JobInfo] = {}
    for job in active_jobs(scheduler):
        jobs.setdefault(str(job.number), job)  # the tasks of an array have one script
    controller = session.connections.to(before.controller.name)
    asked = [f"{number}:{job.work_dir}" for number, job in jobs.items()]
    said = controller.run(["sudo", "-n", "sh", "-c", _SCRIPTS, "sh", *asked], check=False).stdout
    by_pmix, by_srun = [], []
    for number, _, script in (part.partition("\n") for part in said.split("\x01")[1:]):
        if starts_by_pmix(script):
            by_pmix.append(jobs[number])
        elif may_start_by_pmix(script):
            by_srun.append(jobs[number])
    return by_pmix, by_srun


def _first(jobs: Collection[JobInfo]) -> str:
    """``12 (train, running), 13 (mine, waiting) and 7 more``."""
    named = [
        f"{job.id} ({job.name}, {'waiting' if job.state is JobState.PENDING else 'running'})" for job in jobs
    ]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more
