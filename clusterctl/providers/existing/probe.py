"""Asks a login node about its Slurm site, as an ordinary account and in a single session."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from clusterctl.errors import (
    ClusterctlError,
    MachineError,
    SlurmAwayError,
    SlurmError,
    UsageError,
    printable,
)
from clusterctl.providers.existing.site_description import (
    MPI_MODULE,
    SiteDescription,
    SitePartition,
    is_mpi_module,
)
from clusterctl.spec.base import PATTERNS
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ASK_OPERATORS
from clusterctl.spec.providers.existing import ExistingSettings
from clusterctl.spec.sbatch import words_of
from clusterctl.spec.units import parse_duration_s, parse_slurm_time_s
from clusterctl.transport.base import Transport

_PROGRAM: Final = Path(__file__).with_name("remote_probe.sh").read_text(encoding="utf-8")
# Each of at most 80 calls of sbatch can wait for a busy slurmctld.
_PROBE_S: Final = 120.0
_TEST: Final = "sbatch --test-only"
# The choices of the user for the test.
_OF_TEST: Final = ("account", "partition", "time", "slurm")
# remote_probe.sh writes it in place of the line feeds in a value.
_LINE: Final = "\x1f"


@dataclass(frozen=True, slots=True)
class Choices:
    """The settings of an attached cluster that the user has chosen, without modules of MPI. Empty:
    clusterctl finds the setting.
    """

    account: str = ""
    qos: str = ""
    partition: str = ""
    python: str = ""
    modules: tuple[str, ...] = ()
    slurm_path: str = ""
    time: str = ""
    slurm: tuple[str, ...] = ()
    routed: bool = False

    @property
    def minutes(self) -> str:
        """The time limit of the test job, which Slurm counts in minutes. Empty: not chosen."""
        return str(-(-parse_duration_s(self.time) // 60)) if self.time else ""

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> Choices:
        """Return the choices in settings by name, see ``chosen_settings``."""
        values = {field.name: chosen[field.name] for field in fields(cls) if field.name in chosen}
        words = {
            # A library of MPI is for jobs, not for Slurm's commands.
            "modules": tuple(name for name in chosen.get("modules", ()) if not is_mpi_module(name)),
            "slurm": words_of(chosen.get("slurm", ())),
        }
        return cls(**{**values, **words})


def chosen_settings(spec: ClusterSpec | None) -> dict[str, Any]:
    """Return the settings of a spec on which the questions and files of `attach` depend, by name,
    with the default partition unless the site chooses it (`routed`).
    """
    if spec is None or not isinstance(spec.provider, ExistingSettings):
        return {}
    names = {*(each.name for each in fields(Choices)), "folder", "launcher"}
    values = spec.provider.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    chosen = {name: value for name, value in values.items() if name in names}
    return chosen if spec.provider.routed else {**chosen, "partition": spec.partitions[0].name}


@dataclass(frozen=True, slots=True)
class ProbeSubmission:
    """The answer of `sbatch --test-only`, which submits no job, for an account and a partition.

    account: empty for Slurm's default account. partition: empty: the job names none. answer: the
    messages of Slurm and of the site. If Slurm only says that the nodes are out of service, the job
    counts as accepted, because it waits for them. minutes: the time limit. Empty: none.
    """

    account: str
    partition: str
    nodes: int
    accepted: bool
    answer: str
    minutes: str

    def command(self, choices: Choices) -> str:
        """Return the command as it was run."""
        named = {
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            "time": self.minutes,
            "account": self.account,
            "partition": self.partition,
            "qos": choices.qos,
        }
        words = [f"--{name}={value}" for name, value in named.items() if value]
        return f"{_TEST} {shlex.join([*words, *choices.slurm, '--wrap=true'])}"


@dataclass(frozen=True, slots=True)
class SiteProbe:
    """The answers of a login node.

    account: the chosen Slurm account. Empty: jobs name no account, so Slurm takes the user's
        default.
    partition: the chosen default partition of jobs. attempts: all calls of sbatch.
    is_routed: the site chooses the partition of each job itself, and jobs name none.
    minutes: the time limit of the test that was accepted. Empty: none.
    """

    site: SiteDescription
    account: str
    partition: str
    attempts: tuple[ProbeSubmission, ...]
    is_routed: bool = False
    minutes: str = ""

    @property
    def usable(self) -> tuple[SitePartition, ...]:
        """The partitions that accept jobs of the chosen account, the default partition of jobs
        first.
        """
        accepted = {attempt.partition for attempt in self.attempts if attempt.accepted}
        usable = [
            partition
            for partition in self.site.partitions
            if partition.name in accepted or (self.is_routed and partition.state == "up")
        ]
        return tuple(sorted(usable, key=lambda partition: partition.name != self.partition))

    @property
    def test_minutes(self) -> str:
        """The time limit of a job that tests MPI: that of the accepted test, at most the default
        partition's. Empty: none.
        """
        limit_s = self.usable[0].max_time_s if self.usable and not self.is_routed else None
        if not self.minutes or limit_s is None:
            return self.minutes
        return str(min(int(self.minutes), max(limit_s // 60, 1)))

    @property
    def refused(self) -> tuple[ProbeSubmission, ...]:
        """The last attempt for each partition that accepts no jobs."""
        if self.is_routed:
            return ()
        usable = {partition.name for partition in self.usable}
        last = {attempt.partition: attempt for attempt in self.attempts if attempt.nodes == 1}
        return tuple(attempt for name, attempt in last.items() if name not in usable)

    @property
    def proof_nodes(self) -> int:
        """The number of nodes for a job that proves MPI: 2 unless the default partition refuses
        it.
        """
        sizes = [partition.node_count for partition in self.usable[:1]]
        is_refused = any(attempt.nodes > 1 and not attempt.accepted for attempt in self.attempts)
        return min([1 if is_refused else 2, *sizes])


def probe(transport: Transport, choices: Choices) -> SiteProbe:
    """Ask the login node. Nothing is written there, and no job is submitted.

    Raises:
        MachineError: Slurm's commands are not on this machine.
        UsageError: the site does not have the chosen partition.
        SlurmError: Slurm accepts no job of this account. SlurmAwayError: slurmctld does not answer.
        TransportError: the login node can't be reached, or its answer is incomplete.
    """
    argv = ["sh", "-c", _PROGRAM, "probe", choices.account, choices.qos, choices.partition]
    argv += [choices.python, " ".join(choices.modules), choices.slurm_path, f"^({MPI_MODULE})$"]
    argv += [choices.minutes, shlex.join(choices.slurm), "routed" if choices.routed else ""]
    output = transport.run(argv, timeout_s=_PROBE_S).stdout
    return parse(output, choices, transport.host)


class _Answer:
    """The output of remote_probe.sh: lines with a key and its values."""

    def __init__(self, output: str) -> None:
        self._rows: dict[str, list[Sequence[str]]] = {}
        for line in output.split("\n"):
            key, *values = line.split("\t")
            self._rows.setdefault(key, []).append(values)

    def rows(self, key: str, least: int) -> list[Sequence[str]]:
        """Return the lines of a key, without those with less than ``least`` values."""
        return [
            [_joined_lines(value) for value in values]
            for values in self._rows.get(key, ())
            if len(values) >= least
        ]

    def attempts(self, key: str) -> list[_AttemptRow]:
        """Return the calls of sbatch with this key."""
        size = len(_AttemptRow._fields)
        rows = self._rows.get(key, ())
        return [_AttemptRow(*values[:size]) for values in rows if len(values) >= size]

    def first(self, key: str) -> str:
        return next((values[0] for values in self.rows(key, 1)), "")

    def column(self, key: str) -> tuple[str, ...]:
        return tuple(values[0] for values in self.rows(key, 1) if values[0])

    @property
    def chosen(self) -> tuple[str, str, str] | None:
        """The account, the partition and the time limit of the first job that sbatch accepted."""
        rows = self.rows("chosen", 3)
        return next(((account, place, minutes) for account, place, minutes, *_ in rows), None)


class _AttemptRow(NamedTuple):
    """A call of `sbatch --test-only`. output: with _LINE between its lines."""

    account: str
    partition: str
    nodes: str
    exit_code: str
    output: str
    minutes: str

    @property
    def is_accepted(self) -> bool:
        return self.exit_code == "0"


class _Association(NamedTuple):
    """A row of `sacctmgr show assoc`: an account of the user, in all or in one partition.

    max_submit: empty: no limit. allowed_qos: the QOS that jobs may request, separated by commas.
    """

    account: str
    partition: str
    max_submit: str
    default_qos: str
    allowed_qos: str


def parse(text: str, choices: Choices, host: str) -> SiteProbe:
    """Parse the output of remote_probe.sh. Errors: see ``probe``."""
    answer = _Answer(text)
    if not answer.first("slurm_path"):
        raise _no_slurm(answer, choices, host)
    if refusal := answer.first("sinfo"):
        raise _no_partitions(answer, choices, refusal, host)
    partitions = _partitions(answer)
    attempts = _attempts(answer, partitions)
    if choices.partition and choices.partition not in {partition.name for partition in partitions}:
        names = ", ".join(partition.name for partition in partitions)
        raise UsageError(
            f"the cluster has no partition {choices.partition!r}",
            code="not-found",
            about="partition",
            where=host,
            fix=f"use one of these with --partition: {names}",
        )
    accepted = [
        (attempt.account, attempt.partition, attempt.minutes)
        for attempt in attempts
        if attempt.accepted
    ]
    # Empty if no job is accepted.
    account, partition, minutes = answer.chosen or next(iter(accepted), ("", "", ""))
    site = _site(answer, partitions, choices)
    is_routed = bool(accepted) and not partition
    default = next((part.name for part in partitions if part.is_default), "")
    probed = SiteProbe(site, account, partition or default, attempts, is_routed, minutes)
    if not probed.usable:
        raise _nothing_accepted(attempts, choices, host)
    return replace(probed, partition=probed.usable[0].name)


def _joined_lines(value: str) -> str:
    return " ".join(value.split(_LINE))


def _no_slurm(answer: _Answer, choices: Choices, host: str) -> MachineError:
    """Return the error for a machine without sbatch. Its modules may have Slurm."""
    modules = answer.column("slurm_module")
    loading = answer.first("loading")
    reason = "neither the PATH nor the usual folders have the command sbatch"
    if choices.modules:
        load = f"module load {' '.join(choices.modules)}"
        reason += f", also after `{load}`" + (f": {printable(loading)}" if loading else "")
    fix = "attach with a login node of the cluster, on which `sbatch` works"
    if modules and not choices.modules:
        fix = f"load the site's module of Slurm: attach with --module {modules[-1]}"
    fix += (
        "; or write the folder that `command -v sbatch` shows there as provider.slurm_path in a "
        "spec"
    )
    return MachineError(
        "this machine has no Slurm",
        code="tool-missing",
        about="slurm",
        where=host,
        why=reason,
        fix=fix,
    )


def _no_answer(problem: str, refusal: str, host: str) -> SlurmError:
    """Return the error for a Slurm that does not answer the probe. refusal: the words of Slurm."""
    if SlurmAwayError.words.search(refusal):
        fix = f"{ASK_OPERATORS}, or run `clusterctl attach` again later"
        return SlurmAwayError(
            "slurmctld does not answer", where=host, why=printable(refusal), fix=fix
        )
    fix = f"try `sinfo` on the login node; {ASK_OPERATORS}"
    return SlurmError(
        problem,
        about="partitions",
        where=host,
        why=printable(refusal),
        fix=fix,
    )


def _no_partitions(answer: _Answer, choices: Choices, refusal: str, host: str) -> SlurmError:
    """Return the error for a Slurm that lists no partitions. A module may have its configuration."""
    error = _no_answer("Slurm does not list the partitions", refusal, host)
    modules = answer.column("slurm_module")
    if modules and not choices.modules and not error.retryable:
        error.fix = (
            f"load the site's module of Slurm: attach with --module {modules[-1]}; {error.fix}"
        )
    return error


def _attempts(answer: _Answer, partitions: Sequence[SitePartition]) -> tuple[ProbeSubmission, ...]:
    """Return the answers of sbatch, without the lines that a site prints also if a job is accepted.

    A partition with a name that a spec can't hold counts as refused.
    """
    rows = answer.attempts("try")
    noise = {line for row in rows if row.is_accepted for line in row.output.split(_LINE)}
    known = {partition.name: partition for partition in partitions}
    account = answer.chosen and answer.chosen[0]
    attempts = []
    for row in rows:
        lines = row.output.split(_LINE)
        words = " ".join(line for line in lines if row.is_accepted or line not in noise)
        nodes = int(row.nodes)
        attempt = ProbeSubmission(
            row.account, row.partition, nodes, row.is_accepted, words, row.minutes
        )
        if SlurmError.nodes_out.search(words) and _lacks_nodes(known.get(row.partition), nodes):
            # If Slurm accepts no job, the first account whose job would wait is chosen.
            account = row.account if account is None else account
            attempt = replace(attempt, accepted=row.account == account)
        if row.partition and not PATTERNS["slurm_name"].matches(row.partition):
            attempt = replace(attempt, accepted=False, answer="clusterctl can't use its name")
        attempts.append(attempt)
    return tuple(attempts)


def _lacks_nodes(partition: SitePartition | None, count: int) -> bool:
    """Return whether ``count`` nodes of a partition exist, but are not all in service."""
    if partition is None or partition.in_service is None:
        return False
    return partition.in_service < count <= partition.node_count


def _nothing_accepted(
    attempts: Sequence[ProbeSubmission], choices: Choices, host: str
) -> ClusterctlError:
    if away := [a.answer for a in attempts if SlurmAwayError.words.search(a.answer)]:
        return _no_answer("", away[-1], host)
    # Many accounts and partitions may be refused for the same reason.
    asked = {attempt.answer: f"`{attempt.command(choices)}`" for attempt in reversed(attempts)}
    fix = "ask the site's administrators which account and partition you may use"
    if options := [name for name in _OF_TEST if not getattr(choices, name)]:
        fix = f"pass yours with {' or '.join(f'--{name}' for name in options)}; or {fix}"
    is_given = {"account": choices.account, "partition": choices.partition or choices.routed}
    if given := [name for name, is_chosen in is_given.items() if is_chosen]:
        empty = " ".join(f"--{name} ''" for name in given)
        fix = f"`clusterctl attach {empty}` lets `attach` search again; or {fix}"
    return SlurmError(
        "Slurm accepts no job of yours",
        about="all-partitions",
        where=host,
        why="\n".join(f"{command}: {answer}" for answer, command in reversed(asked.items()))
        or "it lists no partition",
        fix=fix,
    )


def _site(
    answer: _Answer,
    partitions: tuple[SitePartition, ...],
    choices: Choices,
) -> SiteDescription:
    config = {name: value for name, value, *_ in answer.rows("config", 2)}
    pythons = {path: version for path, version, *_ in answer.rows("python", 2)}
    return SiteDescription(
        slurm_version=answer.first("slurm_version").rpartition(" ")[2],
        cluster_name=config.get("ClusterName", ""),
        account=answer.first("account"),
        home=answer.first("home"),
        slurm_path=answer.first("slurm_path"),
        host=answer.first("host"),
        accounting=answer.first("sacct"),
        pythons={path: version for path, version in pythons.items() if version},
        modules=answer.column("module"),
        partitions=partitions,
        max_array=_number(config.get("MaxArraySize", ""), 1001),
        max_submit=_max_submit(answer, choices),
        needs_time=any(not row.is_accepted for row in answer.attempts("timeless")),
        mpi_types=answer.column("mpi"),
        quotas=answer.column("quota"),
        glibc=answer.first("glibc"),
        arch=answer.first("arch"),
        variables={name: value for name, value, *_ in answer.rows("variable", 2)},
    )


def _max_submit(answer: _Answer, choices: Choices) -> int | None:
    """Return how many jobs the user may have in the queue. None: no limit is known.

    The limit of a QOS counts in place of that of the account, and the partition's QOS comes first.
    """
    associations = _associations(answer)
    limit_by_qos = {
        name: int(limit) for name, limit, *_ in answer.rows("qos", 2) if limit.isdecimal()
    }
    for qos in (answer.first("partition_qos"), choices.qos or _default_qos(associations)):
        if qos in limit_by_qos:
            return limit_by_qos[qos]
    limits = [association.max_submit for association in associations]
    has_limit = bool(limits) and all(limit.isdecimal() for limit in limits)
    return max(int(limit) for limit in limits) if has_limit else None


def _associations(answer: _Answer) -> list[_Association]:
    """Return the user's associations with the chosen account, or else with all accounts."""
    rows = [_Association(*row[:5]) for row in answer.rows("association", 5)]
    account = answer.chosen[0] if answer.chosen else ""
    # Without associations, there is a line with an empty account.
    return [row for row in rows if row.account and row.account == (account or row.account)]


