"""Two sides measured in turn, so that whatever else the machine does hits both; every round is
shown.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Does it once; returns the seconds, or None for those of the whole call.
Side = Callable[[], float | None]


@dataclass(frozen=True)
class Measured:
    """Seconds of every round, by side; the first side is ours.

    times: the aim, if ours should take at most so many times as long as the other side.
    """

    title: str
    rounds: Mapping[str, list[float]]
    aim: str = ""
    notes: list[str] = field(default_factory=list)
    times: float | None = None

    def median(self, side: str) -> float:
        return statistics.median(self.rounds[side])

    def show(self) -> None:
        aim = self.aim if self.times is None else f"at most {self.times:g} times as long"
        print(f"\n{self.title}" + (f"   (aim: {aim})" if aim else ""))
        for side, taken in self.rounds.items():
            shown = " ".join(f"{seconds:.2f}" for seconds in taken)
            print(f"  {side:28} median {statistics.median(taken):7.2f} s   rounds {shown}")
        ours, *others = self.rounds
        for theirs in others:
            ratio = self.median(theirs) / self.median(ours)
            if self.times is None:
                print(f"  {theirs} / {ours} = {ratio:.2f}")
            else:
                # In the direction of the aim.
                print(
                    f"  {ours} / {theirs} = {1 / ratio:.2f}, aim "
                    f"{'met' if 1 / ratio <= self.times else 'missed'}"
                )
        for note in self.notes:
            print(f"  {note}")


def measure(
    title: str, rounds: int, *, aim: str = "", times: float | None = None, **sides: Side
) -> Measured:
    """Run all sides in turn, so many times; a side's name has underscores for blanks.

    Processor time is that of the programs which a side started here, and has waited for.
    """
    taken: dict[str, list[float]] = {name.replace("_", " "): [] for name in sides}
    used: dict[str, list[float]] = {name: [] for name in taken}
    load = []
    for _ in range(rounds):
        load.append(f"{os.getloadavg()[0]:.1f}")
        for name, side in sides.items():
            start = time.perf_counter()
            before = os.times()
            seconds = side()
            taken[name.replace("_", " ")].append(
                time.perf_counter() - start if seconds is None else seconds
            )
            after = os.times()
            used[name.replace("_", " ")].append(
                after.children_user
                - before.children_user
                + after.children_system
                - before.children_system
            )
    shown = "; ".join(f"{name} {statistics.median(each):.2f} s" for name, each in used.items())
    notes = [
        f"processor time, medians: {shown}",
        f"load average before each round: {' '.join(load)}",
    ]
    return Measured(title, taken, aim, notes, times)


def machine() -> str:
    """This machine in a line."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.machine(),
    )  # fmt: skip
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    return (
        f"{os.cpu_count()} cores of {cpu}, {memory} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d %H:%M')}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
