"""The provider of existing machines: claims each for the cluster and describes them as an
Inventory.
"""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from clusterctl.errors import (
    Failure,
    MachineError,
    ProvisionError,
    UsageError,
)
from clusterctl.hosts.checks import DoctorReport, Finding, findings_as_failures
from clusterctl.providers.base import (
    DEFAULTS,
    REPLACED,
    Action,
    HostChange,
    HostOptions,
    HostPlan,
    Leftover,
    OrphanSearch,
    PendingRelease,
    Prompts,
    Provider,
    Provisioned,
    load_known_hosts,
    load_known_inventory,
    pending_releases,
)
from clusterctl.providers.onprem import members, release, single_hosts
from clusterctl.providers.onprem.access import Resolved, as_ssh_resolves, raise_failures
from clusterctl.providers.onprem.login import OWNER_ANSWER_S, Login
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import Host, Inventory, applied_spec
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts, temporary_folder
from clusterctl.util.progress import NO_LIMIT, Clock, Deadline

# CPU seconds of this machine that examining a host may take.
_HOST_S: Final = 0.5
_THEN: Final = "nothing was changed; fix these problems, then run the same command again"


@dataclass(frozen=True, slots=True)
class _Examination:
    """The result of examining the machines.

    text: the spec as YAML. The result is reused only for the same text and workspace.
    new: names of hosts that are not in the cluster yet.
    silent: name -> host, for hosts of the cluster that do not answer.
    previous_settings: the provider settings of the last `up`.
    preview: lines about the changes that `up` will make on new machines.
    joined: names of new hosts that already are recorded on the host itself.
    """

    text: str
    workspace: Workspace
    inventory: Inventory
    new: tuple[str, ...]
    silent: Mapping[str, Host]
    previous_settings: OnpremSettings
    notes: tuple[str, ...] = ()
    preview: tuple[str, ...] = ()
    joined: set[str] = field(default_factory=set)


# Time limits for examining a few hosts. A host that does not answer in time would end `up`.
_PREFLIGHT_S: Final = 28.0
_UP_S: Final = 60.0
# Time for the user to type the password for sudo.
_TYPING_S: Final = 120.0


