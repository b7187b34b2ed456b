"""The packages, files and units of each Ansible role, and the requirements of a spec for each host.

The source is meta/touches.yml of each role. The Ansible module host_changes keeps the items in these
files that a host's owner had, so that `down` can move them back. Keys that only clusterctl reads:

    hosts: [controller]           the groups of hosts that the role runs on; `login`: hosts of no other group
    when: {scheduler: slurm}      conditions on the cluster and host, all of which must hold (``_spec_facts``,
                                  ``_host_facts``; with a dot, a key of the spec:
                                  `software.apptainer`)
    variables: {x_y: software.y}  variables of the role that get the value of a key of the spec
    packages: as needed           packages depend on the host; or a list; default: the role's *_packages
    ports: [6817]                 ports on which its daemons listen
    drift:                        items that `up` and `plan` compare with their state after the last `up`
      - files, blocks, paths, readable (patterns of files and folders that every user must be able to
        use), openmpi (files beside Open MPI's parameters), units (with the files that each reads at
        its start), accounting (words for sacctmgr), absent (paths), alone (files
        without another *.conf in their folder), rivals (a pattern that no line of a later file in
        the folder may match, by file)
    needs:                        what must hold on a host so that jobs can run
      - check: folder             the check in health.py; its parameters are further keys
        code, what, fix           of its problems in `doctor`
    hint: see ...                 advice if a task of the role fails
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from pydantic_core import to_jsonable_python

from clusterctl.hosts.probe import ProbeRequest
from clusterctl.packages.os_packages import packages_of
from clusterctl.spec.distributions import Distribution, releases
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import SYSTEM_ACCOUNTS
from clusterctl.state.inventory import LOGIN, Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import data_folder, read_table
from clusterctl.util.own_name import OWN

# The file that names the cluster to which a host belongs.
CLAIM: Final = "/etc/clusterctl/cluster.json"
# Files of which each host reports the start of the text in ``HostFacts.texts``.
TEXTS: Final = (CLAIM,)
FABRIC_MANAGER: Final = "nvidia-fabricmanager"
_PLACES: Final = ("/", "/tmp", "/var", "/run")  # noqa: S108

Touches = Mapping[str, Any]


def role_packages(
    spec: ClusterSpec, roles: Sequence[str], distribution: Distribution
) -> tuple[str, ...]:
    """Return the OS packages that all hosts of the groups ``roles`` need. Some hosts need more
    packages.
    """
    touches = _applied(spec, roles)
    listed_packages = [
        name for role_touches in touches.values() for name in _plain_items(role_touches, "packages")
    ]
    default_roles = [
        role for role, role_touches in touches.items() if "packages" not in role_touches
    ]
    return tuple(
        sorted(
            {
                *packages_of(default_roles, distribution, spec.software),
                *listed_packages,
                *spec.software.packages,
            }
        )
    )


def role_files(spec: ClusterSpec, roles: Sequence[str]) -> frozenset[str]:
    """Return patterns of files in /etc, except clusterctl's own, that Ansible roles may change on a
    host.

    roles: the host's groups.
    """
    return frozenset(
        path
        for touches in _applied(spec, roles).values()
        for path in (*_plain_items(touches, "files"), *_plain_items(touches, "blocks"))
        if path.startswith("/etc/") and OWN not in path
    )


def own_paths() -> frozenset[str]:
    """Return patterns of clusterctl's own files and folders on a host, except state in /run and /var,
    and files in homes.
    """
    paths = (
        Path(path)
        for touches in _touches().values()
        for key in ("files", "folders", "trees")
        for path in _plain_items(touches, key)
        if path.startswith(("/etc/", "/opt/", "/usr/local/", "/var/lib/"))
    )
    ours = (
        min((p for p in (path, *path.parents) if OWN in p.name), key=lambda p: len(p.parts))
        for path in paths
        if OWN in str(path)
    )
    record = read_table(data_folder("ansible") / "roles/users/defaults/main.yml", dict[str, Any])
    return frozenset(map(str, ours)) | {f"{record['users_record']}*"}


def role_units(spec: ClusterSpec, roles: Sequence[str]) -> frozenset[str]:
    touches = _applied(spec, roles).values()
    return frozenset(
        unit.removesuffix(".service")
        for role_touches in touches
        for unit in _plain_items(role_touches, "units")
    )


def role_ports(spec: ClusterSpec, roles: Sequence[str]) -> tuple[int, ...]:
    """Return the ports on which daemons listen, for hosts of the groups ``roles``."""
    touches = _applied(spec, roles).values()
    return tuple(port for role_touches in touches for port in role_touches.get("ports", ()))


def can_share_configuration(spec: ClusterSpec) -> bool:
    """Return whether hosts can share a configuration. Without Slurm, each needs all hosts' SSH host
    keys.
    """
    return not spec.scheduler_needs.starts_by_ssh


def host_roles(spec: ClusterSpec, inventory: Inventory) -> dict[str, list[str]]:
    """Return host -> the Ansible roles that run on it, sorted."""
    cluster_facts = _inventory_facts(spec, inventory)
    # Hosts of the same kind run the same roles.
    made: dict[tuple[object, ...], list[str]] = {}
    runs = {}
    for host in inventory.hosts:
        facts = _host_facts(cluster_facts, host)
        if (kind := (tuple(host.roles), *facts.values())) not in made:
            made[kind] = [
                role
                for role, touches in _touches().items()
                if _applies(touches, host.roles, spec, facts)
            ]
        runs[host.name] = made[kind]
    return runs


def cluster_roles(spec: ClusterSpec, inventory: Inventory) -> frozenset[str]:
    return frozenset(role for roles in host_roles(spec, inventory).values() for role in roles)


def spec_variables(spec: ClusterSpec, roles: Collection[str]) -> dict[str, Any]:
    """Return variable -> value, for the variables of these Ansible roles that the spec sets."""
    touches = [_touches()[role] for role in sorted(roles)]
    keys = {
        name: key
        for role_touches in touches
        for name, key in role_touches.get("variables", {}).items()
    }
    variables = {name: to_jsonable_python(attrgetter(key)(spec)) for name, key in keys.items()}
    return {name: value for name, value in variables.items() if value is not None}


def required_accounts(spec: ClusterSpec) -> dict[str, int]:
    """Return account -> uid, which is also its gid, for the daemons and the users."""
    daemons = system_accounts() if spec.scheduler_needs.has_daemons else {}
    return {**daemons, **{user.name: user.uid for user in spec.users}}


def system_accounts() -> Mapping[str, int]:
    """Return account -> uid, which is also its gid, for Slurm's daemons."""
    defaults = read_table(data_folder("ansible") / "roles/users/defaults/main.yml", dict[str, Any])
    return {name: defaults[f"users_{name}_id"] for name in SYSTEM_ACCOUNTS}


