"""The local provider: ClusterSpec -> machines on this one -> Inventory."""

from __future__ import annotations

import os
import pwd
import sys
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import MachineError, UsageError
from clusterctl.providers.base import (
    NO_PROMPTS,
    Bake,
    BakeClass,
    HostChange,
    HostPlan,
    Leftover,
    Prompts,
    Provider,
    Provisioned,
    Size,
    Sizes,
    hosts_as_raised,
)
from clusterctl.providers.local import layout
from clusterctl.providers.local.client import call, keeping_helper, refuse_other_machines, start_ahead
from clusterctl.providers.local.image import DEBIAN, DEFAULT_MIRROR, base_inputs
from clusterctl.providers.node_class import NodeClass, NodeFile
from clusterctl.providers.storage import KeptStorage, taken_up_note, to_take_up
from clusterctl.spec import distributions
from clusterctl.spec.common import LEAST_MEMORY_MIB, User
from clusterctl.spec.models import ClusterSpec, LocalSettings
from clusterctl.spec.units import format_size, shown_memory
from clusterctl.state.inventory import (
    COMPUTE,
    CONTROLLER,
    Host,
    Inventory,
    inventory_if_known,
    keeps_storage,
    may_keep_storage,
)
from clusterctl.state.workspace import Workspace, state_home
from clusterctl.util.assets import digest, install_inputs
from clusterctl.util.progress import ProgressReporter

_SHARED = "/shared"
_KEEP_IMAGE: Final = (
    "nodes keep the image that they were made from: `up` upgrades neither their distribution nor their Slurm "
    "in place"
)
_DOWN_AND_UP: Final = (
    "`clusterctl down`, then `clusterctl up`: what `collect` brought home stays, and with "
    "`storage: {keep: true}` the shared folder; accounts come from the spec; submit waiting jobs again; the "
    "accounting's history is lost"
)


