"""Checks of facts about hosts, for problems that keep a host out of a cluster or disturb the
cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from clusterctl.errors import (
    ClusterctlError,
    ConfigureError,
    Failure,
    ProvisionError,
    TransportError,
)
from clusterctl.hosts.gpus import fault_of
from clusterctl.hosts.needs import NOT_LOOKED
from clusterctl.hosts.probe import (
    PROGRAM,
    GpuFacts,
    HostFacts,
    HostReport,
    ProbeRequest,
    parse_report,
)
from clusterctl.hosts.remote_probe import UNKNOWN
from clusterctl.hosts.roles import CLAIM, FABRIC_MANAGER, HostRequirements
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.names import SYSTEM_ACCOUNTS
from clusterctl.spec.software import LAST_FOR_VOLTA
from clusterctl.state.inventory import ARCHITECTURE, HEALTH_PROGRAM
from clusterctl.util import formatting
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import NO_LIMIT, Deadline

Level = Literal["error", "warning"]

# munge rejects credentials older than 300 s. Half of that is left for clocks that drift further.
MOST_SKEW_S: Final = 150
_SLURM: Final = frozenset({"slurmctld", "slurmd", "slurmdbd"})
# Lowest PCI device number that NVIDIA's open kernel modules support.
_TURING: Final = 0x1E00
NO_CGROUPS: Final = "no-cgroups"
SECURE_BOOT: Final = (
    "Secure Boot is on: the kernel loads only modules that are signed with an enrolled key"
)
_NUMBERS: Final = {
    "uid-differs": "an account has another uid",
    "uid-taken": "a uid is in use",
    "gid-differs": "a group has another gid",
    "gid-taken": "a gid is in use",
    "uid-shared": "two accounts have the same uid",
}
_SIGNED: Final = "see Secure Boot in docs/gpus.md"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a host. With the level ``error``, the host can't join the cluster.

    kind: the code of the failure that it causes. Default: a need that the host lacks.
    """

    host: str
    level: Level
    code: str
    what: str
    why: str
    fix: str
    kind: str = "host-unfit"

    def __str__(self) -> str:
        return f"{self.host}: {self.what}: {self.why}; {self.fix}"


@dataclass(frozen=True, slots=True)
class ExaminedHost:
    """The facts of a host. ``skew_s``: the host's clock minus the clock of this machine, in
    seconds. ``report``: the whole answer.
    """

    facts: HostFacts
    skew_s: float
    report: HostReport


# Called with a host, its facts, and the cluster's requirements.
_CheckOfHost = Callable[[str, HostFacts, HostRequirements], Iterator[Finding]]
_CHECKS_OF_HOST: Final[list[_CheckOfHost]] = []


def _check_of_host(check: _CheckOfHost) -> _CheckOfHost:
    """Decorate a function as a check that ``check_hosts`` calls for each host."""
    _CHECKS_OF_HOST.append(check)
    return check


def check_hosts(
    answers: Mapping[str, ExaminedHost], expected: Mapping[str, HostRequirements], *, leader: str
) -> tuple[Finding, ...]:
    """Return the problems of all hosts. ``leader``: the controller, which has the reference
    clock.
    """
    findings = [*_clocks(answers, leader), *_duplicates(answers)]
    for host, examined in answers.items():
        for check in _CHECKS_OF_HOST:
            findings += check(host, examined.facts, expected[host])
    order = {host: i for i, host in enumerate(expected)}
    return tuple(sorted(findings, key=lambda f: (order[f.host], f.level)))