def role_hint(role: str) -> str:
    """Return advice for a failed task of an Ansible role; "" without advice."""
    return str(_touches().get(role, {}).get("hint", ""))


def probe_requests(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace
) -> dict[str, ProbeRequest]:
    """Return host -> items to probe. Their checksums show whether they have changed since the last
    `up`.
    """
    cluster_facts = _inventory_facts(spec, inventory)
    values = {
        "cluster": spec.name,
        "cluster_id": inventory.cluster_id,
        "shared": inventory.shared,
        "mariadb_conf": inventory.distribution.mariadb_conf,
        "public_key": workspace.read_admin_key(),
    }
    # Hosts of the same kind share a request.
    made: dict[tuple[object, ...], ProbeRequest] = {}
    requests = {}
    for host in inventory.hosts:
        facts = _host_facts(cluster_facts, host)
        if (kind := (tuple(host.roles), host.cpus is None, *facts.values())) not in made:
            made[kind] = _probe_request(host, spec, inventory, values, facts)
        requests[host.name] = made[kind]
    return requests


def key_marks(spec: ClusterSpec) -> dict[str, str]:
    """Return the checksums that a probe finds on the controller if people's keys are those of the
    spec.
    """
    lines = {user.name: "\n".join(sorted(spec.key_lines(user))) for user in spec.users}
    return {f"keys {name}": sha256(text.encode()).hexdigest()[:16] for name, text in lines.items()}


