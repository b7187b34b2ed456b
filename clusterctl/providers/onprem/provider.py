"""Machines that the user has: ClusterSpec -> our account on each of them -> Inventory, and back again."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from clusterctl.errors import (
    ClusterctlError,
    Failure,
    MachineError,
    ProvisionError,
    UnreachableError,
    UsageError,
)
from clusterctl.hosts.checks import DoctorReport, Finding, failures
from clusterctl.providers.base import (
    REPLACED,
    Action,
    HostChange,
    HostPlan,
    Leftover,
    Prompts,
    Provider,
    Provisioned,
    Sizes,
    hosts_as_raised,
    inventory_as_raised,
    pending_releases,
)
from clusterctl.providers.node_class import NodeClass
from clusterctl.providers.onprem import members, release
from clusterctl.providers.onprem.access import raise_failures
from clusterctl.providers.onprem.login import OWNER_ANSWER_S, Login, create_account
from clusterctl.providers.storage import KeptStorage, taken_up_note, to_take_up
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import reject_unknown
from clusterctl.spec.onprem import OnpremSettings
from clusterctl.state.inventory import Host, Inventory, applied_spec
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.process import on_each, temporary_folder
from clusterctl.util.progress import NO_LIMIT, Clock, HostStep, Limit

_HOST_S: Final = 0.5  # of the time of this machine's processors, for a look at one host
_THEN: Final = "nothing was changed; correct it, then run the same command again"
_KEPT: Final = "kept-storage"


@dataclass(frozen=True, slots=True)
class _Found:
    """What a look has come to: the cluster that the machines become, and which of them are ``new`` to us."""

    text: str  # of the spec
    workspace: Workspace
    inventory: Inventory
    new: tuple[str, ...]
    silent: Mapping[str, Host]
    access: OnpremSettings  # how machines were let in to that were in the cluster before
    notes: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()  # what will become of machines that are new
    joined: set[str] = field(default_factory=set)


# Seconds that a look at few hosts may take; `up` would end at a host which is busy.
_PREFLIGHT_S: Final = 28.0
_UP_S: Final = 60.0


class OnpremProvider(Provider):
    def __init__(self, settings: OnpremSettings, prompts: Prompts, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._settings = settings
        self._prompts = prompts
        self._found: _Found | None = None
        self._workspace: Workspace | None = None
        self._tried: tuple[str, ...] | None = None  # what trying the pending releases again came to

    def check(self, spec: ClusterSpec) -> None:  # noqa: ARG002
        if shutil.which("ssh") is None:
            raise MachineError(
                "missing tool: ssh",
                code="tool-missing",
                why="it leads to your machines",
                fix="install OpenSSH's client",
            )

    def examine(
        self, spec: ClusterSpec, workspace: Workspace, *, hosts: Collection[str]
    ) -> DoctorReport | None:
        asked = members.members(spec, self._settings)
        reject_unknown(hosts, [one.name for one in asked], "the cluster has no host")
        only = [one.name for one in asked if not hosts or one.name in hosts]
        with self._login(workspace) as login:
            login.check_keys(only)
            report = members.examine(spec, asked, login, (), only=only, lost=login.trust(only))
        claims = members.claim_findings(report.facts, workspace.known_id() or "")
        return replace(report, findings=(*report.findings, *claims))

    def preflight(self, spec: ClusterSpec, workspace: Workspace) -> DoctorReport | None:
        asked = members.members(spec, self._settings)
        with self._login(workspace, _PREFLIGHT_S * 2 / 3) as login:
            *_, report, wrong = self._examined(spec, workspace, asked, login, find_all=True)
        found = [one for one in report.findings if one.level != "error" or one in wrong]
        return replace(report, findings=tuple(dict.fromkeys((*found, *wrong))))

    def plan(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        *,
        keep: Sizes,
        inputs: str = "",
        recreated: Collection[str] = (),
    ) -> HostPlan:
        del recreated, keep, inputs
        found = self._look(spec, workspace)
        before = hosts_as_raised(workspace)
        left = pending_releases(workspace)
        replaced = {one.host.name for one in left if one.why == REPLACED}
        changes = [_change(host, found, before, replaced) for host in found.inventory.hosts]
        names = {host.name for host in found.inventory.hosts}
        changes += [
            HostChange(name, "remove", _roles(host), "the spec does not name it any more", released=True)
            for name, host in before.items()
            if name not in names
        ]
        kept = self._to_take_up(spec) if not before else ()
        return HostPlan(tuple(changes), notes=(*kept, *found.notes, *found.ahead, *map(str, left)))

    def apply(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        *,
        keep: Sizes,  # noqa: ARG002
        node_class: NodeClass | None = None,  # noqa: ARG002
        recreated: Collection[str] = (),  # noqa: ARG002
    ) -> Provisioned:
        found = self._found
        if found is None or (found.text, found.workspace) != (dump_spec(spec), workspace):
            found = self._look(spec, workspace)
        before = inventory_as_raised(workspace)
        login = Login(self._settings.machines, workspace, self._prompts)
        absent = release.release_removed(found.inventory, login)
        if before is not None:
            for host in before.hosts:
                if host.name in absent:
                    release.record_pending(host, before, found.access, workspace, why=absent[host.name])
        joining = [name for name in found.new if name not in found.joined]
        if joining:
            self._join(found, joining, login)
        if self._tried is None:
            self._tried = release.retry_all(found.inventory.hosts, login)
        return Provisioned(found.inventory, (*found.notes, *self._tried), made=tuple(found.new))

    def alive(self, cluster_id: str) -> bool:  # noqa: ARG002
        if self._workspace is None:
            return True  # nobody knows
        there, failed = members.log_in(list(hosts_as_raised(self._workspace)), self._workspace)
        return bool(there) or not all(isinstance(exc, UnreachableError) for exc in failed.values())

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        if workspace is None:
            with self._login(None) as login:
                release.release_orphan(login, self._settings, cluster_id)
            return
        self._workspace = workspace
        login = Login(self._settings.machines, workspace, self._prompts)
        failed: list[Failure] = []
        try:
            release.release_all(login, cluster_id)
        except ProvisionError as exc:
            failed += exc.failures
        there = hosts_as_raised(workspace).values()
        for note in release.retry_all(there, login, ending=True):
            self._prompts.reporter.note(note)
        failed += [one.failure for one in pending_releases(workspace)]
        if failed:
            raise ProvisionError.of_hosts(
                f"{release.NOT_RELEASED}: {{hosts}}", failed, code="hosts-not-released", then=release.THEN
            )

    def leftovers(self, cluster_id: str) -> tuple[Leftover, ...]:
        with self._login(self._workspace) as login:
            return release.find_leftovers(login, cluster_id)

    def orphans(self, name: str) -> tuple[str, ...]:
        with self._login(None) as login:
            found = release.claims(login).values()
        return tuple(dict.fromkeys(c["id"] for c in found if c.get("name") == name and "id" in c))

    def kept_storage(self, name: str, users: Sequence[str]) -> tuple[KeptStorage, ...]:
        with self._login(self._workspace) as login:
            return find_homes(login, self._settings, name, users)

    def remove_storage(self, kept: KeptStorage) -> None:
        self._prompts.reporter.progress(f"removing {kept.what}")
        with self._login(self._workspace) as login:
            remove_homes(login, self._settings, kept)

    @contextmanager
    def _login(self, workspace: Workspace | None, answer_s: float = OWNER_ANSWER_S) -> Iterator[Login]:
        """A login that is written to the cluster's workspace, or to one for the moment if it has none."""
        if workspace is not None and workspace.root.is_dir():
            yield Login(self._settings.machines, workspace, self._prompts, answer_s=answer_s)
            return
        with temporary_folder() as folder:
            own = Workspace(folder / (workspace.root.name if workspace else "lost"))
            own.create()
            yield Login(self._settings.machines, own, self._prompts, answer_s=answer_s)

    def _to_take_up(self, spec: ClusterSpec) -> tuple[str, ...]:
        """What to say of the storage that an earlier cluster left; the users must be those whose it is."""
        if not spec.storage.keep:
            return ()
        found = self.kept_storage(spec.name, [user.name for user in spec.users])
        kept = to_take_up(spec, found)
        return (taken_up_note(kept),) if kept else ()

    def _not_taken_up(
        self, spec: ClusterSpec, workspace: Workspace, login: Login, report: DoctorReport
    ) -> tuple[Finding, ...]:
        """Why the storage that an earlier cluster left can't be taken up by a new one."""
        leader = self._settings.controller
        if not spec.storage.keep or leader not in report.facts or hosts_as_raised(workspace):
            return ()
        try:
            to_take_up(spec, find_homes(login, self._settings, spec.name, [user.name for user in spec.users]))
        except ClusterctlError as exc:
            return (Finding(leader, "error", _KEPT, exc.what, exc.why, exc.fix),)
        return ()

    def _look(self, spec: ClusterSpec, workspace: Workspace) -> _Found:
        """See what the machines are and what they can become."""
        asked = members.members(spec, self._settings)
        self._prompts.reporter.progress(f"looking at {len(asked)} machines")
        login = Login(self._settings.machines, workspace, self._prompts, answer_s=_UP_S / 2)
        ours, silent, checked, wrong = self._examined(spec, workspace, asked, login)
        if any(one.code != _KEPT for one in wrong):  # that alone is a fault of the spec, as ``plan`` says
            what, found = "these machines can't be used: {hosts}", failures(wrong, phase="plan")
            raise ProvisionError.of_hosts(what, found, code="hosts-unfit", then=_THEN)
        new = tuple(one.name for one in asked if one.name not in {**ours, **silent})
        keys = {name: host.host_key for name, host in ours.items()}
        keys |= {name: login.key_of(name) for name in new}
        inventory = members.inventory(
            spec,
            self._settings,
            asked,
            checked.facts,
            keys,
            cluster_id=workspace.cluster_id(),
            proxies=login.proxies([one.name for one in asked]),
            silent=silent,
        )
        notes = members.notes(spec, checked.findings, known=bool(ours))
        access = _access_before(workspace) or self._settings
        ahead = members.preview(spec, asked, checked.facts, new)
        self._found = _Found(dump_spec(spec), workspace, inventory, new, silent, access, notes, ahead)
        return self._found

    def _examined(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        asked: Sequence[Host],
        login: Login,
        *,
        find_all: bool = False,
    ) -> tuple[Mapping[str, Host], Mapping[str, Host], DoctorReport, tuple[Finding, ...]]:
        """The machines that are ours, those that are silent, what was found of all others, and what of it is
        in the way of `up`.

        ``find_all``: for `plan --preflight`; a host key that is not confirmed is one of the findings, too.
        """
        whole_s = max(_PREFLIGHT_S if find_all else _UP_S, _HOST_S * len(asked))
        limit, first = (Limit.within(seconds, self._clock) for seconds in (whole_s, whole_s / 3))
        ours, silent = members.joined_members(asked, hosts_as_raised(workspace), workspace, first)
        new = tuple(one.name for one in asked if one.name not in {**ours, **silent})
        login.check_keys(new)
        lost = login.trust(new, limit if find_all else NO_LIMIT, find_all=find_all)
        if not find_all:
            limit = Limit.within(whole_s, self._clock)  # somebody was asked about keys
        there = [one.name for one in asked if one.name not in silent]
        report = members.examine(spec, asked, login, ours, only=there, lost=lost, limit=limit)
        wrong = in_the_way(report, asked, new, workspace, silent)
        return ours, silent, report, (*wrong, *self._not_taken_up(spec, workspace, login, report))

    def _join(self, found: _Found, joining: Sequence[str], login: Login) -> None:
        inventory, workspace = found.inventory, login.workspace
        write_atomic(workspace.joining, inventory.model_dump_json(indent=2) + "\n")
        write_ssh_files(inventory, workspace)
        claim = login.claim(inventory.cluster_id, inventory.cluster)
        done, failed = on_each(
            joining, lambda host: create_account(host, login.root, claim, members.admin_login(workspace))
        )
        for host in joining:
            step = HostStep(host, "our account", len(joining), failed=host in failed)
            self._prompts.reporter.progress(step)
        found.joined.update(done)
        then = "the other machines are ready; run `clusterctl up` again"
        raise_failures(failed, what="no account could be made", then=then)