@_check_of_host
def _system(host: str, facts: HostFacts, _: HostRequirements) -> Iterator[Finding]:
    system = facts.system
    if facts.uid != 0:
        cause = f"commands run as uid {facts.uid}, not as root"
        fix = "allow the user to use sudo, or log in as root"
        yield Finding(host, "error", "not-root", "clusterctl has no root access", cause, fix)
    try:
        distribution_of(system.release)
    except ProvisionError as exc:
        name = system.name or "its system"
        fix = "docs/onprem.md lists the supported distributions"
        yield Finding(host, "error", "distribution", f"{name} is not supported", exc.why, fix)
    if system.machine != ARCHITECTURE:
        cause = f"the machine's architecture is {system.machine}"
        fix = f"use {ARCHITECTURE} machines"
        yield Finding(
            host, "error", "architecture", f"the host is not an {ARCHITECTURE} machine", cause, fix
        )
    if not system.systemd:
        cause = "process 1 is another program, and Slurm's daemons run as systemd units"
        yield Finding(
            host, "error", "systemd", "systemd does not run", cause, "boot the host with systemd"
        )


@_check_of_host
def _space(host: str, facts: HostFacts, expected: HostRequirements) -> Iterator[Finding]:
    """Check disks before the host joins. Afterwards its health check does."""
    for disk in () if expected.has_joined else facts.space:
        path = disk.paths[0]
        needed = max(expected.free_mib[path] for path in disk.paths)
        if (free_mib := disk.free >> 20) < needed:
            free, least = map(formatting.exact_size, (free_mib, needed))
            cause = f"{path} has {free} free, but {least} are needed"
            fix = (
                f"find large folders on the host (`sudo du -xk {path} | sort -n | tail`), and "
                "remove some"
            )
            yield Finding(host, "error", "disk-full", "too little disk space", cause, fix)
    for path in sorted(
        expected.free_mib.keys() - {path for disk in facts.space for path in disk.paths}
    ):
        cause = f"{path} can't be read"
        fix = "see `mount` and `dmesg` on the host"
        yield Finding(host, "error", "disk", "a file system does not answer", cause, fix)


@_check_of_host
def _gpus(host: str, facts: HostFacts, expected: HostRequirements) -> Iterator[Finding]:
    gpus = facts.gpus
    count = expected.gpus
    if count and gpus.cards < count and len(gpus.shown) < count:
        cause = f"the spec has {count} GPUs for the host, but the host's PCI bus has {gpus.cards}"
        fix = "correct `gpus` of the partition in the spec, or repair the host"
        yield Finding(host, "error", "gpus-missing", "GPUs are missing", cause, fix)
    elif gpus.driver and len(gpus.shown) < gpus.cards:
        cause = f"nvidia-smi shows {len(gpus.shown)} of {gpus.cards} cards"
        fix = "on the host, `dmesg | grep -i xid` shows the GPU's errors"
        yield Finding(host, "warning", "gpu-lost", "a GPU does not answer", cause, fix)
    elif gpus.cards and not gpus.driver:
        yield from _unsuitable_driver(host, gpus, expected) or [
            _missing_driver(host, gpus, expected)
        ]


@_check_of_host
def _fabric(host: str, facts: HostFacts, expected: HostRequirements) -> Iterator[Finding]:
    """Yield a finding if no fabric manager links the GPUs, so that CUDA fails with error 802."""
    gpus = facts.gpus
    if not gpus.driver or not gpus.switches or FABRIC_MANAGER in facts.units:
        return
    level: Level = "error" if expected.gpus and not expected.driver else "warning"
    has = f"version {gpus.manager}" if gpus.manager else "not installed"
    cause = (
        f"{FABRIC_MANAGER} is not running ({has}; driver {gpus.driver}): programs fail with CUDA "
        "error 802"
    )
    fix = (
        f"install version {gpus.driver} on the host, then run `systemctl enable --now "
        f"{FABRIC_MANAGER}`; if the spec sets software.nvidia, `clusterctl up` does both"
    )
    yield Finding(host, level, "fabric-manager", "NVSwitches are not set up", cause, fix)


