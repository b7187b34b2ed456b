"""The faults: functions that cause a fault in a training, and return the time at which it
happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.support.clusters import BIN
from benchmarks.support.nodes import POWER_OFF, REBOOT
from benchmarks.support.watched import Training

Cause = Callable[[Training], float]
# A file of the checkpoint has half of its length, a changed byte, or is missing.
Damage = Literal["truncated", "flipped", "removed"]
_PATIENCE_S = 180
CHAIN = ("--time", "2m", "--set", "chain=1h")
# A program with a bug: it saves its progress, and raises an exception in iteration 120 of each
# attempt.
RAISES = """\
import json, os, time
from pathlib import Path
if os.environ["RANK"] == "0":
    saved = Path("checkpoint.pt")
    done = int(saved.read_text()) if saved.exists() else 0
    for step in range(done + 1, 1000):
        time.sleep(0.02)
        if step == 120:
            raise ValueError("a bug of the program")
        with open("metrics.jsonl", "a") as file:
            print(json.dumps({"kind": "iteration", "time": time.time(), "step": step}), file=file)
        if step % 50 == 0:
            saved.write_text(str(step))
else:
    time.sleep(600)
"""


@dataclass(frozen=True)
class Fault:
    """A fault that a training is to survive.

    ends: the job's right end. length: how many times as long as usual the training is. options: of
        `submit`.
    program: text of the script that runs in place of `train`; empty: `train`. drawn: whether
    campaigns cause the fault.
    """

    name: str
    cause: Cause
    ends: str = "COMPLETED"
    length: int = 1
    options: tuple[str, ...] = ()
    program: str = ""
    drawn: bool = True


def signal_host(number: int, rank: int, training: Training) -> float:
    host = training.host_of(rank)
    at = time.time()
    training.nodes.signal_init(number, host)
    return at


def die_silently(rank: int, training: Training) -> float:
    """Cut a node off before its end, so that no peer sees its connections closed."""
    host = training.host_of(rank)
    at = time.time()
    training.nodes.link(host, "down")
    training.nodes.signal_init(signal.SIGKILL, host)
    return at


def kill_rank(rank: int, training: Training) -> float:
    pid = training.ranks()[rank].pid
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def kill_stepd(training: Training) -> float:
    parents = training.ranks()[1].parents
    pid = next(process.pid for process in parents if process.name == "slurmstepd")
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def kill_launcher(training: Training) -> float:
    launcher = training.launcher()
    at = time.time()
    for process in launcher:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return at


def kill_daemons(names: str, training: Training) -> float:
    """Kill these daemons on the controller, and slurmd and munged on all hosts."""
    nodes = training.nodes
    at = time.time()
    for name in names.split():
        hosts = {"slurmd": nodes.compute, "munged": list(nodes.machines)}
        nodes.kill(name, *hosts.get(name, [nodes.cluster.controller]))
    return at


def cut(seconds: float, training: Training) -> float:
    """Cut the node of rank 1 off the network for a time."""
    host = training.host_of(1)
    at = time.time()
    training.nodes.link(host, "down")
    time.sleep(seconds)
    training.nodes.link(host, "up")
    return at


def cut_and_up(seconds: float, training: Training) -> float:
    """Cut the node of rank 1 off the network for a time, and call `up` as soon as it is back."""
    at = cut(seconds, training)
    training.nodes.cluster.up()
    return at


def freeze(seconds: float, training: Training) -> float:
    """Stop rank 1 for a time. 0: for good."""
    pid = training.ranks()[1].pid
    at = time.time()
    os.kill(pid, signal.SIGSTOP)
    if seconds:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return at


def tear(damage: Damage, training: Training) -> float:
    """Kill all ranks, and damage the newest checkpoint before the job starts again."""
    # After an earlier damage, older checkpoints may be the last intact checkpoints.
    while training.ranks() and not training.new_checkpoints()[1:]:
        time.sleep(0.05)
    ranks = training.ranks()
    at = time.time()
    for process in ranks:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    newest = training.checkpoints()[-1]
    file = newest / "rank-00001.safetensors" if newest.is_dir() else newest
    content = file.read_bytes()
    half = len(content) // 2
    if damage == "removed":
        file.unlink()
    elif damage == "truncated":
        os.truncate(file, half)
    else:
        file.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    return at


def call(command: str, training: Training) -> float:
    """Run a command on the controller. Each {job} in it stands for the job's id."""
    at = time.time()
    training.nodes.on_controller(command.format(job=training.job))
    return at


