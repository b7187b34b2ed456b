#!/usr/bin/python3 -IS
"""Slurm's HealthCheckProgram: drains this node when it is unhealthy, and resumes it when it is
healthy again.

slurmd runs it regularly as root; without Slurm, clusterctl runs it before each job. An unhealthy
node is drained with a reason that begins with `clusterctl health:`. Its jobs run to their end, and
once the node is healthy it is resumed. A node drained by a person is not resumed. If a person
resumes the node, it is not drained again for the same fault in the kernel's log, nor for the link
of a card that is now idle. A JSON file holds the thresholds and the expected hardware. The exit
code is 1 if the node is unhealthy. Runs with the platform's Python, from 3.9 on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CONFIG = Path("/opt/clusterctl/health.json")
# A reboot clears this file, like the kernel's log.
STATE = Path("/run/clusterctl-health.json")
PREFIX = "clusterctl health: "
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Timeouts of programs. slurmd kills a check after 60 s.
DRIVER_S = 20
SHORT_S = 8
LONGEST_REASON = 240
# A drained GPU must cool down to so many degrees below its limit, so that the node does not flap.
COOLED_C = 5

FIELDS = (
    "index driver_version temperature.gpu ecc.errors.uncorrected.volatile.total "
    "pcie.link.width.current pcie.link.width.max pcie.link.gen.gpucurrent pcie.link.gen.max "
    "pstate compute_mode clocks_event_reasons.active mig.mode.current mig.mode.pending "
    "retired_pages.pending remapped_rows.pending remapped_rows.failure fabric.state "
    "fabric.status"
).split()
# Names of fields before driver 535.
OLD_NAMES = {
    "clocks_event_reasons.active": "clocks_throttle_reasons.active",
    "pcie.link.gen.gpucurrent": "pcie.link.gen.current",
}
# Before driver 570, only the option --query-remapped-rows knows these fields.
REMAPPED_ROWS = ("remapped_rows.pending", "remapped_rows.failure")
YES = {"Yes", "1"}
NOT_AVAILABLE = "[N/A]"
UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
# The text in the cells of a card that does not respond.
LOST = re.compile(r"\[(GPU [\w ]+)\]")
MANAGER = re.compile(r"Fabric Manager version is\s*:\s*(\S+)")
# The state of a fabric that is ready -> its status.
LINKED = {"Completed": "Success"}
NO_FABRIC = {"N/A", "Not Supported"}
SLOWED = {0x08: "hardware slowdown", 0x40: "too hot, as the hardware reports", 0x80: "power brake"}
# Some drivers write these lines instead of an XID if a card has fallen off the bus.
FALLEN = re.compile(
    r"^\[\s*(?P<at>\d+\.\d+)\] NVRM: The NVIDIA GPU (?P<where>\S+)\n.*NVRM: .*\n.*NVRM: fallen "
    r"off the bus",
    re.MULTILINE,
)
FALLEN_XID = 79
XID = re.compile(r"^\[\s*(?P<at>\d+\.\d+)\] .*NVRM: Xid \((?P<where>[^)]*)\): (?P<number>\d+)")
SHARED_MEMORY = "/dev/shm"  # noqa: S108
# Positions of fields in the output of `chronyc -c tracking`.
CHRONY_OFFSET = 4
CHRONY_LEAP = 13


@dataclass
class Problem:
    """A problem of the node.

    lasting: ignored unless two consecutive checks find it. past: whether an earlier check found it.
    """

    text: str
    lasting: bool = False
    past: bool = False


@dataclass
class State:
    """Values that this program stores for its next run.

    drained: whether this program drained the node, if known. seen: problems of the last check.
    xid, drained_xid, known_xid: times in the kernel's log of the newest GPU fault: now, when the
    node was drained, and when a person resumed the node.
    links: problems of PCIe links. stuck: pid of a process that hangs in the driver.
    gone: fields of nvidia-smi that the driver does not know.
    """

    drained: bool | None = None
    seen: list[str] = field(default_factory=list)
    xid: float = -1.0
    drained_xid: float = -1.0
    known_xid: float = -1.0
    links: list[str] = field(default_factory=list)
    stuck: int = 0
    gone: list[str] = field(default_factory=list)

    @classmethod
    def read(cls) -> State:
        try:
            return cls(**json.loads(STATE.read_text()))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self) -> None:
        fresh = STATE.with_name(f"{STATE.name}.{os.getpid()}")
        fresh.write_text(json.dumps(self.__dict__))
        fresh.replace(STATE)


@dataclass
class Answer:
    """Result of a program. ``rc``: exit status; None after a timeout, 127 if the program does not
    exist.
    """

    rc: int | None
    text: str
    pid: int = 0


def ask(*argv: str, seconds: float = SHORT_S) -> Answer:
    """Run a program. After a timeout, kill it without waiting for its end: it may hang in the
    driver.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, env={"PATH": PATH, "LC_ALL": "C"},
        )  # fmt: skip
    except OSError as exc:
        return Answer(127, str(exc))
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Answer(None, "", process.pid)
    return Answer(process.returncode, text.strip())