@_check_of_host
def _fast_network(host: str, facts: HostFacts, _: HostRequirements) -> Iterator[Finding]:
    """Yield a finding if NCCL uses InfiniBand or RoCE ports by detours."""
    ports = ", ".join(port.name for port in facts.fabric_ports) if facts.verbs else ""
    if ports and facts.gpus.driver and not facts.gpudirect:
        cause = (
            f"neither nvidia_peermem nor NVIDIA's open kernel modules are loaded, so that NCCL "
            f"copies data between GPUs and {ports} through the host's memory"
        )
        fix = (
            "`modprobe nvidia_peermem` on the host, and the name in /etc/modules-load.d for the "
            "next boot; or the open kernel modules, with `software: {nvidia: {driver: open}}`"
        )
        summary = "GPUs and the fast network are not connected directly"
        yield Finding(host, "warning", "gpudirect", summary, cause, fix)


def _unsuitable_driver(host: str, gpus: GpuFacts, expected: HostRequirements) -> list[Finding]:
    """Return a finding if the host has a GPU older than Turing that the driver from `up` does not
    support.
    """
    kind = expected.driver
    branch = int(expected.branch or LAST_FOR_VOLTA)
    fits = kind != "open" and branch <= LAST_FOR_VOLTA
    if not kind or gpus.installed or gpus.oldest is None or gpus.oldest >= _TURING or fits:
        return []
    needs = f"NVIDIA's proprietary driver of branch {LAST_FOR_VOLTA}"
    cause = f"the card 10de:{gpus.oldest:04x} is older than Turing, and needs {needs} or older"
    fix = "in the spec, write software: {nvidia: {driver: proprietary}}, and leave out the branch"
    return [
        Finding(host, "error", "driver-unfit", "the driver does not support the card", cause, fix)
    ]


def _missing_driver(host: str, gpus: GpuFacts, expected: HostRequirements) -> Finding:
    """Return the finding about GPUs without a working driver: the cause, and whether a reboot is
    enough.
    """
    fault = fault_of(gpus.fault)
    if fault and (fault.code != "reboot-needed" or "mismatch" in fault.says):
        fix = _how_to_reboot(host, expected) if fault.code == "reboot-needed" else fault.fix
        cause = f"nvidia-smi reports: {gpus.fault}: {fault.means}"
        return Finding(host, "warning", fault.code, fault.what, cause, fix)
    if gpus.installed:
        holder = "the kernel uses nouveau instead" if gpus.nouveau else "it is not loaded"
        fix = _how_to_reboot(host, expected)
        cause = f"NVIDIA's driver {gpus.installed} is installed, but {holder}"
        if gpus.secure_boot:
            cause = f"driver {gpus.installed} is installed, but {SECURE_BOOT}"
            enrol = f"enrol the key that signed the driver, then {fix}; {_SIGNED}"
            return Finding(
                host, "warning", "secure-boot", "Secure Boot rejects NVIDIA's driver", cause, enrol
            )
        return Finding(host, "warning", "reboot-needed", "a reboot is needed", cause, fix)
    cause = f"{gpus.cards} NVIDIA cards have " + (
        "only nouveau" if gpus.nouveau else "no working driver"
    )
    manager = f" and {FABRIC_MANAGER} of the same version" if gpus.switches else ""
    fix = (
        f"install the driver{manager}, or set software: {{nvidia: {{driver: open}}}}; see "
        "docs/gpus.md"
    )
    if expected.driver:
        fix = (
            "`clusterctl up` installs it; after `up`, `dkms status` on the host shows why its "
            "build failed"
        )
    if gpus.secure_boot:
        cause = f"{cause}, and {SECURE_BOOT}"
        fix = f"{fix}. Before that: {_SIGNED}"
    return Finding(host, "warning", "no-driver", "the NVIDIA driver is missing", cause, fix)


def _how_to_reboot(host: str, expected: HostRequirements) -> str:
    """Return how to reboot a host. clusterctl does not reboot the machine on which it runs."""
    if expected.here:
        return "reboot it yourself while no job is running, then run `clusterctl up`"
    return f"`clusterctl node reboot {host}`, which waits until no job is running on the host"


