"""Clusters whose workspace was lost: the machines themselves say whose they are, and are given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterctl.errors import ProvisionError
from clusterctl.providers.onprem import give_back, left_behind, members
from clusterctl.providers.onprem.access import each
from clusterctl.providers.onprem.account import join
from clusterctl.providers.onprem.hands import Hands
from clusterctl.providers.onprem.look import admin, look
from clusterctl.providers.onprem.way_in import WayIn, place
from clusterctl.spec import ClusterSpec
from clusterctl.spec import OnpremProvider as Settings
from clusterctl.spec.load import dump_spec
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.ssh_files import write_ssh_files
from clusterctl.util.progress import Reporter


def orphans(settings: Settings, name: str, hands: Hands) -> tuple[str, ...]:
    """Ids of the clusters of that name that the machines say they belong to."""
    with place(None) as folder:
        found = _claims(WayIn(settings, folder, hands))
    return tuple(dict.fromkeys(str(c["id"]) for c in found.values() if c.get("name") == name and "id" in c))


def give_back_lost(settings: Settings, cluster_id: str, hands: Hands, *, report: Reporter) -> None:
    """Give back the machines that say that they belong to it.

    Raises:
        ProvisionError: some could not be; one failure each.
    """
    with place(None) as folder:
        way = WayIn(settings, folder, hands)
        mine = {host: c for host, c in _claims(way).items() if c.get("id") == cluster_id}
        if not mine:
            return
        folder.create_secrets()
        write_atomic(folder.root / "id", f"{cluster_id}\n")
        name = str(next(iter(mine.values())).get("name"))
        machines = {host: one for host, one in settings.machines.items() if host in mine}
        _make_inventory(left_behind.spec_of(settings, machines, name), way, folder)
        claim = way.claim(cluster_id, name)
        _, failed = each(list(mine), lambda host: join(host, way.access.root, claim, admin(folder)))
        if len(failed) == len(mine):
            raise ProvisionError("none of its machines lets us in", why=str(next(iter(failed.values()))))
        give_back.all_of_it(way, cluster_id, folder, hands, report=report)


def _claims(way: WayIn) -> Mapping[str, Mapping[str, Any]]:
    lost = way.trust(way.hosts)
    asked = [host for host in way.hosts if host not in lost]
    found, _ = each(asked, lambda host: give_back.claim_on(host, way.access))
    return found


def _make_inventory(spec: ClusterSpec, way: WayIn, folder: Workspace) -> None:
    """Write what giving back begins from."""
    narrowed = spec.provider
    assert isinstance(narrowed, Settings)  # noqa: S101 - it was made so
    asked = members.members(spec, narrowed)
    names = [one.name for one in asked]
    checked = look(spec, asked, way.access, folder, (), only=names, lost={})
    if missing := [name for name in names if name not in checked.facts]:
        raise ProvisionError(
            f"these machines do not answer: {', '.join(missing)}", why=str(checked.errors[0])
        )
    made = members.inventory(
        spec,
        narrowed,
        asked,
        checked.facts,
        {name: way.key_of(name) for name in names},
        cluster_id=folder.cluster_id(),
        proxies=way.proxies(names),
        silent={},
    )
    write_atomic(folder.spec, dump_spec(spec))
    write_atomic(folder.joining, made.model_dump_json())
    write_ssh_files(made, folder)