def gpus(config: dict[str, Any], state: State) -> Iterator[Problem]:
    """Check the NVIDIA driver, the number of cards, and each card."""
    expected = config.get("gpus", {})
    if not expected.get("cards"):
        return
    if state.stuck and Path(f"/proc/{state.stuck}").exists():
        yield Problem("nvidia-smi still hangs: the driver does not respond")
        return
    answer, fields = query(state)
    state.stuck = answer.pid if answer.rc is None else 0
    if answer.rc is None:
        yield Problem(f"nvidia-smi did not end within {DRIVER_S} s")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.text.splitlines() if line]
    answered = [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]
    if set(REMAPPED_ROWS) <= set(state.gone):
        for card, values in zip(answered, remapped_rows(len(answered))):
            card.update(values)
    cards = [{**dict.fromkeys(FIELDS, NOT_AVAILABLE), **card} for card in answered]
    if answer.rc and not any(LOST.search(str(card)) for card in cards):
        error = (answer.text.splitlines() or ["no answer"])[0][:120]
        meanings = [text for words, text in config["faults"].items() if words in error]
        yield Problem(": ".join(["nvidia-smi", error, *meanings[:1]]))
        return
    if len(cards) != expected["cards"]:
        yield Problem(f"{len(cards)} GPUs respond instead of {expected['cards']}")
    for card in cards:
        yield from check_gpu(card, config, state)
    if expected.get("parts"):
        yield from mig_devices(expected["parts"])


def query(state: State) -> tuple[Answer, list[str]]:
    """Query with nvidia-smi all fields that the driver knows. Return the output and the fields'
    names.
    """
    while True:
        names = {name: OLD_NAMES.get(name, "") if name in state.gone else name for name in FIELDS}
        queried_names = {
            name: queried
            for name, queried in names.items()
            if queried and (queried == name or queried not in state.gone)
        }
        argv = (f"--query-gpu={','.join(queried_names.values())}", "--format=csv,noheader,nounits")
        answer = ask("nvidia-smi", *argv, seconds=DRIVER_S)
        unknown = UNKNOWN_FIELD.search(answer.text)
        if not answer.rc or not unknown or unknown[1] not in queried_names.values():
            return answer, list(queried_names)
        state.gone.append(unknown[1])


def remapped_rows(cards: int) -> list[dict[str, str]]:
    """Return the values of nvidia-smi on remapped memory rows, by card; empty if not all cards
    respond.
    """
    answer = ask(
        "nvidia-smi", f"--query-remapped-rows={','.join(REMAPPED_ROWS)}", "--format=csv,noheader"
    )
    lines = answer.text.splitlines()
    is_complete = answer.rc == 0 and len(lines) == cards
    return [dict(zip(REMAPPED_ROWS, line.split(", "))) for line in lines] if is_complete else []


