"""The provider of a cluster that other people operate: it creates, changes and removes no host.

``examine_site`` says for `doctor` what works there, and how that is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from clusterctl.providers.base import Leftover, Prompts, Provider
from clusterctl.providers.existing.detach import AttachedFolder
from clusterctl.providers.existing.probe import Choices, Probed, probe
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.existing import ExistingSettings, existing_cluster, operators_only
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import Launcher
from clusterctl.spec.units import format_duration
from clusterctl.state.inventory import Inventory, inventory_of
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import LOGIN_HOST
from clusterctl.transport.ssh import Connections

_TEST: Final = "sbatch --test-only"


class ExistingProvider(Provider):
    def __init__(self, settings: ExistingSettings, prompts: Prompts) -> None:
        self._settings = settings
        self._prompts = prompts

    def check(self, spec: ClusterSpec) -> None:
        raise operators_only(spec.name)

    def plan(self, spec: ClusterSpec, *_: object, **__: object) -> NoReturn:
        raise operators_only(spec.name)

    def apply(self, spec: ClusterSpec, *_: object, **__: object) -> NoReturn:
        raise operators_only(spec.name)

    def alive(self, cluster_id: str) -> bool:  # noqa: ARG002
        return True

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> NoReturn:
        raise operators_only(workspace.root.name if workspace else cluster_id)

    def leftovers(self, cluster_id: str) -> tuple[Leftover, ...]:  # noqa: ARG002
        return ()

    def orphans(self, name: str) -> tuple[str, ...]:  # noqa: ARG002
        return ()

    def kept_storage(self, name: str, users: Sequence[str]) -> tuple[KeptStorage, ...]:  # noqa: ARG002
        return ()

    def remove_storage(self, kept: KeptStorage) -> None:  # noqa: ARG002
        return


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about the site, and the command or job that told it. is_problem: jobs can't run well."""

    fact: str
    value: str
    learned: str
    is_problem: bool = False


def examine_site(spec: ClusterSpec, workspace: Workspace) -> tuple[Fact, ...]:
    """Ask the login node again. No job is submitted, and nothing is written on the cluster.

    Raises the errors of ``probe`` and NotUpError, if `attach` has not finished.
    """
    inventory, settings = inventory_of(workspace), existing_cluster(spec.provider)
    choices = Choices(settings.account or "", settings.qos or "", spec.partitions[0].name)
    with Connections(workspace.ssh_config, stays=LOGIN_HOST) as connections:
        transport = connections.to(LOGIN_HOST)
        probed = probe(transport, choices)
        entries = AttachedFolder(transport, inventory.folder, inventory.cluster_id).entries()
    folder = [Fact(f"folder {entry.name}", str(entry).partition(": ")[2], "du") for entry in entries]
    quotas = [Fact("quota", line, "quota") for line in probed.site.quotas]
    missing = [] if entries else [Fact("folder", f"{inventory.folder} is missing", "ls", is_problem=True)]
    return (*_slurm(probed), *_nodes(probed, inventory, settings), *quotas, *folder, *missing)


def _slurm(probed: Probed) -> Iterator[Fact]:
    site = probed.site
    learned = site.learned.get
    yield Fact("clock", f"{site.clock_ahead_s:+.1f} s", learned("clock_ahead_s", "date"))
    yield Fact("Slurm", site.slurm_version, learned("slurm_version", "sinfo"))
    yield Fact("account", probed.account or "your default account", _TEST)
    for partition in probed.usable:
        limit = f", {format_duration(partition.max_time_s)}" if partition.max_time_s else ""
        yield Fact(f"partition {partition.name}", f"{partition.node_count} nodes{limit}", _TEST)
    for attempt in probed.refused:
        yield Fact(f"partition {attempt.partition}", f"not for you: {attempt.answer}", _TEST)
    records = (
        f"{site.accounting}; final states come from the jobs' own records" if site.accounting else "sacct"
    )
    yield Fact("final states", records, learned("accounting", "sacct"))


def _nodes(probed: Probed, inventory: Inventory, settings: ExistingSettings) -> Iterator[Fact]:
    modules = f", modules {' '.join(settings.modules)}" if settings.modules else ""
    names = {Launcher.SRUN: "srun with PMIx", Launcher.MPIRUN: "mpirun", None: "not proven"}
    by_job = "the job of the last `attach`" if settings.launcher else "no job has run yet"
    yield Fact("MPI", f"{names[settings.launcher]}{modules}", by_job)
    yield Fact("Python", inventory.python, by_job)
    reaches = "reaches a package index" if probed.site.internet else "reaches no package index"
    yield Fact("login node", f"glibc {probed.site.glibc}, {reaches}", probed.site.learned.get("internet", ""))
