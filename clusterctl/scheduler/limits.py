"""The limits of QOS and accounts that a single job exceeds, so that Slurm accepts the job and never
starts it. `sbatch --test-only` does not look at them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from clusterctl.scheduler.capacity import CPU_QUANTITIES, TYPED_GPUS
from clusterctl.scheduler.slurm_values import GPU, amounts_of
from clusterctl.spec.units import parse_slurm_memory_mib, parse_slurm_time_s

if TYPE_CHECKING:
    from clusterctl.scheduler.request import Request

# Limits of a job's resources, by the field of sacctmgr. All are the most that a job may have, but
# the last.
_MOST: Final = ("MaxTRES", "MaxTRESPU", "MaxTRESPA", "GrpTRES")
_PER_NODE: Final = "MaxTRESPerNode"
_MINUTES: Final = "MaxTRESMins"
_LEAST: Final = "MinTRES"
_QOS: Final = ("Name", "Flags", "MaxWall", *_MOST, _PER_NODE, _MINUTES, _LEAST)
_ASSOCIATION: Final = (
    "Account",
    "Partition",
    "DefaultQOS",
    "QOS",
    "MaxWall",
    "MaxTRES",
    "GrpTRES",
    _PER_NODE,
    _MINUTES,
)
_ACCOUNT: Final = ("Account", "ParentName", "GrpTRES")
# Flags of a QOS: its limits come before those of the partition's QOS; it lifts the partition's time
# limit; its limits are shares of the cluster.
_FIRST: Final = "OverPartQOS"
_LIFTS_TIME: Final = "PartitionTimeLimit"
_SHARES: Final = "Relative"
_ENFORCED: Final = frozenset({"limits", "safe"})
# The programs print lines of a word and values, separated by |. They run as a user.
PROGRAM: Final = """\
scontrol show config | sed -n 's/^AccountingStorageEnforce *= */enforced|/p'
scontrol show partition --oneliner |
    sed -n 's/^PartitionName=\\([^ ]*\\) .* QoS=\\([^ ]*\\) .*/partition|\\1|\\2/p'
"""
# On a cluster with accounting. $1: the user's name. Slurm shows the GrpTRES of an account and of its
# parents only in their own rows, which have no user.
ACCOUNTED: Final = f"""\
cluster=$(scontrol show config | sed -n 's/^ClusterName *= *//p')
user=$1
set -- ${{cluster:+cluster="$cluster"}}
sacctmgr -nP show qos format={",".join(_QOS)} | sed 's/^/qos|/'
own=$(sacctmgr -nP show assoc where user="$user" "$@" format={",".join(_ASSOCIATION)})
printf '%s\\n' "$own" | sed 's/^/association|/'
accounts=$(printf '%s\\n' "$own" | cut -d'|' -f1 | sort -u | sed '/^$/d' | paste -sd, -)
for _ in 1 2 3 4 5 6 7 8; do
    [ -n "$accounts" ] || break
    rows=$(sacctmgr -nP show assoc where account="$accounts" "$@" format=User,{",".join(_ACCOUNT)} |
        sed -n 's/^|/account|/p')
    printf '%s\\n' "$rows"
    accounts=$(printf '%s\\n' "$rows" | cut -d'|' -f3 | sort -u | sed '/^$/d' | paste -sd, -)