def _default_qos(associations: Sequence[_Association]) -> str:
    """Return the default QOS of jobs. Empty: it depends on the association."""
    names = {row.default_qos or row.allowed_qos for row in associations}
    return names.pop() if len(names) == 1 else ""


def _partitions(answer: _Answer) -> tuple[SitePartition, ...]:
    """Return the partitions. sinfo has a line for each kind of nodes in a partition."""
    partitions: dict[str, SitePartition] = {}
    rows = answer.rows("partition", 7)
    visible = {shown.removesuffix("*") for shown, *_ in rows}
    named = answer.rows("named", 7)
    for row in (*rows, *(row for row in named if row[0].removesuffix("*") not in visible)):
        shown, limit, default_limit, count, nodes, gres, state, *more = row
        # Numbers of allocated, idle, other and all nodes. Other nodes are drained or down.
        allocated, idle, *_ = (*(more[0] if more else "").split("/"), "")
        name = shown.removesuffix("*")
        partition = SitePartition(
            name=name,
            is_default=shown.endswith("*"),
            max_time_s=_seconds(limit),
            nodes=nodes,
            node_count=_number(count, 0),
            gpus="" if gres == "(null)" else gres,
            state=state,
            default_time_s=_seconds(default_limit),
            in_service=int(allocated) + int(idle)
            if allocated.isdecimal() and idle.isdecimal()
            else None,
        )
        if (earlier := partitions.get(name)) is not None:
            partition = _joined(earlier, partition)
        partitions[name] = partition
    return tuple(partitions.values())


def _joined(first: SitePartition, second: SitePartition) -> SitePartition:
    """Return the partition of both kinds of nodes. Different generic resources are separated by a
    blank.
    """
    gpus = " ".join(dict.fromkeys((first.gpus or "none", second.gpus or "none")))
    return replace(
        first,
        nodes=f"{first.nodes},{second.nodes}",
        node_count=first.node_count + second.node_count,
        in_service=None
        if first.in_service is None or second.in_service is None
        else first.in_service + second.in_service,
        gpus=first.gpus if first.gpus == second.gpus else gpus,
    )


def _seconds(limit: str) -> int | None:
    """Return a time limit that sinfo printed. None: `infinite` and `n/a`."""
    with suppress(ValueError):
        return parse_slurm_time_s(limit)
    return None


def _number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() else default
