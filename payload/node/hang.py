"""Watches the progress of a job, and names a hang. Uses only the standard library of Python 3.8 or
newer.

    python -IS hang.py watch FOLDER MODE@SECONDS FILES [HOST,... SSH]
    python -IS hang.py show FOLDER HOST,... SSH

`watch` runs beside telemetry on the job's first node. Progress is a change of the job's output, of
metrics.jsonl in the program's folder FILES, or of the file $CLUSTERCTL_HEARTBEAT. After a long time
without progress (see ``Patience``), this program runs stacks.py on all nodes. If all ranks wait, it
records a hang in the job's log and in the file job.events, and later the next progress in
job.events. If MODE is `end`, it also writes hang.json, and job.py then ends the program.

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from payload.node import task
from payload.node.processes import WATCHER
from payload.node.requeue import STEP, Events
from payload.node.restarts import HANG_FILE
from payload.node.stacks import BLOCKED, BUSY, ENDED, LIBRARIES, NO_DISK, STOPPED, TRACED, WAITING

POLL_S = 1.0
NS_PER_S = 1e9
# No progress for this many times the longest interval may be a hang. Until ``SETTLED`` changes, and
# between two looks at the same silence, wait up to ``PATIENT`` times the shortest time.
FACTOR = 5
PATIENT = 10
SETTLED = 3
# A hang is still the same after this share of the shortest time. A rank that has used more than
# this share of a core meanwhile has worked.
CONFIRM = 1 / 6
FEW_CPU = 0.05
# A node that transfers more bytes per second may be receiving data for a waiting rank, or writing
# data for a blocked rank.
QUIET_BYTES = 1 << 20
ANSWER_S = 60.0
# A look that takes so much longer than it can was interrupted.
SUSPENDED_S = 10.0
MOST_GROUPS = 8

if TYPE_CHECKING:
    # An answer of stacks.py.
    Answer = Mapping[str, Any]


class Patience:
    """Decides, from the times of progress so far, when a job has been silent for too long.

    Time is counted while this object is told of it, so that a suspended job does not count as
    silent.
    """

    def __init__(self, shortest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = 0.0
        self._changes = 0
        self.silent_s = 0.0
        self._due_s = PATIENT * shortest_s

    def tick(self, elapsed_s: float, *, has_progress: bool, age_s: float = 0.0) -> bool:
        """Return whether the job is now due for a look. elapsed_s: seconds since the last call.
        age_s: of the progress, at most ``elapsed_s``.
        """
        self.silent_s += elapsed_s
        if has_progress:
            self.silent_s -= age_s
            # The first interval includes the start of the program.
            self._longest_s = max(self._longest_s, self.silent_s) if self._changes else 0.0
            self._changes += 1
            self.silent_s = age_s
            usual_s = (
                FACTOR * self._longest_s if self._changes >= SETTLED else PATIENT * self._shortest_s
            )
            self._due_s = max(self._shortest_s, usual_s)
        if self.silent_s < self._due_s:
            return False
        self._due_s = min(2 * self.silent_s, self.silent_s + PATIENT * self._shortest_s)
        return True


def is_hang(answers: Sequence[Answer]) -> bool:
    """Return whether all ranks wait, and no node transfers data for them. answers: of all nodes."""
    ranks = [answer for answer in answers if "rank" in answer]
    for_disk = {
        each["node"] for each in ranks if each["doing"] == BLOCKED and each["within"] not in NO_DISK
    }
    for answer in answers:
        disk = answer.get("disk", 0) if answer["node"] in for_disk else 0
        if answer.get("doing") in BUSY or max(answer.get("network", 0), disk) > QUIET_BYTES:
            return False
    return bool(ranks)


def is_asleep(answers: Sequence[Answer]) -> bool:
    """Return whether a rank sleeps, or a process that it has started, so that it may continue by
    itself.
    """
    return any(answer.get("asleep") for answer in answers)


def has_worked(before: Sequence[Answer], after: Sequence[Answer], elapsed_s: float) -> bool:
    """Return whether a rank worked between two looks, such as a rank that is stopped again and
    again.

    A rank that waits in a library, or at an unknown place, uses its processor as if it worked. A
    rank that waits elsewhere may look around now and then. A rank that is stopped or blocked uses
    no time at all.
    """
    cpu_s = {answer["rank"]: answer["cpu_s"] for answer in before if "rank" in answer}
    for rank in (answer for answer in after if "rank" in answer):
        used_s = rank["cpu_s"] - cpu_s.get(rank["rank"], rank["cpu_s"])
        is_still = rank["doing"] in (STOPPED, BLOCKED)
        may_spin = not is_still and rank["within"] in ("", *LIBRARIES)
        if not may_spin and used_s > (0 if is_still else FEW_CPU * elapsed_s):
            return True
    return False


def groups(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Return the ranks in groups that do the same at the same place, the likely causes of a hang
    first.
    """
    by_place: dict[tuple[str, ...], list[Answer]] = {}
    for answer in sorted(
        (answer for answer in answers if "rank" in answer), key=lambda each: each["rank"]
    ):
        key = tuple(str(answer[name]) for name in ("doing", "within", "place", "source"))
        by_place.setdefault(key, []).append(answer)
    order = (STOPPED, ENDED, BLOCKED, *BUSY, WAITING)
    return sorted(
        by_place.values(),
        key=lambda group: (
            order.index(group[0]["doing"]),
            group[0]["within"] in LIBRARIES,
            len(group),
        ),
    )


