"""The inventory of a cluster: its hosts, as a provider yields them, whichever provider that is.

It is written as `hosts.json`, ours to read back, and for ordinary tools as `inventory.yml` (works with plain
``ansible-playbook -i``), `ssh_config` (with plain ``ssh -F``), `known_hosts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clusterctl.errors import UsageError
from clusterctl.spec import distributions
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.names import ADMIN_USER, ROOT
from clusterctl.state.facts import PartitionFacts, damaged, not_up
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import render

if TYPE_CHECKING:
    from clusterctl.spec.common import ProviderSettings
    from clusterctl.spec.models import ClusterSpec

CONTROLLER = "controller"
ARCHITECTURE = "x86_64"  # of all nodes, as the kernel calls it
COMPUTE = "compute"
LOGIN = "login"  # Slurm's commands alone
HEALTH_PROGRAM: Final = "/opt/clusterctl/health"  # of the role health
SRUN_PORTS = "61000-64999"  # above those that kernels give out, and what the role firewall opens
PROXIED_TIMEOUT_S = 60  # gcloud alone takes seconds to start, and many may start at once


class Host(BaseModel):
    """One reachable machine.

    ``roles``: one or several of CONTROLLER, COMPUTE and LOGIN.

    ``cpus`` and ``memory_mib`` are set where a node gets a share of a larger machine, whose hardware
    facts would be too large; Slurm is then given the share (``config_overrides``). ``disk_mib`` is the
    limit of what it may write, where there is one.

    ``proxy_command`` is a program whose standard streams carry the SSH connection where there is no route;
    `%p` in it is the port. ``job_environment`` is set in every job on the host, unless the job sets it
    itself; `{interface}` in a value is the host's interface on the cluster's network.

    ``address`` is the one that Slurm, MPI and the other hosts use.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: str
    address: str
    ssh_address: str | None = Field(None, description="where SSH goes, unless that is `address`")
    port: int = 22
    user: str = ADMIN_USER
    roles: tuple[str, ...]
    partition: str | None = None
    host_key: str = Field(description="public host key, as `ssh-ed25519 AAAA...`")
    distribution: str = Field(
        distributions.BEFORE, description="ID and VERSION_ID of its os-release, or UNSEEN"
    )
    cgroups: bool = Field(True, description="its kernel lets Slurm make control groups there")
    cpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    hostname: str | None = Field(None, description="its own short name, unless that is `name`")
    instance_id: str | None = Field(None, description="this very machine; one made anew has other keys")
    proxy_command: tuple[str, ...] = ()
    job_environment: Mapping[str, str] = {}
    local_ssds: int = Field(0, description="local disks that become its /scratch")

    @property
    def own_name(self) -> str:
        """The machine's own hostname, as `hostname -s` prints it."""
        return self.hostname or self.name

    @property
    def is_controller(self) -> bool:
        return CONTROLLER in self.roles

    @property
    def is_compute(self) -> bool:
        return COMPUTE in self.roles


