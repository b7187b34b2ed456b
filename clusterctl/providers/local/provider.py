"""The local provider: creates systemd-nspawn nodes on this machine and describes them as an
Inventory.
"""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import MachineError, UsageError
from clusterctl.hosts.checks import DoctorReport, Finding
from clusterctl.providers.base import (
    DEFAULTS,
    NO_PROMPTS,
    Bake,
    BakeTemplates,
    CachedImage,
    FoundCluster,
    HostOptions,
    HostPlan,
    Leftover,
    Orphan,
    OrphanSearch,
    Prompts,
    Provider,
    Provisioned,
    load_known_hosts,
)
from clusterctl.providers.local import layout
from clusterctl.providers.local.capacity import (
    NodeShare,
    compare,
    is_oversubscribed,
    shares_here,
)
from clusterctl.providers.local.client import (
    Helper,
    refuse_other_machines,
    require_root,
    start_ahead,
)
from clusterctl.providers.local.image import DEBIAN, DEFAULT_MIRROR, base_inputs
from clusterctl.providers.storage import KeptStorage, other_storage, storage_note, storage_of
from clusterctl.providers.templates import NodeFile
from clusterctl.spec import distributions
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.inventory import (
    COMPUTE,
    CONTROLLER,
    Host,
    Inventory,
)
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import digest, install_inputs
from clusterctl.util.numbers import counted

_KEEP_IMAGE: Final = (
    "nodes keep the image they were built from: `up` can't upgrade their distribution or their "
    "Slurm in place"
)
_DOWN_AND_UP: Final = (
    "run `clusterctl down`, then `clusterctl up`: collected runs stay, and with `storage: "
    "{name: NAME}` the shared folder; accounts come from the spec; submit waiting jobs again; "
    "the accounting history is lost"
)


