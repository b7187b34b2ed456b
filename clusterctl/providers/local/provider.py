"""The local provider: ClusterSpec -> machines on this one -> Inventory."""

from __future__ import annotations

import os
import platform
import pwd
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterctl.errors import MachineError, UsageError
from clusterctl.providers.base import Bake, BakeTarget, Leftover, Planned, Provisioned, Size, hosts_as_raised
from clusterctl.providers.local import client, plan
from clusterctl.providers.local.image import DEFAULT_MIRROR, base_inputs
from clusterctl.providers.local.layout import (
    BakeRequest,
    CachedImage,
    ClusterRequest,
    ClusterState,
    Existing,
    MadeCluster,
    Node,
)
from clusterctl.providers.local.plan import Hardware, Share, divide, is_oversubscribed
from clusterctl.spec import distributions
from clusterctl.spec.local import LocalProvider as Settings
from clusterctl.spec.models import ADMIN_USER, ClusterSpec, User
from clusterctl.state.inventory import ARCHITECTURE, COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.state.journal import digest
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import install_inputs
from clusterctl.util.progress import Reporter


class LocalProvider:
    """Nodes on this machine. See ``clusterctl.providers.base.Provider`` for the contract."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def check(self, spec: ClusterSpec) -> None:  # noqa: ARG002
        _refuse_elsewhere()
        if (release := distributions.redhat_release()) and release.startswith("rhel"):
            raise UsageError(
                "local nodes are not made on Red Hat Enterprise Linux",
                where="provider.type",
                why="its packages come by a subscription that is the machine's own, and no image has it",
                fix="make this machine itself a cluster: provider: {type: onprem} and address: localhost",
            )
        if release and self._settings.mirror != DEFAULT_MIRROR:
            raise UsageError(
                "the node image is not made from a Debian mirror here",
                where="provider.mirror",
                why=f"this machine is {release}: dnf makes it, from the machine's own repositories",
                fix="remove provider.mirror; a mirror of your own belongs into /etc/yum.repos.d",
            )

    def examine(self, spec: ClusterSpec, workspace: Workspace, *, hosts: Collection[str]) -> None:
        """Its hosts are there once they are made."""

    def prepare(self, spec: ClusterSpec, workspace: Workspace, *, bake: Bake, report: Reporter) -> None:  # noqa: ARG002
        if client.call("check", {"id": workspace.cluster_id()}, report=report)["exists"]:
            return  # its nodes stay what they were made from

        def ready(answer: dict[str, Any]) -> None:
            known_hosts = workspace.root / "known_hosts.bake"
            write_atomic(known_hosts, f"[127.0.0.1]:{answer['port']} {answer['host_key']}\n")
            try:
                bake(
                    BakeTarget(
                        "127.0.0.1",
                        answer["port"],
                        ADMIN_USER,
                        workspace.key,
                        known_hosts,
                        distributions.of_local_nodes(),
                    )
                )
            finally:
                known_hosts.unlink()

        request = _image(self._settings, workspace)
        client.call_with_bake(request.model_dump(mode="json"), report=report, ready=ready)

    def sizes(self, spec: ClusterSpec) -> Mapping[str, Size]:
        shares, _ = divide(spec, Hardware.here())
        return {share.host: Size(share.cpus, share.memory_mib, share.disk_mib) for share in shares}

    def plan(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        *,
        keep: Mapping[str, Size],
        report: Reporter,
    ) -> Planned:
        _refuse_elsewhere()
        shares, notes = divide(spec, Hardware.here(), keep)
        notes += same_uids(spec.users, account_name)
        hosts = hosts_as_raised(workspace)
        found = Existing()
        if cluster_id := workspace.known_id():
            try:
                found = Existing.model_validate(client.call("existing", {"id": cluster_id}, report=report))
            except MachineError as exc:  # to see a plan takes no right
                disks = {host.name: host.disk_mib for host in hosts.values()}
                found = Existing(nodes=disks, running=frozenset(disks))
                notes += (f"the nodes are taken to be as `up` left them: {exc.what}: {exc.why}",)
        if found.state is not None:
            notes += found.state.kept(self._settings.subnet, image_keys(self._settings.mirror)[1])
        return Planned(plan.compare(spec, shares, found, hosts), notes=notes)

    def apply(
        self, spec: ClusterSpec, workspace: Workspace, *, keep: Mapping[str, Size], report: Reporter
    ) -> Provisioned:
        shares, notes = divide(spec, Hardware.here(), keep)
        notes += same_uids(spec.users, account_name)
        image = _image(self._settings, workspace)
        request = ClusterRequest(
            id=workspace.cluster_id(),
            name=spec.name,
            owner=os.getuid(),
            workspace=str(workspace.root),
            image=image.key,
            admin_key=image.admin_key,
            subnet=self._settings.subnet,
            nodes=(
                Node(name=spec.controller_host),
                *(Node(name=share.host, cores=share.cores, disk_mib=share.disk_mib) for share in shares),
            ),
        )
        report(f"starting {len(request.nodes)} machines")
        made = MadeCluster.model_validate(client.call("up", request.model_dump(mode="json"), report=report))
        inventory = _inventory(spec, request.id, shares, made)
        new = tuple(node.name for node in made.nodes if node.made)
        started = tuple(node.name for node in made.nodes if node.started and not node.made)
        return Provisioned(inventory, notes + made.notes + _unused_gpus() + _removed(made), new, started)

    def alive(self, cluster_id: str) -> bool:
        return bool(client.call("alive", {"id": cluster_id}, report=_silent)["machines"])

    def destroy(self, cluster_id: str, *, workspace: Workspace | None, report: Reporter) -> None:  # noqa: ARG002
        client.call("down", {"id": cluster_id}, report=report)

    def leftovers(self, cluster_id: str) -> tuple[Leftover, ...]:
        return tuple(map(Leftover, client.call("look", {"id": cluster_id}, report=_silent)["residue"]))

    def orphans(self, name: str) -> tuple[str, ...]:
        mine = (c for c in clusters() if c.name == name and c.owner == os.getuid())
        return tuple(c.id for c in mine if is_orphan(c))


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
    """The name of an account of this machine."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _refuse_elsewhere() -> None:
    """That local nodes can be at all on such a machine.

    Raises:
        MachineError: they can't.
    """
    client.refuse_other_systems(sys.platform)
    if platform.machine() != ARCHITECTURE:
        raise MachineError(
            f"local nodes are built for {ARCHITECTURE}",
            where=f"this machine is {platform.machine()}",
            fix=f"run clusterctl on an {ARCHITECTURE} machine",
        )


