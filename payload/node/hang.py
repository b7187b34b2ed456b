"""Watches the progress of a job, and names a hang. Uses only the standard library of Python 3.8 or
newer.

    python -IS hang.py watch FOLDER MODE@SECONDS FILES [HOST,... SSH]
    python -IS hang.py show FOLDER HOST,... SSH

`watch` runs beside telemetry on the job's first node. Progress is a change of the job's output, of
metrics.jsonl in the program's folder FILES, or of the file $CLUSTERCTL_HEARTBEAT. A job without
progress for a time (see ``Patience``) hangs: this program then runs stacks.py on all nodes, records
the hang in the job's log and in the file job.events, and later the next progress in job.events. If
MODE is `end`, it also writes hang.json, and job.py then ends the program.

`show` prints a JSON object: where the ranks are, grouped in words, and the answers of stacks.py
with the stacks that it wrote.

    HOST: the job's nodes.
    SSH: the command that connects to them; empty with Slurm.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from payload.node import task
from payload.node.processes import WATCHER
from payload.node.requeue import STEP, JobEvents
from payload.node.restarts import HANG_FILE
from payload.node.stacks import BLOCKED, LONGEST_S, RUNNING, STOPPED

POLL_S = 1.0
NS_PER_S = 1e9
# A job hangs if it makes no progress for the time given, and for this many times the longest
# interval of its progress so far. Until ``SETTLED`` changes, which may be part of its start, it has
# ``PATIENT`` times the time given, but not longer than ``START_S``.
FACTOR = 5
PATIENT = 10
SETTLED = 3
START_S = 600.0
# How long to wait for the answers of stacks.py, which starts a moment later on other nodes.
ANSWER_S = LONGEST_S + 10.0
MOST_GROUPS = 8

if TYPE_CHECKING:
    # A rank in the output of stacks.py.
    Answer = Mapping[str, Any]


class Patience:
    """Decides, from the times of progress so far, when a job has been silent for too long.

    Time is counted while this object is told of it, so that a suspended job does not count as
    silent. given_s: the shortest silence that is a hang.
    """

    def __init__(self, given_s: float) -> None:
        self._given_s = given_s
        self._longest_s = 0.0
        self._changes = 0
        self.silent_s = 0.0

    def tick(self, elapsed_s: float, *, has_progress: bool, age_s: float = 0.0) -> bool:
        """Return whether the job now hangs. elapsed_s: seconds since the last call. age_s: of the
        progress, at most ``elapsed_s``.
        """
        self.silent_s += elapsed_s
        if has_progress:
            self.silent_s -= age_s
            # The first interval includes the start of the program.
            self._longest_s = max(self._longest_s, self.silent_s) if self._changes else 0.0
            self._changes += 1
            self.silent_s = age_s
        usual_s = FACTOR * self._longest_s
        if self._changes < SETTLED:
            usual_s = min(PATIENT * self._given_s, START_S)
        return self.silent_s >= max(self._given_s, usual_s)


class RankAnswers(NamedTuple):
    """The answers of a job's nodes about its ranks. missing: the number of nodes that did not
    answer, or not completely.
    """

    ranks: Sequence[Answer]
    missing: int = 0


def groups(ranks: Sequence[Answer]) -> list[list[Answer]]:
    """Return the ranks in groups that are at the same place, the likely causes of a hang first: ranks
    that can't run, then small groups.
    """
    by_place: dict[tuple[str, ...], list[Answer]] = {}
    for rank in sorted(ranks, key=lambda each: each["rank"]):
        key = tuple(str(rank[name]) for name in ("state", "place", "source", "unread"))
        by_place.setdefault(key, []).append(rank)
    return sorted(by_place.values(), key=lambda group: (group[0]["state"] == RUNNING, len(group)))


def words(group: Sequence[Answer]) -> str:
    """Describe a group: ``rank 7 on n2 is at train.py:88: comm.recv(source=0)``."""
    first = group[0]
    subject = f"rank {first['rank']} on {first['node']} is"
    workers = ", ".join(first["workers"])
    if group[1:]:
        subject = f"{len(group)} ranks ({ranges([answer['rank'] for answer in group])}) are"
        workers = ""
    state = "" if first["state"] == RUNNING else f"{first['state']}, "
    place = first["place"] or "an unknown place"
    source = f": {first['source']}" if first["source"] else ""
    unread = f" (no stack could be read: {first['unread']})" if first["unread"] else ""
    more = f" (its other processes: {workers})" if workers else ""
    return f"{subject} {state}at {place}{source}{unread}{more}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as 0-6,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def sentences(look: RankAnswers) -> list[str]:
    """Describe where all ranks are, and how many nodes did not answer."""
    texts = [words(group) for group in groups(look.ranks)]
    more = len(texts) - MOST_GROUPS
    texts[MOST_GROUPS:] = [f"{more} more groups"] if more > 0 else []
    return texts + ([f"{look.missing} of its nodes did not answer"] if look.missing else [])


def suspects(ranks: Sequence[Answer]) -> list[str]:
    """Return the nodes whose ranks can't run, for a reason that a node can cause."""
    bad = {rank["node"] for rank in ranks if rank["state"] in (STOPPED, BLOCKED)}
    good = {rank["node"] for rank in ranks if rank["state"] == RUNNING}
    return sorted(bad - good)


