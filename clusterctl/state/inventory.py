"""The inventory of a cluster: its hosts, in the same form for all providers.

The file `hosts.json` stores the inventory. Files for other tools are derived from it:
`inventory.yml` (``ansible-playbook -i``), `ssh_config` (``ssh -F``) and `known_hosts`.
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
from clusterctl.spec.names import ADMIN_USER, FOLDER, MAX_ARRAY_SIZE, ROOT
from clusterctl.state.facts import PartitionFacts, damaged, not_up
from clusterctl.state.workspace import JUMP, Workspace
from clusterctl.util.assets import digest, render

if TYPE_CHECKING:
    from clusterctl.spec.common import ProviderSettings
    from clusterctl.spec.models import ClusterSpec

CONTROLLER = "controller"
COMPUTE = "compute"
LOGIN = "login"
# The architecture of all nodes, as `uname -m` prints it.
ARCHITECTURE = "x86_64"
HEALTH_PROGRAM: Final = "/opt/clusterctl/health"
# Above the ephemeral ports of the kernel. The role firewall opens the same range.
SRUN_PORTS = "61000-64999"
# A tunnel may need this long to open.
PROXIED_TIMEOUT_S = 60
# A jump host may need this long to reach a host behind it, with the time of gcloud to open the
# tunnel.
JUMP_TIMEOUT_S = 30


class Host(BaseModel):
    """A machine of the cluster.

    address: the address that Slurm, MPI and the other hosts use.
    roles: a subset of CONTROLLER, COMPUTE and LOGIN.
    cpus, memory_mib: the node's share of a machine, if several nodes share a machine. Slurm is
        configured with this share instead of the detected hardware (``config_overrides``).
    disk_mib: limit of the disk space that the node may use. Default: no limit.
    proxy_command: program whose standard streams carry the SSH connection if there is no route to
        the host; `%p` stands for the port.
    jump: name of the host that SSH connects through, if there is no other way to the host.
    job_environment: variables for every job on the host, unless the job sets them; `{interface}` in
        a value stands for the host's interface on the cluster's network.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: str
    address: str
    ssh_address: str | None = Field(None, description="address for SSH, if it is not `address`")
    port: int = 22
    user: str = ADMIN_USER
    roles: tuple[str, ...]
    partition: str | None = None
    host_key: str = Field(description="public host key, as `ssh-ed25519 AAAA...`")
    distribution: str = Field(
        distributions.BEFORE, description="ID and VERSION_ID of its os-release, or UNSEEN"
    )
    cgroups: bool = Field(True, description="whether Slurm can use control groups on this host")
    cpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    hostname: str | None = Field(
        None, description="the machine's short hostname, if it is not `name`"
    )
    instance_id: str | None = Field(
        None, description="id of the machine; a recreated host has another"
    )
    proxy_command: tuple[str, ...] = ()
    jump: str | None = None
    job_environment: Mapping[str, str] = {}
    local_ssds: int = Field(0, description="number of local disks that form /scratch")

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
    """The source of the folder that all hosts share.

    `existing`: hosts have the folder mounted already. `nfs`: the controller exports the folder.
    `filestore`: a Filestore instance exports it. `server`: the user's NFS server exports it.
        `none`: no shared folder.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    kind: Literal["existing", "nfs", "filestore", "server", "none"] = "existing"
    server: str | None = Field(None, description="address of the server that exports the folder")
    path: str | None = Field(None, description="exported path, unless it is mounted already")
    disk: str | None = Field(
        None, description="device name of the controller's disk for the folder"
    )


class Inventory(BaseModel):
    """The hosts of a cluster, the controller first, and facts about the cluster that tools and jobs
    need.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    cluster: str
    cluster_id: str
    provider: str
    hosts: tuple[Host, ...]
    network: str = Field(description="CIDR that MPI and Slurm traffic uses")
    shared: str = Field(description="path of the shared folder on every host")
    shared_folder: SharedFolder = SharedFolder()
    bucket: str | None = Field(
        None, description="Cloud Storage bucket mounted at /bucket on every host"
    )
    oversubscribed: bool = Field(False, description="the compute nodes share cores with each other")
    usd_per_hour: float | None = Field(
        None, description="cost of the cluster at the prices of its last `up`"
    )
    scheduler: Literal["slurm", "none"] = Field("slurm", description="the scheduler of its jobs")
    job_user: str | None = Field(None, description="the account that jobs run as")
    partitions: tuple[PartitionFacts, ...] = ()
    interval_s: int = Field(1, description="seconds between two samples of telemetry")
    requirements: str | None = Field(None, description="requirements file of the jobs' Python")
    max_array: int = Field(MAX_ARRAY_SIZE, description="Slurm's MaxArraySize")
    max_submit: int | None = Field(
        None, description="how many jobs of the account Slurm's queue takes"
    )
    root: str = Field(ROOT, description="folder with the software of jobs, such as their Python")
    folder: str = Field(FOLDER, description="folder with the job user's files of clusterctl")
    python: str = Field(
        "", description="release of the jobs' Python, if it is not the distribution's"
    )
    glibc_minor: int = Field(0, description="minor release of glibc on the nodes, with `python`")
    slurm: str = Field("", description="Slurm's release, if it is not the distribution's")
    no_accounting: str = Field("", description="why the job user can't read Slurm's accounting")
    account: str = Field("", description="Slurm account of jobs, if not the user's default account")
    qos: str = Field("", description="quality of service of jobs, if not the account's")
    is_foreign: bool = Field(False, description="other people run the cluster")
    slurm_path: str = Field("", description="folder of Slurm's commands, if PATH may lack it")
    pmix: bool = Field(True, description="Slurm starts ranks of MPI programs itself, by PMIx")
    baked: bool = Field(description="whether the hosts' image has the install part of every role")

    @property
    def traits(self) -> type[ProviderSettings]:
        # Importing the models of the spec takes 0.1 s, and most verbs don't need them.
        from clusterctl.spec.models import traits_of  # noqa: PLC0415

        return traits_of(self.provider)

    @property
    def controller(self) -> Host:
        return next(h for h in self.hosts if h.is_controller)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def compute(self) -> tuple[Host, ...]:
        """The hosts that run slurmd, in the order of the partitions."""
        return tuple(h for h in self.hosts if h.is_compute)

    @property
    def distribution(self) -> Distribution:
        return distributions.distribution_of(self.controller.distribution)

    @property
    def cgroups(self) -> bool:
        """Whether Slurm can confine jobs by control groups, which most containers don't allow."""
        return self.distribution.cgroup_v2 and all(host.cgroups for host in self.compute)

    @property
    def constrains_devices(self) -> bool:
        """Whether Slurm hides a job's GPUs from other jobs. It can't if several nodes share a
        machine.
        """
        shares = any(host.cpus is not None and host.memory_mib is not None for host in self.compute)
        return self.has_slurm and self.cgroups and not shares

    @property
    def has_slurm(self) -> bool:
        """Whether Slurm runs the jobs. Otherwise jobs run with mpirun over SSH."""
        return self.scheduler == "slurm"

    @property
    def has_task_prolog(self) -> bool:
        """Whether jobs need a TaskProlog: hosts set variables in jobs, or Slurm lacks PMIx."""
        return any(host.job_environment for host in self.hosts) or (
            self.has_slurm and not self.pmix
        )

    def host(self, name: str) -> Host | None:
        return next((h for h in self.hosts if h.name == name), None)

    def ssh_config(self, *, key: Path, known_hosts: Path) -> str:
        """Return an ssh_config for all hosts, which lies beside ``known_hosts``.

        With it, ssh uses only these two files, and never prompts. Hosts behind a proxy command or a
        jump host get a longer connection timeout. Paths are quoted, because paths may contain
        spaces.
        """
        proxies = {host.name: self._proxy_command(host, known_hosts.parent) for host in self.hosts}
        timeouts = {
            host.name: JUMP_TIMEOUT_S if host.jump else PROXIED_TIMEOUT_S for host in self.hosts
        }
        values = {"key": key, "known_hosts": known_hosts, "timeouts": timeouts}
        return render("ssh_config.j2", hosts=self.hosts, proxies=proxies, **values)

    def _proxy_command(self, host: Host, folder: Path) -> tuple[str, ...]:
        jump = self.host(host.jump) if host.jump else None
        if jump is None:
            return host.proxy_command
        # A recreated jump host has another key, and so another connection.
        name = f"jump-{digest(jump.host_key)[:8]}"
        return ("sh", "-c", JUMP, str(folder.absolute()), name, "%h", "%p", jump.name)

    def known_hosts(self) -> str:
        """Return the content of known_hosts: a line per host, under the host's name (see
        HostKeyAlias).
        """
        return "".join(f"{host.name} {host.host_key}\n" for host in self.hosts)