class LocalProvider(Provider):
    known_shared = _SHARED

    def __init__(self, settings: LocalSettings, prompts: Prompts = NO_PROMPTS) -> None:
        self._settings = settings
        self._report = prompts.reporter.progress
        if settings.release in DEBIAN.suites:  # its package of MariaDB makes the files of databases
            self.class_groups = (COMPUTE, CONTROLLER)

    def check(self, spec: ClusterSpec) -> None:  # noqa: ARG002
        refuse_other_machines(sys.platform)
        if (release := distributions.redhat_release()) and release.startswith("rhel"):
            what = "local nodes are not made on Red Hat Enterprise Linux"
            why = "its packages come by a subscription that is the machine's own, and no image has it"
            fix = "make this machine itself a cluster: provider: {type: onprem} and address: localhost"
            raise UsageError(what, code="rhel-without-images", where="provider.type", why=why, fix=fix)
        if release and self._settings.mirror != DEFAULT_MIRROR:
            what = "the node image is not made from a Debian mirror here"
            why = f"this machine is {release}: dnf makes it, from the machine's own repositories"
            fix = "remove provider.mirror; a mirror of your own belongs into /etc/yum.repos.d"
            raise UsageError(what, code="mirror-without-debian", where="provider.mirror", why=why, fix=fix)
        if release and self._settings.distribution:
            raise UsageError(
                "local nodes have the distribution of this machine here",
                code="distribution-of-this-machine",
                where="provider.distribution",
                why=f"this machine is {release}: dnf makes the node image, from its own repositories",
                fix="remove provider.distribution",
            )

    def start_ahead(self) -> None:
        start_ahead()

    def working(self) -> AbstractContextManager[None]:
        return keeping_helper()

    def prepare(self, spec: ClusterSpec, workspace: Workspace, *, bake: Bake) -> None:
        def ready(answer: dict[str, Any]) -> None:
            bake(self._image_host(answer, "image", CONTROLLER, COMPUTE))

        image = _image(self._settings, spec, workspace)
        call("bake", image.model_dump(mode="json"), report=self._report, ready=ready)

    def _image_host(self, answer: Mapping[str, Any], name: str, *roles: str) -> Host:
        release = self._settings.release
        return Host(name=name, address="127.0.0.1", roles=roles, distribution=release, **answer[name])

    def prepare_class(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        inputs: Mapping[str, str],
        *,
        bake: BakeClass,
    ) -> Mapping[str, str]:
        image = _image(self._settings, spec, workspace)
        request = layout.ClassRequest(
            id=workspace.cluster_id(), image=image.key, inputs=dict(inputs), admin_key=image.admin_key
        )

        def ready(answer: dict[str, Any]) -> None:
            place = {"cluster": spec.name, "cluster_id": request.id, "provider": self._settings.type}
            images = tuple(self._image_host(answer, group, group) for group in answer)
            bake(Inventory(hosts=images, network="", shared=_SHARED, baked=True, **place))

        made = call("bake_class", request.model_dump(mode="json"), report=self._report, ready=ready)
        return {group: key for group, key in made.items() if key}

    def sizes(self, spec: ClusterSpec) -> Sizes:
        return {share.host: share.size for share in divide(spec, Hardware.here())[0]}

    def plan(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        *,
        keep: Sizes,
        inputs: str = "",
        recreated: Collection[str] = (),
    ) -> HostPlan:
        del inputs
        refuse_other_machines(sys.platform)
        shares, notes = _shares(spec, keep)
        hosts = hosts_as_raised(workspace)
        found = layout.Existing()
        if cluster_id := workspace.known_id():
            try:
                found = _existing(cluster_id)
            except MachineError as exc:  # to see a plan takes no right
                disks = {host.name: host.disk_mib for host in hosts.values()}
                found = layout.Existing(nodes=disks, running=frozenset(disks))
                notes += (f"the nodes are taken to be as `up` left them: {exc.cause}",)
        if found.state is not None:
            notes += self._notes_on(found.state, spec, workspace)
        notes += self._storage_notes(spec, found)
        return HostPlan(compare(spec, shares, found, hosts, recreated), notes=notes)

    def _notes_on(
        self, state: layout.ClusterState, spec: ClusterSpec, workspace: Workspace
    ) -> tuple[str, ...]:
        """Return the settings that a cluster that is up does not take over.

        Raises:
            UsageError: its nodes have another distribution than the spec names, or another release of Slurm.
        """
        runs, wanted = _release(state.distribution, workspace), self._settings.distribution
        if runs and wanted and runs != wanted:
            has, asked = (distributions.distribution_of(name).title for name in (runs, wanted))
            what = f"the nodes of cluster {state.name!r} run {has}, and the spec asks for {asked}"
            where = "provider.distribution"
            fix = f"write distribution: {runs}; or {_DOWN_AND_UP}"
            raise UsageError(what, code="distribution-changed", where=where, why=_KEEP_IMAGE, fix=fix)
        slurm, version = _slurm(state.slurm, runs, workspace), spec.slurm.version
        if slurm and version and slurm != version:
            what = f"the nodes of cluster {state.name!r} run Slurm {slurm}, and the spec asks for {version}"
            fix = f'write slurm: {{version: "{slurm}"}}; or {_DOWN_AND_UP}'
            raise UsageError(what, code="slurm-changed", where="slurm.version", why=_KEEP_IMAGE, fix=fix)
        new_slurm = _slurm_of_new_nodes(self._settings, spec)
        image = image_keys(self._settings, new_slurm)[1]
        return state.kept(self._settings.subnet, image, self._settings.release, new_slurm)

    def _storage_notes(self, spec: ClusterSpec, found: layout.Existing) -> tuple[str, ...]:
        if not spec.storage.keep:
            return ()
        try:
            kept = to_take_up(spec, self.kept_storage(spec.name, ()))
        except MachineError as exc:  # to see a plan takes no right
            return (f"whether there is kept storage of this name is not known: {exc.cause}",)
        if kept and found.nodes:
            what = f"cluster {spec.name!r} has another shared folder than the one that is kept"
            why = f"it was raised without `keep: true`, and so did not take this up: {kept}"
            fix = "take it down as it was raised, then run `clusterctl up` with `keep: true`"
            raise UsageError(what, code="storage-keep-changed", where="storage.keep", why=why, fix=fix)
        return (taken_up_note(kept),) if kept else ()

    def apply(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        *,
        keep: Sizes,
        node_class: NodeClass | None = None,
        recreated: Collection[str] = (),
    ) -> Provisioned:
        shares, notes = _shares(spec, keep)
        image = _image(self._settings, spec, workspace)
        kept = to_take_up(spec, self.kept_storage(spec.name, ())) if spec.storage.keep else None
        request = layout.ClusterRequest(
            id=workspace.cluster_id(),
            name=spec.name,
            owner=os.getuid(),
            workspace=str(workspace.root),
            image=image.key,
            distribution=image.distribution,
            slurm=_slurm_of_new_nodes(self._settings, spec),
            admin_key=image.admin_key,
            subnet=self._settings.subnet,
            keep_storage=spec.storage.keep,
            storage=kept and kept.id,
            node_class=node_class and node_class.keys.get(COMPUTE),
            controller_class=node_class and node_class.keys.get(CONTROLLER),
            homes=tuple(
                layout.Home(name=user.name, uid=user.uid, keys=(image.admin_key,)) for user in spec.users
            ),
            nodes=(
                layout.Node(name=spec.controller_host),
                *(layout.Node(name=one.host, cores=one.cores, disk_mib=one.size.disk_mib) for one in shares),
            ),
            anew=tuple(recreated),
        )
        classed: tuple[str, ...] = ()
        inventory_of = partial(_inventory, spec, workspace, request, shares)

        def ready(answer: dict[str, Any]) -> object:
            nonlocal classed
            planned = layout.MadeCluster.model_validate(answer)
            files = node_class.files(inventory_of(planned)) if node_class else {}
            of_class = {node.name for node in request.nodes if request.class_of(node)}
            classed = tuple(node.name for node in planned.nodes if node.made and node.name in of_class)
            return {name: [_placed(path, file) for path, file in files[name].items()] for name in classed}

        self._report(f"starting {len(request.nodes)} machines")
        answer = call("up", request.model_dump(mode="json"), report=self._report, ready=ready)
        made = layout.MadeCluster.model_validate(answer)
        inventory = inventory_of(made)
        new = tuple(node.name for node in made.nodes if node.made)
        started = tuple(node.name for node in made.nodes if node.started and not node.made)
        removed = (f"removed {', '.join(made.removed)}",) if made.removed else ()
        notes += (taken_up_note(kept),) if kept else ()
        return Provisioned(inventory, notes + made.notes + _unused_gpus() + removed, new, started, classed)

    def alive(self, cluster_id: str) -> bool:
        return bool(_existing(cluster_id).machines)

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        keep: bool | None = None
        if workspace is not None and keeps_storage(workspace) == may_keep_storage(workspace):
            keep = keeps_storage(workspace)
        call("down", {"id": cluster_id, "keep_storage": keep}, report=self._report)

    def leftovers(self, cluster_id: str) -> tuple[Leftover, ...]:
        return tuple(map(Leftover, call("look", {"id": cluster_id})["residue"]))

    def orphans(self, name: str) -> tuple[str, ...]:
        mine = (c for c in clusters() if c.name == name and c.owner == os.getuid())
        return tuple(c.id for c in mine if is_orphan(c))

    def kept_storage(self, name: str, users: Sequence[str]) -> tuple[KeptStorage, ...]:  # noqa: ARG002
        # The helper lists those of all accounts.
        found = map(layout.KeptFolder.model_validate, call("storage", {})["kept"])
        return tuple(_kept(one) for one in found if one.name == name and _is_ours(one))

    def remove_storage(self, kept: KeptStorage) -> None:
        call("storage", {"remove": [kept.id]}, report=self._report)