class LocalProvider(Provider):
    _settings: LocalSettings
    takes_single_hosts = False
    recreates_hosts = True
    known_shared = layout.SHARED

    def __init__(self, settings: LocalSettings, prompts: Prompts = NO_PROMPTS) -> None:
        self._settings = settings
        self._helper = Helper(prompts.reporter.progress)
        # MariaDB's package on Debian creates the database files, so a controller's template can
        # hold them.
        if settings.release in DEBIAN.suites:
            self.template_groups = (COMPUTE, CONTROLLER)

    def check(self, spec: ClusterSpec) -> None:  # noqa: ARG002
        refuse_other_machines(sys.platform)
        if (release := distributions.redhat_release()) and release.startswith("rhel"):
            summary = "local nodes are not supported on Red Hat Enterprise Linux"
            reason = (
                "RHEL's packages need a subscription, and node images can't use that of this "
                "machine"
            )
            fix = (
                "use this machine itself as a node: provider: {type: onprem} and address: localhost"
            )
            raise UsageError(
                summary,
                code="unsupported",
                about="rhel",
                where="provider.type",
                why=reason,
                fix=fix,
            )
        of_debian = {
            "provider.mirror": self._settings.mirror != DEFAULT_MIRROR,
            "provider.distribution": self._settings.distribution is not None,
        }
        if where := ", ".join(key for key, is_set in of_debian.items() if is_set and release):
            raise UsageError(
                "local nodes on this machine can only have the machine's own distribution and "
                "repositories",
                code="unsupported",
                about="distribution",
                where=where,
                why=f"this machine runs {release}: dnf builds the node image from the machine's "
                "repositories",
                fix=f"remove {where}; to use a mirror, configure it in /etc/yum.repos.d of this "
                "machine",
            )

    def check_replacement(self) -> None:
        return

    def start_ahead(self) -> None:
        start_ahead()

    def require_rights(self) -> None:
        self._helper.call("clusters", {})

    def preflight(self, spec: ClusterSpec, workspace: Workspace) -> DoctorReport | None:  # noqa: ARG002
        try:
            require_root(sys.platform)
        except MachineError as exc:
            finding = Finding(
                "this machine",
                "error",
                exc.about or exc.code,
                exc.what,
                exc.why,
                exc.fix,
                exc.code,
            )
            return DoctorReport((finding,), {})
        return None

    def prepare(self, spec: ClusterSpec, workspace: Workspace, *, bake: Bake) -> None:
        image = _image(self._settings, spec, workspace)
        with self._helper.asking("bake", image.model_dump(mode="json")) as exchange:
            if (answer := exchange.ready()) is not None:
                bake(self._image_host(answer, "image", CONTROLLER, COMPUTE))
                exchange.send("done")
            exchange.result()

    def _image_host(self, answer: Mapping[str, Any], name: str, *roles: str) -> Host:
        release = self._settings.release
        return Host(
            name=name, address="127.0.0.1", roles=roles, distribution=release, **answer[name]
        )

    def prepare_templates(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        inputs: Mapping[str, str],
        *,
        bake: BakeTemplates,
    ) -> Mapping[str, str]:
        image = _image(self._settings, spec, workspace)
        request = layout.ClassRequest(
            id=workspace.cluster_id(),
            image=image.key,
            inputs=dict(inputs),
            admin_key=image.admin_key,
        )

        with self._helper.asking("bake_class", request.model_dump(mode="json")) as exchange:
            if (answer := exchange.ready()) is not None:
                inventory = Inventory(
                    cluster=spec.name,
                    cluster_id=request.id,
                    provider=self._settings.type,
                    hosts=tuple(self._image_host(answer, group, group) for group in answer),
                    network="",
                    shared=layout.SHARED,
                    baked=True,
                )
                bake(inventory)
                exchange.send("done")
            return exchange.result()

    def plan(
        self, spec: ClusterSpec, workspace: Workspace, options: HostOptions = DEFAULTS
    ) -> HostPlan:
        refuse_other_machines(sys.platform)
        shares, notes = shares_here(spec)
        hosts = load_known_hosts(workspace)
        existing = layout.ExistingMachines()
        storages = tuple[KeptStorage, ...]()
        try:
            if cluster_id := workspace.known_id():
                existing = self._existing(cluster_id)
            if spec.storage.name:
                storages = self.storages()
        # A plan is shown even without root access.
        except MachineError as exc:
            names = frozenset(hosts)
            existing = layout.ExistingMachines(nodes=names, running=names)
            notes += (
                (
                    "nodes and storage are shown as `up` left them; they could not be "
                    f"checked: {exc.cause}"
                ),
            )
        if existing.state is not None:
            notes += self._notes_on(existing.state, spec)
        storage = storage_of(spec, storages)
        if not existing.nodes:
            if storage:
                storage.reject_use(workspace.known_id())
            notes += storage_note(spec, storage)
        return HostPlan(
            tuple(compare(spec, shares, existing, hosts, options.recreated)), notes=notes
        )

    def _notes_on(self, state: layout.ClusterState, spec: ClusterSpec) -> tuple[str, ...]:
        """Return notes about changed settings. Raise a UsageError if the storage, the distribution
        or Slurm changed.
        """
        # The record of the last `up`, with which the spec was compared, may be lost.
        if state.storage != spec.storage.name:
            raise other_storage(state.name, state.storage)
        subject = f"the nodes of cluster {state.name!r} run"
        reason = _KEEP_IMAGE
        runs = state.distribution
        requested = self._settings.distribution
        if runs and requested and runs != requested:
            current_title, requested_title = (
                distributions.distribution_of(name).title for name in (runs, requested)
            )
            raise UsageError(
                f"{subject} {current_title}, but the spec asks for {requested_title}",
                code="fixed-while-up",
                about="distribution",
                where="provider.distribution",
                why=reason,
                fix=f"write distribution: {runs}; or {_DOWN_AND_UP}",
            )
        packages = state.with_packages(spec.software.packages).packages
        image = image_keys(self._settings, packages)[1]
        return tuple(
            state.notes_on_kept_settings(self._settings.subnet, image, self._settings.release)
        )

    def apply(
        self, spec: ClusterSpec, workspace: Workspace, options: HostOptions = DEFAULTS
    ) -> Provisioned:
        node_class = options.templates
        shares, notes = shares_here(spec)
        request = self._request(spec, workspace, shares, node_class.keys if node_class else {})
        request = request.model_copy(update={"anew": tuple(options.recreated)})
        classed: tuple[str, ...] = ()
        self._helper.report(f"starting {counted(len(request.nodes), 'node')}")
        with self._helper.asking("up", request.model_dump(mode="json")) as exchange:
            if (answer := exchange.ready()) is not None:
                planned = layout.MadeCluster.model_validate(answer)
                inventory = _inventory(spec, request, shares, planned)
                files = node_class.files(inventory) if node_class else {}
                of_class = {node.name for node in request.nodes if request.class_of(node)}
                classed = tuple(
                    node.name for node in planned.nodes if node.made and node.name in of_class
                )
                exchange.send(
                    {name: [_placed(*file) for file in files[name].items()] for name in classed}
                )
            made = layout.MadeCluster.model_validate(exchange.result())
        removed = (f"removed {', '.join(made.removed)}",) if made.removed else ()
        return Provisioned(
            _inventory(spec, request, shares, made),
            notes + made.notes + unused_gpus() + removed,
            made=tuple(node.name for node in made.nodes if node.made),
            started=tuple(node.name for node in made.nodes if node.started and not node.made),
            from_template=classed,
        )

    def _request(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        sizes: Sequence[NodeShare],
        classes: Mapping[str, str],
    ) -> layout.ClusterRequest:
        image = _image(self._settings, spec, workspace)
        homes = (
            layout.Home(name=user.name, uid=user.uid, keys=(image.admin_key,))
            for user in spec.users
        )
        nodes = (layout.NspawnNode(name=s.host, cores=s.cores) for s in sizes)
        return layout.ClusterRequest(
            id=workspace.cluster_id(),
            name=spec.name,
            owner=os.getuid(),
            workspace=str(workspace.root),
            image=image.key,
            packages=spec.software.packages,
            distribution=image.distribution,
            admin_key=image.admin_key,
            subnet=self._settings.subnet,
            storage=spec.storage.name,
            node_class=classes.get(COMPUTE),
            controller_class=classes.get(CONTROLLER),
            homes=tuple(homes),
            nodes=(layout.NspawnNode(name=spec.controller_host), *nodes),
        )

    def _existing(self, cluster_id: str) -> layout.ExistingMachines:
        return layout.ExistingMachines.model_validate(
            self._helper.call("existing", {"id": cluster_id})
        )

    def kill_host(self, cluster_id: str, host: str) -> None:
        self._helper.call("kill_host", {"id": cluster_id, "host": host})

    def signal_ranks(
        self, cluster_id: str, job: str, number: int, *, last: bool
    ) -> tuple[str, ...]:
        request = {"id": cluster_id, "job": job, "number": number, "last": last}
        return tuple(self._helper.call("signal_ranks", request)["hosts"])

    def alive(self, cluster_id: str) -> bool:
        return bool(self._existing(cluster_id).machines)

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:  # noqa: ARG002
        self._helper.call("down", {"id": cluster_id})

    def leftovers(self, cluster_id: str, *, workspace: Workspace | None) -> tuple[Leftover, ...]:  # noqa: ARG002
        return tuple(map(Leftover, self._helper.call("look", {"id": cluster_id})["residue"]))

    def orphans(self, name: str) -> OrphanSearch:
        mine = (c for c in clusters() if c.name == name and c.owner == os.getuid())
        return OrphanSearch(tuple(Orphan(c.id) for c in mine if is_orphan(c)))

    def storages(self) -> tuple[KeptStorage, ...]:
        answer = self._helper.call("storage", {"owner": os.getuid()})
        folders = map(layout.StoredFolder.model_validate, answer["storages"])
        top = layout.storages_folder(os.getuid())
        return tuple(
            KeptStorage(id=folder.name, what=f"folder {top / folder.name}", **folder.model_dump())
            for folder in folders
        )

    def remove_storage(self, storage: KeptStorage) -> None:
        self._helper.call("storage", {"owner": os.getuid(), "remove": storage.name})

    def cached_images(self, *, prune: bool = False) -> tuple[CachedImage, ...]:
        answer = self._helper.call("cache", {"prune": prune})
        images = map(layout.ImageInCache.model_validate, answer["images"])
        return tuple(CachedImage(image.key, image.size_mib, image.used_by) for image in images)

    def clusters_here(self) -> tuple[FoundCluster, ...]:
        # Workspaces of other accounts can't be read, so it is unknown whether their clusters are
        # orphans.
        return tuple(
            FoundCluster(
                id=cluster.id,
                name=cluster.name,
                provider=self._settings.type,
                workspace=cluster.workspace,
                nodes=sum(not name.endswith("-ctl") for name in cluster.numbers),
                is_orphan=is_orphan(cluster),
            )
            for cluster in clusters()
            if cluster.owner == os.getuid()
        )


