"""The Ansible roles: what each installs, writes and starts, and what a spec needs of each host for them.

Their meta/touches.yml are the one source. The ledger on the hosts reads the same files: `down` releases what
they name. What only clusterctl reads:

    hosts: [controller]           the groups of hosts it runs on; `login`: those that are nothing else
    when: {scheduler: slurm}      and on which clusters: all of these hold (``_of_spec``, ``_of_host``; with a
                                  dot, it is a key of the spec: `software.apptainer`)
    variables: {x_y: software.y}  its variables that have the value of a key of the spec
    packages: as needed           what a host lacks decides; a list: these; by default the role's *_packages
    ports: {6817: slurmctld}      who listens where
    drift:                        what `up` and `plan` compare with what the last `up` left
      - files, blocks, paths, units (unit -> files it reads at its start), accounting (words for sacctmgr),
        absent (paths), alone (files that have no other *.conf beside them), rivals (file -> pattern of a
        line that no file after it in its folder has)
    hint: see ...                 what to look at where a task of the role fails
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from pydantic_core import to_jsonable_python

from clusterctl.hosts.probe import ProbeRequest
from clusterctl.packages.os_packages import packages_of
from clusterctl.spec.common import ADMIN_ID
from clusterctl.spec.distributions import Distribution, releases
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ADMIN_USER, SYSTEM_ACCOUNTS
from clusterctl.state.inventory import LOGIN, Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import asset, table

CLAIM: Final = "/etc/clusterctl/cluster.json"  # the cluster that the host belongs to; JSON
FABRIC_MANAGER: Final = "nvidia-fabricmanager"
_PLACES: Final = ("/", "/tmp", "/var", "/run")  # noqa: S108

Touches = Mapping[str, Any]


def role_packages(spec: ClusterSpec, roles: Sequence[str], distribution: Distribution) -> tuple[str, ...]:
    """OS packages that every host of these groups gets.

    More may come for what the host is or has: EPEL, a clock that nobody keeps, SELinux, cards, an NFS folder.
    """
    touches = _applied(spec, roles)
    named = [name for one in touches.values() for name in _listed(one, "packages")]
    usual = [role for role, one in touches.items() if "packages" not in one]
    return tuple(sorted({*packages_of(usual, distribution, spec.software), *named}))


def role_files(spec: ClusterSpec, roles: Sequence[str]) -> frozenset[str]:
    """Patterns of the files of a host of these groups that may be changed, but for clusterctl's own.

    A role that mounts folders is left out: whether it writes /etc/fstab is known once there is an inventory.
    """
    return frozenset(
        path
        for touches in _applied(spec, roles).values()
        for path in (() if "mounts" in touches else _listed(touches, "files"))
        if path.startswith("/etc/") and "clusterctl" not in path
    )


def role_units(spec: ClusterSpec, roles: Sequence[str]) -> frozenset[str]:
    touches = _applied(spec, roles).values()
    return frozenset(unit.removesuffix(".service") for one in touches for unit in _listed(one, "units"))


def role_ports(spec: ClusterSpec, roles: Sequence[str]) -> Mapping[int, str]:
    """Port -> the daemon that listens there on a host of these groups."""
    touches = _applied(spec, roles).values()
    return {port: daemon for one in touches for port, daemon in one.get("ports", {}).items()}


def can_share(spec: ClusterSpec) -> bool:
    """Whether hosts can have their configuration in common: without Slurm each has the keys of all others."""
    return spec.has_slurm


def cluster_roles(spec: ClusterSpec, inventory: Inventory) -> frozenset[str]:
    of_cluster = _of_inventory(spec, inventory)
    kinds = {(host.roles, bool(host.local_ssds)): host for host in inventory.hosts}.values()
    facts = [(host.roles, _of_host(of_cluster, host)) for host in kinds]
    return frozenset(
        role
        for role, touches in _touches().items()
        if any(_applies(touches, roles, spec, of_host) for roles, of_host in facts)
    )


def spec_variables(spec: ClusterSpec, roles: Collection[str]) -> dict[str, Any]:
    """The variables of these roles that have the value of a key of the spec; none where it has no value."""
    touches = [_touches()[role] for role in sorted(roles)]
    keys = {name: key for one in touches for name, key in one.get("variables", {}).items()}
    found = {name: to_jsonable_python(attrgetter(key)(spec)) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def wanted_accounts(spec: ClusterSpec) -> dict[str, int]:
    """Account -> its uid and gid on every host of the cluster: the daemons' and the users'."""
    daemons = system_accounts() if spec.scheduler == "slurm" else {}
    return {**daemons, **{user.name: user.uid for user in spec.users}}


def system_accounts() -> Mapping[str, int]:
    """The accounts of Slurm's daemons -> the uid and gid that the role gives them."""
    known = table(asset("ansible") / "roles/users/defaults/main.yml", dict[str, Any])
    return {name: known[f"users_{name}_id"] for name in SYSTEM_ACCOUNTS}