def _existing(cluster_id: str) -> layout.Existing:
    return layout.Existing.model_validate(call("existing", {"id": cluster_id}))


def same_uids(users: Iterable[User], name_of: Callable[[int], str | None]) -> tuple[str, ...]:
    """Notes on the accounts of this machine that have the uid of another account on the nodes.

    Processes of nodes are this machine's: its kernel knows them by their uid.
    """
    return tuple(
        f"uid {user.uid} is {name}'s on this machine: {name} can read and end what runs as {user.name} on "
        f"the nodes; `users` of the spec gives {user.name} another `uid`"
        for user in users
        if (name := name_of(user.uid)) not in (None, user.name)
    )


def account_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def is_orphan(cluster: layout.ClusterState) -> bool:
    """Whether no workspace knows it any more: else it is that of another home, however it is called."""
    try:
        return (Path(cluster.workspace) / "id").read_text().strip() != cluster.id
    except (FileNotFoundError, NotADirectoryError):
        return True


def image_keys(settings: LocalSettings, slurm: str | None = None) -> tuple[str, str]:
    """Return what the cache calls the base and the image over it: hashes of what goes in.

    ``slurm``: the release of Slurm. None, or the distribution's own: the packages of the distribution.
    """
    base_key = digest(settings.mirror, *base_inputs(settings.release))
    is_newer = slurm in distributions.distribution_of(settings.release).newer_slurm
    return base_key, digest(base_key, *install_inputs(), *([str(slurm)] if is_newer else []))


def _slurm_of_new_nodes(settings: LocalSettings, spec: ClusterSpec) -> str | None:
    return spec.slurm.version or distributions.distribution_of(settings.release).slurm


