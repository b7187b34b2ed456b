"""What the provider can't do itself: ask its user, and have Ansible put back what was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from clusterctl.errors import Failure, HostKeyError, ProvisionError
from clusterctl.providers.onprem.access import refused
from clusterctl.providers.onprem.host_keys import Confirm, Offered
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Reporter

# Gives these hosts back as they were; what was left on each of them, and why.
Restore = Callable[[Inventory, Collection[str], Workspace, Reporter], Mapping[str, tuple[str, ...]]]


def nobody_asked(offered: Sequence[Offered]) -> None:
    """For who only looks.

    Raises:
        ProvisionError: the keys are not known; one failure each.
    """
    raise unconfirmed(offered, then="`clusterctl up` shows them and asks")


def unconfirmed(offered: Sequence[Offered], *, then: str) -> ProvisionError:
    """Keys that nobody has confirmed, one failure each."""
    failures = [
        Failure(
            HostKeyError.code,
            f"nobody has confirmed its host key yet: {one.kind} {one.fingerprint}",
            one.title,
            "plan",
            f"compare it with what `ssh-keygen -lf /etc/ssh/ssh_host_{_file(one)}_key.pub` says there",
        )
        for one in offered
    ]
    return refused(failures, what="unknown host keys", then=then)


def _file(one: Offered) -> str:
    return one.kind.removeprefix("ssh-").split("-")[0]


def _no_restore(
    _i: Inventory, _h: Collection[str], _w: Workspace, _s: Reporter
) -> Mapping[str, tuple[str, ...]]:
    return {}


def _unheard(_: str) -> None:
    """For who does not want to hear it."""


@dataclass(frozen=True, slots=True)
class Hands:
    """``confirm`` is shown unknown host keys, ``accepted`` has fingerprints that were confirmed before.

    ``password`` is for sudo, on machines that want one; it is never shown. ``told`` hears what was left on
    machines that were given back, and why.
    """

    confirm: Confirm = nobody_asked
    accepted: tuple[str, ...] = ()
    password: str | None = field(default=None, repr=False)
    restore: Restore = _no_restore
    told: Callable[[str], None] = _unheard


NO_HANDS: Final = Hands()