def role_hint(role: str) -> str:
    """What to look at where a task of the role failed; "" if there is nothing to say."""
    return str(_touches().get(role, {}).get("hint", ""))


def probe_requests(spec: ClusterSpec, inventory: Inventory, workspace: Workspace) -> dict[str, ProbeRequest]:
    """Host name -> what to probe there, with the checksums by which drift is found."""
    of_cluster = _of_inventory(spec, inventory)
    values = {
        "cluster": spec.name,
        "cluster_id": inventory.cluster_id,
        "shared": inventory.shared,
        "openmpi_conf": inventory.distribution.openmpi_conf,
        "prte_conf": str(Path(inventory.distribution.openmpi_conf).with_name("prte-mca-params.conf")),
        "mariadb_conf": inventory.distribution.mariadb_conf,
        "public_key": workspace.public_key.read_text().strip(),
    }
    made: dict[tuple[tuple[str, ...], bool, bool], ProbeRequest] = {}  # of hosts alike it is the same
    found = {}
    for host in inventory.hosts:
        if (kind := (tuple(host.roles), bool(host.local_ssds), host.cpus is None)) not in made:
            made[kind] = _probe_request(host, spec, inventory, values, _of_host(of_cluster, host))
        found[host.name] = made[kind]
    return found


def _probe_request(
    host: Host,
    spec: ClusterSpec,
    inventory: Inventory,
    values: Mapping[str, str],
    facts: Mapping[str, object],
) -> ProbeRequest:
    drift = [
        _filled(one, values)
        for touches in _touches().values()
        if _applies(touches, host.roles, spec, facts)
        for one in touches.get("drift", ())
        if _applies(one, host.roles, spec, facts)
    ]
    users = tuple(user.name for user in spec.users)
    homes = {user: f"{inventory.shared}/home/{user}" for user in users}
    own = {ADMIN_USER: ADMIN_ID} if spec.scheduler == "slurm" else {}
    has_homes = host.is_controller or inventory.shared_folder.kind == "none"
    return ProbeRequest(
        files=tuple(path for one in drift for path in one.get("files", ())),
        blocks={path: tuple(edges) for one in drift for path, edges in one.get("blocks", {}).items()},
        paths=tuple(path for one in drift for path in one.get("paths", ())),
        absent=tuple(path for one in drift for path in one.get("absent", ())),
        alone=tuple(path for one in drift for path in one.get("alone", ())),
        rivals={path: line for one in drift for path, line in one.get("rivals", {}).items()},
        users=users,
        numbers=own | wanted_accounts(spec),
        homes=homes if has_homes else {},
        far_homes={} if has_homes else homes,
        keys=dict.fromkeys(users, values["public_key"]),
        units={unit: tuple(files) for one in drift for unit, files in one.get("units", {}).items()},
        packages=role_packages(spec, host.roles, inventory.distribution),
        accounting=tuple(tuple(words) for one in drift for words in one.get("accounting", ())),
        space=(*_PLACES, inventory.shared),
        sized=host.cpus is not None or not host.is_compute,
    )


def _of_spec(spec: ClusterSpec) -> dict[str, object]:
    """What ``when`` can say of a cluster before its hosts are known."""
    return {"scheduler": spec.scheduler, "idle_timeout": bool(spec.provider.idle_timeout_s)}


def _of_inventory(spec: ClusterSpec, inventory: Inventory) -> dict[str, object]:
    """What ``when`` can say of all hosts of an inventory alike; it takes a look at each of them."""
    return {
        **_of_spec(spec),
        "scheduler": inventory.scheduler,
        "shared_folder": inventory.shared_folder.kind,
        "shared_disk": bool(inventory.shared_folder.disk),
        "bucket": bool(inventory.bucket),
        "mpi_module": bool(inventory.distribution.mpi_module),
        "task_prolog": inventory.has_task_prolog,
    }


def _of_host(of_cluster: Mapping[str, object], host: Host) -> dict[str, object]:
    """What ``when`` can say of a host of an inventory."""
    return {**of_cluster, "local_ssds": bool(host.local_ssds), "controller": host.is_controller}


def _applied(spec: ClusterSpec, roles: Sequence[str]) -> dict[str, Touches]:
    """The roles that run on a host of these groups, as far as the spec tells."""
    facts = _of_spec(spec)
    return {role: touches for role, touches in _touches().items() if _applies(touches, roles, spec, facts)}


def _applies(entry: Touches, roles: Sequence[str], spec: ClusterSpec, facts: Mapping[str, object]) -> bool:
    groups = set(roles) - {LOGIN} or {LOGIN}
    here = not groups.isdisjoint(entry.get("hosts", groups))
    return here and all(
        (attrgetter(fact)(spec) if "." in fact else facts.get(fact)) == value
        for fact, value in entry.get("when", {}).items()
    )