@_check_of_host
def _accounts(host: str, facts: HostFacts, expected: HostRequirements) -> Iterator[Finding]:
    for each in taken_numbers(expected.accounts, facts.accounts, facts.groups):
        yield Finding(host, "error", each.about, _NUMBERS[each.about], each.cause, each.fix)


@_check_of_host
def _cgroups(host: str, facts: HostFacts, expected: HostRequirements) -> Iterator[Finding]:
    """Yield a finding if Slurm on the host has no cgroups plugin."""
    if expected.cgroups and facts.cgroup_plugin is False:
        yield cgroup_finding(host)


def cgroup_finding(host: str) -> Finding:
    """Return the finding that Slurm can't limit jobs with cgroups. ``host`` may name several
    hosts.
    """
    cause = (
        "Slurm has no plugin for the kernel's version of control groups: jobs can use GPUs of "
        "other jobs, and are cancelled only some seconds after they exceed their memory"
    )
    fix = (
        f"if that matters, use a build of Slurm with the plugin: see {NO_CGROUPS} in docs/doctor.md"
    )
    return Finding(host, "warning", NO_CGROUPS, "Slurm runs without control groups", cause, fix)


@_check_of_host
def _services_in_use(host: str, facts: HostFacts, expected: HostRequirements) -> Iterator[Finding]:
    """Yield findings about existing Slurm, MariaDB and munge services that `up` would
    reconfigure.
    """
    if facts.texts[CLAIM] or not expected.brings & {*_SLURM, "munge"}:
        return
    if daemons := sorted(facts.units & _SLURM):
        names = " and ".join(daemons)
        cause = f"`up` would reconfigure {names} of another cluster, and its jobs would be lost"
        fix = (
            f"run `systemctl disable --now {' '.join(daemons)}` there, or remove the host from "
            "the spec"
        )
        yield Finding(
            host, "error", "slurm-in-use", "Slurm is already running on the host", cause, fix
        )
    elif "munge" in facts.units:
        cause = "`up` replaces munge's key with the cluster's key; `down` moves the old key back"
        fix = "check that no other program on the host needs munge's present key"
        yield Finding(
            host, "warning", "munge-in-use", "munge is already running on the host", cause, fix
        )
    if "slurmctld" in expected.brings and facts.slurm_state:
        cause = (
            "`up` would overwrite the files in /var/lib/slurm/slurmctld, such as "
            f"{facts.slurm_state[0]}"
        )
        fix = "move that folder to another path, or use another controller"
        yield Finding(
            host, "error", "slurm-state", "the host has files of another slurmctld", cause, fix
        )
    if "mariadb" in expected.brings and facts.databases:
        names = ", ".join(facts.databases)
        cause = (
            f"MariaDB has the databases {names}; `up` would restart it and close its port to "
            "other hosts"
        )
        fix = (
            "use another controller, or move these databases; a slurm_acct_db that no Slurm "
            "needs: `mariadb -e 'DROP DATABASE slurm_acct_db'`"
        )
        yield Finding(host, "error", "database-in-use", "MariaDB is in use", cause, fix)


@_check_of_host
def _unmet_needs(host: str, facts: HostFacts, expected: HostRequirements) -> Iterator[Finding]:
    """Yield the unmet needs of a node, as its health check reports them (`needs` of touches.yml)."""
    if facts.unmet is None and expected.has_joined:
        cause = f"{HEALTH_PROGRAM} is missing, did not answer in time, or failed"
        by_hand = f"`clusterctl ssh {host} --admin -- sudo {HEALTH_PROGRAM} report`"
        fix = f"`clusterctl up` restores it; {by_hand} runs it by hand"
        yield Finding(
            host, "error", "health-silent", "the health check does not answer", cause, fix
        )
    for need in facts.unmet or ():
        if need["code"] == NOT_LOOKED:
            what = "a need of the node was not checked"
            yield Finding(host, "warning", "not-looked-at", what, need["why"], "run it again")
        else:
            yield Finding(host, "error", need["code"], need["what"], need["why"], need["fix"])


