"""The files specific to a host, which are all that a new host from a template lacks.

A template has the configuration of its group, without names, addresses, sizes and secrets. These
files are rendered here, Ansible's roles copy them, and a host from a template gets them without
Ansible. Ansible runs only on new hosts on which a probe does not find the expected files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from clusterctl.configure.inventory_file import HOSTS_FILE, OF_HOSTS, OPENMPI_FILE
from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.probe import Checksums, HostReport
from clusterctl.hosts.roles import key_marks, probe_requests, system_accounts
from clusterctl.providers.templates import NodeFile, NodeFiles
from clusterctl.scheduler.slurm.conf import has_limited_shares, health_settings, slurmd_digests
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import MPI_SSH
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport, remote_argv
from clusterctl.util.assets import data_folder, read_table, render


class _Copy(NamedTuple):
    """A host's file, as a role installs it: a copy of ``source`` in ``workspace.rendered``."""

    source: str
    mode: int = 0o644
    owner: str = "root"


_HEALTH: Final = f"{OF_HOSTS}/{{host}}.health.json"
_SLURMD: Final = f"{OF_HOSTS}/{{host}}.slurmd.conf"
# Path on a host -> the origin of the copy. Open MPI's file is not listed: its folder differs
# between hosts.
_COPIES: Final = {
    "/etc/hosts": _Copy(HOSTS_FILE),
    "/opt/clusterctl/health.json": _Copy(_HEALTH),
    "/etc/systemd/system/slurmd.service.d/clusterctl.conf": _Copy(_SLURMD),
    "/etc/slurm/slurmdbd.conf": _Copy("slurmdbd.conf", 0o600, "slurm"),
    **{
        f"/etc/slurm/{name}": _Copy(name)
        for name in ("slurm.conf", "gres.conf", "cgroup.conf", "topology.conf")
    },
}
_KEY: Final = "/etc/munge/munge.key"


def render_host_files(
    spec: ClusterSpec,
    inventory: Inventory,
    slurm: Mapping[str, str],
    drivers: Mapping[str, Driver],
) -> dict[str, str]:
    """Return the files that roles copy: path in ``workspace.rendered`` -> content.

    slurm: Slurm's files, from ``render_files``. drivers: host -> its GPUs, if it has any.
    """
    names = "".join(f"{host.address} {host.name}\n" for host in inventory.hosts)
    by_ssh = inventory.scheduler_needs.starts_by_ssh
    files = {
        **slurm,
        HOSTS_FILE: names,
        OPENMPI_FILE: render(
            f"{OPENMPI_FILE}.j2",
            network=inventory.network,
            ssh=MPI_SSH if by_ssh else "",
            launch_agent=_launch_agent() if inventory.distribution.mpi_module else "",
            yields=inventory.oversubscribed,
            fabric=spec.provider.may_have_fabric,
        ),
    }
    for host, settings in health_settings(spec, inventory, drivers).items():
        files[_HEALTH.format(host=host)] = json.dumps(settings, indent=1, sort_keys=True) + "\n"
    for host, digest in (slurmd_digests(slurm, inventory) if slurm else {}).items():
        files[_SLURMD.format(host=host)] = render(
            "slurmd.conf.j2",
            digest=digest,
            server=inventory.controller.name,
            limits_shares=has_limited_shares(inventory),
        )
    return files


def _launch_agent() -> str:
    defaults = read_table(
        data_folder("ansible") / "roles/openmpi/defaults/main.yml", dict[str, Any]
    )
    return str(defaults["openmpi_launch_agent"])


def node_files(
    spec: ClusterSpec,
    inventory: Inventory,
    workspace: Workspace,
    rendered: Mapping[str, str],
    reports: Mapping[str, HostReport],
) -> NodeFiles:
    """Return host -> path -> host-specific file, with the content that roles install.

    rendered: from ``render_host_files``. reports: host -> facts. Hosts without facts have the
        distribution's Open MPI.
    """
    ids = {"root": 0, **system_accounts()}
    key = NodeFile(workspace.munge_key.read_bytes(), 0o400, ids["munge"])

    def files_of(host: str) -> Iterator[tuple[str, NodeFile]]:
        request = requests[host]
        for path in (*request.files, *request.blocks):
            if path == _KEY:
                yield path, key
            elif path in _COPIES:
                copy = _COPIES[path]
                data = rendered[copy.source.format(host=host)].encode()
                yield path, NodeFile(data, copy.mode, ids[copy.owner], request.blocks.get(path))
        if OPENMPI_FILE in request.openmpi:
            folder = host in reports and reports[host].openmpi
            distributed = PurePosixPath(inventory.distribution.openmpi_conf)
            yield str(PurePosixPath(folder or distributed.parent, OPENMPI_FILE)), openmpi

    openmpi = NodeFile(rendered[OPENMPI_FILE].encode())
    requests = probe_requests(spec, inventory, workspace)
    return {host: dict(files_of(host)) for host in requests}


def expected_marks(files: Mapping[str, NodeFile]) -> Checksums:
    """Return the checksums that a probe finds on a host that has ``files`` (path -> file)."""
    return {_key(path, file): file.mark for path, file in files.items()}


def marks_from_template(
    spec: ClusterSpec, inventory: Inventory, files: NodeFiles
) -> dict[str, Checksums]:
    """Return host -> the checksums that a probe finds on a new host that needs no Ansible.

    The controller needs Ansible unless the homes have exactly the spec's keys of people.
    """
    keys = {inventory.controller.name: key_marks(spec)}
    return {host: {**expected_marks(own), **keys.get(host, {})} for host, own in files.items()}


def _key(path: str, file: NodeFile) -> str:
    return f"{'block' if file.edges else 'file'} {path}"


def can_renew(files: Mapping[str, NodeFile], checksums: Checksums) -> bool:
    """Return whether ``renew`` can update a host: all files are probed, no secret file differs.

    files: path -> wanted file. checksums: the checksums that a probe of the host found.
    """
    marks = expected_marks(files)
    secrets = [f"file {path}" for path, file in files.items() if not file.mode & 0o077]
    return marks.keys() <= checksums.keys() and all(checksums[key] == marks[key] for key in secrets)


def renew(files: Mapping[str, NodeFile], checksums: Checksums, transport: Transport) -> None:
    """Rewrite the ``files`` with another checksum on the host, and restart the units that read
    them. Record on the host that all are wanted.
    """
    stale = {
        path: files[path]
        for path in files
        if checksums[_key(path, files[path])] != files[path].mark
    }
    contents = {path: (file.data.decode(), file.mode, file.edges) for path, file in stale.items()}
    _write(transport, contents, {"marks": expected_marks(files)})


def record_wanted(transport: Transport, **changes: Mapping[str, Any]) -> None:
    """Change these parts of the host's record (``clusterctl.util.remote_wanted``)."""
    _write(transport, {}, changes)


def _write(
    transport: Transport,
    files: Mapping[str, tuple[str, int, tuple[str, str] | None]],
    wanted: Mapping[str, Any],
) -> None:
    request = json.dumps({"files": files, "wanted": wanted})
    transport.run(("sudo", "-n", *remote_argv("clusterctl.hosts.remote_host_files", request)))