def ask_nodes(folder: str, nodes: Sequence[str], ssh: str) -> RankAnswers:
    """Run stacks.py on the job's nodes, by srun or ``ssh``, and return their answers."""
    here = os.path.dirname(os.path.abspath(__file__))
    commands = [program := [sys.executable, "-IS", f"{here}/stacks.py", folder]]
    count = len(nodes) or int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    environment = {**os.environ, WATCHER: "1"}
    if ssh:
        quoted = " ".join(map(shlex.quote, program))
        commands = [
            program if node == task.host_name() else [*ssh.split(), node, quoted] for node in nodes
        ]
    elif count > 1:
        job = f"--jobid={os.environ['SLURM_JOB_ID']}"
        commands = [[*STEP, job, f"--nodes={count}", f"--ntasks={count}", *program]]
        # The variables of this process's own step would limit the new step to the same nodes.
        own = [
            name
            for name in environment
            if name.startswith(("SLURM_", "SRUN_")) and name != "SLURM_CONF"
        ]
        for name in own:
            del environment[name]
    running = []
    for command in commands:
        with suppress(OSError):
            running.append(_start(command, environment))
    lines: list[str] = []
    deadline = time.monotonic() + ANSWER_S
    for process in running:
        try:
            output = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        lines += output.splitlines()
    answers = parse(lines)
    whole = Counter(answer["node"] for answer in answers if "rank" in answer)
    complete = [one for one in answers if "ranks" in one and one["ranks"] == whole[one["node"]]]
    return RankAnswers([answer for answer in answers if "rank" in answer], count - len(complete))


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def parse(lines: Iterable[str]) -> list[Answer]:
    """Return the answers of stacks.py among lines of output, such as warnings of a launcher."""
    answers: list[Answer] = []
    for line in lines:
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and "node" in answer:
                answers.append(answer)
    return answers


def written_stack(rank: int) -> list[str]:
    """Return the stacks of a rank that stacks.py wrote into the current folder."""
    try:
        with open(f"rank-logs/{rank}.stack", errors="replace") as file:
            return file.read().splitlines()[1:]
    except OSError:
        return []


