"""The questions that a provider has for its user: unknown host keys and the password for sudo."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from clusterctl.errors import Failure, HostKeyError, ProvisionError
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Reporter


@dataclass(frozen=True, slots=True)
class OfferedKey:
    """A host key that a machine shows and that is not confirmed yet. ``title`` is its name in known_hosts."""

    title: str
    address: str
    key: str  # as `ssh-ed25519 AAAA...`
    fingerprint: str  # as `SHA256:...`

    @property
    def kind(self) -> str:
        """The type of the key, as ssh calls it."""
        return self.key.partition(" ")[0]

    @property
    def failure(self) -> Failure:
        """The refusal of the machine until its key is confirmed."""
        file = f"/etc/ssh/ssh_host_{self.kind.removeprefix('ssh-').split('-')[0]}_key.pub"
        return Failure(
            HostKeyError.code,
            f"its host key is not confirmed yet: {self.kind} {self.fingerprint}",
            self.title,
            "plan",
            f"compare it with the output of `ssh-keygen -lf {file}` there",
        )


Confirm = Callable[[Sequence[OfferedKey]], None]  # returns if all of them are right
# Restores the configuration of these hosts; what was left on each of them, and why.
Restore = Callable[[Inventory, Collection[str], Workspace, Reporter], Mapping[str, tuple[str, ...]]]


def failed_hosts(failures: Sequence[Failure], *, what: str, then: str) -> ProvisionError:
    """One error of several hosts: the cause on each, and what to do about it."""
    hosts = ", ".join(dict.fromkeys(str(failure.host) for failure in failures))
    fixes = dict.fromkeys(failure.fix for failure in failures if failure.fix)
    return ProvisionError(
        f"{what}: {hosts}",
        why="\n".join(f"{failure.host}: {failure.cause}" for failure in failures),
        fix="\n".join([*fixes, then]),
        failures=tuple(failures),
    )


def refuse_unknown_keys(offered: Sequence[OfferedKey]) -> None:
    """Refuse all unknown keys, for verbs that change nothing.

    Raises:
        ProvisionError: one failure a key.
    """
    then = "`clusterctl up` shows them and asks"
    raise failed_hosts([one.failure for one in offered], what="unknown host keys", then=then)


@dataclass(frozen=True, slots=True)
class Prompts:
    """``confirm`` is shown unknown host keys, ``accepted`` has fingerprints that were confirmed before.

    ``password`` is for sudo, on machines that want one; it is never shown. ``note`` gets lines for the user,
    such as what was left on machines that were released, and why.
    """

    confirm: Confirm = refuse_unknown_keys
    accepted: tuple[str, ...] = ()
    password: str | None = field(default=None, repr=False)
    restore: Restore = lambda _i, _h, _w, _s: {}
    note: Callable[[str], None] = lambda _: None


NO_PROMPTS: Final = Prompts()