def check_gpu(card: dict[str, str], config: dict[str, Any], state: State) -> Iterator[Problem]:
    """Check a card by its values from nvidia-smi: field -> text. A value ``[N/A]`` is not
    checked.
    """
    value = {name: number(text) for name, text in card.items()}
    name = f"GPU {card['index']}"
    if lost := LOST.search(" ".join(card.values())):
        meanings = [text for words, text in config["faults"].items() if words in lost[1]]
        yield Problem(": ".join([name, lost[1], *meanings[:1]]))
        return
    yield from (
        Problem(f"{name}: {text}") for key, text in config["flags"].items() if card[key] in YES
    )
    fabric = card["fabric.state"].strip("[]")
    if fabric not in NO_FABRIC and card["fabric.status"] != LINKED.get(fabric):
        status = card["fabric.status"] if fabric in LINKED else fabric
        yield Problem(
            f"{name}: its NVLink fabric is {status}: {fabric_manager_hint(card['driver_version'])}",
            lasting=True,
        )
    now = card["mig.mode.current"]
    then = card["mig.mode.pending"]
    if {now, then} == {"Enabled", "Disabled"}:
        yield Problem(
            f"{name}: MIG is {now} now, but {then} after a reboot: reboot the node", lasting=True
        )
    limit = config["gpu_temperature_c"] - (COOLED_C if state.drained else 0)
    heat = value["temperature.gpu"]
    if heat is not None and heat > limit:
        yield Problem(f"{name}: {heat} C, the limit is {config['gpu_temperature_c']} C")
    if value["ecc.errors.uncorrected.volatile.total"]:
        count = value["ecc.errors.uncorrected.volatile.total"]
        yield Problem(f"{name}: {count} memory errors that ECC could not correct")
    yield from check_link(name, value, state, at_work=card["pstate"] == "P0")
    if card["compute_mode"] == "Prohibited":
        yield Problem(f"{name}: its compute mode forbids all work")
    reasons = value["clocks_event_reasons.active"] or 0
    for bit, words in SLOWED.items():
        if reasons & bit:
            yield Problem(f"{name}: slowed down ({words})", lasting=True)


@cache
def fabric_manager_hint(driver: str) -> str:
    """Return advice for an NVLink fabric that is not ready. driver: version of the NVIDIA
    driver.
    """
    match = MANAGER.search(ask("nv-fabricmanager", "--version").text)
    if match and match[1] != driver:
        return (
            f"nvidia-fabricmanager {match[1]} works only with the same driver version, not with "
            f"{driver}"
        )
    return "see nvidia-fabricmanager"


def check_link(
    name: str, value: dict[str, int | None], state: State, *, at_work: bool
) -> Iterator[Problem]:
    """Check the PCIe link of a card. at_work: whether the card is busy.

    The link of an idle card is slower and narrower, to save power. If a slow link has drained the
    node, this problem remains until the card is busy again; otherwise the idle node would be
    resumed.
    """
    earlier = [text for text in state.links if text.startswith(f"{name}: ")]
    if not at_work and state.drained:
        yield from (Problem(text, past=True) for text in earlier)
        return
    problems = list(check_busy_link(name, value)) if at_work else []
    lasting = [problem.text for problem in problems if without_numbers(problem.text) in state.seen]
    state.links = [text for text in state.links if text not in earlier] + lasting
    yield from problems


def check_busy_link(name: str, value: dict[str, int | None]) -> Iterator[Problem]:
    """Check the link of a busy card. Problems are ``lasting``, because the link becomes fast with a
    delay.
    """
    width = value["pcie.link.width.current"]
    widest = value["pcie.link.width.max"]
    if width is not None and widest is not None and width < widest:
        yield Problem(f"{name}: PCIe x{width} instead of x{widest}", lasting=True)
    speed = value["pcie.link.gen.gpucurrent"]
    fastest = value["pcie.link.gen.max"]
    if speed is not None and fastest is not None and speed < fastest:
        yield Problem(f"{name}: PCIe generation {speed} instead of {fastest}", lasting=True)


def number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def mig_devices(expected: int) -> Iterator[Problem]:
    answer = ask("nvidia-smi", "--list-gpus", seconds=DRIVER_S)
    count = answer.text.count("UUID: MIG-")
    if answer.rc == 0 and count != expected:
        yield Problem(f"{count} MIG devices instead of {expected}")


def kernel(config: dict[str, Any], state: State) -> Iterator[Problem]:
    """Check for a GPU fault (XID) in the kernel's log that is newer than the last resumption by a
    person.
    """
    if not config.get("gpus", {}).get("cards"):
        return
    grave = set(config["xids"])
    log = ask("dmesg").text
    lines = [match for match in map(XID.match, log.splitlines()) if match]
    faults = [
        (float(match["at"]), int(match["number"]), match["where"])
        for match in lines
        if int(match["number"]) in grave
    ]
    faults += [(float(match["at"]), FALLEN_XID, match["where"]) for match in FALLEN.finditer(log)]
    state.xid, number, where = max(faults, default=(-1.0, 0, ""))
    if state.xid > state.known_xid:
        yield Problem(f"XID {number} at {where} in the kernel's log")


