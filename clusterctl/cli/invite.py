"""The command invite, for colleagues who use a cluster with accounts of their own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen
from clusterctl.cluster import invite as cluster
from clusterctl.state.chosen_spec import reject_foreign
from clusterctl.state.inventory import applied_spec, inventory_of


def invite(
    screen: Screen,
    user: Annotated[str, argument("A user of the spec with ssh_keys.", metavar="NAME")],
) -> None:
    """Print the command with which a colleague attaches the cluster.

    The colleague then works with clusterctl and an account of their own. The command has the host
    key of the cluster, and no secret.
    """
    reject_foreign(screen.chosen())
    workspace = screen.chosen().workspace()
    inventory = inventory_of(workspace)
    invitation = cluster.invite(applied_spec(workspace), inventory, user)
    screen.note(*invitation.notes)
    answer = {key: value for key, value in asdict(invitation).items() if key != "notes"}
    screen.result(answer, f"{user} runs:", "", invitation.command)