class SharedFolder(BaseModel):
    """Where the shared folder comes from.

    `existing`: it is mounted already. `nfs`: the controller exports its own folder. `filestore`: a server of
    its own exports it. `server`: an NFS server of the user's does. `none`: there is none.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    kind: Literal["existing", "nfs", "filestore", "server", "none"] = "existing"
    server: str | None = Field(None, description="address of the server that exports it, unless it exists")
    path: str | None = Field(None, description="what is exported, unless it exists")
    disk: str | None = Field(None, description="device name of the controller's disk that it is on, if any")


class Inventory(BaseModel):
    """The hosts of one cluster, controller first."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    cluster: str
    cluster_id: str
    provider: str
    hosts: tuple[Host, ...]
    network: str = Field(description="CIDR that MPI and Slurm traffic uses")
    shared: str = Field(description="folder that every host sees")
    shared_folder: SharedFolder = SharedFolder()
    bucket: str | None = Field(None, description="Cloud Storage bucket that every host sees as /bucket")
    oversubscribed: bool = Field(False, description="the compute nodes share cores with each other")
    usd_per_hour: float | None = Field(None, description="its cost, at the prices of its last `up`")
    scheduler: Literal["slurm", "none"] = Field("slurm", description="the scheduler of its jobs")
    job_user: str | None = Field(None, description="the account that jobs run as")
    partitions: tuple[PartitionFacts, ...] = ()
    interval_s: int = Field(1, description="seconds between two samples of telemetry")
    requirements: str | None = Field(None, description="requirements file of the jobs' Python")
    root: str = Field(ROOT, description="folder on every host with what jobs use, such as their Python")
    slurm: str = Field("", description="Slurm's release, where it is another than the distribution's")
    pmix: bool = Field(True, description="Slurm starts ranks of MPI programs itself, by PMIx")
    baked: bool = Field(description="the install part of every role is in the hosts' image already")

    @property
    def traits(self) -> type[ProviderSettings]:
        # Models of the spec take 0.1 s of verbs that need none.
        from clusterctl.spec.common import ProviderSettings  # noqa: PLC0415
        from clusterctl.spec.models import PROVIDERS  # noqa: PLC0415

        return PROVIDERS.get(self.provider, ProviderSettings)

    @property
    def controller(self) -> Host:
        return next(h for h in self.hosts if h.is_controller)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def compute(self) -> tuple[Host, ...]:
        """The hosts that run slurmd, in partition order."""
        return tuple(h for h in self.hosts if h.is_compute)

    @property
    def distribution(self) -> Distribution:
        """The distribution of all hosts: a cluster never has several."""
        return distributions.distribution_of(self.controller.distribution)

    @property
    def cgroups(self) -> bool:
        """Whether Slurm can keep jobs in control groups: not in most containers."""
        return self.distribution.cgroup_v2 and all(host.cgroups for host in self.compute)

    @property
    def constrains_devices(self) -> bool:
        """Whether Slurm keeps jobs from others' devices: not where nodes have shares of a machine."""
        shares = any(host.cpus is not None and host.memory_mib is not None for host in self.compute)
        return self.has_slurm and self.cgroups and not shares

    @property
    def has_slurm(self) -> bool:
        """Whether Slurm runs the jobs; else they are plain mpirun over SSH."""
        return self.scheduler == "slurm"

    @property
    def has_task_prolog(self) -> bool:
        """Whether tasks are told something of their host: its variables, or that Slurm has no PMIx there."""
        return any(host.job_environment for host in self.hosts) or (self.has_slurm and not self.pmix)

    def host(self, name: str) -> Host | None:
        return next((h for h in self.hosts if h.name == name), None)

    def ssh_config(self, *, key: Path, known_hosts: Path) -> str:
        """OpenSSH client configuration for all hosts: our key and our known_hosts alone, and no prompts.

        A proxy's command takes the rest of its line, for the user's shell; it gets time to start. Paths are
        quoted: a home may contain spaces.
        """
        values = {"key": key, "known_hosts": known_hosts, "proxied_timeout_s": PROXIED_TIMEOUT_S}
        return render("ssh_config.j2", hosts=self.hosts, **values)

    def known_hosts(self) -> str:
        """One line a host, under the host's name (see HostKeyAlias)."""
        return "".join(f"{host.name} {host.host_key}\n" for host in self.hosts)


def inventory_of(workspace: Workspace) -> Inventory:
    """The inventory that `up` left; UsageError if the cluster is not up, or its record is damaged."""
    try:
        return Inventory.model_validate_json(workspace.inventory.read_bytes())
    except ValidationError as exc:
        raise damaged(workspace) from exc
    except FileNotFoundError as exc:
        raise not_up(workspace) from exc


def inventory_if_known(workspace: Workspace) -> Inventory | None:
    """The inventory that `up` left; None where the last one did not end, or the record is damaged."""
    with suppress(UsageError):
        return inventory_of(workspace)
    return None


def applied_spec(workspace: Workspace) -> ClusterSpec:
    """The spec that `up` was last given, which may differ from what the user's file says by now."""
    from clusterctl.spec.load import load_spec  # noqa: PLC0415 - as above

    return load_spec(workspace.spec, recorded=True)


def applied_if_known(workspace: Workspace) -> ClusterSpec | None:
    """The applied spec; None where there is none that can be read."""
    with suppress(UsageError):
        return applied_spec(workspace)
    return None


def keeps_storage(workspace: Workspace, *, if_damaged: bool = False) -> bool:
    """Whether the shared folder outlives the cluster, by its applied spec."""
    try:
        return applied_spec(workspace).storage.keep
    except UsageError:
        return if_damaged


def may_keep_storage(workspace: Workspace) -> bool:
    """Return whether the shared folder outlives the cluster, or may.

    An earlier `up` that failed before it configured the hosts may have taken up kept storage.
    """
    if keeps_storage(workspace, if_damaged=True):
        return True
    return not (workspace.configured.exists() or applied_spec(workspace).provider.user_owned)


def distribution_ahead(spec: ClusterSpec, workspace: Workspace) -> Distribution | None:
    """What the hosts have; None where they are to be looked at first."""
    try:
        return inventory_of(workspace).distribution
    except UsageError:
        release = spec.provider.expected_release(spec)
        return distributions.distribution_of(release) if release else None