def _clocks(answers: Mapping[str, ExaminedHost], leader: str) -> Iterator[Finding]:
    reference = answers[leader].skew_s if leader in answers else 0.0
    for host, examined in answers.items():
        skew = examined.skew_s - reference
        if abs(skew) <= MOST_SKEW_S:
            continue
        skew_shown = formatting.duration(round(abs(skew)))
        reference_name = f"{leader}'s" if leader in answers else "this machine's"
        cause = (
            f"the clock is {skew_shown} "
            + ("ahead of " if skew > 0 else "behind ")
            + reference_name
        )
        fix = "set the host's clock with `chronyc makestep` or `timedatectl set-ntp true`"
        yield Finding(host, "error", "clock", "the clock is wrong", cause, fix)


def _duplicates(answers: Mapping[str, ExaminedHost]) -> Iterator[Finding]:
    first: dict[Collection[str], str] = {}
    for host, examined in answers.items():
        same = first.setdefault(frozenset(examined.facts.addresses), host)
        if same != host:
            cause = f"it is the same machine as {same}"
            fix = "list each machine once in the spec"
            yield Finding(host, "error", "same-machine", "a machine has two names", cause, fix)


def reject_full_disks(reports: Mapping[str, HostReport]) -> None:
    """Raise a ConfigureError if file systems are full, because neither Ansible nor jobs can run
    then.
    """
    failures = tuple(
        Failure(
            "disk-full",
            str(disk),
            name,
            "reach",
            f"on the host, find large folders (`sudo du -xk {disk.paths[0]} | sort -n | tail`); "
            "remove some",
        )
        for name, report in reports.items()
        for disk in report.full
    )
    if failures:
        fix = (
            "remove unneeded files (`clusterctl ssh --admin HOST`), then run `clusterctl up` again"
        )
        raise ConfigureError.of_hosts(
            "no disk space left on {hosts}", failures, code="disk-full", about="host", fix=fix
        )


def reject_silent_folders(reports: Mapping[str, HostReport]) -> None:
    """Raise a ConfigureError if a file server does not answer, because Ansible would wait for
    it.
    """
    failures = tuple(
        Failure(
            "host-unfit",
            f"{mark.removeprefix('path ')} can't be looked at: its file server does not answer",
            name,
            "reach",
            f"check the server and the network; `clusterctl ssh --admin {name} -- mount` shows it",
            about="folder-silent",
        )
        for name, report in reports.items()
        for mark, state in report.checksums.items()
        if mark.startswith("path ") and state == UNKNOWN
    )
    if failures:
        raise ConfigureError.of_hosts(
            "a file system does not answer on {hosts}",
            failures,
            code="host-unfit",
            about="file-server",
            fix=f"{failures[0].fix}; then run `clusterctl up` again",
        )


def taken_numbers(
    required: Mapping[str, int], accounts: Mapping[str, int], groups: Mapping[str, int]
) -> Iterator[Failure]:
    """Yield a failure without a host for each account that can't get its uid or gid on a host.

    required: account -> its uid and gid. accounts, groups: name -> number, for those on the host.
    The uids of slurm and munge are fixed, so other accounts must change theirs. An existing account
    munge may have any uid. If groups slurm and munge exist, the Ansible role changes their gids.
    """
    for name, number in required.items():
        exists = name in accounts
        fixed = name in SYSTEM_ACCOUNTS
        if exists and name == "munge":
            continue
        scope = "on all hosts of a cluster" if fixed else "in the spec"
        for kind, table in (("uid", accounts),) if exists else (("uid", accounts), ("gid", groups)):
            actual = table.get(name, number)
            change = f"{'user' if kind == 'uid' else 'group'}mod --{kind}"
            holders = sorted(user for user, uid in table.items() if uid == number and user != name)
            if actual != number and not (fixed and kind == "gid"):
                fix = f"`{change} {number} {name}` on the host, and chown its files"
                if not fixed:
                    fix += f"; if all hosts have {actual}, write uid: {actual} in the spec instead"
                yield Failure(
                    "host-unfit",
                    f"{name} has {kind} {actual} on the host, but {number} {scope}",
                    phase="reach",
                    fix=fix,
                    about=f"{kind}-differs",
                )
                break
            if holders:
                fix = f"give that account another {kind}: `{change} {kind.upper()} {holders[0]}`"
                if not fixed and not exists:
                    fix = f"give {name} another uid in the spec"
                yield Failure(
                    "host-unfit",
                    f"{kind} {number}, which {name} needs, belongs to {', '.join(holders)}",
                    phase="reach",
                    fix=fix,
                    about="uid-shared" if exists else f"{kind}-taken",
                )
                break