def is_orphan(cluster: layout.ClusterState) -> bool:
    """Return whether the cluster's workspace folder is missing or now belongs to another
    cluster.
    """
    try:
        return Workspace(Path(cluster.workspace)).known_id() != cluster.id
    except (NotADirectoryError, MachineError):
        return True


def image_keys(settings: LocalSettings, packages: Sequence[str] = ()) -> tuple[str, str]:
    """Return cache keys, which are hashes of all inputs: (of the base image, of the node image on
    this base).

    packages: the additional packages of the spec.
    """
    base_key = digest(settings.mirror, *base_inputs(settings.release))
    chosen = sorted(f"package {name}" for name in packages)
    return base_key, digest(base_key, *install_inputs(), *chosen)


def _image(settings: LocalSettings, spec: ClusterSpec, workspace: Workspace) -> layout.BakeRequest:
    base_key, key = image_keys(settings, spec.software.packages)
    return layout.BakeRequest(
        id=workspace.cluster_id(),
        subnet=settings.subnet,
        key=key,
        base_key=base_key,
        distribution=settings.release,
        mirror=settings.mirror,
        admin_key=workspace.read_admin_key(),
    )


def clusters() -> tuple[layout.ClusterState, ...]:
    answer = Helper().call("clusters", {})
    return tuple(layout.ClusterState.model_validate(state) for state in answer["clusters"])


