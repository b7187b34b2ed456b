"""Finds reasons why a job wastes its time, from its telemetry and metrics. Uses only the standard
library of Python 3.8 or newer.

    python -IS alarms.py FOLDER RULES FILES INTERVAL

This program runs on the job's first node beside telemetry. RULES is a list such as
``idle=warn@1800,memory=end@60``: the kind of an alarm, its action, and for how many seconds its
condition must hold without interruption, in every window (see ``window_s``). FILES is the program's
folder, INTERVAL the seconds between two samples. An alarm is recorded in the job's log and in
job.events, as is its end. If the action is `end`, this program also writes ``ALARM_FILE``, and
job.py then ends the program.

A condition is a function of the samples of a window (see ``Window``) that returns subject ->
sentence. What is not known breaks a condition: an alarm never rests on a missing value.
Without a shared folder, only the telemetry of the first node is here, and only this node is judged.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from payload.node import task
from payload.node.requeue import JobEvents
from payload.node.restarts import ALARM_FILE
from payload.node.sensors import MIB, TMP, room

POLL_S = 2.0
WINDOW_S = 60.0
# Programs may write a line of metrics for many steps.
DATA_WINDOW_S = 600.0
# A window with fewer samples says nothing.
FEWEST = 3
# A GPU is idle if its memory was in use for at most this part of the time, in percent, and its power
# was at most this many times the least that it has needed in this job. Power rises with any work,
# also with work that needs no memory.
FEW_TRAFFIC = 1
IDLE_POWER = 1.15
# A job waits for data if it does so for this share of the time of its steps.
DATA_SHARE = 0.5
FEWEST_STEPS = 5
# Memory and disks are near their limit from this share on. File systems of many terabytes are often
# as full as that, so a disk is near its limit only if less than this is left.
NEAR = 0.95
MUCH_BYTES = 1 << 40
MANY_FILES = 1_000_000
# How often the disk and the quota are looked at, and how long quota(1) may take.
DISK_S = 30.0
QUOTA_S = 10.0
KIB = 1024
MIB_OF_GIB = 1024
# Smaller sizes are shown in MiB.
FEW_GIB = 10
# Keys of lines of metrics: the time for which a step waited for data, its unit in seconds, and the
# time of the step. They are those of clusterctl's own programs, and of MMEngine and Detectron2.
DATA_KEYS = (("data_ms", 1e-3, "seconds"), ("data_time", 1.0, "time"))
LONGEST_STEP_S = 1e6
METRICS = "metrics.jsonl"
MOST_BYTES = 1 << 20
MOST_NAMED = 4

if TYPE_CHECKING:
    Sample = Mapping[str, Any]
    # Subject -> sentence.
    Found = Mapping[str, str]
    # When lines of a file were read, and the lines.
    Lines = list[tuple[float, dict[str, Any]]]


class AlarmRule(NamedTuple):
    """An alarm: its kind, its action (warn or end), and how long its condition must hold."""

    kind: str
    action: str
    seconds: float


class Window(NamedTuple):
    """The data of the last seconds.

    samples: node -> its samples of telemetry. metrics: lines of metrics. least_power: (node, index of
        a GPU) -> the least power in this job, in watts. disk: full file systems and
        quotas.
    """

    samples: Mapping[str, Sequence[Sample]]
    metrics: Sequence[Mapping[str, Any]] = ()
    least_power: Mapping[tuple[str, int], float] = MappingProxyType({})
    disk: Found = MappingProxyType({})


def rules_of(text: str) -> list[AlarmRule]:
    rules = []
    for part in filter(None, text.split(",")):
        kind, _, rest = part.partition("=")
        action, _, seconds = rest.partition("@")
        rules.append(AlarmRule(kind, action, float(seconds)))
    return rules


def window_s(rule: AlarmRule, interval_s: float) -> float:
    """Return the length of the windows in which a condition is judged, in seconds.

    A look at disks needs no window. interval_s: between two samples.
    """
    if rule.kind == "disk":
        return 0.0
    longest_s = DATA_WINDOW_S if rule.kind == "data" else WINDOW_S
    return max(min(longest_s, rule.seconds), (FEWEST + 1) * interval_s)


def idle(window: Window) -> Found:
    """Return the GPUs of the job that do nothing: no process uses them, or their memory is unused
    and their power is that of an idle GPU. The share of busy time does not count, because a program
    that waits in a loop on the GPU is busy, too.
    """
    found = {}
    for node, index, states in _gpus(window):
        name = f"GPU {index} of {node}"
        if all(state.get("processes") == 0 for state in states):
            found[name] = f"{name} is idle: no process uses it"
            continue
        least = window.least_power.get((node, index))
        traffic = [use for state in states if (use := _number(state, "mem_util")) is not None]
        watts = [power for state in states if (power := _number(state, "power_w")) is not None]
        if least is None or not len(traffic) == len(watts) == len(states):
            continue
        if max(traffic) <= FEW_TRAFFIC and max(watts) <= IDLE_POWER * least:
            found[name] = f"{name} is idle: no memory traffic, {max(watts):.0f} W"
    return found


def throttled(window: Window) -> Found:
    """Return the GPUs that the driver slows down, in all samples."""
    found = {}
    for node, index, states in _gpus(window):
        reasons = [state.get("slowed_by") for state in states]
        if all(isinstance(reason, list) and reason for reason in reasons):
            last = states[-1]
            clocks = [_number(last, key) for key in ("clock_mhz", "max_clock_mhz")]
            speed = "" if None in clocks else f", {clocks[0]:.0f} of {clocks[1]:.0f} MHz"
            causes = ", ".join(map(str, last["slowed_by"]))
            name = f"GPU {index} of {node}"
            found[name] = f"{name} is slowed down by {causes}{speed}"
    return found


def memory(window: Window) -> Found:
    """Return the nodes on which the job is near the limit of its memory, without files that the
    kernel can drop.
    """
    found = {}
    for node, samples in window.samples.items():
        pairs = [
            (_number(sample, "job_used_mib"), _number(sample, "job_limit_mib"))
            for sample in samples
        ]
        if any(used is None or not limit or used < NEAR * limit for used, limit in pairs):
            continue
        used, limit = pairs[-1]
        ranks = _mapping(samples[-1].get("ranks"))
        sizes = {rank: _number(_mapping(use), "memory_mib") or 0 for rank, use in ranks.items()}
        largest = max(sizes, key=lambda rank: sizes[rank], default="")
        most = f", most by rank {largest} ({_size(sizes[largest])})" if largest else ""
        found[node] = f"{node} uses {_size(used)} of the job's {_size(limit)} of memory{most}"
    return found


def disk(window: Window) -> Found:
    """Return the full file systems and quotas."""
    return window.disk


def data(window: Window) -> Found:
    """Return the share of time for which steps wait for data, if the metrics tell it."""
    for key, unit, of_step in DATA_KEYS:
        pairs = [(_number(line, key), _number(line, of_step)) for line in window.metrics]
        known = [
            (waited * unit, whole)
            for waited, whole in pairs
            if waited is not None and whole is not None and 0 < whole < LONGEST_STEP_S
        ]
        whole_s = sum(whole for _, whole in known)
        share = sum(waited for waited, _ in known) / whole_s if whole_s else 0.0
        if len(known) >= FEWEST_STEPS and share >= DATA_SHARE:
            text = (
                f"{100 * share:.0f} % of the time of {len(known)} steps is waiting for data ({key})"
            )
            return {"data": text}
    return {}


CONDITIONS = {
    "idle": idle,
    "data": data,
    "throttled": throttled,
    "memory": memory,
    "disk": disk,
}


def _gpus(window: Window) -> Iterator[tuple[str, int, list[Mapping[str, Any]]]]:
    """Yield node, index and states of each GPU that belongs to the job and is in all samples."""
    for node, samples in window.samples.items():
        listed = [
            {
                gpu["index"]: gpu
                for gpu in map(_mapping, _list(sample.get("gpus")))
                if isinstance(gpu.get("index"), int)
            }
            for sample in samples
        ]
        # If all programs see all GPUs, the other GPUs may belong to other jobs.
        if any(len(gpus) != sample.get("job_gpus") for gpus, sample in zip(listed, samples)):
            continue
        for index in listed[0] if listed else ():
            if all(index in gpus for gpus in listed):
                yield node, index, [gpus[index] for gpus in listed]


def full_disk(folder: str, room: Mapping[str, Any]) -> Found:
    """Return whether the file system of a folder is nearly full. room: see ``sensors.room``."""
    found = {}
    free, total, free_inodes, inodes = (
        _number(room, key) or 0 for key in ("free", "total", "free_inodes", "inodes")
    )
    if total and free <= min((1 - NEAR) * total, MUCH_BYTES):
        size = f"{_size(free / MIB)} of {_size(total / MIB)}"
        found[folder] = f"the file system of {folder} has only {size} left"
    if inodes and free_inodes <= min((1 - NEAR) * inodes, MANY_FILES):
        text = f"the file system of {folder} has only {free_inodes:,} of {inodes:,} inodes left"
        found[f"{folder} inodes"] = text
    return found


def full_disks(samples: Mapping[str, Sample]) -> dict[str, str]:
    """Return the file systems that are nearly full: that of the current folder, and of each node the
    one for temporary files. samples: node -> its last sample.
    """
    found: dict[str, str] = {}
    with suppress(OSError):
        found.update(full_disk(os.getcwd(), room(os.getcwd())))
    for node, sample in samples.items():
        found.update(full_disk(f"{TMP} on {node}", _mapping(sample.get("tmp"))))
    return found


def used_quotas(text: str) -> Found:
    """Return the quotas in the output of quota(1) that are nearly used up: of blocks of 1 KiB, and of
    files. An asterisk marks values above the quota.
    """
    found = {}
    for line in text.splitlines():
        words = line.replace("*", " ").split()
        if len(words) < 9 or not all(word.isdecimal() for word in words[1:9]):  # noqa: PLR2004
            continue
        for what, at, much in (("KiB", 1, MUCH_BYTES // KIB), ("files", 5, MANY_FILES)):
            used, soft, hard = map(int, words[at : at + 3])
            limit = hard or soft
            if limit and used >= limit - min((1 - NEAR) * limit, much):
                shown = f"{used:,} of {limit:,} files"
                if what == "KiB":
                    shown = f"{_size(used / KIB)} of {_size(limit / KIB)}"
                found[f"{words[0]} {what}"] = f"the quota on {words[0]} is nearly used up: {shown}"
    return found


def _output(*command: str) -> str:
    try:
        run = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=QUOTA_S,
            check=False,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout


class Judge:
    """Decides which alarms are due, from how long their conditions hold.

    windows: kind -> the length of its windows, in seconds.
    """

    def __init__(self, rules: Sequence[AlarmRule], windows: Mapping[str, float]) -> None:
        self._rules = rules
        self._windows = windows
        # (Kind, subject) -> since when its condition holds.
        self._since: dict[tuple[str, str], float] = {}
        # Kind -> the subjects of the alarm that is raised.
        self._raised: dict[str, set[str]] = {}
        # Kind -> when the condition of the alarm that is raised last held.
        self._held: dict[str, float] = {}

    def step(
        self, now: float, found: Mapping[str, Found]
    ) -> tuple[list[tuple[AlarmRule, str, float]], list[tuple[str, float]]]:
        """Return the alarms that begin now (rule, sentence, seconds that the condition has held), and
        those that have ended (kind, seconds since the condition last held).

        An alarm has ended if its condition has not held for the length of a window. So a value near
        a limit does not end and raise it again and again.

        found: kind -> what its condition returns for the window that ends now.
        """
        begun = []
        ended = []
        for rule in self._rules:
            holding = found.get(rule.kind, {})
            for key in [key for key in self._since if key[0] == rule.kind]:
                if key[1] not in holding:
                    del self._since[key]
            for subject in holding:
                self._since.setdefault((rule.kind, subject), now - self._windows[rule.kind])
            due = {
                subject
                for subject in holding
                if now - self._since[rule.kind, subject] >= rule.seconds
            }
            raised = self._raised.get(rule.kind, set())
            if raised & set(holding):
                self._held[rule.kind] = now
            since_s = now - self._held.get(rule.kind, now)
            if raised and since_s >= max(WINDOW_S, self._windows[rule.kind]):
                ended.append((rule.kind, since_s))
                raised = set()
            if due - raised:
                named = sorted(due)
                more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
                text = "; ".join(holding[subject] for subject in named[:MOST_NAMED]) + more
                held_s = now - min(self._since[rule.kind, subject] for subject in due)
                begun.append((rule, text, held_s))
                raised = raised | due
                self._held[rule.kind] = now
            self._raised[rule.kind] = raised
        return begun, ended


class LineReader:
    """Reads the whole lines that files gain."""

    def __init__(self) -> None:
        self._offsets: dict[str, int] = {}

    def gained(self, path: str, *, from_start: bool = False) -> list[dict[str, Any]]:
        """Return the JSON objects in new lines of a file. Of a file that is new here, only later
        lines count, unless ``from_start``.
        """
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self._offsets.get(path, 0 if from_start else size)
                begin = begin if begin <= size else 0
                file.seek(max(begin, size - MOST_BYTES))
                text = file.read(MOST_BYTES)
                begin = file.tell() - len(text)
        except OSError:
            return []
        whole, newline, _ = text.rpartition(b"\n")
        self._offsets[path] = begin + len(whole) + len(newline)
        return [record for record in map(_parsed, whole.split(b"\n")) if record]


def _parsed(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        return record if isinstance(record, dict) else {}
    return {}


class AlarmWatch:
    """The watch over a job. files: the program's folder. interval_s: between two samples."""

    def __init__(self, rules: Sequence[AlarmRule], files: str, interval_s: float = 1.0) -> None:
        self._rules = rules
        self._files = files
        self._windows = {rule.kind: window_s(rule, interval_s) for rule in rules}
        self._judge = Judge(rules, self._windows)
        self._reader = LineReader()
        # File -> when lines were read, and the lines.
        self._samples: dict[str, Lines] = {}
        self._metrics: Lines = []
        # File -> when its last sample was read, and this sample.
        self._last: dict[str, tuple[float, Sample]] = {}
        self._interval_s = interval_s
        # File -> when its first line was read.
        self._first_line: dict[str, float] = {}
        self._least_power: dict[tuple[str, int], float] = {}
        self._disk: Found = {}
        self._disk_at = -DISK_S
        number = os.environ.get("SLURM_ARRAY_TASK_ID", "")
        self._log = f"../stderr-{number}.log" if number else "stderr.log"

    def run(self) -> None:
        """Watch the job until this process is ended, or until the job is to be ended."""
        while True:
            time.sleep(POLL_S)
            now = time.monotonic()
            self.read(now)
            found = {
                rule.kind: CONDITIONS[rule.kind](self.window(rule, now)) for rule in self._rules
            }
            begun, ended = self._judge.step(now, found)
            for kind, since_s in ended:
                JobEvents().add("alarm-over", kind=kind, seconds=round(since_s))
            for rule, text, held_s in begun:
                self._report(rule, text, held_s)
                if rule.action == "end":
                    return

    def read(self, now: float) -> None:
        """Read new lines, and forget data older than the windows."""
        for name in _names("telemetry"):
            samples = self._samples.setdefault(name, [])
            for sample in self._reader.gained(f"telemetry/{name}"):
                if sample.get("kind") == "sample":
                    samples.append((now, sample))
                    self._last[name] = now, sample
                    self._first_line.setdefault(name, now)
                    self._note_power(_node(name), sample)
            longest_s = max(
                self._windows.get(kind, 0.0) for kind in ("idle", "throttled", "memory")
            )
            _forget(samples, now - longest_s)
        if "data" in self._windows:
            gained = self._reader.gained(f"{self._files}/{METRICS}", from_start=True)
            if gained:
                self._first_line.setdefault(METRICS, now)
            self._metrics += [(now, line) for line in gained]
            _forget(self._metrics, now - self._windows["data"])
        if "disk" in self._windows and now - self._disk_at >= DISK_S:
            recent_s = max(DISK_S, FEWEST * self._interval_s)
            recent = {
                _node(name): sample
                for name, (at, sample) in self._last.items()
                if now - at <= recent_s
            }
            self._disk = {**full_disks(recent), **used_quotas(_output("quota", "-p", "-w"))}
            self._disk_at = time.monotonic()

    def window(self, rule: AlarmRule, now: float) -> Window:
        """Return the window of an alarm that ends now. Data that does not reach back to its
        beginning is left out.
        """
        begin = now - self._windows[rule.kind]
        if rule.kind == "data":
            lines = self._metrics if self._is_whole(METRICS, begin) else []
            return Window({}, [line for _, line in lines])
        samples = {}
        for name, lines in self._samples.items():
            inside = [sample for at, sample in lines if at > begin]
            if self._is_whole(name, begin) and len(inside) >= FEWEST:
                samples[_node(name)] = inside
        return Window(samples, (), self._least_power, self._disk)

    def _is_whole(self, file: str, begin: float) -> bool:
        """Return whether a file has had lines for the whole window."""
        return self._first_line.get(file, math.inf) <= begin + POLL_S

    def _note_power(self, node: str, sample: Sample) -> None:
        for gpu in map(_mapping, _list(sample.get("gpus"))):
            watts = _number(gpu, "power_w")
            index = gpu.get("index")
            if watts and isinstance(index, int):
                least = self._least_power.get((node, index), watts)
                self._least_power[node, index] = min(least, watts)

    def _report(self, rule: AlarmRule, text: str, held_s: float) -> None:
        seconds = round(held_s)
        JobEvents().add("alarm", kind=rule.kind, seconds=seconds, summary=text, action=rule.action)
        consequence = "; the program is ended" if rule.action == "end" else ""
        advice = f"`--set alarm={rule.kind}=off` turns this alarm off"
        line = f"\nclusterctl: alarm: {text}, for {seconds} s{consequence}; {advice}\n"
        task.write_file(self._log, os.O_APPEND, line.encode(errors="replace"))
        if rule.action == "end":
            with open(f"{ALARM_FILE}.new", "w") as record:
                record.write(json.dumps({"kind": rule.kind, "summary": text}) + "\n")
            os.replace(f"{ALARM_FILE}.new", ALARM_FILE)


def _forget(lines: Lines, before: float) -> None:
    """Remove the lines that were read before a time. They are in order."""
    kept = next((at for at, line in enumerate(lines) if line[0] > before), len(lines))
    del lines[:kept]


def _names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if re.fullmatch(r"[\w.-]+\.jsonl", name)]
    except OSError:
        return []


def _node(name: str) -> str:
    return name[: -len(".jsonl")]


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _size(mib: float | None) -> str:
    """Return a size with at least three digits, so that it can be compared with its limit."""
    known = mib or 0.0
    if known < FEW_GIB * MIB_OF_GIB:
        return f"{known:,.0f} MiB"
    return f"{known / MIB_OF_GIB:,.1f} GiB"


def main(folder: str, rules: str, files: str, interval_s: str) -> None:
    """Run the program, with the arguments that the module describes."""
    os.chdir(folder)
    AlarmWatch(rules_of(rules), files, float(interval_s)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