done
"""
# The options of sbatch for tasks and CPUs that ``RequestedResources`` reads. The effect of other
# options depends on the nodes.
_READ: Final = frozenset(
    "--nodes --ntasks --ntasks-per-node --tasks-per-node --cpus-per-task".split()
)
_NODES: Final = re.compile(r"([1-9][0-9]*)(-[0-9]+)?")


@dataclass(frozen=True, slots=True)
class RequestedResources:
    """The resources that a job requests, and that limits count. Empty: not requested.

    max_time: the partition's time limit. time_s: None: unknown.
    nodes: the number of nodes. None: Slurm chooses it.
    amounts: the least that the job gets of each resource, by Slurm's names. uncertain: resources of
        which it may get more.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    max_time: str = ""
    time_s: int | None = None
    nodes: int | None = None
    amounts: Mapping[str, float] = field(default_factory=dict)
    uncertain: frozenset[str] = frozenset()

    @classmethod
    def of(cls, request: Request, max_time: str = "") -> RequestedResources:
        """Return a job's request to a partition with this time limit."""
        values = {one.own_name: one.value or "" for one in request.options}
        tasks = _count(values.get("--ntasks"))
        nodes, is_exact = _nodes_of(request, values, tasks)
        per_node = _count(values.get("--ntasks-per-node", values.get("--tasks-per-node")))
        all_tasks = tasks or nodes * (per_node or 1)
        uncertain = set() if is_exact else {"node"}
        cpus = max(all_tasks * (_count(values.get("--cpus-per-task")) or 1), nodes)
        asked = {one.own_name for one in request.options if one.quantities & CPU_QUANTITIES}
        if asked - _READ or not (is_exact or tasks):
            uncertain.add("cpu")
        if asked - _READ - {"--exclusive"}:
            cpus = nodes
        amounts: dict[str, float] = {"node": nodes, "cpu": cpus}
        gpus, are_exact = _gpus_of(request, nodes if is_exact else None, tasks)
        uncertain |= set() if are_exact else {GPU}
        amounts |= gpus
        memory_mib, resource = _memory_of(values)
        if resource:
            amounts["mem"] = (memory_mib << 20) * amounts[resource]
            uncertain |= {"mem"} if resource in uncertain or not memory_mib else set()
        return cls(
            request.value("--partition"),
            request.value("--account"),
            request.value("--qos"),
            max_time,
            request.time_s,
            nodes if is_exact else None,
            amounts,
            frozenset(uncertain),
        )

    def amount(self, key: str, name: str) -> tuple[float, bool]:
        """Return (the least amount of a resource that the limit ``key`` counts, whether this amount
        is exact).
        """
        amount = self.amounts.get(name, 0)
        # Of gres/gpu:a100, the GPUs.
        is_exact = name.partition(":")[0] not in self.uncertain
        if key == _MINUTES:
            return amount * (self.time_s or 0) / 60, is_exact
        if key != _PER_NODE:
            return amount, is_exact
        # Slurm compares the average of the nodes, rounded down.
        return (0, not amount) if self.nodes is None else (amount // self.nodes, is_exact)


def _count(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _nodes_of(request: Request, values: Mapping[str, str], tasks: int | None) -> tuple[int, bool]:
    """Return (the least number of nodes, whether it is the number)."""
    text = values.get("--nodes")
    if text is None:
        chosen_by_slurm = (tasks or 1) > 1 or "--gpus" in values or request.sets("--nodelist")
        return 1, not chosen_by_slurm
    match = _NODES.fullmatch(text)
    least = int(match[1]) if match else 1
    # sbatch takes no more nodes than tasks.
    return min(least, tasks or least), match is not None and not match[2]


def _gpus_of(
    request: Request, nodes: int | None, tasks: int | None
) -> tuple[Mapping[str, float], bool]:
    """Return (resource -> the least number of GPUs, whether it is the number)."""
    given = {one.own_name: one for one in request.options if "--gpus-per-node" in one.quantities}
    if not given:
        return {GPU: 0}, True
    factors = {"--gpus": 1, "--gpus-per-node": nodes, "--gres": nodes, "--gpus-per-task": tasks}
    ((name, directive), *others) = given.items()
    match = TYPED_GPUS.fullmatch(directive.value or "")
    if others or match is None or name not in factors:
        return {GPU: 0}, False
    factor = factors[name]
    count = int(match["count"]) * (factor or 1)
    typed = {f"{GPU}:{match['type']}": count} if match["type"] else {}
    return {GPU: count, **typed}, factor is not None


def _memory_of(values: Mapping[str, str]) -> tuple[int, str]:
    """Return (MiB, the resource of which each has so much). 0: unknown, or all of a node. "": the
    job names no memory.
    """
    resources = {"--mem": "node", "--mem-per-cpu": "cpu", "--mem-per-gpu": GPU}
    name = next((name for name in resources if name in values), "")
    with suppress(ValueError):
        return parse_slurm_memory_mib(values.get(name)), resources[name]
    return 0, resources.get(name, "")


@dataclass(frozen=True, slots=True)
class LimitsVerdict:
    """The effect of limits on a job. never: the limit that keeps the job from starting. "": no
    known limit does. unknown: a missing fact, because of which a limit may keep it from starting.
    """

    never: str = ""
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that Slurm enforces.

    enforced: None: unknown. qos: name -> field of sacctmgr -> value.
    qos_of_partition: partition -> its QOS, which takes precedence over the job's QOS. "": the
        partition has no QOS.
    associations: the user's, by the fields of sacctmgr. accounts: name -> field -> value, of the
        accounts of these and of their parents.
    """

    enforced: bool | None
    qos: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    qos_of_partition: Mapping[str, str] = field(default_factory=dict)
    associations: tuple[Mapping[str, str], ...] = ()
    accounts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Return the limits in the output of ``PROGRAM`` and ``ACCOUNTED``."""
        rows = [line.split("|") for line in text.splitlines()]
        enforced = next((words[1] for words in rows if words[0] == "enforced"), None)

        def read(kind: str, names: tuple[str, ...]) -> Iterator[Mapping[str, str]]:
            for words in rows:
                if words[0] == kind and len(words) == len(names) + 1:
                    yield dict(zip(names, words[1:], strict=True))

        return cls(
            None if enforced is None else bool(_ENFORCED & {*enforced.split(",")}),
            {row["Name"]: row for row in read("qos", _QOS)},
            {
                words[1]: "" if words[2] in {"N/A", "(null)"} else words[2]
                for words in rows
                if words[0] == "partition"
            },
            tuple(row for row in read("association", _ASSOCIATION) if row["Account"]),
            {row["Account"]: row for row in read("account", _ACCOUNT)},
        )

    def judge(self, ask: RequestedResources) -> LimitsVerdict:
        """Return whether a limit keeps a job from starting in an empty cluster, too."""
        is_readable = bool(self.qos and self.associations)
        if self.enforced is None or (self.enforced and not is_readable):
            return LimitsVerdict(unknown="Slurm does not show you the limits of QOS and accounts")
        found = [self._verdict(ask, *each) for each in self._possible(ask)]
        if found and all(each.never for each in found):
            return found[0]
        if never := next((each.never for each in found if each.never), ""):
            return LimitsVerdict(unknown=f"{never}, unless the job gets another QOS or partition")
        return next((each for each in found if each.unknown), LimitsVerdict())

    def _possible(self, ask: RequestedResources) -> Iterator[tuple[str, Mapping[str, str], str]]:
        """Yield each (partition, association, QOS) that Slurm may give a job."""
        rows: list[Mapping[str, str]] = [
            row
            for row in self.associations
            if row["Account"] == (ask.account or row["Account"])
            and (not ask.partition or row["Partition"] in {"", ask.partition})
        ]
        if not rows and not self.enforced:
            rows = [{}]
        partitions = [ask.partition] if ask.partition else [*self.qos_of_partition] or [""]
        for row in rows:
            for partition in partitions:
                for qos in [ask.qos] if ask.qos else _qos_of(row):
                    yield partition, row, qos

    def _verdict(
        self, ask: RequestedResources, partition: str, association: Mapping[str, str], qos: str
    ) -> LimitsVerdict:
        names = [self.qos_of_partition.get(partition, ""), qos]
        if _FIRST in self._flags(qos):
            names.reverse()
        flags = {flag for name in names for flag in self._flags(name)}
        if _LIFTS_TIME not in flags and _is_longer(ask, ask.max_time):
            return LimitsVerdict(never=f"the partition's time limit is {ask.max_time}")
        if not self.enforced:
            return LimitsVerdict()
        names = [name for name in names if name]
        for name in names:
            if name not in self.qos or _SHARES in self._flags(name):
                return LimitsVerdict(unknown=f"Slurm does not show you what QOS {name} allows")
        return self._exceeded(ask, association, names)

    def _flags(self, qos: str) -> frozenset[str]:
        return frozenset(self.qos.get(qos, {}).get("Flags", "").split(","))

    def _exceeded(
        self, ask: RequestedResources, association: Mapping[str, str], qos: list[str]
    ) -> LimitsVerdict:
        """Judge by the limits of QOS, in their order, of an association, and of its accounts. The
        limit that a QOS sets for a resource replaces the same limit of all that follow.
        """
        account = association["Account"]
        accounts, is_whole = self._parents(account)
        sources = [(f"QOS {name}", self.qos[name]) for name in qos]
        sources.append((f"account {account}", association))
        sources += [(f"account {row['Account']}", row) for row in accounts]
        replaced: set[tuple[str, str]] = set()
        doubt = "" if is_whole else "Slurm does not show you the limits of your account's parents"
        for index, (source, limits) in enumerate(sources):
            for key, is_certain in _exceeding(ask, limits, replaced):
                text = f"the limit {key} of {source} is {limits[key]}"
                if is_certain:
                    return LimitsVerdict(never=text)
                doubt = doubt or text
            if index < len(qos):
                replaced |= {
                    (key, name)
                    for key in (*_MOST, _PER_NODE, _MINUTES, _LEAST)
                    for name in amounts_of(limits[key])
                }
                replaced |= {("MaxWall", "")} if limits["MaxWall"] else set()
        return LimitsVerdict(unknown=doubt)

    def _parents(self, account: str) -> tuple[list[Mapping[str, str]], bool]:
        """Return (an account and its parents, whether Slurm shows all)."""
        found: list[Mapping[str, str]] = []
        while account in self.accounts and self.accounts[account] not in found:
            found.append(self.accounts[account])
            account = found[-1]["ParentName"]
        return found, not account


def _qos_of(association: Mapping[str, str]) -> list[str]:
    """Return the default QOS of a job; several if Slurm does not tell which QOS it chooses."""
    default = association.get("DefaultQOS", "")
    return [default] if default else association.get("QOS", "").split(",")


def _is_longer(ask: RequestedResources, limit: str) -> bool:
    with suppress(ValueError):
        return ask.time_s is not None and ask.time_s > parse_slurm_time_s(limit)
    return False


def _exceeding(
    ask: RequestedResources, limits: Mapping[str, str], replaced: set[tuple[str, str]]
) -> Iterator[tuple[str, bool]]:
    """Yield (field, whether it is certain) for each limit that a job alone may exceed."""
    if ("MaxWall", "") not in replaced and _is_longer(ask, limits.get("MaxWall", "")):
        yield "MaxWall", True
    for key in (*_MOST, _PER_NODE, _MINUTES):
        for name, most in amounts_of(limits.get(key, "")).items():
            amount, is_exact = ask.amount(key, name)
            if (key, name) not in replaced and (amount > most or not is_exact):
                yield key, amount > most
    # Where jobs have whole nodes, a job gets more than it asks.
    for name, least in amounts_of(limits.get(_LEAST, "")).items():
        if (_LEAST, name) not in replaced and ask.amounts.get(name, least) < least:
            yield _LEAST, False
