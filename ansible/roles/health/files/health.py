#!/usr/bin/python3 -IS
"""Slurm's HealthCheckProgram: drains this node when it is unhealthy, and resumes what it drained.

slurmd runs it as root every so often; where there is no Slurm, clusterctl does before each job. An unhealthy
node is drained with a reason that begins with `clusterctl health:`; its jobs end in peace, and once it is
healthy it is resumed. A node that somebody else drained is left to them. One that a person resumes stays in
service while the kernel's log still tells of a fault, or a card sleeps whose link was at fault: they know.
Thresholds and what the node must have stand in a JSON file beside it. Ends with 1 where the node is
unhealthy. Runs under the platform's Python, from 3.9 on.
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
STATE = Path("/run/clusterctl-health.json")  # gone with a reboot, as the kernel's log is
PREFIX = "clusterctl health: "
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DRIVER_S, SHORT_S = 20, 8  # slurmd ends a check after 60 s
LONGEST_REASON = 240
COOLED_C = 5  # so much cooler than its limit a drained GPU must be, or it would come and go

FIELDS = (
    "index driver_version temperature.gpu ecc.errors.uncorrected.volatile.total pcie.link.width.current "
    "pcie.link.width.max pcie.link.gen.gpucurrent pcie.link.gen.max pstate compute_mode "
    "clocks_event_reasons.active mig.mode.current mig.mode.pending retired_pages.pending "
    "remapped_rows.pending remapped_rows.failure fabric.state fabric.status"
).split()
OLD_NAMES = {  # before driver 535
    "clocks_event_reasons.active": "clocks_throttle_reasons.active",
    "pcie.link.gen.gpucurrent": "pcie.link.gen.current",
}
ROWS = ("remapped_rows.pending", "remapped_rows.failure")  # before driver 570 known to another switch alone
YES = {"Yes", "1"}
UNTOLD = "[N/A]"
UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
LOST = re.compile(r"\[(GPU [\w ]+)\]")  # what a card's cells say that does not answer
MANAGER = re.compile(r"Fabric Manager version is\s*:\s*(\S+)")
LINKED = {"Completed": "Success"}  # the state of a fabric that is ready, and its status
NO_FABRIC = {"N/A", "Not Supported"}
SLOWED = {0x08: "hardware slowdown", 0x40: "too hot, says the hardware", 0x80: "power brake"}
# Some drivers write no XID of a card that has fallen off the bus, but these three lines.
FALLEN = re.compile(
    r"^\[\s*(?P<at>\d+\.\d+)\] NVRM: The NVIDIA GPU (?P<where>\S+)\n.*NVRM: .*\n.*NVRM: fallen off the bus",
    re.MULTILINE,
)
FALLEN_XID = 79
XID = re.compile(r"^\[\s*(?P<at>\d+\.\d+)\] .*NVRM: Xid \((?P<where>[^)]*)\): (?P<number>\d+)")
CHRONY_OFFSET, CHRONY_LEAP = 4, 13  # fields of `chronyc -c tracking`


@dataclass
class Problem:
    """What is wrong. ``lasting`` ones count when they are seen twice running; ``past``: not seen now."""

    text: str
    lasting: bool = False
    past: bool = False


@dataclass
class State:
    """What the last run left.

    ``drained`` by us, or None where that is not known. Times of the kernel's log: ``xid`` of the newest
    fault, ``drained_xid`` when the node was drained, ``known_xid`` of the newest that a person knows.
    ``links``: what counts against those of cards. ``stuck``: a process that hangs in the driver. ``gone``:
    fields that the driver does not know.
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
    """What a program said; ``rc`` is None where it did not end in time, and 127 where there is none."""

    rc: int | None
    text: str
    pid: int = 0


def ask(*argv: str, seconds: float = SHORT_S) -> Answer:
    """Run a program for so long at most; one that hangs in the driver can't be waited for, even killed."""
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
    """The driver, the number of cards, and each card."""
    wanted = config.get("gpus", {})
    if not wanted.get("cards"):
        return
    if state.stuck and Path(f"/proc/{state.stuck}").exists():
        yield Problem("nvidia-smi still hangs: the driver does not answer")
        return
    answer, asked = query(state)
    state.stuck = answer.pid if answer.rc is None else 0
    if answer.rc is None:
        yield Problem(f"nvidia-smi did not end within {DRIVER_S} s")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.text.splitlines() if line]
    told = [dict(zip(asked, row)) for row in rows if len(row) == len(asked)]  # noqa: B905 - 3.9 has no strict
    if set(ROWS) <= set(state.gone):
        for card, more in zip(told, remapped_rows(len(told))):  # noqa: B905
            card.update(more)
    cards = [{**dict.fromkeys(FIELDS, UNTOLD), **card} for card in told]
    if answer.rc and not any(LOST.search(str(card)) for card in cards):
        said = (answer.text.splitlines() or ["no answer"])[0][:120]
        known = [text for words, text in config["faults"].items() if words in said]
        yield Problem(": ".join(["nvidia-smi", said, *known[:1]]))
        return
    if len(cards) != wanted["cards"]:
        yield Problem(f"{len(cards)} GPUs answer, and not {wanted['cards']}")
    for card in cards:
        yield from one_gpu(card, config, state)
    if wanted.get("parts"):
        yield from parts(wanted["parts"])