class HangWatch:
    """The watch over a job. mode: warn or end. where: arguments of ``ask_nodes``. metrics: path of
    a file.
    """

    def __init__(
        self,
        mode: str,
        given_s: float,
        where: tuple[str, Sequence[str], str],
        metrics: str = "metrics.jsonl",
    ) -> None:
        self._mode = mode
        self._where = where
        self._patience = Patience(given_s)
        self._before = time.monotonic()
        self._number = os.environ.get("SLURM_ARRAY_TASK_ID", "")
        self._logs = [
            f"../{name}-{self._number}.log" if self._number else f"{name}.log"
            for name in ("stderr", "stdout")
        ]
        self._metrics = metrics
        self._seen = self.state()

    def run(self) -> None:
        """Watch the job until this process is ended, or until the job is to be ended."""
        is_reported = False
        while True:
            time.sleep(POLL_S)
            now = time.monotonic()
            state = self.state()
            elapsed_s = min(now - self._before, 5 * POLL_S)
            self._before = now
            has_progress = state != self._seen
            self._seen = state
            age_s = min(max(0.0, time.time() - max(at for _, at in state) / NS_PER_S), elapsed_s)
            if is_reported and has_progress:
                is_reported = False
                JobEvents().add("progress", age=round(age_s, 1))
            is_due = self._patience.tick(elapsed_s, has_progress=has_progress, age_s=age_s)
            if is_due and not is_reported:
                is_reported = self.look()
                if is_reported and self._mode == "end":
                    return

    def state(self) -> list[tuple[int, int]]:
        """Return size and time of the files that change when the job makes progress."""
        states = []
        for path in (
            *self._logs,
            self._metrics,
            os.environ.get("CLUSTERCTL_HEARTBEAT", "heartbeat"),
        ):
            try:
                status = os.stat(path)
                states.append((status.st_size, status.st_mtime_ns))
            except OSError:
                states.append((0, 0))
        return states

    def look(self) -> bool:
        """Ask where the ranks are, and report the hang. Return whether the job still hangs."""
        look = ask_nodes(*self._where)
        if not (look.ranks or look.missing):
            # The job has no rank that could make progress, such as while its files are staged.
            self._patience.silent_s = 0.0
            return False
        if self.state() != self._seen:
            return False
        self._report(look)
        return True

    def _report(self, look: RankAnswers) -> None:
        silent_s = self._patience.silent_s + time.monotonic() - self._before
        text = "; ".join(sentences(look))
        JobEvents().add("hang", seconds=round(silent_s, 1), summary=text, action=self._mode)
        advice = (
            "a program that works in silence should write to $CLUSTERCTL_HEARTBEAT, or use --hang "
            "with a longer time"
        )
        if self._mode == "end":
            advice = "the program is ended (--hang end)"
        stacks = "the stacks are in rank-logs/"
        line = f"clusterctl: hang: no progress for {round(silent_s)} s: {text}; {stacks}; {advice}"
        task.write_file(self._logs[0], os.O_APPEND, f"\n{line}\n".encode(errors="replace"))
        self._seen = self.state()
        if self._mode == "end":
            record = {
                "seconds": round(silent_s),
                "summary": text,
                "ranks": look.ranks,
                "nodes": suspects(look.ranks),
            }
            with open(f"{HANG_FILE}.new", "w") as file:
                file.write(json.dumps(record) + "\n")
            os.replace(f"{HANG_FILE}.new", HANG_FILE)


def main(verb: str, folder: str, *more: str) -> None:
    """Run the program, with the arguments that the module describes."""
    os.chdir(folder)
    if verb == "watch":
        mode, _, given_s = more[0].partition("@")
        files = more[1]
        more = more[2:]
    nodes, ssh = more or ("", "")
    where = (folder, [node for node in nodes.split(",") if node], ssh)
    if verb == "watch":
        HangWatch(mode, float(given_s), where, f"{files}/metrics.jsonl").run()
    else:
        look = ask_nodes(*where)
        ranks = [{**rank, "stack": written_stack(rank["rank"])} for rank in look.ranks]
        ranks.sort(key=lambda rank: rank["rank"])
        answer = {"groups": sentences(look), "ranks": ranks}
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