def disks(config: dict[str, Any], _: State) -> Iterator[Problem]:
    """Check the free space and inodes of each file system that jobs need."""
    devices = set()
    for path in config["disks"]:
        try:
            device = Path(path).stat().st_dev
            room = os.statvfs(path)
        except OSError as exc:
            if Path(path).parent.exists() and not isinstance(exc, FileNotFoundError):
                yield Problem(f"{path}: {exc.strerror}")
            continue
        if device in devices:
            continue
        devices.add(device)
        free_mib = room.f_bavail * room.f_frsize >> 20
        needed_mib = config["disk_free_mib"]
        if path == SHARED_MEMORY:
            # In containers, it may be smaller than the least free space on disks.
            needed_mib = min(needed_mib, (room.f_blocks * room.f_frsize >> 20) // 2)
        if free_mib < needed_mib:
            yield Problem(f"{path} has {free_mib} MiB free, but needs {needed_mib}")
        elif room.f_files and not room.f_favail:
            yield Problem(f"{path} has no free inodes")


def clock(config: dict[str, Any], _: State) -> Iterator[Problem]:
    """Check the clock if chrony runs, because munge rejects all messages of a node with a wrong
    clock.
    """
    answer = ask("chronyc", "-c", "tracking")
    cells = answer.text.split(",")
    if answer.rc or len(cells) <= CHRONY_LEAP or cells[CHRONY_LEAP] == "Not synchronised":
        return
    try:
        offset = float(cells[CHRONY_OFFSET])
    except ValueError:
        return
    if abs(offset) > config["clock_offset_s"]:
        yield Problem(f"the clock is wrong by {abs(offset):.1f} s")


@dataclass
class Node:
    """This node's state in Slurm."""

    name: str
    drained: bool
    reason: str

    @classmethod
    def read(cls, name: str) -> Node | None:
        answer = ask("scontrol", "--oneliner", "show", "node", name)
        state = re.search(r"\bState=(\S+)", answer.text)
        if answer.rc or not state:
            return None
        reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\]|$)", answer.text)
        return cls(name, "DRAIN" in state[1], reason[1] if reason else "")

    @property
    def drained_by_us(self) -> bool:
        return self.drained and self.reason.startswith(PREFIX.strip())

    def update(self, *words: str) -> bool:
        return ask("scontrol", "update", f"NodeName={self.name}", *words).rc == 0


def act(problems: list[Problem], state: State, name: str) -> None:
    """Drain or resume the node ``name`` if necessary. Do nothing if the controller does not
    answer.
    """
    if not problems and state.drained is False:
        return
    node = Node.read(name)
    if node is None:
        return
    # A person has resumed the node, and so knows its problems.
    if state.drained and not node.drained:
        past = {problem.text for problem in problems if problem.past}
        state.links = [text for text in state.links if text not in past]
        state.known_xid = max(state.known_xid, state.drained_xid)
        if state.xid <= state.known_xid:
            past |= {problem.text for problem in problems if problem.text.startswith("XID ")}
        problems[:] = [problem for problem in problems if problem.text not in past]
    reason = (PREFIX + "; ".join(problem.text for problem in problems))[:LONGEST_REASON]
    if not problems:
        state.drained = node.drained_by_us and not node.update("State=UNDRAIN")
    elif not node.drained or (
        node.drained_by_us and without_numbers(node.reason) != without_numbers(reason)
    ):
        state.drained = node.update("State=DRAIN", f"Reason={reason}")
        state.drained_xid = state.xid
    else:
        state.drained = node.drained_by_us


def without_numbers(text: str) -> str:
    """Return the text with `#` for each number, so that texts of the same problem are equal in all
    checks.
    """
    return re.sub(r"\d+(\.\d+)?", "#", text)


def main() -> int:
    config = json.loads(CONFIG.read_text())
    state = State.read()
    candidates = [
        problem for check in (gpus, kernel, disks, clock) for problem in check(config, state)
    ]
    earlier_shapes = set(state.seen)
    state.seen = [without_numbers(problem.text) for problem in candidates]
    problems = [
        problem
        for problem in candidates
        if not problem.lasting or without_numbers(problem.text) in earlier_shapes
    ]
    act(problems, state, config["node"])
    state.write()
    for problem in problems:
        sys.stdout.write(f"{problem.text}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