def query(state: State) -> tuple[Answer, list[str]]:
    """The fields of every card that the driver knows, under these names or old ones, and which these are."""
    while True:
        names = {name: OLD_NAMES.get(name, "") if name in state.gone else name for name in FIELDS}
        asked = {name: own for name, own in names.items() if own and (own == name or own not in state.gone)}
        argv = (f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits")
        answer = ask("nvidia-smi", *argv, seconds=DRIVER_S)
        unknown = UNKNOWN_FIELD.search(answer.text)
        if not answer.rc or not unknown or unknown[1] not in asked.values():
            return answer, list(asked)
        state.gone.append(unknown[1])


def remapped_rows(cards: int) -> list[dict[str, str]]:
    """What each of so many cards says of its remapped rows; nothing if they are not as many there."""
    answer = ask("nvidia-smi", f"--query-remapped-rows={','.join(ROWS)}", "--format=csv,noheader")
    lines = answer.text.splitlines()
    known = answer.rc == 0 and len(lines) == cards
    return [dict(zip(ROWS, line.split(", "))) for line in lines] if known else []  # noqa: B905


def one_gpu(card: dict[str, str], config: dict[str, Any], state: State) -> Iterator[Problem]:
    """What a card does not tell (``[N/A]``) is not judged."""
    value = {name: number(text) for name, text in card.items()}
    name = f"GPU {card['index']}"
    if lost := LOST.search(" ".join(card.values())):
        means = [text for words, text in config["faults"].items() if words in lost[1]]
        yield Problem(": ".join([name, lost[1], *means[:1]]))
        return
    yield from (Problem(f"{name}: {text}") for key, text in config["flags"].items() if card[key] in YES)
    fabric = card["fabric.state"].strip("[]")
    if fabric not in NO_FABRIC and card["fabric.status"] != LINKED.get(fabric):
        why = card["fabric.status"] if fabric in LINKED else fabric
        yield Problem(f"{name}: its NVLink fabric is {why}: {manager(card['driver_version'])}", lasting=True)
    now, then = card["mig.mode.current"], card["mig.mode.pending"]
    if {now, then} == {"Enabled", "Disabled"}:
        yield Problem(f"{name}: MIG is {now}, and {then} after a boot: boot the node", lasting=True)
    limit = config["gpu_temperature_c"] - (COOLED_C if state.drained else 0)
    heat = value["temperature.gpu"]
    if heat is not None and heat > limit:
        yield Problem(f"{name}: {heat} C, and {config['gpu_temperature_c']} are allowed")
    if value["ecc.errors.uncorrected.volatile.total"]:
        count = value["ecc.errors.uncorrected.volatile.total"]
        yield Problem(f"{name}: {count} memory errors that ECC could not correct")
    yield from link(name, value, state, at_work=card["pstate"] == "P0")
    if card["compute_mode"] == "Prohibited":
        yield Problem(f"{name}: its compute mode forbids all work")
    reasons = value["clocks_event_reasons.active"] or 0
    for bit, words in SLOWED.items():
        if reasons & bit:
            yield Problem(f"{name}: slowed down ({words})", lasting=True)


@cache
def manager(driver: str) -> str:
    """What the fabric manager's version tells of a fabric that is not ready."""
    found = MANAGER.search(ask("nv-fabricmanager", "--version").text)
    if found and found[1] != driver:
        return f"nvidia-fabricmanager is {found[1]}, and works with its own driver alone, not with {driver}"
    return "see nvidia-fabricmanager"


def link(name: str, value: dict[str, int | None], state: State, *, at_work: bool) -> Iterator[Problem]:
    """The PCIe link of a card, which is slower and narrower to save power while the card is not at work.

    What drained the node counts until the card is at work again: asleep it would come back into service.
    """
    known = [text for text in state.links if text.startswith(f"{name}: ")]
    if not at_work and state.drained:
        yield from (Problem(text, past=True) for text in known)
        return
    found = list(link_at_work(name, value)) if at_work else []
    counts = [one.text for one in found if shape(one.text) in state.seen]
    state.links = [text for text in state.links if text not in known] + counts
    yield from found


def link_at_work(name: str, value: dict[str, int | None]) -> Iterator[Problem]:
    """At full clock, behind which the link may lag for a moment."""
    width, widest = value["pcie.link.width.current"], value["pcie.link.width.max"]
    if width is not None and widest is not None and width < widest:
        yield Problem(f"{name}: PCIe x{width} instead of x{widest}", lasting=True)
    speed, fastest = value["pcie.link.gen.gpucurrent"], value["pcie.link.gen.max"]
    if speed is not None and fastest is not None and speed < fastest:
        yield Problem(f"{name}: PCIe generation {speed} instead of {fastest}", lasting=True)


def number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def parts(wanted: int) -> Iterator[Problem]:
    answer = ask("nvidia-smi", "--list-gpus", seconds=DRIVER_S)
    found = answer.text.count("UUID: MIG-")
    if answer.rc == 0 and found != wanted:
        yield Problem(f"{found} MIG devices, and not {wanted}")


def kernel(config: dict[str, Any], state: State) -> Iterator[Problem]:
    """The newest fault of a GPU that the kernel's log tells of, unless a person knows it."""
    if not config.get("gpus", {}).get("cards"):
        return
    grave = set(config["xids"])
    said = ask("dmesg").text
    lines = [match for match in map(XID.match, said.splitlines()) if match]
    told = [
        (float(one["at"]), int(one["number"]), one["where"]) for one in lines if int(one["number"]) in grave
    ]
    told += [(float(one["at"]), FALLEN_XID, one["where"]) for one in FALLEN.finditer(said)]
    state.xid, number, where = max(told, default=(-1.0, 0, ""))
    if state.xid > state.known_xid:
        yield Problem(f"XID {number} at {where} in the kernel's log")


def disks(config: dict[str, Any], _: State) -> Iterator[Problem]:
    """Space and inodes of each file system that a job needs, once each."""
    devices = set()
    for path in config["disks"]:
        try:
            device, room = Path(path).stat().st_dev, os.statvfs(path)
        except OSError as exc:
            if Path(path).parent.exists() and not isinstance(exc, FileNotFoundError):
                yield Problem(f"{path}: {exc.strerror}")
            continue
        if device in devices:
            continue
        devices.add(device)
        free_mib = room.f_bavail * room.f_frsize >> 20
        if free_mib < config["disk_free_mib"]:
            yield Problem(f"{path} has {free_mib} MiB free, and needs {config['disk_free_mib']}")
        elif room.f_files and not room.f_favail:
            yield Problem(f"{path} has no inodes free")


def clock(config: dict[str, Any], _: State) -> Iterator[Problem]:
    """Where chrony runs: a clock that is off makes munge refuse every message."""
    answer = ask("chronyc", "-c", "tracking")
    cells = answer.text.split(",")
    if answer.rc or len(cells) <= CHRONY_LEAP or cells[CHRONY_LEAP] == "Not synchronised":
        return
    try:
        offset = float(cells[CHRONY_OFFSET])
    except ValueError:
        return
    if abs(offset) > config["clock_offset_s"]:
        yield Problem(f"the clock is off by {abs(offset):.1f} s")


@dataclass
class Node:
    """This node in Slurm's eyes."""

    name: str
    drained: bool
    reason: str

    @classmethod
    def look(cls, name: str) -> Node | None:
        answer = ask("scontrol", "--oneliner", "show", "node", name)
        state = re.search(r"\bState=(\S+)", answer.text)
        if answer.rc or not state:
            return None
        reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\]|$)", answer.text)
        return cls(name, "DRAIN" in state[1], reason[1] if reason else "")

    @property
    def ours(self) -> bool:
        return self.drained and self.reason.startswith(PREFIX.strip())

    def update(self, *words: str) -> bool:
        return ask("scontrol", "update", f"NodeName={self.name}", *words).rc == 0