def reject_taken_numbers(reports: Mapping[str, HostReport], required: Mapping[str, int]) -> None:
    """Raise a ConfigureError if accounts can't be created, because a host uses their uids or
    gids.
    """
    failures = tuple(
        replace(each, host=host)
        for host, report in reports.items()
        for each in taken_numbers(required, report.accounts, report.groups)
        if each.about not in {"uid-differs", "uid-shared"}
    )
    if failures:
        fix = f"{failures[0].fix}, then run `clusterctl up` again"
        raise ConfigureError.of_hosts(
            "accounts can't be created on {hosts}",
            failures,
            code="host-unfit",
            about="accounts",
            fix=fix,
        )


# Runs a command as root on a host. Arguments: host, command, standard input. Returns the standard
# output.
RunAsRoot = Callable[[str, Sequence[str], bytes], str]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The findings about all hosts, and the facts of those that answered. reports: their whole
    answers.
    """

    findings: tuple[Finding, ...]
    facts: Mapping[str, HostFacts]
    reports: Mapping[str, HostReport] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")

    def and_also(self, findings: Iterable[Finding]) -> DoctorReport:
        return replace(self, findings=(*self.findings, *findings))


def examine(
    requests: Mapping[str, ProbeRequest],
    expected: Mapping[str, HostRequirements],
    root: RunAsRoot,
    *,
    leader: str,
    limit: Deadline = NO_LIMIT,
) -> DoctorReport:
    """Probe and check the hosts in ``requests``. A silent host gets a finding too."""
    answers, failed = call_on_hosts(
        requests, lambda host: _examine_host(host, requests[host], root), limit=limit
    )
    silent = [_unreached_finding(host, error) for host, error in failed.items()]
    findings = check_hosts(answers, expected, leader=leader)
    return DoctorReport(
        (*silent, *findings),
        {host: examined.facts for host, examined in answers.items()},
        {host: examined.report for host, examined in answers.items()},
    )


def findings_as_failures(findings: Sequence[Finding], *, phase: str) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            f.kind,
            f"{f.what}: {f.why}",
            f.host,
            phase,
            f.fix,
            about="" if f.code == f.kind else f.code,
        )
        for f in findings
    )


def _examine_host(host: str, request: ProbeRequest, root: RunAsRoot) -> ExaminedHost:
    started = time.time()
    text = root(host, request.argv(), PROGRAM)
    report = parse_report(text)
    if (facts := report.host) is None:
        raise TransportError(
            "the host did not return valid JSON", code="internal", about="answer", why=text[:500]
        )
    # The host's clock was read between these two times, so a time in between is no skew.
    skew_s = facts.time - min(max(facts.time, started), time.time())
    return ExaminedHost(facts, skew_s, report)


def _unreached_finding(host: str, error: ClusterctlError) -> Finding:
    # The failure of a host may have a more specific code than the error.
    kind = error.failures[0].code
    code = error.failures[0].about or kind
    why = error.why or "no reason is known"
    return Finding(host, "error", code, error.what, why, error.fix, kind)