@cache
def _touches() -> Mapping[str, Touches]:
    """Role -> its meta/touches.yml."""
    paths = sorted((asset("ansible") / "roles").glob("*/meta/touches.yml"))
    found = {path.parts[-3]: table(path, dict[str, Any]) for path in paths}
    return {role: document[f"{role}_touches"] for role, document in found.items()}


def _listed(touches: Touches, key: str) -> Iterator[str]:
    """What is listed there as it is; what Ansible has to work out is not known here."""
    listed = touches.get(key, ())
    yield from (one for one in listed if "{{" not in one) if isinstance(listed, list) else ()


def _filled(entry: Any, values: Mapping[str, str]) -> Any:
    """The entry with its `{placeholders}` filled in."""
    match entry:
        case str():
            return entry.format_map(values)
        case list():
            return [_filled(one, values) for one in entry]
        case dict():
            return {_filled(key, values): _filled(value, values) for key, value in entry.items()}
    return entry


@dataclass(frozen=True, slots=True)
class Expected:
    """What the cluster needs of a host.

    ``ports`` -> the daemon of ours that will listen there. ``accounts``: name -> number. ``gpus``: how many,
    None where whatever is there is taken. ``address``: where the other hosts reach it. ``free_mib``: path ->
    room that is needed there. ``brings``: the units that the roles will start on a host that is not the
    cluster's yet; what somebody already runs of these would be taken over. ``driver``: the kind that `up`
    installs, of this ``branch``; "" where it installs none. ``here``:
    it is the machine that one is on. ``cgroups``: Slurm is to keep jobs in control groups there.
    """

    address: str
    ports: Mapping[int, str]
    accounts: Mapping[str, int]
    free_mib: Mapping[str, int]
    gpus: int | None = None
    brings: frozenset[str] = frozenset()
    driver: str = ""
    branch: str | None = None
    here: bool = False
    cgroups: bool = False


# MiB: Slurm, MariaDB, Open MPI and the Python of jobs, with what unpacks them; and once they are there.
_BEFORE: Final = {"/": 512, "/usr": 3072, "/var": 2048, "/opt": 1024, "/tmp": 256}  # noqa: S108
_AFTER: Final = {"/": 128, "/var": 256, "/tmp": 64}  # noqa: S108
_CUPY: Final = {"/opt": 7168}  # with CUDA's libraries, and their wheels until they are unpacked


def host_facts_request(spec: ClusterSpec, members: Sequence[Host]) -> ProbeRequest:
    """What to ask of every host before it is part of the cluster, and for `doctor`."""
    roles = sorted({one.roles for one in members})
    ports = {port for group in roles for port in role_ports(spec, group)}
    packages = {name for one in releases() for group in roles for name in role_packages(spec, group, one)}
    request: dict[str, Sequence[str | int]] = {
        "names": [member.name for member in members],  # to resolve
        "ports": sorted(ports),
        "paths": [*_BEFORE],  # whose room counts
        "units": sorted({FABRIC_MANAGER}.union(*(role_units(spec, group) for group in roles))),
        "accounts": [
            *wanted_accounts(spec),
            *([ADMIN_USER] if spec.scheduler == "slurm" else ()),
        ],
        "uids": [*wanted_accounts(spec).values()],
        "files": sorted({file for group in roles for file in role_files(spec, group)}),  # are they there
        "texts": [CLAIM],  # whose first bytes are read
        "packages": sorted(packages),
    }
    return ProbeRequest(host=request, node=False)


def expected(
    spec: ClusterSpec, members: Sequence[Host], *, installed: Collection[str]
) -> Mapping[str, Expected]:
    """Host -> what the spec needs of it; where all is ``installed`` already that takes less room."""
    room = {True: dict.fromkeys(_BEFORE, 0) | _AFTER, False: dict(_BEFORE)}
    gpus = {
        host: partition.gpus.count
        for partition in spec.partitions
        if partition.gpus
        for host in spec.node_names(partition)
    }
    cupy, nvidia = set(gpus) - set(installed) if spec.software.cupy else (), spec.software.nvidia
    cgroups = spec.scheduler == "slurm" and not spec.provider.shares_kernel
    here = [name for name, machine in spec.provider.machines.items() if machine.is_here]
    return {
        member.name: Expected(
            address=member.address,
            ports=role_ports(spec, member.roles),
            accounts=wanted_accounts(spec),
            free_mib=room[member.name in installed] | (_CUPY if member.name in cupy else {}),
            gpus=gpus.get(member.name),
            brings=frozenset() if member.name in installed else role_units(spec, member.roles),
            driver=nvidia.driver if nvidia.has_driver else "",
            branch=nvidia.of_branch,
            here=member.name in here,
            cgroups=cgroups and member.is_compute,
        )
        for member in members
    }
