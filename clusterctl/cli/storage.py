"""The commands storage list and storage remove."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from clusterctl.cli.down import DiscardAll, Project
from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import Phases, Yes
from clusterctl.cluster.storage import (
    Storages,
    choose_storage,
    find_storages,
    origin_of,
    reject_unexamined,
    remove_storages,
)
from clusterctl.providers.base import NO_PROMPTS

_Name = Annotated[str, argument("The storage's name.", metavar="NAME")]


def storage_list(screen: Screen, project: Project = None) -> None:
    """List your storages on this machine, or all storages of a Google Cloud project.

    A cluster with `storage: {name: NAME}` in its spec creates and uses a storage; `clusterctl down`
    leaves it alone.
    """
    found = _search(screen, project).found
    rows = [
        [
            one.name,
            str(one),
            ", ".join(one.used_by) or "-",
            "here" if one.is_from_here else "elsewhere",
        ]
        for one in found
    ]
    head = ["NAME", "WHAT", "USED BY", "CREATED"]
    table = screen.table(head, rows) if rows else ["no storage"]
    screen.result({"storage": [one.as_dict() for one in found]}, *table)


def storage_remove(
    screen: Screen,
    name: _Name,
    project: Project = None,
    yes: Yes = False,
    discard: DiscardAll = False,
) -> None:
    """Remove a storage with all data on it. Shows the storage first, and asks.

    Without --discard, exits with code 1, even with --yes: the storage may hold the only copy of
    files. Says if a storage at Google was created elsewhere, such as by a colleague.
    """
    storages = _search(screen, project)
    chosen = choose_storage(storages, name)
    screen.note(*(f"storage {name!r}: {origin_of(one)}{one}" for one in chosen))
    reject_unexamined(chosen, discard=discard)
    screen.confirm("remove the storage with all data on it?", yes=yes)
    with screen.working("removing"):
        remove_storages(storages.provider, chosen)
    screen.note(*(f"discarded: {one}" for one in chosen))
    screen.result({"storage": [one.as_dict() for one in chosen]}, f"removed storage {name!r}")


def _search(screen: Screen, project: str | None) -> Storages:
    with screen.working("searching"):
        prompts = replace(NO_PROMPTS, reporter=Phases(screen))
        return find_storages(screen.chosen(), prompts, project=project)
