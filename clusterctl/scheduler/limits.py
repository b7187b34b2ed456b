"""The limits of QOS and accounts that a single job exceeds, so that Slurm accepts the job and never
starts it. `sbatch --test-only` does not look at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from clusterctl.scheduler.slurm_values import GPU, amounts_of
from clusterctl.spec.units import parse_slurm_time_s

if TYPE_CHECKING:
    from clusterctl.scheduler.capacity import Shape

# Limits of a job's resources, by the field of sacctmgr. All are the most that a job may have, but
# the last.
_MOST: Final = ("MaxTRES", "MaxTRESPU", "MaxTRESPA", "GrpTRES")
_PER_NODE: Final = "MaxTRESPerNode"
_MINUTES: Final = "MaxTRESMins"
_LEAST: Final = "MinTRES"
_QOS: Final = ("Name", "MaxWall", *_MOST, _PER_NODE, _MINUTES, _LEAST)
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
_ENFORCED: Final = frozenset({"limits", "safe"})
# Run as a user; $1: the user's name. A line is a word and values, separated by |.
PROGRAM: Final = f"""\
scontrol show config | sed -n 's/^AccountingStorageEnforce *= */enforced|/p'
scontrol show partition --oneliner |
    sed -n 's/^PartitionName=\\([^ ]*\\) .* QoS=\\([^ ]*\\) .*/partition|\\1|\\2/p'
sacctmgr -nP show qos format={",".join(_QOS)} | sed 's/^/qos|/'
sacctmgr -nP show assoc where user="$1" format={",".join(_ASSOCIATION)} | sed 's/^/association|/'
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a job asks of the limits. Empty: the job names none. shape, time_s: None: unknown."""

    partition: str
    account: str
    qos: str
    shape: Shape | None
    time_s: int | None

    @property
    def amounts(self) -> Mapping[str, float]:
        """The least that the job gets of each resource, as Slurm names them."""
        if self.shape is None:
            return {}
        count = self.shape.nodes
        return {"node": count, **{name: count * n for name, n in self.of_a_node.items()}}

    @property
    def of_a_node(self) -> Mapping[str, float]:
        shape = self.shape
        if shape is None:
            return {}
        amounts: dict[str, float] = {"cpu": shape.cpus, GPU: shape.gpus}
        if shape.memory_mib:
            amounts["mem"] = shape.memory_mib << 20
        if shape.gpu_type:
            amounts[f"{GPU}:{shape.gpu_type}"] = shape.gpus
        return amounts


@dataclass(frozen=True, slots=True)
class Verdict:
    """never: the limit that keeps the job from starting. "": no limit is known to. unknown: what
    could not be read, so that another limit may.
    """

    never: str = ""
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that Slurm enforces.

    enforced: None: Slurm does not tell whether it does. qos: name -> field of sacctmgr -> value.
    qos_of_partition: partition -> its QOS, which comes before that of a job.
    associations: the user's, by the fields of sacctmgr.
    """

    enforced: bool | None
    qos: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    qos_of_partition: Mapping[str, str] = field(default_factory=dict)
    associations: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Return the limits in the output of ``PROGRAM``."""
        rows = [line.split("|") for line in text.splitlines()]
        enforced = next((words[1] for words in rows if words[0] == "enforced"), None)
        qos = [
            dict(zip(_QOS, words[1:], strict=True))
            for words in rows
            if words[0] == "qos" and len(words) == len(_QOS) + 1
        ]
        associations = (
            dict(zip(_ASSOCIATION, words[1:], strict=True))
            for words in rows
            if words[0] == "association" and len(words) == len(_ASSOCIATION) + 1
        )
        return cls(
            None if enforced is None else bool(_ENFORCED & {*enforced.split(",")}),
            {row["Name"]: row for row in qos},
            {
                words[1]: words[2]
                for words in rows
                if words[0] == "partition" and words[2] not in {"N/A", "(null)"}
            },
            tuple(row for row in associations if row["Account"]),
        )

    def judge(self, ask: Ask) -> Verdict:
        """Return whether a limit keeps a job from starting in an empty cluster, too."""
        if self.enforced is False:
            return Verdict()
        if self.enforced is None or not self.qos or not self.associations:
            return Verdict(unknown="Slurm does not show you the limits of QOS and accounts")
        own = [
            row
            for row in self.associations
            if row["Account"] == (ask.account or row["Account"])
            and row["Partition"] in {"", ask.partition}
        ]
        found = [
            self._exceeded(ask, row, qos)
            for row in own
            for qos in ([ask.qos] if ask.qos else _qos_of(row))
        ]
        if not found or not any(found):
            return Verdict()
        if all(found):
            return Verdict(never=found[0])
        return Verdict(unknown=f"{next(filter(None, found))}, unless the job gets another QOS")

    def _exceeded(self, ask: Ask, association: Mapping[str, str], qos: str) -> str:
        """Return the first limit that a job exceeds. The limit of a QOS replaces that of the
        account.
        """
        partition_qos = self.qos_of_partition.get(ask.partition, "")
        sources = [(f"QOS {name}", self.qos.get(name, {})) for name in (partition_qos, qos) if name]
        sources.append((f"account {association['Account']}", association))
        replaced: set[str] = set()
        for source, limits in sources:
            for key, text in _exceeding(ask, limits, replaced):
                return f"the limit {key} of {source} is {text}"
            replaced |= {key for key, text in limits.items() if text}
        return ""


def _qos_of(association: Mapping[str, str]) -> list[str]:
    """Return the QOS of a job that names none; several if Slurm does not tell which."""
    return (
        [association["DefaultQOS"]] if association["DefaultQOS"] else association["QOS"].split(",")
    )


def _exceeding(
    ask: Ask, limits: Mapping[str, str], replaced: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield the field and the value of each limit that a job alone exceeds."""
    own = {key: text for key, text in limits.items() if text and key not in replaced}
    with suppress(ValueError):
        if ask.time_s is not None and ask.time_s > parse_slurm_time_s(own.get("MaxWall", "")):
            yield "MaxWall", own["MaxWall"]
    minutes = {name: amount * (ask.time_s or 0) / 60 for name, amount in ask.amounts.items()}
    asked = {
        **dict.fromkeys(_MOST, ask.amounts),
        _PER_NODE: ask.of_a_node,
        _MINUTES: minutes,
    }
    for key, amounts in asked.items():
        for name, most in amounts_of(own.get(key, "")).items():
            if amounts.get(name, 0) > most:
                yield key, own[key]
    for name, least in amounts_of(own.get(_LEAST, "")).items():
        if name in ask.amounts and ask.amounts[name] < least:
            yield _LEAST, own[_LEAST]
