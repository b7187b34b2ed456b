"""The checks of a host: what is wrong, or will be once it has joined."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from clusterctl.errors import ClusterctlError, ConfigureError, Failure, ProvisionError, TransportError
from clusterctl.hosts.gpus import fault_of, flags
from clusterctl.hosts.probe import PROGRAM, GpuFacts, HostFacts, HostReport, ProbeRequest, parse_report
from clusterctl.hosts.roles import CLAIM, FABRIC_MANAGER, Expected
from clusterctl.spec.common import ADMIN_ID, LAST_FOR_VOLTA
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.names import ADMIN_USER, SYSTEM_ACCOUNTS
from clusterctl.spec.units import format_duration, format_size
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.process import on_each
from clusterctl.util.progress import NO_LIMIT, Limit

Level = Literal["error", "warning"]

# munge refuses what is older than 300 s; half of it is left for the clocks to drift on.
MOST_SKEW_S: Final = 150
NOTABLE_SKEW_S: Final = 2
LEAST_INODES: Final = 50_000
_SLURM: Final = frozenset({"slurmctld", "slurmd", "slurmdbd"})
_LOOPBACK: Final = "127."
_READY: Final = ("Completed, Success", "[", "N/A", "Not Supported")  # how a card's state begins that is fine
_MIG_NOW: Final = "mig.mode.current"
_MIG_THEN: Final = "mig.mode.pending"
_TURING: Final = 0x1E00  # numbers of models begin here with what NVIDIA's open modules know
NO_CGROUPS: Final = "no-cgroups"
SECURE_BOOT: Final = "Secure Boot is on: the kernel loads no module that no enrolled key has signed"
_NUMBERS: Final = {
    "uid-differs": "an account differs",
    "uid-taken": "a uid is taken",
    "gid-differs": "a group differs",
    "gid-taken": "a gid is taken",
    "uid-shared": "two accounts have one uid",
}
_SIGNED: Final = "see Secure Boot in docs/gpus.md"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be on a host. An ``error`` keeps it out of the cluster."""

    host: str
    level: Level
    code: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.host}: {self.what}: {self.why}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Examined:
    """A host that answered; ``skew_s`` is by how much its clock is ahead of ours."""

    facts: HostFacts
    skew_s: float


def check_hosts(
    seen: Mapping[str, Examined], expected: Mapping[str, Expected], *, leader: str
) -> tuple[Finding, ...]:
    """Everything that is wrong, host by host; clocks are compared with that of ``leader``, the controller."""
    found = [*_clocks(seen, leader), *_twins(seen), *_names(seen, expected)]
    found += other_numbers({host: one.facts.accounts for host, one in seen.items()}, leader)
    for host, one in seen.items():
        of_slurm = (_cgroups, _ports, _in_use)
        for check in (_system, _space, _gpus, _accounts, *of_slurm):
            found += check(host, one.facts, expected[host])
    order = {host: i for i, host in enumerate(expected)}
    return tuple(sorted(found, key=lambda f: (order[f.host], f.level)))


def _system(host: str, facts: HostFacts, _: Expected) -> Iterator[Finding]:
    system = facts.system
    if facts.uid != 0:
        why = f"commands run as uid {facts.uid}"
        yield Finding(host, "error", "not-root", "no root", why, "give the user sudo, or log in as root")
    try:
        distribution_of(system.release)
    except ProvisionError as exc:
        fix = "see docs/onprem.md for what can be configured"
        yield Finding(host, "error", "distribution", system.name or "an unknown system", exc.why, fix)
    if system.machine != ARCHITECTURE:
        why = f"this is {system.machine}"
        fix = f"use {ARCHITECTURE} machines"
        yield Finding(host, "error", "architecture", f"not {ARCHITECTURE}", why, fix)
    if not system.systemd:
        why = "its first process is another"
        yield Finding(host, "error", "systemd", "no systemd", why, "Slurm's daemons run as its units")


