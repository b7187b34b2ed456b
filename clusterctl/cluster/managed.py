"""What the configure half of the roles keeps in order on each host: that is what `up` looks at.

A role that manages another file, unit or entry names it here too; else only `up --reconfigure` repairs it.
"""

from __future__ import annotations

from typing import Final

from clusterctl.hosts.report import ProbeRequest
from clusterctl.scheduler.slurm.config import CONTROLLER_PROLOG, TASK_PROLOG
from clusterctl.spec.distributions import JOB_PROFILE, LAUNCH_AGENT, Distribution
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import HEALTH_PROGRAM, HEALTH_SETTINGS, MPI_SSH_FOLDER, Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import payload_hash

_PAYLOAD = "/opt/clusterctl/payload"
_HOSTS_BLOCK = tuple(f"# {word} hosts of this cluster (clusterctl)" for word in ("BEGIN", "END"))
_MUNGE_KEY = "/etc/munge/munge.key"
_SLURM = tuple(f"/etc/slurm/{name}.conf" for name in ("slurm", "gres", "cgroup", "topology"))
_SLURMDBD = "/etc/slurm/slurmdbd.conf"
_SLURMD = "/etc/systemd/system/slurmd.service.d/clusterctl.conf"
_EXPORTS = "/etc/exports.d/clusterctl.exports"
_TUNING = ("/etc/sysctl.d/90-clusterctl.conf", "/etc/security/limits.d/61-clusterctl.conf")
_SCRATCH = "/usr/local/sbin/clusterctl-scratch"
_MPI_SSH = tuple(f"{MPI_SSH_FOLDER}/{name}" for name in ("ssh_config", "known_hosts"))
_AUTO_DOWN = ("/opt/clusterctl/auto-down", "/etc/clusterctl/auto-down.json")
AUTO_DOWN_TIMER: Final = "clusterctl-auto-down.timer"
_PLACES = ("/", "/tmp", "/var", "/run")  # noqa: S108


def questions(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> dict[str, ProbeRequest]:
    """Host name -> what to look at there."""
    return {host.name: _question(host, spec, inventory, workspace) for host in inventory.hosts}


def _question(host: Host, spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> ProbeRequest:
    leads = host.is_controller
    distribution = inventory.distribution
    home_root = f"{inventory.shared}/home"
    units = _slurms_units(host, distribution) if inventory.has_slurm else {}
    files = [distribution.openmpi_conf, *(_slurms_files(host) if inventory.has_slurm else _MPI_SSH)]
    files += (HEALTH_PROGRAM, HEALTH_SETTINGS) if host.is_compute else ()
    if distribution.mpi_module:
        files += [JOB_PROFILE] if inventory.has_slurm else [JOB_PROFILE, LAUNCH_AGENT]
    if inventory.has_job_environment:
        files.append(TASK_PROLOG)
    if leads and inventory.shared_folder.kind == "nfs":
        units["nfs-server"] = (_EXPORTS,)
        files.append(_EXPORTS)
    if host.local_ssds:
        units["clusterctl-scratch"] = ()
        files.append(_SCRATCH)
    if leads and spec.provider.idle_timeout_s:
        units[AUTO_DOWN_TIMER] = (f"/etc/systemd/system/{AUTO_DOWN_TIMER}",)
        files += _AUTO_DOWN
    files += _TUNING if spec.provider.user_owned else ()
    users = tuple(user.name for user in spec.users)
    has_homes = leads or inventory.shared_folder.kind == "none"
    homes = {user: f"{home_root}/{user}" for user in users}
    return ProbeRequest(
        files=tuple(files),
        blocks={"/etc/hosts": (_HOSTS_BLOCK[0], _HOSTS_BLOCK[1])},
        paths=(
            f"{_PAYLOAD}/{payload_hash()}/.complete",
            f"{home_root}/.clusterctl-{inventory.cluster_id}",
        ),
        users=users,
        homes=homes if has_homes else {},
        far_homes={} if has_homes else homes,
        keys=dict.fromkeys(users, workspace.public_key.read_text().strip()),
        units=units,
        accounting=_accounting(spec) if leads and inventory.has_slurm else (),
        space=(*_PLACES, inventory.shared),
    )


def _slurms_units(host: Host, distribution: Distribution) -> dict[str, tuple[str, ...]]:
    units: dict[str, tuple[str, ...]] = {"munge": (_MUNGE_KEY,)}
    if host.is_controller:
        units |= {
            "mariadb": (distribution.mariadb_conf,),
            "slurmdbd": (_SLURMDBD,),
            "slurmctld": (*_SLURM, "/etc/passwd"),
        }
    if host.is_compute:
        units["slurmd"] = (_SLURMD,)
    return units


def _slurms_files(host: Host) -> tuple[str, ...]:
    return (
        _MUNGE_KEY,
        *((*_SLURM, _SLURMDBD, CONTROLLER_PROLOG) if host.is_controller else ()),
        *(() if host.is_controller or host.is_compute else _SLURM[:1]),
        *((_SLURMD,) if host.is_compute else ()),
    )


def _accounting(spec: ClusterSpec) -> tuple[tuple[str, ...], ...]:
    return (
        ("associations", f"cluster={spec.name}", "format=account,user,qos"),
        ("user", "format=user,defaultaccount,adminlevel"),
        ("qos", "format=name,priority,maxwall,flags"),
    )