def is_orphan(cluster: ClusterState) -> bool:
    """Whether no workspace knows it any more: else it is that of another home, however it is called."""
    try:
        return (Path(cluster.workspace) / "id").read_text().strip() != cluster.id
    except (FileNotFoundError, NotADirectoryError):
        return True


def image_keys(mirror: str) -> tuple[str, str]:
    """What the cache calls the base from this mirror, and the image over it: hashes of what goes in."""
    base_key = digest(mirror, *base_inputs())
    return base_key, digest(base_key, *install_inputs())


def _image(settings: Settings, workspace: Workspace) -> BakeRequest:
    base_key, key = image_keys(settings.mirror)
    return BakeRequest(
        key=key,
        base_key=base_key,
        mirror=settings.mirror,
        admin_key=workspace.public_key.read_text().strip(),
    )


def clusters() -> tuple[ClusterState, ...]:
    """The clusters that live on this machine, whoever's they are."""
    answer = client.call("clusters", {}, report=_silent)
    return tuple(ClusterState.model_validate(state) for state in answer["clusters"])


def cached_images(*, prune: bool = False, report: Reporter) -> tuple[CachedImage, ...]:
    """The image cache, or what was removed from it."""
    answer = client.call("cache", {"prune": prune}, report=report)
    return tuple(CachedImage.model_validate(image) for image in answer["images"])


def _silent(_: object) -> None:
    return None


def _inventory(spec: ClusterSpec, cluster_id: str, shares: tuple[Share, ...], made: MadeCluster) -> Inventory:
    share_of = {share.host: share for share in shares}
    hosts = []
    for node in made.nodes:
        share = share_of.get(node.name)
        hosts.append(
            Host(
                name=node.name,
                address=node.address,
                roles=(COMPUTE if share else CONTROLLER,),
                partition=share.partition if share else None,
                host_key=node.host_key,
                distribution=distributions.of_local_nodes(),
                cpus=share.cpus if share else None,
                memory_mib=share.memory_mib if share else None,
                disk_mib=share.disk_mib if share else None,
            )
        )
    return Inventory(
        cluster=spec.name,
        cluster_id=cluster_id,
        provider=spec.provider.type,
        hosts=tuple(hosts),
        network=str(made.subnet),
        shared="/shared",
        oversubscribed=is_oversubscribed(shares),
        baked=True,
    )


def _removed(made: MadeCluster) -> tuple[str, ...]:
    return (f"removed {', '.join(made.removed)}",) if made.removed else ()


def _unused_gpus() -> tuple[str, ...]:
    """A GPU of this machine that the nodes do not see is worth a word."""
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not gpus:
        return ()
    return (
        f"this machine has {len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''} that local nodes do not see; "
        "the training program uses them when it is run here by hand (see docs/local.md)",
    )