def _space(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    for one in facts.space:
        path = one.paths[0]
        needed, free_mib = max(expected.free_mib[path] for path in one.paths), one.free >> 20
        if one.read_only:
            why, fix = f"{path} is mounted so", "see `dmesg`: the kernel remounts a failing disk read-only"
            yield Finding(host, "error", "read-only", "a file system can't be written", why, fix)
        elif free_mib < needed:
            why = f"{path} has {format_size(free_mib)} free, and needs {format_size(needed)}"
            fix = f"`sudo du -xk {path} | sort -n | tail` there lists what takes most: remove some of it"
            yield Finding(host, "error", "disk-full", "too little disk", why, fix)
        elif one.inodes is not None and one.inodes < LEAST_INODES:
            why = f"{path} has {one.inodes} inodes free, and needs {LEAST_INODES}"
            yield Finding(host, "error", "disk-full", "too few inodes", why, "remove small files there")
        if one.noexec:
            level: Level = "warning" if one.paths == ("/tmp",) else "error"  # noqa: S108
            why = f"{', '.join(one.paths)} is mounted noexec, and Slurm's scripts and jobs run programs there"
            fix = "`mount -o remount,exec` there, and the same in /etc/fstab; of /tmp alone: --env TMPDIR=..."
            yield Finding(host, level, "noexec", "programs can't run", why, fix)
    for path in sorted(expected.free_mib.keys() - {path for one in facts.space for path in one.paths}):
        why, fix = f"{path} can't be looked at", "see `mount` and `dmesg` there"
        yield Finding(host, "error", "disk", "a file system does not answer", why, fix)


def _ports(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    for port, daemon in expected.ports.items():
        holder = facts.listeners.get(port)
        if holder is not None and holder not in _SLURM:
            why = f"{holder} listens on port {port}, which {daemon} needs"
            fix = f"stop it, or give it another port (`ss -lptn sport = :{port}` shows it)"
            yield Finding(host, "error", "port-taken", "a port is taken", why, fix)


def _gpus(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    gpus, wanted = facts.gpus, expected.gpus
    if wanted and gpus.cards < wanted and len(gpus.shown) < wanted:
        why = f"the spec says {wanted}, and the PCI bus has {gpus.cards}"
        yield Finding(
            host, "error", "gpus-missing", "GPUs are missing", why, "correct gpus in the spec, or the host"
        )
    elif gpus.driver and len(gpus.shown) < gpus.cards:
        why = f"nvidia-smi shows {len(gpus.shown)} of {gpus.cards} cards"
        yield Finding(host, "warning", "gpu-lost", "a GPU does not answer", why, "see `dmesg | grep -i xid`")
    elif gpus.cards and not gpus.driver:
        yield from _unfit(host, gpus, expected) or [_no_driver(host, gpus, expected)]
    if gpus.driver:
        yield from _fabric(host, facts, expected)
        yield from _cards(host, facts, expected)


def _fabric(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    """Cards that programs can't use (CUDA error 802) until the fabric manager has linked them."""
    gpus = facts.gpus
    told = [f"{one['fabric.state']}, {one['fabric.status']}" for one in gpus.states if "fabric.state" in one]
    waiting = [state for state in told if not state.startswith(_READY)]
    stopped = gpus.switches > 0 and FABRIC_MANAGER not in facts.units
    level: Level = "error" if stopped and expected.gpus and not expected.driver else "warning"
    if stopped or (waiting and gpus.manager not in ("", gpus.driver)):
        has = f"it is {gpus.manager}" if gpus.manager else "it is not installed"
        state = "does not run" if stopped else f"has not linked {len(waiting)} of {len(told)} GPUs"
        why = f"{FABRIC_MANAGER} {state} ({has}, the driver {gpus.driver}): programs end with CUDA error 802"
        fix = f"install version {gpus.driver}, as software.nvidia does, and `systemctl enable --now` it there"
        yield Finding(host, level, "fabric-manager", "NVSwitches are not set up", why, fix)
    elif waiting:
        why = f"{len(waiting)} of {len(told)} GPUs say {waiting[0]}; programs end with CUDA error 802"
        fix = f"wait a minute after a boot; then see `systemctl status {FABRIC_MANAGER}` there"
        yield Finding(host, "warning", "fabric-not-ready", "NVLinks are not set up", why, fix)


def _cards(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    """Cards whose memory a boot repairs, if anything does, or whose parts it changes."""
    cards = dict(enumerate(facts.gpus.states))
    for flag in flags():
        if those := [number for number, card in cards.items() if flag.is_set(card)]:
            why, fix = f"{_numbered(those)}: {flag.means}", flag.fix or _boot(host, expected)
            yield Finding(host, "warning", "gpu-memory", "a GPU's memory has faults", why, fix)
    modes = {number: (card.get(_MIG_NOW, ""), card.get(_MIG_THEN, "")) for number, card in cards.items()}
    for now, then in dict.fromkeys(mode for mode in modes.values() if {*mode} == {"Enabled", "Disabled"}):
        those = [number for number, mode in modes.items() if mode == (now, then)]
        why = (
            f"{_numbered(those)}: MIG is {now}, and {then} after a boot or a reset, with other GPUs for jobs"
        )
        fix = f"{_boot(host, expected)}, then run `clusterctl up`"
        yield Finding(host, "warning", "mig-pending", "MIG changes with the next boot", why, fix)


def _numbered(cards: Sequence[int]) -> str:
    return f"GPU{'s' * (len(cards) > 1)} {', '.join(map(str, cards))}"


def _unfit(host: str, gpus: GpuFacts, expected: Expected) -> list[Finding]:
    """A card that is older than Turing, for which no driver that `up` would install is made."""
    wanted, branch = expected.driver, int(expected.branch or LAST_FOR_VOLTA)
    fits = wanted != "open" and branch <= LAST_FOR_VOLTA
    if not wanted or gpus.installed or gpus.oldest is None or gpus.oldest >= _TURING or fits:
        return []
    needs = f"NVIDIA's proprietary driver of branch {LAST_FOR_VOLTA}"
    why = f"its card 10de:{gpus.oldest:04x} is older than Turing, and needs {needs} or older"
    fix = "write software: {nvidia: {driver: proprietary}}, without a branch or with an older one"
    return [Finding(host, "error", "driver-unfit", "the driver does not know the card", why, fix)]


def _no_driver(host: str, gpus: GpuFacts, expected: Expected) -> Finding:
    """Cards that nobody can use: why, and whether a reboot is all that it takes."""
    fault = fault_of(gpus.fault)
    if fault and (fault.code != "reboot-needed" or "mismatch" in fault.says):
        fix = _boot(host, expected) if fault.code == "reboot-needed" else fault.fix
        why = f"nvidia-smi says: {gpus.fault}: {fault.means}"
        return Finding(host, "warning", fault.code, fault.what, why, fix)
    if gpus.installed:
        holder = "nouveau has the cards" if gpus.nouveau else "it is not loaded"
        why, fix = f"NVIDIA's driver {gpus.installed} is there, and {holder}", _boot(host, expected)
        if gpus.secure_boot:
            why = f"driver {gpus.installed} is there and {SECURE_BOOT}"
            fix = f"enrol the key that it is signed with, then {fix}: {_SIGNED}"
            return Finding(host, "warning", "secure-boot", "Secure Boot rejects NVIDIA's driver", why, fix)
        return Finding(host, "warning", "reboot-needed", "a reboot is needed", why, fix)
    why = "nouveau has them" if gpus.nouveau else f"{gpus.cards} NVIDIA cards and no driver that answers"
    manager = f" and {FABRIC_MANAGER} of the same version" if gpus.switches else ""
    fix = f"install it{manager}, or write software: {{nvidia: {{driver: open}}}}: see docs/gpus.md"
    if expected.driver:
        fix = "`clusterctl up` installs it; where it has, `dkms status` there says why it was not built"
    if gpus.secure_boot:
        why, fix = f"{why}; and {SECURE_BOOT}", f"{fix}. Before that: {_SIGNED}"
    return Finding(host, "warning", "no-driver", "no NVIDIA driver", why, fix)


def _boot(host: str, expected: Expected) -> str:
    """How to boot it: the machine that one is on is nobody's but the user's to boot."""
    if expected.here:
        return "boot it yourself while no job runs, then `clusterctl up`"
    return f"`clusterctl node reboot {host}`, which waits until no job is at work there"


def _accounts(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    for code, why, fix in taken_numbers(expected.accounts, facts.accounts, facts.groups):
        yield Finding(host, "error", code, _NUMBERS[code], why, fix)


def _cgroups(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    """Slurm that can't keep jobs in control groups, by its build, or by its release before it is there."""
    with suppress(ProvisionError):  # which another check is about
        knows = distribution_of(facts.system.release).cgroup_v2
        if expected.cgroups and (facts.cgroup_plugin is False or not knows):
            yield no_cgroups(host)


def no_cgroups(host: str) -> Finding:
    """That Slurm limits nothing by control groups, since it can't on this host, or on these."""
    why = (
        "it has no plugin for the kernel's: jobs are not kept from others' GPUs, and are ended some seconds "
        "after they use more memory than they asked for"
    )
    fix = f"where that matters, take a distribution whose Slurm has it: see {NO_CGROUPS} in docs/doctor.md"
    return Finding(host, "warning", NO_CGROUPS, "Slurm does without control groups", why, fix)


def _in_use(host: str, facts: HostFacts, expected: Expected) -> Iterator[Finding]:
    """Slurm, MariaDB and munge of somebody's, which the roles would configure anew and restart."""
    if facts.texts.get(CLAIM) or not expected.brings & {*_SLURM, "munge"}:
        return
    if daemons := sorted(facts.units & _SLURM):
        why = (
            f"{' and '.join(daemons)} of another cluster would get a new configuration, and its jobs be lost"
        )
        fix = (
            f"take it out of that cluster (`systemctl disable --now {' '.join(daemons)}`), or out of the spec"
        )
        yield Finding(host, "error", "slurm-in-use", "Slurm runs there", why, fix)
    elif "munge" in facts.units:
        why = "the cluster's key takes the place of its key, until `clusterctl down`"
        fix = "see that nothing there needs its own"
        yield Finding(host, "warning", "munge-in-use", "munge runs there", why, fix)
    if "slurmctld" in expected.brings and facts.slurm_state:
        why = f"/var/lib/slurm/slurmctld holds its state ({facts.slurm_state[0]}): ours would overwrite it"
        fix = "move that folder away, or give the cluster another controller"
        yield Finding(host, "error", "slurm-state", "another slurmctld's state is there", why, fix)
    if "mariadb" in expected.brings and facts.databases:
        names = ", ".join(facts.databases)
        why = f"it holds {names}; it would be restarted, and listen to no network"
        fix = (
            "give the cluster another controller, or move these databases; slurm_acct_db, which `down` "
            "leaves in a MariaDB that was there before: `mariadb -e 'DROP DATABASE slurm_acct_db'`"
        )
        yield Finding(host, "error", "database-in-use", "MariaDB is in use", why, fix)


def _clocks(seen: Mapping[str, Examined], leader: str) -> Iterator[Finding]:
    reference = seen[leader].skew_s if leader in seen else 0.0
    for host, one in seen.items():
        skew = one.skew_s - reference
        if abs(skew) < NOTABLE_SKEW_S:
            continue
        level: Level = "error" if abs(skew) > MOST_SKEW_S else "warning"
        by = format_duration(round(abs(skew)))
        whose = f"{leader}'s" if leader in seen else "this machine's"
        why = f"it is {by} {'ahead of' if skew > 0 else 'behind'} {whose}"
        fix = "set it: `chronyc makestep`, or `timedatectl set-ntp true`"
        yield Finding(host, level, "clock", "the clock is off", why, fix)


def other_numbers(accounts: Mapping[str, Mapping[str, int]], leader: str) -> Iterator[Finding]:
    """Where our own account has another uid than its jobs have: that on ``leader``, the controller."""
    ours = accounts.get(leader, {}).get(ADMIN_USER)
    for host, numbers in accounts.items():
        there = numbers.get(ADMIN_USER, ours)
        if there != ours and ours is not None:
            why = f"{ADMIN_USER} has uid {there} there, and {ours} on {leader}, as the proof job of `up` has"
            rented = f"`clusterctl up` gives it uid {ADMIN_ID} on rented hosts where that is free"
            fix = f"{rented}; of your own machines `clusterctl down`, then `up`"
            yield Finding(host, "warning", "admin-differs", "our own account differs", why, fix)


def _twins(seen: Mapping[str, Examined]) -> Iterator[Finding]:
    by_id: defaultdict[str, list[str]] = defaultdict(list)
    for host, one in seen.items():
        by_id[one.facts.system.machine_id].append(host)
    for hosts in by_id.values():
        first, *others = hosts
        for host in others:
            if seen[host].facts.addresses == seen[first].facts.addresses:
                why, fix = f"it is {first} under another name", "name each machine once in the spec"
                yield Finding(host, "error", "same-machine", "one machine under two names", why, fix)
            else:
                why = f"{first} has the same /etc/machine-id: one is a clone of the other"
                fix = "remove /etc/machine-id on one of them, run `systemd-machine-id-setup`, and reboot it"
                yield Finding(host, "warning", "machine-id", "two machines have one machine-id", why, fix)


def _names(seen: Mapping[str, Examined], expected: Mapping[str, Expected]) -> Iterator[Finding]:
    """Names that lead elsewhere than the spec says. Those that lead nowhere are put into /etc/hosts."""
    for host, one in seen.items():
        for name, found in one.facts.resolved.items():
            # A host's own name may be a loopback address: Debian has it so.
            own = name == host and all(address.startswith(_LOOPBACK) for address in found)
            known = name in expected  # one that can't be logged in to is not looked at
            if known and found and expected[name].address not in found and not own:
                why = f"{name} is {', '.join(found)} there, and {expected[name].address} in the spec"
                fix = "correct /etc/hosts there, the name server, or the spec"
                yield Finding(host, "warning", "name", "a name resolves to another address", why, fix)


def reject_full_disks(reports: Mapping[str, HostReport]) -> None:
    """Nothing can be configured, and no job started, where nothing can be written.

    Raises:
        ConfigureError: a file system of some host is full; one failure each.
    """
    failures = tuple(
        Failure(
            "disk-full",
            str(disk),
            name,
            "reach",
            f"`sudo du -xk {disk.paths[0]} | sort -n | tail` there lists what takes most: remove some of it",
        )
        for name, one in reports.items()
        for disk in one.full
    )
    if failures:
        fix = "remove what is not needed (`clusterctl ssh --admin HOST`), then run `clusterctl up` again"
        raise ConfigureError.of_hosts("no room left on {hosts}", failures, code="no-room", fix=fix)


def taken_numbers(
    wanted: Mapping[str, int], accounts: Mapping[str, int], groups: Mapping[str, int]
) -> Iterator[tuple[str, str, str]]:
    """Code, cause and fix of each account that can't be made beside what is there, with its uid and gid.

    No spec says the numbers of slurm and munge, so what is there gives way. An account munge may have any
    number, and the role gives a group of these names its gid.
    """
    for name, number in wanted.items():
        is_there, fixed = name in accounts, name in SYSTEM_ACCOUNTS
        if is_there and name == "munge":
            continue
        said = "on all hosts of a cluster" if fixed else "in the spec"
        for kind, table in (("uid", accounts),) if is_there else (("uid", accounts), ("gid", groups)):
            there, change = table.get(name, number), f"{'user' if kind == 'uid' else 'group'}mod --{kind}"
            others = sorted(one for one, its in table.items() if its == number and one != name)
            if there != number and not (fixed and kind == "gid"):
                fix = f"`{change} {number} {name}`, and its files" if fixed else f"write uid: {there}"
                yield f"{kind}-differs", f"{name} has {kind} {there} there, and {number} {said}", fix
                break
            if others:
                code = "uid-shared" if is_there else f"{kind}-taken"
                fix = f"give it another: `{change} {kind.upper()} {others[0]}`"
                if not fixed and not is_there:
                    fix = f"give {name} another uid in the spec"
                yield code, f"{kind} {number} of {name} is that of {', '.join(others)}", fix
                break


def reject_taken_numbers(reports: Mapping[str, HostReport], wanted: Mapping[str, int]) -> None:
    """Every host is looked at before any is changed. An account of another number of ours is set right later.

    Raises:
        ConfigureError: accounts can't be made on some host; one failure each.
    """
    failures = tuple(
        Failure(code, why, host, "reach", fix)
        for host, one in reports.items()
        for code, why, fix in taken_numbers(wanted, one.accounts, one.groups)
        if code not in {"uid-differs", "uid-shared"}
    )
    if failures:
        fix = f"{failures[0].fix}, then run `clusterctl up` again"
        raise ConfigureError.of_hosts(
            "accounts can't be made on {hosts}", failures, code="accounts-conflict", fix=fix
        )


# Runs a command as root on a host, with bytes on its standard input; its standard output.
RunAsRoot = Callable[[str, Sequence[str], bytes], str]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What was found; ``facts`` are those of the hosts that answered."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, HostFacts]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What keeps hosts out of the cluster."""
        return tuple(finding for finding in self.findings if finding.level == "error")


def examine(
    request: ProbeRequest,
    expected: Mapping[str, Expected],
    root: RunAsRoot,
    *,
    leader: str,
    only: Collection[str] = (),
    limit: Limit = NO_LIMIT,
) -> DoctorReport:
    """Look at every host of ``expected``, or at those of ``only``.

    A host that can't be reached, or gives no answer within ``limit``, is a finding, like all else.
    """
    hosts = [host for host in expected if not only or host in only]
    seen, failed = on_each(hosts, lambda host: _look(host, request, root), limit=limit)
    silent = [_unreached(host, error) for host, error in failed.items()]
    found = check_hosts(seen, expected, leader=leader)
    return DoctorReport((*silent, *found), {host: one.facts for host, one in seen.items()})


def failures(findings: Sequence[Finding], *, phase: str) -> tuple[Failure, ...]:
    return tuple(Failure(f.code, f"{f.what}: {f.why}", f.host, phase, f.fix) for f in findings)


def _look(host: str, request: ProbeRequest, root: RunAsRoot) -> Examined:
    begun = time.time()
    text = root(host, request.argv(), PROGRAM)
    facts = parse_report(text).host
    if facts is None:
        raise TransportError("the host gave no usable answer", code="answer-garbled", why=text[:500])
    ended = time.time()
    # Its clock was read between the two; what lies in between is not skew.
    skew_s = facts.time - min(max(facts.time, begun), ended)
    return Examined(facts, skew_s)


def _unreached(host: str, error: ClusterctlError) -> Finding:
    (failure, *_) = error.failures  # of one host, which may say more than the error's own code
    return Finding(host, "error", failure.code, error.what, error.why or "it gave no reason", error.fix)
