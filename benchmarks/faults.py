"""Faults in a training on a local cluster: when it continues, and whether its weights stay the
same.

Creates a cluster of its own, with a controller and three nodes. Each training has a rank on two of
them; the third is the spare. Needs root, because it kills machines and daemons.
Usage: python benchmarks/faults.py [table] [--only NAME]... [--rounds N] [--launcher NAME]
       python benchmarks/faults.py campaign [--seed S] [--trainings N] [--faults N] [--only NAME]...

The training is the bundled one, or with the launcher torchrun that of examples/torch_ddp.py.

table: each fault in a training of its own, N rounds: seconds until the first sign of the fault, and
until training continued (median and worst), iterations that were repeated, the final weights
compared with those of an undisturbed training, and the diagnosis. campaign: random faults at random
times, several in each training: the number of trainings that were lost, hung, trained twice at the
same time, ended with other weights, or left something behind. Both write all results as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.support.clusters import raised
from benchmarks.support.fault_kinds import FAULTS, Fault
from benchmarks.support.nodes import Nodes
from benchmarks.support.rounds import machine
from benchmarks.support.trials import Result, Trials

BY_NAME = {fault.name: fault for fault in FAULTS}
ROW = "{:27} {:9} {:>13} {:>13} {:>6} {:>6} {:>9}  {}"
TITLES = ROW.format(
    "fault", "verdict", "noticed s", "again s", "starts", "redone", "weights", "diagnosis"
)


def table(trials: Trials, faults: Sequence[Fault], rounds: int) -> Iterator[Result]:
    """Cause each fault in trainings of its own, print a row for each fault, and yield the
    results.
    """
    print(TITLES, flush=True)
    for fault in faults:
        results = []
        for _ in range(rounds):
            results.append(trials.once(fault))
            yield results[-1]
        print(shown_row(fault.name, results), flush=True)
        for result in results:
            print(*notes(result), sep="\n", flush=True)


def shown_row(name: str, results: Sequence[Result]) -> str:
    """Return a row of the table."""
    figures = [result.figures[0] for result in results if result.figures]
    verdicts = Counter(result.verdict for result in results)
    weights = Counter(result.compared for result in results)
    return ROW.format(
        name,
        shown_counts(verdicts),
        median_and_worst(each.noticed for each in figures),
        median_and_worst(each.again for each in figures),
        max((each.starts for each in figures), default=0),
        max((each.redone for each in figures), default=0),
        shown_counts(weights),
        " / ".join(sorted({result.diagnosis for result in results} - {""})) or "-",
    )


def shown_counts(counts: Counter[str]) -> str:
    """Return words with their counts, or a single word without its count."""
    return ", ".join(
        f"{number} {word}" if len(counts) > 1 else word for word, number in counts.items()
    )


def median_and_worst(seconds: Iterable[float | None]) -> str:
    """Return the median and the worst, or a single value. None counts as never."""
    values = [math.inf if value is None else value for value in seconds]
    pair = (statistics.median(values), max(values)) if len(values) > 1 else values
    return " ".join("never" if value == math.inf else f"{value:.1f}" for value in pair) or "never"


def notes(result: Result) -> list[str]:
    """Return lines about each fault, the end, errors and remains of a training."""
    lines = [
        f"{name}: first sign after {median_and_worst([each.noticed])} s ({each.sign or '-'}), "
        f"again after {median_and_worst([each.again])} s, {each.redone} iterations redone"
        for name, each in zip(result.faults, result.figures, strict=True)
    ]
    if result.verdict not in {"ok", "residue"}:
        lines.append(f"end: {result.end}; error: {result.error or '-'}")
    lines += [f"left: {line}" for line in result.residue]
    lines += [f"`up` repaired the nodes in {result.repair:.1f} s"] if result.repair else []
    return [f"    {line}" for line in lines]


def campaign(
    trials: Trials, faults: Sequence[Fault], asked: argparse.Namespace
) -> Iterator[Result]:
    """Cause random faults in several trainings, print and yield the result of each training.

    Faults for which a training was too short are caused in the next, so that there may be more
    trainings.
    """
    draw = random.Random(asked.seed)  # noqa: S311
    left = draw.choices(faults, k=asked.faults)
    share = math.ceil(asked.faults / asked.trainings)
    for number in itertools.count(1):
        result = trials.several(tuple(left[:share]), draw)
        print(
            f"training {number}: {result.verdict}, {result.end}, {len(result.faults)} of {share} "
            "faults"
        )
        print(*notes(result), sep="\n", flush=True)
        yield result
        left = left[max(1, len(result.faults)) :]
        if not left:
            return


def summary(results: Sequence[Result]) -> dict[str, int]:
    """Count the trainings by verdict, and all faults."""
    verdicts = Counter(result.verdict for result in results)
    names = ("ok", "lost", "hung", "wrong", "doubled", "residue", "error")
    faults = sum(len(result.faults) for result in results)
    return {"trainings": len(results), "faults": faults, **{name: verdicts[name] for name in names}}


def number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["table", "campaign"], default="table")
    parser.add_argument(
        "--only", action="append", choices=BY_NAME, metavar="NAME", help="; ".join(BY_NAME)
    )
    parser.add_argument("--rounds", type=number, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainings", type=number, default=10, help="at least")
    parser.add_argument("--faults", type=number, default=100)
    parser.add_argument("--launcher", choices=["srun", "mpirun", "torchrun"], default="srun")
    parser.add_argument(
        "--patience",
        type=number,
        default=400,
        help="observations (two a second) without progress: hung",
    )
    parser.add_argument(
        "--cluster", default="", metavar="NAME", help="the cluster's name; default: random"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="default: build/faults-table.json"
    )
    asked = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("root is required, because this program kills machines: run it with sudo")
    if asked.what == "campaign" and asked.faults < asked.trainings:
        parser.error("--faults must be at least --trainings")
    return asked


def main() -> None:
    asked = options()
    # As Ctrl-C does, SIGTERM removes the cluster.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.monotonic()
    about = machine()
    print(about, flush=True)
    file = asked.json or Path("build", f"faults-{asked.what}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn = [fault for fault in FAULTS if fault.drawn or asked.what == "table"]
    faults = [BY_NAME[name] for name in asked.only] if asked.only else drawn
    results: list[Result] = []
    with raised(3, name=asked.cluster) as cluster:
        trials = Trials(Nodes(cluster), asked.launcher, asked.patience)
        rows = (
            table(trials, faults, asked.rounds)
            if asked.what == "table"
            else campaign(trials, faults, asked)
        )
        for result in rows:
            results.append(result)
            record = {"machine": about, "launcher": asked.launcher, **summary(results)}
            record["results"] = [dataclasses.asdict(each) for each in results]
            # Results so far survive an interruption.
            file.write_text(json.dumps(record, indent=1) + "\n")
    counts = summary(results)
    shown = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{shown} in {time.monotonic() - begun:.0f} s")
    sys.exit(0 if counts["ok"] == len(results) else 1)


if __name__ == "__main__":
    main()