def node_needs(spec: ClusterSpec, inventory: Inventory, host: Host) -> list[dict[str, Any]]:
    """Return the needs of a node to run jobs: entries of `needs`, as health.py reads them."""
    facts = _host_facts(_inventory_facts(spec, inventory), host)
    values = {
        "host": host.name,
        "cluster_id": inventory.cluster_id,
        "shared": inventory.shared,
        "mount": "" if inventory.shared_folder.kind == "none" else inventory.shared,
    }
    return [
        {key: value for key, value in need.items() if key not in ("hosts", "when")}
        for touches in _touches().values()
        if _applies(touches, host.roles, spec, facts)
        for need in _fill_placeholders(touches.get("needs", []), values)
        if _applies(need, host.roles, spec, facts)
    ]


def _probe_request(
    host: Host,
    spec: ClusterSpec,
    inventory: Inventory,
    values: Mapping[str, str],
    facts: Mapping[str, object],
) -> ProbeRequest:
    drift = [
        _fill_placeholders(entry, values)
        for touches in _touches().values()
        if _applies(touches, host.roles, spec, facts)
        for entry in touches.get("drift", ())
        if _applies(entry, host.roles, spec, facts)
    ]
    users = tuple(user.name for user in spec.users)
    homes = {user: f"{inventory.shared}/home/{user}" for user in users}
    has_homes = host.is_controller or inventory.shared_folder.kind == "none"
    return ProbeRequest(
        files=tuple(path for entry in drift for path in entry.get("files", ())),
        blocks={
            path: tuple(edges) for entry in drift for path, edges in entry.get("blocks", {}).items()
        },
        paths=tuple(path for entry in drift for path in entry.get("paths", ())),
        readable=tuple(path for entry in drift for path in entry.get("readable", ())),
        openmpi=tuple(name for entry in drift for name in entry.get("openmpi", ())),
        absent=tuple(path for entry in drift for path in entry.get("absent", ())),
        alone=tuple(path for entry in drift for path in entry.get("alone", ())),
        rivals={path: line for entry in drift for path, line in entry.get("rivals", {}).items()},
        users=users,
        numbers=required_accounts(spec),
        homes=homes if has_homes else {},
        far_homes={} if has_homes else homes,
        keys=dict.fromkeys(users, values["public_key"]),
        key_end=spec.key_mark,
        units={
            unit: tuple(files) for entry in drift for unit, files in entry.get("units", {}).items()
        },
        packages=role_packages(spec, host.roles, inventory.distribution),
        accounting=tuple(tuple(words) for entry in drift for words in entry.get("accounting", ())),
        space=(*_PLACES, inventory.shared),
        hardware="gpus" if host.cpus is not None or not host.is_compute else "all",
    )


def _spec_facts(spec: ClusterSpec) -> dict[str, object]:
    """Return the values for ``when`` conditions in touches.yml that depend only on the spec."""
    return {"scheduler": spec.scheduler, "idle_timeout": bool(spec.provider.idle_timeout_s)}


def _inventory_facts(spec: ClusterSpec, inventory: Inventory) -> dict[str, object]:
    """Return the values for ``when`` conditions in touches.yml that are the same for all hosts."""
    return {
        **_spec_facts(spec),
        "scheduler": inventory.scheduler,
        "shared_folder": inventory.shared_folder.kind,
        "shared_disk": bool(inventory.shared_folder.disk),
        "bucket": bool(inventory.bucket),
        "mpi_module": bool(inventory.distribution.mpi_module),
    }


def _host_facts(cluster_facts: Mapping[str, object], host: Host) -> dict[str, object]:
    return {
        **cluster_facts,
        "local_ssds": bool(host.local_ssds),
        "controller": host.is_controller,
        "job_variables": bool(host.job_environment),
    }


def _applied(spec: ClusterSpec, roles: Sequence[str]) -> dict[str, Touches]:
    """Return Ansible role -> its touches.yml, for the roles that run on hosts of the groups
    ``roles``.
    """
    facts = _spec_facts(spec)
    return {
        role: touches
        for role, touches in _touches().items()
        if _applies(touches, roles, spec, facts)
    }


def _applies(
    entry: Touches, roles: Sequence[str], spec: ClusterSpec, facts: Mapping[str, object]
) -> bool:
    groups = set(roles) - {LOGIN} or {LOGIN}
    is_in_group = not groups.isdisjoint(entry.get("hosts", groups))
    return is_in_group and all(
        (attrgetter(fact)(spec) if "." in fact else facts.get(fact)) == value
        for fact, value in entry.get("when", {}).items()
    )