def words(group: Sequence[Answer]) -> str:
    """Describe a group: ``rank 7 on n2 is waiting in MPI at train.py:88: comm.recv(source=0)``."""
    first = group[0]
    subject = f"rank {first['rank']} on {first['node']}"
    verb = "is"
    if group[1:]:
        subject = f"{len(group)} ranks ({ranges([answer['rank'] for answer in group])})"
        verb = "are"
    by = {STOPPED: " by a signal", TRACED: " by a debugger"}.get(first["doing"], "")
    within = f" in {first['within']}" if first["within"] else ""
    place = f" at {first['place']}" if first["place"] else ""
    source = f": {first['source']}" if first["source"] else ""
    # A rank that waits for another rank does not wait for its own processes.
    workers = "" if first["within"] in LIBRARIES else ", ".join(first["workers"])
    more = f" (its other processes: {workers})" if workers else ""
    return f"{subject} {verb} {first['doing']}{by}{within}{place}{source}{more}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as 0-6,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def summary(answers: Sequence[Answer]) -> str:
    """Describe where all ranks are."""
    by_place = groups(answers)
    more = len(by_place) - MOST_GROUPS
    texts = [words(group) for group in by_place[:MOST_GROUPS]] + (
        [f"{more} more groups"] if more > 0 else []
    )
    return "; ".join(texts) or "no rank is running"


def suspects(answers: Sequence[Answer]) -> list[str]:
    """Return the nodes of ranks that differ from the other ranks in a way that a node can cause."""
    bad = {answer["node"] for answer in answers if answer.get("doing") in (STOPPED, BLOCKED, ENDED)}
    good = {answer["node"] for answer in answers if answer.get("doing") == WAITING}
    return sorted(bad - good)