class OnpremProvider(Provider):
    _settings: OnpremSettings
    takes_single_hosts = True
    recreates_hosts = False

    def __init__(
        self, settings: OnpremSettings, prompts: Prompts, clock: Clock | None = None
    ) -> None:
        self._clock = clock or Clock()
        self._settings = settings
        self._prompts = prompts
        self._examination: _Examination | None = None
        # Notes about the pending releases, once they have been tried again.
        self._retry_notes: tuple[str, ...] | None = None

    @cached_property
    def _resolved(self) -> Resolved:
        return as_ssh_resolves(self._settings)

    def check(self, spec: ClusterSpec) -> None:
        if shutil.which("ssh") is None:
            raise MachineError(
                "missing tool: ssh",
                code="tool-missing",
                why="clusterctl reaches your machines with ssh",
                fix="install OpenSSH's client",
            )
        user = getpass.getuser()
        is_here = any(machine.is_here for machine in self._settings.machines.values())
        if is_here and user not in ("root", spec.job_user.name):
            raise UsageError(
                f"jobs of {spec.job_user.name} can't be sent to this machine",
                code="unsupported",
                about="other-user",
                where="users",
                why=f"you are {user}, and clusterctl logs in to its own machine only as you",
                fix=f"name {user} first in `users`, or leave `users` out",
            )

    def preflight(self, spec: ClusterSpec, workspace: Workspace) -> DoctorReport | None:
        hosts = members.members(spec, self._resolved.settings, self._resolved.jumps)
        with self._login(workspace, _PREFLIGHT_S * 2 / 3) as login:
            *_, report, blocking = self._collect_findings(
                spec, workspace, hosts, login, find_all=True
            )
        findings = [
            finding
            for finding in report.findings
            if finding.level != "error" or finding in blocking
        ]
        return replace(report, findings=tuple(dict.fromkeys((*findings, *blocking))))

    def plan(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        options: HostOptions = DEFAULTS,  # noqa: ARG002
    ) -> HostPlan:
        examination = self._examine_machines(spec, workspace)
        previous = load_known_hosts(workspace)
        pending = pending_releases(workspace)
        replaced = {late.host.name for late in pending if late.why == REPLACED}
        changes = [
            _change(host, examination, previous, replaced) for host in examination.inventory.hosts
        ]
        names = {host.name for host in examination.inventory.hosts}
        changes += [
            HostChange(name, "remove", _roles(host), "no longer in the spec", released=True)
            for name, host in previous.items()
            if name not in names
        ]
        lines = (*examination.notes, *examination.preview, *map(str, pending))
        return HostPlan(
            tuple(changes), notes=lines, distribution=examination.inventory.distribution
        )

    def apply(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        options: HostOptions = DEFAULTS,  # noqa: ARG002
    ) -> Provisioned:
        examination = self._examination
        if examination is None or (examination.text, examination.workspace) != (
            dump_spec(spec),
            workspace,
        ):
            examination = self._examine_machines(spec, workspace)
        previous_inventory = load_known_inventory(workspace)
        login = self._login_to(self._machines(workspace), workspace)
        absent = release.release_removed(examination.inventory, login)
        if previous_inventory is not None:
            settings = examination.previous_settings
            for host in previous_inventory.hosts:
                if (reason := absent.get(host.name)) is not None:
                    release.record_pending(
                        host, previous_inventory, settings, workspace, why=reason
                    )
        joining = [name for name in examination.new if name not in examination.joined]
        if joining:
            self._join(examination, joining, login)
        if self._retry_notes is None:
            self._retry_notes = release.retry_all(examination.inventory.hosts, login)
        notes = (*examination.notes, *self._retry_notes)
        return Provisioned(examination.inventory, notes, made=tuple(examination.new))

    def alive(self, cluster_id: str) -> bool:  # noqa: ARG002
        # Nobody else knows whether a machine that does not answer is off.
        return True

    @staticmethod
    def may_have_hosts(workspace: Workspace) -> bool:
        return workspace.adopts_hosts

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        if workspace is None:
            with self._login(None) as login:
                release.release_orphan(login, self._resolved.settings, cluster_id)
            return
        login = self._login_to(self._machines(workspace), workspace)
        failed: list[Failure] = []
        try:
            release.release_all(login)
        except ProvisionError as exc:
            failed += exc.failures
        previous_hosts = load_known_hosts(workspace).values()
        for note in release.retry_all(previous_hosts, login, ending=True):
            self._prompts.reporter.note(note)
        failed += [pending.failure for pending in pending_releases(workspace)]
        if failed:
            raise ProvisionError.of_hosts(
                f"{release.NOT_RELEASED}: {{hosts}}",
                failed,
                code="leftovers",
                about="hosts",
                then=release.THEN,
            )

    def leftovers(self, cluster_id: str, *, workspace: Workspace | None) -> tuple[Leftover, ...]:
        with self._login(workspace) as login:
            return release.find_leftovers(login, cluster_id)

    def orphans(self, name: str) -> OrphanSearch:
        with self._login(None) as login:
            return release.find_orphans(login, name)

    def limited(
        self, spec: ClusterSpec, workspace: Workspace, limit: Collection[str]
    ) -> ClusterSpec:
        return single_hosts.limited(spec, self._settings, workspace, limit)

    def without(self, spec: ClusterSpec, names: Collection[str]) -> ClusterSpec:
        return single_hosts.without(spec, self._settings, names)

    def record_pending(
        self, host: Host, inventory: Inventory, workspace: Workspace, *, why: str
    ) -> PendingRelease:
        return release.record_pending(host, inventory, self._settings, workspace, why=why)

    def _machines(self, workspace: Workspace) -> Mapping[str, OnpremHost]:
        """Return how to log in to the machines of the spec, and to those that leave the cluster."""
        settings = _previous_settings(workspace) or self._resolved.settings
        known = load_known_hosts(workspace).values()
        former = {host.name: release.machine_of(host, settings) for host in known}
        return {**former, **self._resolved.machines}

    def _login_to(
        self,
        machines: Mapping[str, OnpremHost],
        workspace: Workspace,
        answer_s: float = OWNER_ANSWER_S,
    ) -> Login:
        return Login(
            machines, workspace, self._prompts, jumps=self._resolved.jumps, answer_s=answer_s
        )

    @contextmanager
    def _login(
        self, workspace: Workspace | None, answer_s: float = OWNER_ANSWER_S
    ) -> Iterator[Login]:
        """Yield a login as the machines' owner. If there is no workspace yet, use a temporary
        folder.
        """
        if workspace is not None and workspace.root.is_dir():
            yield self._login_to(self._resolved.machines, workspace, answer_s)
            return
        with temporary_folder() as folder:
            temporary = Workspace(folder / (workspace.root.name if workspace else "lost"))
            temporary.create()
            try:
                yield self._login_to(self._resolved.machines, temporary, answer_s)
            finally:
                end_all_connections(temporary.access_config)

    def _examine_machines(self, spec: ClusterSpec, workspace: Workspace) -> _Examination:
        """Examine the machines. Raise a ProvisionError if they can't form the cluster."""
        hosts = members.members(spec, self._resolved.settings, self._resolved.jumps)
        self._prompts.reporter.progress(f"checking {counted(len(hosts), 'machine')}")
        login = self._login_to(self._resolved.machines, workspace, _UP_S / 2)
        joined, silent, report, blocking = self._collect_findings(spec, workspace, hosts, login)
        if blocking:
            summary = "these machines don't meet the requirements of a cluster: {hosts}"
            failures = findings_as_failures(blocking, phase="plan")
            raise ProvisionError.of_hosts(
                summary, failures, code="host-unfit", about="hosts", then=_THEN
            )
        new = tuple(host.name for host in hosts if host.name not in {**joined, **silent})
        keys = {host.name: login.key_of(host.name) for host in hosts if host.name not in silent}
        inventory = members.inventory(
            spec,
            self._resolved.settings,
            hosts,
            report.facts,
            keys,
            cluster_id=workspace.cluster_id(),
            proxies=login.proxies(),
            silent=silent,
        )
        inventory = replace(inventory, hosts=tuple(map(login.reached, inventory.hosts)))
        notes = members.notes(spec, report.findings, joined=joined)
        settings = _previous_settings(workspace) or self._resolved.settings
        preview = members.preview(spec, hosts, report.facts, new)
        self._examination = _Examination(
            dump_spec(spec), workspace, inventory, new, silent, settings, notes, preview
        )
        return self._examination

    def _collect_findings(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        hosts: Sequence[Host],
        login: Login,
        *,
        find_all: bool = False,
    ) -> tuple[Mapping[str, Host], Mapping[str, Host], DoctorReport, tuple[Finding, ...]]:
        """Examine all machines that answer.

        Return (hosts of the cluster, hosts that do not answer, report, findings that stop `up`). The
        first two are mappings of name -> host.
        find_all: whether an unconfirmed host key becomes a finding, not an error, as for `plan
            --preflight`.
        """
        total_s = max(_PREFLIGHT_S if find_all else _UP_S, _HOST_S * len(hosts))
        names = [host.name for host in hosts]
        login.check_keys(names)
        # The limits do not include the time until the user confirms host keys.
        limit = Deadline.within(total_s, self._clock) if find_all else NO_LIMIT
        lost = login.trust(names, limit, find_all=find_all)
        login_limit = Deadline.within(total_s / 3, self._clock)
        known = load_known_hosts(workspace)
        silent = {name: known[name] for name in known if members.is_silent_in(name, lost)}
        reachable = [host for host in hosts if host.name not in lost]
        joined, unanswering, refused = members.joined_members(reachable, known, login, login_limit)
        silent = {**silent, **unanswering}
        lost = {name: exc for name, exc in {**lost, **refused}.items() if name not in silent}
        new = tuple(name for name in names if name not in {**joined, **silent})
        patience = Deadline.within(total_s + _TYPING_S, self._clock)
        asked = [name for name in names if name not in {**lost, **silent}]
        lost |= login.try_sudo(asked, patience)
        limit = Deadline.within(total_s, self._clock)
        answering = [host.name for host in hosts if host.name not in silent]
        report = members.examine(spec, hosts, login, joined, only=answering, lost=lost, limit=limit)
        blocking = blocking_findings(report, hosts, new, workspace, silent)
        return joined, silent, report, blocking

    def _join(self, examination: _Examination, joining: Sequence[str], login: Login) -> None:
        inventory = examination.inventory
        workspace = login.workspace
        write_atomic(workspace.joining, inventory.text)
        write_ssh_files(inventory, workspace)
        joined, failed = call_on_hosts(
            joining, lambda host: login.join(host, inventory.cluster_id, inventory.cluster)
        )
        examination.joined.update(joined)
        then = "the other machines are ready; run `clusterctl up` again"
        raise_failures(failed, summary="the machine could not join the cluster", then=then)