def act(problems: list[Problem], state: State, name: str) -> None:
    """Drain or resume the node, if either is to be done. With no word of the controller's, nothing is."""
    if not problems and state.drained is False:
        return
    node = Node.look(name)
    if node is None:
        return
    if state.drained and not node.drained:  # a person resumed it, and knows what it was drained for
        past = {one.text for one in problems if one.past}
        state.links = [text for text in state.links if text not in past]
        state.known_xid = max(state.known_xid, state.drained_xid)
        if state.xid <= state.known_xid:
            past |= {one.text for one in problems if one.text.startswith("XID ")}
        problems[:] = [one for one in problems if one.text not in past]
    reason = (PREFIX + "; ".join(one.text for one in problems))[:LONGEST_REASON]
    if not problems:
        state.drained = node.ours and not node.update("State=UNDRAIN")
    elif not node.drained or (node.ours and shape(node.reason) != shape(reason)):
        state.drained, state.drained_xid = node.update("State=DRAIN", f"Reason={reason}"), state.xid
    else:
        state.drained = node.ours


def shape(text: str) -> str:
    """Without numbers, which change from one look to the next."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


def main() -> int:
    config = json.loads(CONFIG.read_text())
    state = State.read()
    found = [problem for check in (gpus, kernel, disks, clock) for problem in check(config, state)]
    before, state.seen = set(state.seen), [shape(one.text) for one in found]
    problems = [one for one in found if not one.lasting or shape(one.text) in before]
    act(problems, state, config["node"])
    state.write()
    for problem in problems:
        sys.stdout.write(f"{problem.text}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
