"""Conversions of the texts that Slurm's commands print in a field: numbers, times, hostlists,
resources.

Each conversion raises ValueError if Slurm would not print the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

from ClusterShell.NodeSet import NodeSet, NodeSetException

from clusterctl.spec.units import parse_slurm_time_s

# Time limit of a job without a limit in sacct's output, and sometimes in squeue's in 24.11.
_YEAR_S = 365 * 86_400
_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}
# The resource of Slurm for GPUs of any type.
GPU: Final = "gres/gpu"
_HOST_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
_GPUS = re.compile(r"(?:^|,)gpu(?::([^:,(]+))?:([0-9]+)")


def is_number(text: str) -> bool:
    return text.isdigit() and text.isascii()


def gpu_count(gres: str) -> int:
    """Return the number of GPUs in a text such as ``gpu:h100:8(S:0-1),shard:16``."""
    return sum(gpus_by_type(gres).values())


def gpus_by_type(gres: str) -> Mapping[str, int]:
    """Return type -> number of GPUs in such a text. The type "" is that of GPUs without one."""
    counts: Counter[str] = Counter()
    for name, count in _GPUS.findall(gres):
        counts[name] += int(count)
    return counts


def amounts_of(tres: str) -> Mapping[str, float]:
    """Return resource -> amount in a text such as ``cpu=2,mem=4G``. Memory without a unit is in
    MiB.
    """
    amounts = {}
    for part in tres.split(","):
        name, _, value = part.partition("=")
        if number := re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", value):
            unit = number[2] or ("M" if name == "mem" else "")
            amounts[name] = float(number[1]) * (1 << _UNITS[unit])
    return amounts


def as_number(text: str) -> int:
    if not is_number(text):
        raise ValueError(text)
    return int(text)


def as_known_number(text: str) -> int | None:
    """Return a number, such as a Unix time; None for a text such as N/A or Unknown."""
    return int(text) if is_number(text) else None


def as_text(text: str) -> str:
    """Return a text; "" for a text such as (null), which Slurm prints for an empty field."""
    return "" if text in {"(null)", "None", "N/A"} else text


def as_task(text: str) -> int | None:
    """Return the number of an array's task; None for another job."""
    return None if text == "N/A" else as_number(text)


@lru_cache
def as_limit_s(text: str) -> int | None:
    """Return a time limit in seconds. None for UNLIMITED, NOT_SET, and 365 days, which mean no
    limit.
    """
    with suppress(ValueError):
        seconds = parse_slurm_time_s(text)
        return None if seconds == _YEAR_S else seconds
    return None


def as_seconds(text: str) -> int:
    """Return a duration of Slurm in seconds. 0 for a text that is none."""
    with suppress(ValueError):
        return parse_slurm_time_s(text)
    return 0


def as_exit_code(text: str) -> int:
    """Return the exit code from ``1:0`` or, in squeue before Slurm 23, a status of wait(2)."""
    return _exit(text)[0]


def as_signal(text: str) -> int:
    """Return the signal from ``0:9`` or, in squeue before Slurm 23, a status of wait(2)."""
    return _exit(text)[1]


def _exit(text: str) -> tuple[int, int]:
    code, colon, signal = text.partition(":")
    if colon and is_number(code) and is_number(signal):
        return int(code), int(signal)
    status = as_number(text)
    return status >> 8, status & 0x7F


def expand_nodes(nodelist: str) -> tuple[str, ...]:
    """Return the node names in a Slurm hostlist such as ``a-[1-3,7]``; raise ValueError if it is
    invalid.
    """
    if nodelist in {"", "None assigned", "(null)", "N/A"}:
        return ()
    if not {",", "["} & set(nodelist):
        return (nodelist,)
    return tuple(_node_set(nodelist))


def fold_nodes(nodes: Sequence[str]) -> str:
    """Return nodes as a Slurm hostlist: ``a-[1-3,7]``.

    If a name can't be that of a host, they are only joined by commas: ClusterShell would expand
    ``n[1-9]``, ``n*`` and ``@group``.
    """
    if len(nodes) > 1 and all(map(_HOST_NAME.fullmatch, nodes)):
        with suppress(ValueError):
            return str(_node_set(",".join(nodes)))
    return ",".join(nodes)


def _node_set(nodelist: str) -> NodeSet:
    try:
        return NodeSet(nodelist)
    except NodeSetException as exc:
        raise ValueError(f"NodeList {nodelist[:100]!r}") from exc