def _image(settings: LocalSettings, spec: ClusterSpec, workspace: Workspace) -> layout.BakeRequest:
    base_key, key = image_keys(settings, _slurm_of_new_nodes(settings, spec))
    return layout.BakeRequest(
        id=workspace.cluster_id(),
        key=key,
        base_key=base_key,
        distribution=settings.release,
        mirror=settings.mirror,
        admin_key=workspace.public_key.read_text().strip(),
    )


def _release(recorded: str | None, workspace: Workspace) -> str | None:
    """Return what the nodes of a cluster run, as the helper recorded it, or `up` before it did."""
    return recorded or next((host.distribution for host in hosts_as_raised(workspace).values()), None)


def _slurm(recorded: str | None, release: str | None, workspace: Workspace) -> str | None:
    """Return the Slurm of the nodes of a cluster, recorded likewise, or of ``release``; None: not known."""
    before = inventory_if_known(workspace)
    known = recorded or (before.slurm if before else "")
    return known or (distributions.distribution_of(release).slurm if release else None)


def clusters() -> tuple[layout.ClusterState, ...]:
    """The clusters that live on this machine, whoever's they are."""
    answer = call("clusters", {})
    return tuple(layout.ClusterState.model_validate(state) for state in answer["clusters"])


def _placed(path: str, file: NodeFile) -> dict[str, Any]:
    data = b64encode(file.data).decode()
    placed = layout.PlacedFile(path=path, data=data, mode=file.mode, owner=file.owner, edges=file.edges)
    return placed.model_dump(mode="json")


def _is_ours(one: layout.KeptFolder) -> bool:
    """Whether it was left by a cluster of the caller's state folder, or of one that is gone."""
    folder = Path(one.workspace).parent
    return one.owner == os.getuid() and (folder == state_home() or not folder.exists())


def _kept(one: layout.KeptFolder) -> KeptStorage:
    where = f"folder {layout.shared_folder(one.id)}"
    said = {key: getattr(one, key) for key in ("id", "size_mib", "since", "homes")}
    return KeptStorage(cluster=one.name, what=where, usd_per_month=0.0, **said)


def cached_images(*, prune: bool = False, report: ProgressReporter) -> tuple[layout.CachedImage, ...]:
    """The image cache, or what was removed from it."""
    answer = call("cache", {"prune": prune}, report=report)
    return tuple(layout.CachedImage.model_validate(image) for image in answer["images"])


def _inventory(
    spec: ClusterSpec,
    workspace: Workspace,
    request: layout.ClusterRequest,
    sizes: tuple[Share, ...],
    made: layout.MadeCluster,
) -> Inventory:
    release = _release(made.distribution, workspace) or request.distribution
    slurm = _slurm(made.slurm, release, workspace)
    distribution = distributions.distribution_of(release)
    share_of = {share.host: share for share in sizes}
    return Inventory(
        cluster=spec.name,
        cluster_id=request.id,
        provider=spec.provider.type,
        hosts=tuple(_host(node, share_of.get(node.name), release) for node in made.nodes),
        network=str(made.subnet),
        shared=_SHARED,
        oversubscribed=is_oversubscribed(sizes),
        slurm=slurm if slurm and slurm != distribution.slurm else "",
        pmix=slurm not in distribution.slurm_without_pmix,
        baked=True,
    )


def _host(node: layout.MadeNode, share: Share | None, release: str) -> Host:
    """A compute node, or the controller, which has no share."""
    return Host(
        name=node.name,
        address=node.address,
        roles=(COMPUTE if share else CONTROLLER,),
        partition=share.partition if share else None,
        host_key=node.host_key,
        distribution=release,
        **(asdict(share.size) if share else {}),
    )


def _unused_gpus() -> tuple[str, ...]:
    """A GPU of this machine that the nodes do not see is worth a word."""
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not gpus:
        return ()
    return (
        f"this machine has {len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''} that local nodes do not see; "
        "the training program uses them when it is run here by hand (see docs/local.md)",
    )


def compare(
    spec: ClusterSpec,
    nodes: Sequence[Share],
    found: layout.Existing,
    hosts: Mapping[str, Host],
    anew: Collection[str] = (),
) -> tuple[HostChange, ...]:
    """What becomes of each machine, those ``anew`` made so as they are. ``hosts``: as `up` left them."""
    wanted = {share.host: share for share in nodes}
    prices = {partition.name: partition.price_per_hour for partition in spec.partitions}
    gone = (name for name in found.nodes if name != spec.controller_host and name not in wanted)
    return (
        _change(spec.controller_host, None, None, found, None),
        *(
            _change(name, one, prices[one.partition], found, hosts.get(name), anew=name in anew)
            for name, one in wanted.items()
        ),
        *(_gone(name, prices, hosts.get(name)) for name in gone),
    )