def _placed(path: str, file: NodeFile) -> dict[str, Any]:
    data = b64encode(file.data).decode()
    placed = layout.PlacedFile(
        path=path, data=data, mode=file.mode, owner=file.owner, edges=file.edges
    )
    return placed.model_dump(mode="json")


def _inventory(
    spec: ClusterSpec,
    request: layout.ClusterRequest,
    sizes: tuple[NodeShare, ...],
    made: layout.MadeCluster,
) -> Inventory:
    release = made.distribution or request.distribution
    share_of = {share.host: share for share in sizes}
    return Inventory(
        cluster=spec.name,
        cluster_id=request.id,
        provider=spec.provider.type,
        hosts=tuple(
            replace(_host(node, share_of.get(node.name), release), cgroups=made.limits_memory)
            for node in made.nodes
        ),
        network=str(made.subnet),
        shared=layout.SHARED,
        oversubscribed=is_oversubscribed(sizes),
        baked=True,
    )


def _host(node: layout.MadeNode, share: NodeShare | None, release: str) -> Host:
    return Host(
        name=node.name,
        address=node.address,
        roles=(COMPUTE if share else CONTROLLER,),
        partition=share.partition if share else None,
        host_key=node.host_key,
        distribution=release,
        **(asdict(share.size) if share else {}),
    )


def unused_gpus(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return a note on the GPUs of this machine, if it has any."""
    gpus = sorted(devices.glob("nvidia[0-9]*"))
    if not gpus:
        return ()
    return (
        f"this machine has {counted(len(gpus), 'NVIDIA GPU')} that local nodes can't use; a cluster "
        "of this machine itself, with `provider: onprem`, uses them (see docs/onprem.md)",
    )
