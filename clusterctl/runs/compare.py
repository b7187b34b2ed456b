"""What differs between two collected runs, from the job and its code to the result; whether losses do."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import CollectError
from clusterctl.runs.find import FIELDS, Row
from clusterctl.runs.series import config_of, flat, records
from clusterctl.state.ledger import Value
from clusterctl.state.submissions import ENVIRONMENT_FILE, SOURCE_FILE
from clusterctl.transport.remote_open import read_json

# Of what was submitted: not what it computes, or told elsewhere in full.
_NOT_THE_JOB: Final = frozenset(
    "name args tag note include exclude outputs folder requirements time account qos signal".split()
)
_RESULT: Final = ("state", "exit", "elapsed", "cost")
_PINNED: Final = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", re.MULTILINE)
_MAX_BYTES: Final = 64 << 20
_MAX_FILES: Final = 50  # that are named as changed
_LONGEST: Final = 1 << 16  # of a text that was asked for
_MAX_LOSSES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same; None where a run does not have it.

    ``section`` is job, code, configuration, data, environment, hardware or result.
    """

    section: str
    key: str
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Losses:
    """How the losses of two runs compare at the ``steps`` that both have, of ``a`` and ``b`` steps.

    ``first`` is the first step at which one differs, ``largest`` the largest difference; None where none
    does, or where one of two is NaN or infinite.
    """

    identical: bool
    steps: int
    a: int
    b: int
    first: int | None = None
    largest: float | None = None

    def __str__(self) -> str:
        steps = f"{self.steps} step{'s' if self.steps != 1 else ''}"
        of = "" if self.a == self.b == self.steps else f" of {self.a} and {self.b}"
        if self.identical:
            return f"identical over {steps}{of}"
        by = "one is no number" if self.largest is None else f"the largest difference is {self.largest:.3g}"
        return f"different from step {self.first} on, of {steps}{of}: {by}"


def compare_losses(a: Row, b: Row) -> Losses | None:
    """How the losses compare: metrics whose names have ``loss``. None if a run has none."""
    losses_a, losses_b = _losses(a), _losses(b)
    both = {key: (loss, losses_b[key]) for key, loss in losses_a.items() if key in losses_b}
    if not both:
        return None
    wrong = {key: (x, y) for key, (x, y) in both.items() if x != y and not (math.isnan(x) and math.isnan(y))}
    gaps = [abs(x - y) for x, y in wrong.values()]
    steps, steps_a, steps_b = (
        len({(task, step) for task, _, step in found}) for found in (both, losses_a, losses_b)
    )
    return Losses(
        not wrong,
        steps,
        steps_a,
        steps_b,
        first=min((step for _, _, step in wrong), default=None),
        largest=max(gaps) if gaps and all(map(math.isfinite, gaps)) else None,
    )


def _losses(row: Row) -> dict[tuple[str, str, int], float]:
    """Task, name and step of each loss; where the program tells no step, its place in the order."""
    found: dict[tuple[str, str, int], float] = {}
    counts: Counter[tuple[str, str]] = Counter()
    tasks = row.tasks or [row]
    for one in tasks:
        number = one.number if len(tasks) > 1 else ""
        for record in records(one.folder):
            for name, value in record.values.items():
                if "loss" in name.lower() and "scale" not in name.lower() and len(found) < _MAX_LOSSES:
                    counts[number, name] += 1
                    step = counts[number, name] if record.step is None else record.step
                    found[number, name, step] = value
    return found


def compare(a: Row, b: Row) -> tuple[Difference, ...]:
    """What differs, in the order of the sections. What only one run's record knows is a difference, too.

    Raises:
        CollectError: a file of a run is damaged.
    """
    facts_a, facts_b = facts_of(a), facts_of(b)
    return (
        *_differences("job", _job(a, facts_a), _job(b, facts_b)),
        *_code(a, b, facts_a, facts_b),
        *_differences("configuration", _configuration(a), _configuration(b)),
        *_differences("data", _data(a), _data(b)),
        *_differences("environment", software_of(facts_a), software_of(facts_b)),
        *_differences("hardware", hardware_of(facts_a), hardware_of(facts_b)),
        *_differences("result", _result(a), _result(b)),
    )


def _differences(section: str, a: Mapping[str, Value], b: Mapping[str, Value]) -> Iterator[Difference]:
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) != b.get(key):
            yield Difference(section, key, a.get(key), b.get(key))


