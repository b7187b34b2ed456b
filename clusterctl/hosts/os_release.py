"""Which distribution hosts have that were made from an image of anybody's: they say it themselves."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from clusterctl.errors import TransportError
from clusterctl.hosts.probe import Question, reach
from clusterctl.spec import distributions
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.ssh_files import write_ssh_files
from clusterctl.util.progress import Reporter

_NOTHING = Question(space=())


def recognised(
    inventory: Inventory,
    workspace: Workspace,
    to: Callable[[str], Transport],
    *,
    report: Reporter = lambda _: None,
) -> Inventory:
    """The inventory, with the distribution of every host in it: nobody has looked yet at those without one.

    Raises:
        TransportError: some hosts did not answer in time.
        ProvisionError: some can't be configured, or differ from the others; one failure a host.
    """
    unseen = [host.name for host in inventory.hosts if host.distribution == distributions.UNSEEN]
    if not unseen:
        return inventory
    write_ssh_files(inventory, workspace)
    try:
        views = reach(dict.fromkeys(unseen, _NOTHING), to, report=report)
    except TransportError as exc:
        by_hand = f"ssh -F {shlex.quote(str(workspace.ssh_config))} HOST"
        fix = f"see what `{by_hand}` says, then run `clusterctl up` again"
        raise TransportError(exc.what, why=exc.why, fix=fix, failures=exc.failures) from exc
    found = {host.name: host.distribution for host in inventory.hosts}
    found |= {name: view.distribution for name, view in views.items()}
    distributions.common(found)
    hosts = (host.model_copy(update={"distribution": found[host.name]}) for host in inventory.hosts)
    return inventory.model_copy(update={"hosts": tuple(hosts)})