def inventory_of(workspace: Workspace) -> Inventory:
    """Read hosts.json, which `clusterctl up` writes. UsageError: the file is missing or damaged."""
    try:
        return Inventory.model_validate_json(workspace.inventory.read_bytes())
    except ValidationError as exc:
        raise damaged(workspace) from exc
    except FileNotFoundError as exc:
        raise not_up(workspace) from exc


def inventory_if_known(workspace: Workspace) -> Inventory | None:
    """Read hosts.json like ``inventory_of``, but return None if the file is missing or damaged."""
    with suppress(UsageError):
        return inventory_of(workspace)
    return None


def applied_spec(workspace: Workspace) -> ClusterSpec:
    """Return the spec of the last `clusterctl up`. The user may have changed the spec file since
    then.
    """
    from clusterctl.spec.load import load_spec  # noqa: PLC0415 - as above

    return load_spec(workspace.spec, recorded=True)


def applied_if_known(workspace: Workspace) -> ClusterSpec | None:
    """Return the spec of the last `clusterctl up`; None if it is missing or damaged."""
    with suppress(UsageError):
        return applied_spec(workspace)
    return None


def keeps_storage(workspace: Workspace, *, if_damaged: bool = False) -> bool:
    """Return whether the last `up`'s spec keeps the shared folder; ``if_damaged`` if it can't be
    read.
    """
    try:
        return applied_spec(workspace).storage.keep
    except UsageError:
        return if_damaged


def may_keep_storage(workspace: Workspace) -> bool:
    """Return whether a shared folder may remain after `down`: the spec keeps it, or `up` never
    finished.

    In the second case, `up` may have attached the folder of an earlier cluster.
    """
    if keeps_storage(workspace, if_damaged=True):
        return True
    return not (workspace.configured.exists() or applied_spec(workspace).provider.user_owned)


def planned_distribution(spec: ClusterSpec, workspace: Workspace) -> Distribution | None:
    """Return the Linux distribution that the hosts have or will have; None before `up` has looked
    at them.
    """
    try:
        return inventory_of(workspace).distribution
    except UsageError:
        release = spec.provider.expected_release(spec)
        return distributions.distribution_of(release) if release else None
