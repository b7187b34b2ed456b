"""`down --orphans`: clusters that nothing is known of any more here, found where they are and removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from clusterctl.cli.options import Options
from clusterctl.cli.own_machines import hands
from clusterctl.cli.phases import Phases
from clusterctl.cli.show import Screen
from clusterctl.cli.which import spec_of, workspace_of
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.cluster.teardown import Orphan
    from clusterctl.spec import Provider

_ANY_ZONE = "us-central1-a"  # a project is searched as a whole


def down_orphans(
    screen: Screen, options: Options, *, project: str | None, yes: bool, ask_become_pass: bool = False
) -> None:
    """Find them, show what there is with its cost, ask, and remove it all."""
    from clusterctl.cluster import lifecycle
    from clusterctl.providers.onprem import left_behind
    from clusterctl.state.workspace import Workspace

    settings, name = _where(screen, options, project)
    asking = hands(screen, ask_password=ask_become_pass)
    with screen.working("looking"):
        found = lifecycle.orphans(settings, name, asking)
    answer = {"cluster": name, "provider": settings.type, "orphans": [asdict(one) for one in found]}
    for one in left_behind.found(Workspace.of(name)):  # by a cluster that is not lost
        screen.note(f"note: {one}", f"  {one.fix}")
    if not found:
        here = " on this machine; -f or --project says where else to look" if settings.type == "local" else ""
        screen.result(answer, f"no cluster {name!r} was lost{here}")
        return
    screen.note(*_lines(found))
    which = ", ".join(one.cluster_id for one in found)
    screen.confirm(f"remove all of this ({which})? It may be somebody else's", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    with phases.shown():
        lifecycle.down_orphans(settings, found, reporter=phases, hands=asking)
    screen.result(answer, f"cluster {name!r} ({which}) is down; an independent look found nothing of it")


def _where(screen: Screen, options: Options, project: str | None) -> tuple[Provider, str]:
    """Whom to ask, and for which name. Who says only the name means a local one where no spec is known."""
    from clusterctl.spec import GcpProvider, LocalProvider

    if project is None:
        if options.cluster is not None and not workspace_of(screen, options).spec.exists():
            return LocalProvider(), options.cluster
        spec = spec_of(screen, options)
        return spec.provider, spec.name
    if options.cluster is None or options.file is not None:
        raise UsageError(
            "--project needs the name of a cluster and no spec file", fix="say --cluster NAME with it"
        )
    return GcpProvider(type="gcp", project=project, zone=_ANY_ZONE), options.cluster


def _lines(found: Sequence[Orphan]) -> list[str]:
    lines = []
    for orphan in found:
        cost = sum(one.usd_per_hour or 0 for one in orphan.left)
        lines.append(f"cluster {orphan.cluster_id}" + (f", {cost:.2f} USD an hour:" if cost else ":"))
        lines += [f"  {one}" for one in orphan.left]
    return lines
