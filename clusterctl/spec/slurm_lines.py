"""The lines of ``slurm.extra``: settings of slurm.conf, more partitions, and node sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clusterctl.errors import BadValueError
from clusterctl.spec.base import PATTERNS, Loc, SpecFault
from clusterctl.spec.hosts import expand
from clusterctl.spec.names import DATA, PROOF_PARTITION
from clusterctl.spec.units import parse_slurm_time_s, shown
from clusterctl.util.assets import read_table

_RESERVED: Final = read_table(DATA / "reserved.toml", dict[str, tuple[str, ...]])
OWNED_SLURM_KEYS = frozenset(" ".join(_RESERVED["slurm_keys"]).lower().split())

_VALUE: Final = r'("[^"#\\]*"|[^ "#\\]+)'
_SETTING: Final = rf"[A-Za-z0-9_.]+ *= *{_VALUE}"
# Lines that may stand more than once, with the name of what they define, and several settings each.
_NAMED: Final = ("PartitionName", "NodeSet")
_NAMED_KEYS: Final = "|".join(
    "".join(f"[{letter.upper()}{letter.lower()}]" for letter in key) for key in _NAMED
)
# Slurm accepts several settings in any line. Elsewhere they are rejected, because they could hide a
# reserved key.
SLURM_LINE: Final = rf"^({_SETTING}|({_NAMED_KEYS})={_VALUE}( +[A-Za-z0-9_.]+={_VALUE})+)$"

# Settings of a partition of the spec that have a key in the spec, or that clusterctl sets.
_SPEC_SETS: Final = {"nodes": "nodes", "maxtime": "max_time", "default": "the order of partitions"}
_NO_LIMIT: Final = ("unlimited", "infinite", "-1")


@dataclass(frozen=True)
class SlurmLine:
    """A line of slurm.conf.

    key: its first key, as written.
    value: the value of this key; of a partition or node set its name.
    settings: the other settings of a partition or node set, as written. Empty for other lines.
    """

    key: str
    value: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def defines(self) -> str:
        """The kind of definition in the line: ``partitionname``, ``nodeset``, or "" for a setting."""
        key = self.key.lower()
        return key if key in {name.lower() for name in _NAMED} else ""

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for lines that set the same thing."""
        return (self.key.lower(), self.value if self.defines else "")

    def setting(self, key: str) -> str | None:
        """Return the value of another setting of the line, whatever its case; None if it is not
        set.
        """
        return next((value for name, value in self.settings if name.lower() == key), None)

    @property
    def max_time_s(self) -> int | None:
        """The time limit of a partition in seconds. None: no limit."""
        limit = self.setting("maxtime")
        return None if limit is None or limit.lower() in _NO_LIMIT else parse_slurm_time_s(limit)


def parse_line(line: str) -> SlurmLine:
    """Parse a line of ``slurm.extra``.

    Raises:
        BadValueError: the line is not ``Key=value``, sets a key that clusterctl sets, or names a
            partition that is reserved.
    """
    if not line.isprintable() or re.search(SLURM_LINE, line) is None:
        raise BadValueError(
            "not-a-setting", f"{shown(line)} is not a slurm.conf line like Key=value"
        )
    pairs = re.findall(rf"([A-Za-z0-9_.]+) *= *{_VALUE}", line)
    key, value = pairs[0]
    others = pairs[1:]
    parsed = SlurmLine(key, value, tuple(others))
    if not parsed.defines:
        if parsed.key.lower() in OWNED_SLURM_KEYS:
            message = f"{parsed.key} can't be set here, because clusterctl sets it"
            raise BadValueError("setting-reserved", message)
        return parsed
    if not PATTERNS["slurm_name"].matches(parsed.value):
        asks_for = PATTERNS["slurm_name"].asks_for
        raise BadValueError(
            "bad-format", f"{parsed.key} must be {asks_for}, not {shown(parsed.value)}"
        )
    if parsed.value.lower() in {PROOF_PARTITION, "default", "all"}:
        message = f"{parsed.value!r} is reserved: it is a name that clusterctl or Slurm uses"
        raise BadValueError("name-reserved", message)
    keys = [key.lower() for key, _ in others]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise BadValueError("setting-twice", f"{twice!r} is set twice in {shown(line)}")
    if clash := next(
        (key for key in keys if key in {"partitionname", "nodeset", "nodename"}), None
    ):
        raise BadValueError("setting-reserved", f"{clash!r} must begin a line of its own")
    return parsed