def in_the_way(
    report: DoctorReport,
    asked: Sequence[Host],
    new: Collection[str],
    workspace: Workspace,
    silent: Mapping[str, Host],
) -> tuple[Finding, ...]:
    """What keeps new machines from being what the spec wants, a host out, or is wrong with the controller."""
    leader = asked[0].name
    wrong = [
        one
        for one in report.findings
        if one.host in new
        or one.host not in report.facts
        or one.code in members.UNFIT
        or (new and one.code in ("firewall", "network"))
    ]
    wrong += members.claim_findings(report.facts, workspace.known_id() or "")
    found = [one for one in wrong if one.level == "error"]
    if leader in silent:
        host = silent[leader]
        why = f"no SSH connection to {host.ssh_address or host.address}:{host.port}"
        fix = "see that it is switched on, and that no firewall is in between"
        found.append(Finding(leader, "error", "controller-silent", "the controller is silent", why, fix))
    return tuple(found)


def _access_before(workspace: Workspace) -> OnpremSettings | None:
    """What the spec of the last `up` said of its machines."""
    try:
        provider = applied_spec(workspace).provider
    except UsageError:
        return None
    return provider if isinstance(provider, OnpremSettings) else None


def _change(host: Host, found: _Found, before: Mapping[str, Host], replaced: Collection[str]) -> HostChange:
    action: Action = "make" if host.name in found.new else "keep"
    why = ""
    if action == "make" and host.name in replaced:
        action, why = "replace", REPLACED
    elif host.name in found.new and host.name in before:
        why = "our account there is gone, or it is another machine"
    elif host.name in found.silent:
        why = "it does not answer"
    return HostChange(
        host.name,
        action,
        f"{host.address}, {_roles(host)}",
        why,
        off=host.name in found.silent,
        released=action == "replace",
    )