def facts_of(row: Row) -> Mapping[str, Any]:
    """environment.json of a run; empty where there is none.

    Raises:
        CollectError: it can't be read, or is no JSON.
    """
    found = _read(row.run.directory / ENVIRONMENT_FILE)
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> Any:
    """The JSON of a file of a run; None where there is none.

    Raises:
        CollectError: it can't be read, or is no JSON.
    """
    try:
        return read_json(os.fsencode(path.parent), os.fsencode(path.name), _MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise CollectError(
            f"{path.name} of a run can't be read",
            code="run-file-unreadable",
            where=str(path),
            why=str(exc).partition("\n")[0],
            fix="compare runs whose files are whole; `sha256sum -c SHA256SUMS` checks them",
        ) from exc


def mapping(value: Any, *keys: str) -> Mapping[str, Any]:
    """What is below these keys, if it is a mapping; else an empty one."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _said(values: Mapping[str, Any]) -> dict[str, Value]:
    """The values that are not empty, with names such as ``env.SEED`` for what is nested."""
    # Two images may differ in the end of a long name only.
    return {
        key: value for key, value in flat(values, longest=_LONGEST).items() if value not in (None, "[]", "")
    }


def _job(row: Row, facts: Mapping[str, Any]) -> dict[str, Value]:
    """What was asked of the scheduler and the launcher, and where it ran."""
    said = mapping(facts, "client", "job")
    # The values of a task of a sweep are its configuration.
    others = {"array", "sweep"} if row.task is not None else set()
    asked = {key: value for key, value in said.items() if key not in _NOT_THE_JOB | others}
    if isinstance(script := asked.get("script"), str):
        asked["script"] = Path(script).name
    found = {key: value for key, value in _said(asked).items() if not key.startswith("env.SWEEP_")}
    return {**found, "cluster": row.run.cluster, "partition": row.run.partition}


def _code(a: Row, b: Row, facts_a: Mapping[str, Any], facts_b: Mapping[str, Any]) -> Iterator[Difference]:
    """The files that were sent, and the version of clusterctl. If files differ, the commits, too."""
    files_a, files_b = _files(a), _files(b)
    changed = list(_differences("code", files_a, files_b))
    yield from changed[:_MAX_FILES]
    if (more := len(changed) - _MAX_FILES) > 0:
        yield Difference("code", "more files", None, more)
    versions = ({"clusterctl": mapping(one, "client").get("clusterctl")} for one in (facts_a, facts_b))
    yield from _differences("code", *versions)
    if changed:
        commits = [mapping(one, "client", "git") for one in (facts_a, facts_b)]
        yield from _differences("code", *({"commit": one.get("commit")} for one in commits))


def _files(row: Row) -> dict[str, Value]:
    """File or link -> what is in it, in short."""
    source = _read(row.run.directory / SOURCE_FILE)
    found: dict[str, Value] = {}
    for kind, content in (("files", "sha256"), ("links", "target")):
        listed = source.get(kind) if isinstance(source, dict) else None
        for one in listed if isinstance(listed, list) else ():
            if isinstance(one, dict) and isinstance(said := one.get(content), str):
                found[str(one.get("path"))] = said[:12] if kind == "files" else f"-> {said}"
    return found


def _configuration(row: Row) -> dict[str, Value]:
    """The program's options and other arguments; of an array those of each task."""
    arguments = " ".join(config_of(row.run.args)[1]) or None
    found = {**row.config, "arguments": arguments}
    return found | {f"task {task.number}: {k}": v for task in row.tasks for k, v in task.config.items()}


def _data(row: Row) -> dict[str, Value]:
    """What the program read, as the first line of its metrics.jsonl says: how much, and hashes of files."""
    found: dict[str, Value] = {}
    for one in row.tasks or [row]:
        task = f"task {one.number}: " if row.tasks else ""
        first = next(records(one.folder), None)
        said = flat(mapping(first.line, "data")) if first else {}
        said.pop("name", None)  # where it lies, which the configuration has
        found |= {task + k: v[:12] if isinstance(v, str) and "sha256" in k else v for k, v in said.items()}
    return found


def software_of(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Slurm, the versions that the nodes tell, and the packages that the job asked for."""
    found: dict[str, Value] = {"slurm": facts.get("slurm")}
    for host in mapping(facts, "hosts").values():
        found |= _said(mapping(host, "versions"))
    lock = mapping(facts, "client").get("requirements")
    return found | dict(_PINNED.findall(lock)) if isinstance(lock, str) else found


def hardware_of(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Which kinds of nodes, as their telemetry describes them; neither their names nor their number."""
    kinds = set()
    for host in mapping(facts, "hosts").values():
        if isinstance(host, Mapping):
            cores, memory, gpus = host.get("cpus"), host.get("memory_total_mib"), host.get("gpus")
            parts = [f"{len(cores)} cores" if isinstance(cores, list) else "", host.get("cpu_model")]
            parts += [f"{memory} MiB" if memory else ""]
            listed = gpus if isinstance(gpus, list) else ()
            parts += [str(one.get("name")) for one in listed if isinstance(one, Mapping)]
            kinds.add(", ".join(str(part) for part in parts if part))
    return {"nodes": "; ".join(sorted(kinds))} if kinds else {}


def _result(row: Row) -> dict[str, Value]:
    found = {key: FIELDS[key](row) for key in _RESULT}
    found |= {name: metric.last for name, metric in row.metrics.items()}
    return found | {f"task {task.number}: {k}": m.last for task in row.tasks for k, m in task.metrics.items()}