def faults_of(
    lines: tuple[SlurmLine, ...], nodes: Mapping[str, tuple[str, ...]]
) -> Iterator[SpecFault]:
    """Yield each contradiction between the lines of ``slurm.extra`` and the partitions of the spec.

    nodes: name of a partition of the spec -> its nodes. Only used if a line defines a partition or
        node set.
    """
    sets = {line.value for line in lines if line.defines == "nodeset"}
    first: dict[tuple[str, str], int] = {}
    for index, line in enumerate(lines):
        loc = ("slurm", "extra", index)
        if first.setdefault(line.identity, index) != index:
            name = f"{line.key} {line.value}" if line.defines else shown(line.key)
            yield SpecFault(
                "setting-twice", loc, f"{name} is already set above", "remove one of the lines"
            )
        elif line.defines:
            if line.defines == "partitionname":
                yield from _partition_faults(line, loc, nodes)
            yield from _node_faults(
                line, loc, {node for names in nodes.values() for node in names} | sets
            )


def _partition_faults(
    line: SlurmLine, loc: Loc, nodes: Mapping[str, tuple[str, ...]]
) -> Iterator[SpecFault]:
    if line.value in nodes:
        for key, spec_key in _SPEC_SETS.items():
            if line.setting(key) is not None:
                message = f"{key} of partition {line.value} can't be set here"
                yield SpecFault("setting-reserved", loc, message, f"{spec_key} of the spec sets it")
        return
    if line.setting("nodes") is None:
        fix = f"add Nodes=ALL or names of nodes; the spec has these partitions: {', '.join(nodes)}"
        yield SpecFault("partition-without-nodes", loc, f"partition {line.value} has no nodes", fix)
    if line.setting("default") is not None:
        message = f"partition {line.value} can't be the default"
        fix = "remove Default; the first of the spec's partitions is the default"
        yield SpecFault("setting-reserved", loc, message, fix)
    try:
        _ = line.max_time_s
    except BadValueError as exc:
        yield SpecFault(exc.code, loc, str(exc))


def _node_faults(line: SlurmLine, loc: Loc, known: set[str]) -> Iterator[SpecFault]:
    text = line.setting("nodes")
    if text is None or text.upper() == "ALL":
        return
    try:
        unknown = [name for name in expand(text) if name not in known]
    except BadValueError as exc:
        yield SpecFault(exc.code, loc, str(exc))
        return
    if unknown:
        message = f"{line.key} {line.value}: there is no node {', '.join(unknown)}"
        yield SpecFault("unknown-node", loc, message, "use names of the spec's nodes, or ALL")


def nodes_of(
    line: SlurmLine,
    lines: tuple[SlurmLine, ...],
    nodes: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Return the nodes of a partition or node set that a line defines, in the order of the spec.

    nodes: name of a partition of the spec -> its nodes. Each node has its partition's name as a
        feature.
    """
    every = tuple(node for names in nodes.values() for node in names)
    chosen = set(nodes.get(line.setting("feature") or "", ()))
    sets = {
        other.value: other for other in lines if other.defines == "nodeset" and other is not line
    }
    text = line.setting("nodes") or ""
    if text.upper() == "ALL":
        return every
    for name in expand(text) if text else ():
        if name in sets and line.defines == "partitionname":
            chosen |= {*nodes_of(sets[name], lines, nodes)}
        else:
            chosen.add(name)
    return tuple(node for node in every if node in chosen)