def _roles(host: Host) -> str:
    return ", ".join(host.roles) + (f", partition {host.partition}" if host.partition else "")


# PATH USER...: their homes with the owner's uid; anybody may see that.
_LOOK_AT_HOMES: Final = """
cd "$1/home" 2>/dev/null || exit 0
shift
for user do
    if [ -d "$user" ] && [ ! -L "$user" ]; then stat -c '%n %u' -- "$user"; fi
done
"""
# PATH NAME UID ...: of an account that is there still, its home is its own.
_REMOVE_HOMES: Final = """
path=$1
cd "$path/home" 2>/dev/null || exit 0
shift
while [ $# -gt 0 ]; do
    if [ -d "$1" ] && [ ! -L "$1" ] && [ "$(stat -c %u -- "$1")" = "$2" ]; then
        if getent passwd "$1" >/dev/null; then
            rm -rf --one-file-system -- "./$1/clusterctl"
        else
            rm -rf --one-file-system -- "./$1"
        fi
    fi
    shift 2
done
cd /
rmdir "$path/home" "$path" 2>/dev/null || true
"""


def find_homes(
    login: Login, settings: OnpremSettings, name: str, users: Sequence[str]
) -> tuple[KeptStorage, ...]:
    """What is kept when machines are released: the homes of these users on the shared folder.

    They stay in any case. Kept, they are listed, and `storage remove` removes them: nothing but what jobs had
    in them where the account is somebody's own. An NFS server of the user's is the user's affair.
    """
    shared, host = settings.shared, settings.controller
    if shared.server is not None:
        return ()
    if lost := login.trust([host]):
        raise lost[host]
    lines = login.run(host, ("sh", "-c", _LOOK_AT_HOMES, "sh", shared.path, *users)).splitlines()
    homes = {name: int(uid) for name, uid in map(str.split, lines)}
    if not homes:
        return ()
    size_mib = None
    with suppress(ClusterctlError):  # without a password for sudo the homes themselves are closed
        said = login.root(host, ("du", "-smc", "--", *(f"{shared.path}/home/{user}" for user in homes)))
        size_mib = int(said.splitlines()[-1].split()[0])
    what = f"folder {shared.path}/home on {host}"
    kept = KeptStorage(
        cluster=name, id=shared.path, what=what, size_mib=size_mib, usd_per_month=0.0, homes=homes
    )
    return (kept,)


def remove_homes(login: Login, settings: OnpremSettings, kept: KeptStorage) -> None:
    host = settings.controller
    if lost := login.trust([host]):
        raise lost[host]
    pairs = [word for user, uid in kept.homes.items() for word in (user, str(uid))]
    login.root(host, ("sh", "-c", _REMOVE_HOMES, "sh", kept.id, *pairs))