def ask_nodes(folder: str, nodes: Sequence[str], ssh: str) -> list[Answer]:
    """Run stacks.py on the job's nodes, by srun or ``ssh``. Return all answers, or [] if any is
    missing.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    commands = [program := [sys.executable, "-I", f"{here}/stacks.py", folder]]
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
    pipe = subprocess.PIPE
    null = subprocess.DEVNULL
    running = [
        subprocess.Popen(
            command, env=environment, stdin=null, stdout=pipe, text=True, errors="replace"
        )
        for command in commands
    ]
    lines: list[str] = []
    for process in running:
        try:
            lines += process.communicate(timeout=ANSWER_S)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
    answers = parse(lines)
    expected = sum(answer["ranks"] for answer in answers if "ranks" in answer)
    counts = [sum(key in answer for answer in answers) for key in ("ranks", "rank")]
    return answers if counts == [count, expected] else []


def parse(lines: Iterable[str]) -> list[Answer]:
    """Return the answers of stacks.py among lines of output, such as warnings of a launcher."""
    answers: list[Answer] = []
    for line in lines:
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and "node" in answer:
                answers.append(answer)
    return answers


def stack_of(rank: int) -> list[str]:
    """Return the stacks of a rank that stacks.py wrote into the current folder."""
    try:
        with open(f"rank-logs/{rank}.stack", errors="replace") as file:
            return file.read().splitlines()[1:]
    except OSError:
        return []


class Watch:
    """The watch over a job. mode: warn or end. where: arguments of ``ask_nodes``. metrics: path of
    a file.
    """

    def __init__(
        self,
        mode: str,
        shortest_s: float,
        where: tuple[str, Sequence[str], str],
        metrics: str = "metrics.jsonl",
    ) -> None:
        self._mode = mode
        self._shortest_s = shortest_s
        self._where = where
        self._patience = Patience(shortest_s)
        self._before = time.monotonic()
        self._number = os.environ.get("SLURM_ARRAY_TASK_ID", "")
        self._logs = [
            f"../{name}-{self._number}.log" if self._number else f"{name}.log"
            for name in ("stderr", "stdout")
        ]
        self._metrics = metrics
        self._seen = self.state()
        # When the nodes were asked before in this silence, and their answers.
        self._earlier: list[tuple[float, Sequence[Answer]]] = []

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
            if has_progress:
                self._earlier = []
            age_s = min(max(0.0, time.time() - max(at for _, at in state) / NS_PER_S), elapsed_s)
            if is_reported and has_progress:
                is_reported = False
                Events().add("progress", age=round(age_s, 1))
            is_due = self._patience.tick(elapsed_s, has_progress=has_progress, age_s=age_s)
            if is_due and not (is_reported and self._mode == "warn"):
                action = self.look(is_reported=is_reported)
                is_reported = is_reported or bool(action)
                if action == "end":
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

    def look(self, *, is_reported: bool = False) -> str:
        """Ask where the ranks are. Report a hang, unless it was reported.

        Return the consequence, `warn` or `end`, or "" if there is no hang. A look that fails tells
        nothing. It must not end the watch, because the next look may succeed.
        """
        try:
            answers, confirmed = self._answers_of_a_hang()
            if not confirmed:
                return ""
            # A rank that sleeps continues by itself, so the program is ended later.
            is_early = (
                is_asleep([*answers, *confirmed])
                and self._patience.silent_s < PATIENT * self._shortest_s
            )
            action = "warn" if is_early else self._mode
            if action == "end" or not is_reported:
                self._report(confirmed, action)
            return action
        except Exception as exc:
            task.complain(f"could not find out whether the job hangs: {exc!r}")
            return ""

    def _answers_of_a_hang(self) -> tuple[Sequence[Answer], Sequence[Answer]]:
        """Ask the nodes, and again after a while. Return both answers; empty if the job does not
        hang.
        """
        earlier = self._earlier
        answers = ask_nodes(*self._where)
        asked_at = time.monotonic()
        self._earlier = [(asked_at, answers)]
        if not is_hang(answers):
            return (), ()
        time.sleep(self._shortest_s * CONFIRM)
        again = ask_nodes(*self._where)
        now = time.monotonic()
        # If the job was suspended meanwhile, its processor time does not show whether it works.
        was_suspended = now - asked_at > self._shortest_s * CONFIRM + ANSWER_S + SUSPENDED_S
        is_unchanged = is_hang(again) and summary(again) == summary(answers)
        if was_suspended or not is_unchanged or self.state() != self._seen:
            return (), ()
        if any(has_worked(before, again, now - at) for at, before in (*earlier, *self._earlier)):
            return (), ()
        return answers, again

    def _report(self, answers: Sequence[Answer], action: str) -> None:
        exact_s = self._patience.silent_s + time.monotonic() - self._before
        silent_s = round(exact_s)
        text = summary(answers)
        Events().add("hang", seconds=round(exact_s, 1), summary=text, action=action)
        advice = (
            "a program that works in silence should write to $CLUSTERCTL_HEARTBEAT, or use "
            "--hang off"
        )
        if self._mode == "end":
            later = (
                f" after {PATIENT * self._shortest_s:g} s, because a rank may only sleep"
                if action == "warn"
                else ""
            )
            advice = f"the program is ended{later} (--hang end)"
        line = f"\nclusterctl: hang: no progress for {silent_s} s: {text}; {advice}\n"
        task.write_all(
            task.open_for_writing(self._logs[0], os.O_APPEND), line.encode(errors="replace")
        )
        self._seen = self.state()
        if action == "end":
            ranks = [answer for answer in answers if "rank" in answer]
            record = {
                "seconds": silent_s,
                "summary": text,
                "ranks": ranks,
                "nodes": suspects(answers),
            }
            with open(f"{HANG_FILE}.new", "w") as file:
                file.write(json.dumps(record) + "\n")
            os.replace(f"{HANG_FILE}.new", HANG_FILE)


def main(verb: str, folder: str, *more: str) -> None:
    """Run the program, with the arguments that the module describes."""
    os.chdir(folder)
    if verb == "watch":
        mode, _, shortest_s = more[0].partition("@")
        files = more[1]
        more = more[2:]
    nodes, ssh = more or ("", "")
    where = (folder, [node for node in nodes.split(",") if node], ssh)
    if verb == "watch":
        Watch(mode, float(shortest_s), where, f"{files}/metrics.jsonl").run()
    else:
        ranks = [
            {**each, "stack": stack_of(each["rank"])}
            for each in ask_nodes(*where)
            if "rank" in each
        ]
        ranks.sort(key=lambda rank: rank["rank"])
        answer = {"groups": [words(group) for group in groups(ranks)], "ranks": ranks}
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