def blocking_findings(
    report: DoctorReport,
    hosts: Sequence[Host],
    new: Collection[str],
    workspace: Workspace,
    silent: Mapping[str, Host],
) -> tuple[Finding, ...]:
    """Return the errors that stop `up`: of new, unexamined or unsuitable hosts, or of a silent
    controller.
    """
    leader = hosts[0].name
    relevant = [
        finding
        for finding in report.findings
        if finding.host in new or finding.host not in report.facts or finding.code in members.UNFIT
    ]
    relevant += members.claim_findings(report.facts, workspace.known_id() or "")
    errors = [finding for finding in relevant if finding.level == "error"]
    if leader in silent:
        host = silent[leader]
        reason = f"no SSH connection to {host.ssh_address or host.address}:{host.port}"
        fix = "check that the machine is on, and that no firewall blocks the port"
        errors.append(
            Finding(
                leader, "error", "controller-silent", "the controller does not answer", reason, fix
            )
        )
    return tuple(errors)


def _previous_settings(workspace: Workspace) -> OnpremSettings | None:
    """Return the provider settings of the last `up`, if the provider of the last `up` was
    `onprem`.
    """
    try:
        provider = applied_spec(workspace).provider
    except UsageError:
        return None
    return provider if isinstance(provider, OnpremSettings) else None


def _change(
    host: Host, examination: _Examination, previous: Mapping[str, Host], replaced: Collection[str]
) -> HostChange:
    action: Action = "make" if host.name in examination.new else "keep"
    reason = ""
    if action == "make" and host.name in replaced:
        action = "replace"
        reason = REPLACED
    elif host.name in examination.new and host.name in previous:
        reason = "it has no record of the cluster, or it is another machine"
    elif host.name in examination.silent:
        reason = "it does not answer"
    return HostChange(
        host.name,
        action,
        f"{host.address}, {_roles(host)}",
        reason,
        off=host.name in examination.silent,
        released=action == "replace",
    )


def _roles(host: Host) -> str:
    return ", ".join(host.roles) + (f", partition {host.partition}" if host.partition else "")