@cache
def _touches() -> Mapping[str, Touches]:
    paths = sorted((data_folder("ansible") / "roles").glob("*/meta/touches.yml"))
    documents = {path.parts[-3]: read_table(path, dict[str, Any]) for path in paths}
    return {role: document[f"{role}_touches"] for role, document in documents.items()}


def _plain_items(touches: Touches, key: str) -> Iterator[str]:
    items = touches.get(key, ())
    yield from (item for item in items if "{{" not in item) if isinstance(items, list) else ()


def _fill_placeholders(entry: Any, values: Mapping[str, str]) -> Any:
    """Return ``entry`` (text, list or dict) with each `{name}` in its texts replaced by
    ``values[name]``.
    """
    match entry:
        case str():
            return entry.format_map(values)
        case list():
            return [_fill_placeholders(item, values) for item in entry]
        case dict():
            return {
                _fill_placeholders(key, values): _fill_placeholders(value, values)
                for key, value in entry.items()
            }
    return entry


@dataclass(frozen=True, slots=True)
class HostRequirements:
    """The requirements of the cluster for a host.

    accounts: account -> uid and gid.
    free_mib: path -> disk space, of a host that has not joined yet.
    gpus: number of GPUs, if the spec gives it.
    brings: units that `up` will start or reconfigure on a host that has not joined yet.
    driver, branch: kind and branch of the NVIDIA driver that `up` installs, if any.
    here: clusterctl runs on the host.
    cgroups: Slurm will limit jobs by control groups.
    """

    accounts: Mapping[str, int]
    free_mib: Mapping[str, int]
    gpus: int | None = None
    brings: frozenset[str] = frozenset()
    driver: str = ""
    branch: str | None = None
    here: bool = False
    cgroups: bool = False

    @property
    def has_joined(self) -> bool:
        """Whether the host has the cluster's software, and so a health check."""
        return not self.free_mib


# Disk space in MiB to install Slurm, MariaDB, Open MPI and Python.
_BEFORE: Final = {
    "/": 512,
    "/usr": 3072,
    "/var": 2048,
    "/opt": 1024,
    "/tmp": 256,  # noqa: S108
}
# CuPy with CUDA's libraries, and their wheels until they are unpacked.
_CUPY: Final = {"/opt": 7168}


def host_facts_request(
    spec: ClusterSpec, members: Sequence[Host], folders: Collection[str] = ()
) -> ProbeRequest:
    """Return the facts to ask of hosts before they join the cluster, and of all hosts for
    `doctor`.

    folders: further paths to look for, among the roles' files.
    """
    roles = sorted({member.roles for member in members})
    packages = {
        name for os in releases() for group in roles for name in role_packages(spec, group, os)
    }
    request: dict[str, Sequence[str | int]] = {
        "paths": [*_BEFORE],
        "units": sorted({FABRIC_MANAGER}.union(*(role_units(spec, group) for group in roles))),
        "accounts": [*required_accounts(spec)],
        "uids": [*required_accounts(spec).values()],
        "files": sorted({*folders}.union(*(role_files(spec, group) for group in roles))),
        "texts": [*TEXTS],
        "packages": sorted(packages),
    }
    return ProbeRequest(host=request, node=False)


def requirements_of_hosts(
    spec: ClusterSpec, members: Sequence[Host], *, installed: Collection[str]
) -> Mapping[str, HostRequirements]:
    """Return host -> requirements. Hosts in ``installed`` have the cluster's software, and their
    health check looks at their disks.
    """
    gpus = {
        host: partition.gpus.count
        for partition in spec.partitions
        if partition.gpus
        for host in spec.node_names(partition)
    }
    cupy = gpus if spec.software.cupy else ()
    nvidia = spec.software.nvidia
    cgroups = spec.scheduler_needs.has_daemons and not spec.provider.shares_kernel
    here = [name for name, machine in spec.provider.machines.items() if machine.is_here]
    none: frozenset[str] = frozenset()
    return {
        member.name: HostRequirements(
            accounts=required_accounts(spec),
            free_mib={}
            if member.name in installed
            else _BEFORE | (_CUPY if member.name in cupy else {}),
            gpus=gpus.get(member.name),
            brings=none if member.name in installed else role_units(spec, member.roles),
            driver=nvidia.driver if nvidia.has_driver else "",
            branch=nvidia.of_branch,
            here=member.name in here,
            cgroups=cgroups and member.is_compute,
        )
        for member in members
    }