def _change(
    name: str,
    share: Share | None,
    price: float | None,
    found: layout.Existing,
    host: Host | None,
    *,
    anew: bool = False,
) -> HostChange:
    """What becomes of a node, or of the controller, which has no share."""
    size, was = share and share.size, Size.of(host)
    what = str(size) if size else "the controller"
    if name not in found.nodes:
        return HostChange(name, "make", what, usd_per_hour=price)
    if size and (anew or found.nodes[name] != size.disk_mib):
        why_anew = "" if anew else _disks(found.nodes[name], size.disk_mib)
        return HostChange(name, "replace", what, why_anew, price)
    off = name not in found.running
    why = ["it is off"] if off else []
    if size and was:
        pairs = zip(was.parts[:2], size.parts, strict=False)  # another disk has replaced it
        why += [f"{before} until now" for before, now in pairs if before != now]
    return HostChange(name, "change" if why else "keep", what, "; ".join(why), price, off=off)


def _gone(name: str, prices: Mapping[str, float | None], host: Host | None) -> HostChange:
    size = Size.of(host)
    price = prices.get(host.partition or "") if host and size else None
    return HostChange(name, "remove", str(size or "a node"), "the spec has no place for it", price)


def _disks(now: int | None, then: int | None) -> str:
    if now is None:
        return "it has no disk of its own until now"
    return f"{format_size(now)} of disk until now" if then else "it has a disk of its own until now"


_RESERVE_MIB = 1024  # for this machine itself and the controller's daemons


@dataclass(frozen=True, slots=True)
class Share:
    host: str
    partition: str
    cores: tuple[int, ...]
    size: Size


@dataclass(frozen=True, slots=True)
class Hardware:
    """This machine's usable cores and memory."""

    cores: tuple[int, ...]
    memory_mib: int

    @classmethod
    def here(cls) -> Hardware:
        """Read from the kernel: the cores we may run on, and the memory in all."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
        return cls(tuple(sorted(os.sched_getaffinity(0))), total_kib // 1024)


def divide(
    spec: ClusterSpec, hardware: Hardware, keep: Mapping[str, Size] | None = None
) -> tuple[tuple[Share, ...], tuple[str, ...]]:
    """The share of each compute node, and what the user should be told about it.

    Nodes in ``keep`` have the cpus and the memory that are said there.
    """
    count = sum(p.nodes for p in spec.partitions)
    cpus_each = max(1, len(hardware.cores) // count)
    memory_each = max(LEAST_MEMORY_MIB, (hardware.memory_mib - _RESERVE_MIB) // count)
    nodes = []
    cursor = 0
    for partition in spec.partitions:
        for host in spec.node_names(partition):
            kept = (keep or {}).get(host)
            cpus = kept.cpus if kept else partition.cpus or cpus_each
            cores = {hardware.cores[(cursor + i) % len(hardware.cores)] for i in range(cpus)}
            cursor += cpus
            memory = kept.memory_mib if kept else partition.memory or memory_each
            size = Size(cpus, memory, partition.disk)
            nodes.append(Share(host, partition.name, tuple(sorted(cores)), size))
    return tuple(nodes), _notes(tuple(nodes), hardware)


def _shares(spec: ClusterSpec, keep: Sizes) -> tuple[tuple[Share, ...], tuple[str, ...]]:
    """The shares of this very machine, and all that is to be said of them."""
    shares, notes = divide(spec, Hardware.here(), keep)
    return shares, notes + same_uids(spec.users, account_name)


def is_oversubscribed(nodes: Sequence[Share]) -> bool:
    """Whether some core is in the share of more than one node."""
    return sum(share.size.cpus for share in nodes) > len({core for share in nodes for core in share.cores})


def _notes(nodes: tuple[Share, ...], hardware: Hardware) -> tuple[str, ...]:
    notes = []
    cpus = sum(share.size.cpus for share in nodes)
    if cpus > len(hardware.cores):
        notes.append(
            f"oversubscribed: the nodes have {cpus} cores together, this machine has {len(hardware.cores)}; "
            "they share them, so timings mean little"
        )
    memory = sum(share.size.memory_mib for share in nodes)
    if memory > hardware.memory_mib:
        notes.append(
            f"oversubscribed: the nodes have {shown_memory(memory)} of memory together, "
            f"this machine has {shown_memory(hardware.memory_mib)}"
        )
    return tuple(notes)