def stop_slurmctld(seconds: float, training: Training) -> float:
    at = call("systemctl stop slurmctld", training)
    time.sleep(seconds)
    call("systemctl start slurmctld", training)
    return at


def await_event(name: str, training: Training) -> float:
    """Wait for an event of the job, which causes the fault itself."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for event in training.events():
            if event["event"] == name:
                return float(event["time"])
        time.sleep(0.1)
    return time.time()


def cut_power(training: Training) -> float:
    """Kill all machines, and call `up`."""
    nodes = training.nodes
    at = time.time()
    nodes.signal_init(signal.SIGKILL, *nodes.machines)
    nodes.cluster.up()
    return at


def kill_controller(seconds: float, training: Training) -> float:
    """Kill the controller's machine, and call `up` after a time."""
    nodes = training.nodes
    at = time.time()
    nodes.signal_init(signal.SIGKILL, nodes.cluster.controller)
    time.sleep(seconds)
    nodes.cluster.up()
    return at


def up_twice(training: Training) -> float:
    cluster = training.nodes.cluster
    argv = [BIN / "clusterctl", "-f", cluster.folder / "cluster.yaml", "up"]
    at = time.time()
    with Path(cluster.folder, "up.log").open("ab") as log:
        both = [
            subprocess.Popen(argv, env=dict(cluster.environ), stdout=log, stderr=log)
            for _ in range(2)
        ]
    codes = [process.wait() for process in both]
    assert codes == [0, 0], f"two up at once exited with {codes}"
    return at


FAULTS = (
    Fault("node of rank 1 dies, FIN", partial(signal_host, signal.SIGKILL, 1)),
    Fault("node of rank 0 dies, FIN", partial(signal_host, signal.SIGKILL, 0)),
    Fault("node of rank 1 dies, silent", partial(die_silently, 1)),
    Fault("node of rank 0 dies, silent", partial(die_silently, 0)),
    Fault("SIGKILL rank 1", partial(kill_rank, 1)),
    Fault("SIGKILL rank 0", partial(kill_rank, 0)),
    Fault("SIGKILL slurmstepd", kill_stepd),
    Fault("SIGKILL launcher", kill_launcher),
    Fault("poweroff, rank 1's node", partial(signal_host, POWER_OFF, 1)),
    Fault("poweroff, rank 0's node", partial(signal_host, POWER_OFF, 0)),
    Fault("reboot, rank 1's node", partial(signal_host, REBOOT, 1)),
    Fault("network cut 10 s", partial(cut, 10)),
    Fault("network cut 40 s", partial(cut, 40), length=6),
    Fault("network cut 180 s", partial(cut, 180), length=24, drawn=False),
    Fault("network cut 180 s, up", partial(cut_and_up, 180), length=24, drawn=False),
    Fault("SIGSTOP rank 1, 40 s", partial(freeze, 40)),
    Fault("SIGSTOP rank 1 for good", partial(freeze, 0), drawn=False),
    Fault("checkpoint truncated", partial(tear, "truncated")),
    Fault("checkpoint flipped", partial(tear, "flipped")),
    Fault("checkpoint removed", partial(tear, "removed")),
    Fault("scontrol requeue", partial(call, "scontrol requeue {job}")),
    Fault("scancel", partial(call, "scancel {job}"), ends="CANCELLED", drawn=False),
    Fault("all machines die, up", cut_power),
    Fault("time limit", partial(await_event, "signal"), length=24, options=CHAIN, drawn=False),
    Fault(
        "time limit, 10 min", partial(await_event, "signal"), length=75, options=CHAIN, drawn=False
    ),
    Fault("own exception", partial(await_event, "end"), ends="FAILED", program=RAISES, drawn=False),
    Fault("SIGKILL slurmd", partial(kill_daemons, "slurmd")),
    Fault("controller dies, up", partial(kill_controller, 15), length=4),
    Fault("slurmctld stopped 75 s", partial(stop_slurmctld, 75), length=12, drawn=False),
    Fault("SIGKILL slurmctld", partial(kill_daemons, "slurmctld")),
    Fault("SIGKILL slurmdbd, mariadbd", partial(kill_daemons, "slurmdbd mariadbd")),
    Fault("SIGKILL munged", partial(kill_daemons, "munged")),
    Fault("two up at once", up_twice),
)
