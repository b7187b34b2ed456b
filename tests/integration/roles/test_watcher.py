"""The real watcher of the controller, with a played Slurm that answers as Slurm 24.11."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from clusterctl.scheduler.base import NodeInfo
from clusterctl.scheduler.slurm.availability import Availability, availability_of
from clusterctl.spec.names import ALIVE_PORT, FENCE_PORT, SLURMD_PORT
from clusterctl.util.assets import data_folder
from tests.support.clocks import replace_clock
from tests.support.plays import load_module

N1 = "t-1"
N2 = "t-2"
N3 = "t-3"
LIMIT = 3
PREFIX = "clusterctl watcher: "
FAN = "a fan is broken"
KILLED = "RaisedSignal:9(Killed)"
REQUEUE = "#!/bin/bash\n#SBATCH --requeue\n"


@dataclass
class Job:
    nodes: str
    state: str = "RUNNING"
    reason: str = "None"
    script: str = REQUEUE
    restarts: int = 0
    starts_in_s: int = 10
    ended_s_ago: int = 0
    host: str = N2
    start: int = 1795714000
    excluded: str = N3


@dataclass
class Slurm:
    """The cluster: node -> state and reason, job -> its fields. ``fenced``: (node, job) in this
    order.

    boot: start of slurmctld. lists: node -> its answer to a request for its jobs.
    ``once_drained``: node -> its state when it has been drained; ``broken``: part of the commands
        that fail.
    """

    nodes: dict[str, list[str]] = field(
        default_factory=lambda: {name: ["IDLE", ""] for name in (N1, N2, N3)}
    )
    jobs: dict[str, Job] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    without_slurmd: set[str] = field(default_factory=set)
    unkillable: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    once_drained: dict[str, str] = field(default_factory=dict)
    broken: str = ""
    keeps_jobs: bool = False
    boot: int = 1795714400
    lists: dict[str, list[str] | None] = field(default_factory=dict)
    now: float = 1795714480.4
    calls: list[str] = field(default_factory=list)
    fenced: list[tuple[str, str]] = field(default_factory=list)

    def ask(self, *argv: str, text: str = "") -> str:
        assert not text
        self.calls.append(" ".join(argv))
        if self.broken and self.broken in self.calls[-1]:
            return ""
        match argv:
            case ("squeue", *options):
                return (
                    "JOBID|JOBID|STATE|REASON|NODELIST|EXEC_HOST|END_TIME|START_TIME|EXC_NODES\n"
                    + "".join(
                        f"{i}|{i}|{job.state}|{job.reason}|{job.nodes}|{job.host}"
                        f"|{int(self.now) - job.ended_s_ago}|{job.start}|{job.excluded}\n"
                        for i, job in self.jobs.items()
                        if job.state != "FAILED" or "--states=all" in options
                    )
                )
            case ("scontrol", "--oneliner", "show", "node", *names):
                shown = (
                    names[0].replace("t-[1-2]", f"{N1},{N2}").split(",") if names else self.nodes
                )
                return "".join(self.line_of(name) for name in self.nodes if name in shown)
            case ("scontrol", "--oneliner", "show", "job", number):
                job = self.jobs[number]
                start = f"EligibleTime=1 StartTime={int(self.now) + job.starts_in_s} EndTime=1"
                return f"JobId={number} Requeue=1 Restarts={job.restarts} BatchFlag=1 {start}\n"
            case ("scontrol", "show", "config"):
                return f"BatchStartTimeout       = 60 sec\nBOOT_TIME               = {self.boot}\n"
            case ("scontrol", "show", "hostnames", nodes):
                return nodes.replace("t-[1-2]", f"{N1}\n{N2}\n")
            case ("scontrol", "write", "batch_script", number, "-"):
                return self.jobs[number].script
            case ("scontrol", "update", target, *words):
                self.update(target.partition("=")[2], dict(word.split("=", 1) for word in words))
                return ""
            case ("scontrol", "reconfigure"):
                return ""
            case ("scontrol", "requeue", number):
                self.jobs[number].state = "COMPLETING"
                return ""
        raise AssertionError(argv)

    def line_of(self, name: str) -> str:
        state, reason = self.nodes[name]
        reason = f"Reason={reason} [root@1795714480]" if reason else ""
        address = (
            f"NodeAddr=10.0.0.{name[-1]} NodeHostName={name} Version=24.11.5 OS=Linux 6.12 #1 "
            "SMP @0"
        )
        return (
            f"NodeName={name} Arch=x86_64 {address} State={state} NextState=X ThreadsPerCore=1 "
            f"{reason}\n"
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def update(self, name: str, words: dict[str, str]) -> None:
        if "excnodelist" in words:
            self.jobs[name].excluded = words["excnodelist"]
        elif "starttime" in words:
            self.jobs[name].reason = "None"
        else:
            states = {"down": "DOWN", "drain": self.drained(name), "resume": "IDLE"}
            self.nodes[name] = [states[words["state"]], words.get("reason", "")]
            if words["state"] == "down" and not self.keeps_jobs:
                for job in self.jobs.values():
                    job.state = "COMPLETING"

    def drained(self, name: str) -> str:
        return self.once_drained.get(name, f"{self.nodes[name][0]}+DRAIN")

    def fence(self, jobs: str, node: Any) -> bool:
        self.fenced += [(node.name, job) for job in jobs.split()]
        return node.name not in self.unkillable


@pytest.fixture
def program() -> ModuleType:
    load_module("slurm", "roles/slurmctld/files")
    return load_module("watcher", "roles/slurmctld/files")


@pytest.fixture
def slurm(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    cluster = Slurm()
    monkeypatch.setattr(program.slurm, "ask", cluster.ask)
    monkeypatch.setattr(program.slurm, "request_fence", cluster.fence)
    monkeypatch.setattr(
        program.slurm, "request_list", lambda node: (node.name, cluster.lists.get(node.name))
    )
    monkeypatch.setattr(program.slurm, "is_own", lambda node: node.name in cluster.own)
    monkeypatch.setattr(
        program.slurm, "runs_slurmd", lambda node: node.name not in cluster.without_slurmd
    )
    monkeypatch.setattr(
        program.slurm,
        "silent_nodes",
        lambda nodes, _: {node.name for node in nodes} & cluster.silent,
    )
    monkeypatch.setattr(program.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    played = {"time": lambda: cluster.now, "sleep": cluster.sleep}
    replace_clock(monkeypatch, program, program.slurm, **played)
    return cluster


def look(watcher: Any, times: int = 1) -> None:
    """Let the watcher run for this number of seconds."""
    for _ in range(times):
        watcher.nodes_due = 0.0
        watcher.check_nodes()
        watcher.look_at_jobs()


@pytest.fixture
def watcher(program: ModuleType, slurm: Slurm) -> Any:
    """A watcher that has had an answer of every node."""
    made = program.Watcher(LIMIT)
    look(made)
    return made


def test_watcher_has_the_ports_of_fence_and_slurmd(program: ModuleType) -> None:
    ports = (program.slurm.ALIVE_PORT, program.slurm.FENCE_PORT, program.slurm.SLURMD_PORT)
    assert ports == (ALIVE_PORT, FENCE_PORT, SLURMD_PORT)


def test_lost_node_is_set_down_and_its_job_killed_elsewhere(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    slurm.silent = {N2}
    look(watcher, LIMIT - 1)
    assert slurm.nodes[N2] == ["IDLE", ""]
    look(watcher)
    state, reason = slurm.nodes[N2]
    assert state == "DOWN+DRAIN"
    assert reason.startswith(PREFIX)
    assert slurm.fenced == [(N1, "7")]
    assert slurm.nodes[N1] == slurm.nodes[N3] == ["IDLE", ""]
    # `up` may resume the node.
    assert (
        availability_of(NodeInfo(N2, "down+drain", reason, 1, 1, "", (), "root"))
        is Availability.OUT
    )


@pytest.mark.parametrize("keeps_jobs", [False, True])
def test_job_that_slurm_keeps_on_a_lost_node_is_requeued(
    watcher: Any, slurm: Slurm, *, keeps_jobs: bool
) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    slurm.silent = {N2}
    slurm.keeps_jobs = keeps_jobs
    look(watcher, LIMIT)
    assert ("scontrol requeue 7" in slurm.calls) is keeps_jobs


@pytest.mark.parametrize("state", ["COMPLETING", "FAILED"])
def test_job_that_was_killed_with_its_node_is_requeued(
    watcher: Any, slurm: Slurm, state: str
) -> None:
    """The dying node may report the end of the job's script before its connections are lost."""
    slurm.jobs = {"7": Job("t-[1-2]", state, KILLED, ended_s_ago=LIMIT)}
    slurm.silent = {N2}
    look(watcher, LIMIT)
    assert slurm.nodes[N2][0] == "DOWN+DRAIN"
    assert slurm.fenced == [(N1, "7")]
    assert slurm.calls.count("scontrol requeue 7") == 1


@pytest.mark.parametrize(
    "job",
    [
        Job("t-[1-2]", "FAILED", KILLED, "#!/bin/bash\n"),
        Job("t-[1-2]", "FAILED", KILLED, host=N1),
        Job(N2, "TIMEOUT", KILLED),
    ],
)
def test_watcher_requeues_only_killed_jobs_that_ask_for_it(
    watcher: Any, slurm: Slurm, job: Job
) -> None:
    slurm.jobs = {"7": job, "8": Job(N2)}
    slurm.silent = {N2}
    look(watcher, LIMIT)
    assert not [call for call in slurm.calls if call.startswith("scontrol requeue")]


def test_node_is_set_down_for_a_job_that_is_to_start_again(watcher: Any, slurm: Slurm) -> None:
    """The job's program may have requeued it before the node was found lost."""
    slurm.jobs = {"7": Job("t-[1-2]", "COMPLETING")}
    slurm.silent = {N2}
    look(watcher, LIMIT)
    assert slurm.nodes[N2][0] == "DOWN+DRAIN"
    assert slurm.fenced == []


@pytest.mark.parametrize(
    ("script", "excluded"),
    [
        (f"{REQUEUE}exec python3 -IS job.py run\n", ""),
        (f"{REQUEUE}#SBATCH --nice=1 --exclude=t-7\nexec python3 -IS job.py run\n", "t-7"),
        (f"{REQUEUE}#SBATCH -x t-7\nexec python3 -IS job.py run\n", "t-7"),
        (
            f"{REQUEUE}#SBATCH --exclude='t-[7,8]' # --exclude t-9\nexec python3 -IS job.py run\n",
            "t-[7,8]",
        ),
        (f'{REQUEUE}#SBATCH --comment="try -x t-7"\n#SBATCH -h\nexec python3 -IS job.py run\n', ""),
        # The watcher must not end.
        (f"{REQUEUE}#SBATCH --comment -x\nexec python3 -IS job.py run\n", ""),
        (REQUEUE, N3),
    ],
)
def test_job_waiting_for_lost_nodes_may_use_excluded_nodes(
    watcher: Any, slurm: Slurm, script: str, excluded: str
) -> None:
    """Otherwise, the job would wait although a node is idle. The exclusions of its user stay."""
    slurm.nodes[N2] = ["DOWN", "clusterctl: the machine shuts down"]
    slurm.jobs["7"] = Job("", "PENDING", f"ReqNodeNotAvail, UnavailableNodes:{N2}", script)
    look(watcher, 3)
    assert slurm.jobs["7"].excluded == excluded
    assert sum("excnodelist" in call for call in slurm.calls) == (excluded != N3)
    assert sum("batch_script" in call for call in slurm.calls) <= 2


@pytest.mark.parametrize(
    "reason",
    [
        "Resources",
        "ReqNodeNotAvail, Reserved for maintenance",
        "ReqNodeNotAvail, May be reserved for other job",
    ],
)
def test_job_that_waits_for_busy_nodes_does_not_use_excluded_nodes(
    watcher: Any, slurm: Slurm, reason: str
) -> None:
    slurm.jobs["7"] = Job("", "PENDING", reason, f"{REQUEUE}exec python3 -IS job.py run\n")
    look(watcher)
    assert slurm.jobs["7"].excluded == N3


@pytest.mark.parametrize("command", ["batch_script", "excnodelist"])
def test_excluded_nodes_may_be_used_after_slurm_failed_once(
    watcher: Any, slurm: Slurm, command: str
) -> None:
    reason = f"ReqNodeNotAvail, UnavailableNodes:{N2}"
    slurm.jobs["7"] = Job("", "PENDING", reason, f"{REQUEUE}exec python3 -IS job.py run\n")
    slurm.broken = command
    look(watcher)
    assert slurm.jobs["7"].excluded == N3
    slurm.broken = ""
    look(watcher)
    assert slurm.jobs["7"].excluded == ""


def test_watcher_counts_misses_anew_after_an_answer(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    for _ in range(LIMIT):
        slurm.silent = {N2}
        look(watcher, LIMIT - 1)
        slurm.silent = set()
        look(watcher)
    assert slurm.nodes[N2] == ["IDLE", ""]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"silent": {N1, N2, N3}}, id="all nodes are silent"),
        pytest.param({"silent": {N2, N3}, "own": {N1}}, id="only the controller answers"),
        pytest.param({"nodes": {N2: ["IDLE", ""]}}, id="it is the only node"),
        pytest.param({"jobs": {}}, id="no job"),
        pytest.param({"jobs": {"7": Job(N2, "FAILED", "NonZeroExitCode")}}, id="its job failed"),
        pytest.param(
            {"jobs": {"7": Job(N2, "FAILED", KILLED, ended_s_ago=60)}}, id="was killed before"
        ),
        pytest.param({"jobs": {"7": Job(N1)}}, id="a job elsewhere"),
        pytest.param({"jobs": {"7": Job("t-[1-2]", script="#!/bin/bash\n")}}, id="no requeue"),
        pytest.param(
            {"jobs": {"7": Job(N2), "8": Job(N2, script="#!/bin/bash\n")}}, id="a job without"
        ),
        pytest.param(
            {"nodes": {N1: ["IDLE", ""], N2: ["MIXED+REBOOT_ISSUED", "new kernel"]}}, id="reboots"
        ),
        pytest.param({"nodes": {N1: ["IDLE", ""], N2: ["POWERED_DOWN", ""]}}, id="is off"),
    ],
)
def test_watcher_does_not_set_a_silent_node_down_if(
    watcher: Any, slurm: Slurm, fault: dict[str, Any]
) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    slurm.silent = {N2}
    for name, value in fault.items():
        setattr(slurm, name, value)
    before = {name: [*values] for name, values in slurm.nodes.items()}
    look(watcher, 2 * LIMIT)
    assert slurm.nodes == before
    assert slurm.fenced == []


def test_watcher_sets_the_only_other_node_down(watcher: Any, slurm: Slurm) -> None:
    del slurm.nodes[N3]
    slurm.jobs = {"7": Job("t-[1-2]")}
    slurm.silent = {N2}
    slurm.own = {N1}
    look(watcher, LIMIT)
    assert slurm.nodes[N2][0] == "DOWN+DRAIN"


def test_watcher_does_not_watch_the_host_of_the_controller(program: ModuleType) -> None:
    nodes = [program.Node("", address, "IDLE") for address in ("127.0.0.1", "192.0.2.1")]
    assert [program.slurm.is_own(node) for node in nodes] == [True, False]


def test_jobs_that_end_have_their_grace_when_a_node_is_lost(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job("t-[1-2]"), "8": Job("t-[1-2]", "COMPLETING")}
    slurm.silent = {N2}
    look(watcher, LIMIT)
    assert slurm.fenced == [(N1, "7")]


def test_jobs_continue_if_slurm_does_not_set_their_node_down(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    slurm.silent = {N2}
    slurm.broken = "state=down"
    look(watcher, LIMIT)
    assert any(slurm.broken in call for call in slurm.calls)
    assert slurm.fenced == []
    assert slurm.nodes[N2] == ["IDLE", ""]


def test_node_is_not_set_down_for_jobs_that_may_have_ended(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    look(watcher)
    slurm.silent = {N2}
    slurm.broken = "squeue"
    look(watcher, LIMIT)
    assert slurm.nodes[N2] == ["IDLE", ""]
    slurm.broken = ""
    look(watcher)
    assert slurm.nodes[N2][0] == "DOWN+DRAIN"


@pytest.mark.parametrize("command", ["squeue", "show node"])
def test_watcher_keeps_its_jobs_and_nodes_if_a_command_fails(
    watcher: Any, slurm: Slurm, command: str
) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    look(watcher)
    slurm.broken = command
    look(watcher)
    assert list(watcher.nodes) == [N1, N2, N3]
    assert [job.id for job in watcher.jobs] == ["7"]
    assert watcher.ran_on == {"7": "t-[1-2]"}


def test_load_does_not_change_when_a_node_is_tried_again(
    watcher: Any, program: ModuleType, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.jobs = {"7": Job(N2, script="#!/bin/bash\n")}
    slurm.silent = {N2}
    look(watcher, LIMIT - 1)
    for more in range(program.AGAIN + 1):
        load = float(more * program.LOAD_PER_MISS * (program.os.cpu_count() or 1))
        monkeypatch.setattr(program.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        look(watcher)
    assert sum("batch_script" in call for call in slurm.calls) == 2


def test_node_that_is_lost_again_is_tried_at_once(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job(N2, script="#!/bin/bash\n")}
    slurm.silent = {N2}
    look(watcher, LIMIT)
    slurm.silent = set()
    look(watcher)
    slurm.jobs = {"8": Job(N2)}
    slurm.silent = {N2}
    look(watcher, LIMIT)
    assert slurm.nodes[N2][0] == "DOWN+DRAIN"


def test_nodes_that_never_answered_are_left_alone(program: ModuleType, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job(N2)}
    slurm.silent = {N2}
    look(program.Watcher(LIMIT), 2 * LIMIT)
    assert slurm.nodes[N2] == ["IDLE", ""]


def test_zero_checks_switch_only_the_setting_down_off(program: ModuleType, slurm: Slurm) -> None:
    watcher = program.Watcher(0)
    look(watcher)
    slurm.jobs = {"7": Job(N2), "8": Job("", "PENDING", "BeginTime", restarts=1)}
    slurm.silent = {N2}
    look(watcher, 5)
    assert slurm.nodes[N2] == ["IDLE", ""]
    assert slurm.jobs["8"].reason == "None"


def test_more_nodes_and_load_allow_more_misses(
    watcher: Any, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher.nodes = dict.fromkeys(map(str, range(128)))
    assert watcher.limit_now() == LIMIT + 2
    monkeypatch.setattr(
        program.os, "getloadavg", lambda: (8.0 * (program.os.cpu_count() or 1), 0.0, 0.0)
    )
    assert watcher.limit_now() == LIMIT + 4


def test_drained_node_keeps_its_reason(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    slurm.silent = {N2}
    slurm.nodes[N2] = ["MIXED+DRAIN", FAN]
    look(watcher, LIMIT)
    assert slurm.nodes[N2] == ["DOWN", FAN]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("DOWN+DRAIN+NOT_RESPONDING", "clusterctl watcher: no answer for 3 s"),
        ("DOWN", "Not responding"),
        ("IDLE+DRAIN", "Duplicate jobid"),
    ],
)
def test_node_that_answers_again_is_fenced_then_resumed(
    watcher: Any, program: ModuleType, slurm: Slurm, state: str, reason: str
) -> None:
    slurm.nodes[N2] = [state, reason]
    slurm.without_slurmd = {N2}
    look(watcher)
    assert slurm.nodes[N2] == [state, reason]
    slurm.without_slurmd = set()
    slurm.unkillable = {N2}
    look(watcher)
    assert "DRAIN" in slurm.nodes[N2][0]
    slurm.unkillable = set()
    look(watcher, program.AGAIN - 1)
    assert slurm.fenced == [(N2, "all")]
    look(watcher)
    assert slurm.nodes[N2] == ["IDLE", ""]
    assert slurm.fenced == [(N2, "all")] * 2


@pytest.mark.parametrize(
    ("hours", "lost", "drained"), [(1, {N2}, True), (25, {N2}, False), (1, {N2, N3}, False)]
)
def test_node_that_is_lost_twice_in_a_day_stays_drained(
    watcher: Any, slurm: Slurm, hours: int, lost: set[str], drained: bool
) -> None:
    """Nodes that are lost together have a common cause, such as a switch."""
    for _ in range(2):
        assert slurm.nodes[N2] == ["IDLE", ""]
        slurm.jobs = {"7": Job("t-[1-2]"), "8": Job(N3)}
        slurm.silent = lost
        look(watcher, LIMIT)
        slurm.silent = set()
        look(watcher)
        slurm.now += hours * 3600
    state, reason = slurm.nodes[N2]
    assert ("DRAIN" in state, reason.startswith("clusterctl: "), "jobs 7" in reason) == 3 * (
        drained,
    )
    look(watcher, 20)
    assert slurm.fenced.count((N2, "all")) == 2
    assert slurm.nodes[N2] == [state, reason]


def test_node_is_not_blamed_while_another_has_just_become_silent(
    watcher: Any, slurm: Slurm
) -> None:
    """A switch that fails does not silence all its nodes within the same second."""
    for _ in range(2):
        slurm.jobs = {"7": Job("t-[1-2]"), "8": Job(N3)}
        slurm.silent = {N2}
        look(watcher, LIMIT - 1)
        slurm.silent = {N2, N3}
        look(watcher)
        slurm.silent = set()
        look(watcher, 2)
    assert slurm.nodes[N2] == ["IDLE", ""]


def test_up_may_resume_a_node_that_stays_drained(
    watcher: Any, program: ModuleType, slurm: Slurm
) -> None:
    reason = f"{program.BAD}26 Nov 20:00 (jobs 7)"
    assert (
        availability_of(NodeInfo(N2, "down+drain", reason, 1, 1, "", (), "root"))
        is Availability.OUT
    )
    slurm.nodes[N2], slurm.unkillable = ["DOWN+DRAIN", reason], {N2}
    look(watcher, program.AGAIN + 1)
    assert slurm.nodes[N2] == ["DOWN+DRAIN", reason]
    assert slurm.fenced == [(N2, "all")] * 2
    slurm.unkillable = set()
    look(watcher, 2 * program.AGAIN)
    assert slurm.fenced == [(N2, "all")] * 3
    slurm.nodes[N2] = ["IDLE", ""]
    look(watcher, 2 * program.AGAIN)
    assert slurm.nodes[N2] == ["IDLE", ""]
    assert slurm.fenced == [(N2, "all")] * 3
    slurm.jobs = {"7": Job(N2)}
    slurm.silent = {N2}
    look(watcher, LIMIT)
    assert slurm.nodes[N2][0] == "DOWN+DRAIN"
    slurm.silent = set()
    look(watcher)
    assert slurm.nodes[N2] == ["IDLE", ""]
    assert slurm.fenced == [(N2, "all")] * 4


@pytest.mark.parametrize(
    ("state", "fenced"),
    [("MIXED+DRAIN", []), ("ALLOCATED+DRAIN", []), ("IDLE+COMPLETING+DRAIN", [(N2, "all")])],
)
def test_jobs_that_started_on_a_returned_node_are_not_killed(
    watcher: Any, slurm: Slurm, state: str, fenced: list[tuple[str, str]]
) -> None:
    slurm.nodes[N2] = ["DOWN", "Not responding"]
    slurm.once_drained = {N2: state}
    look(watcher)
    assert slurm.nodes[N2] == ["IDLE", ""]
    assert slurm.fenced == fenced


def test_nodes_that_return_are_fenced_together(
    watcher: Any, program: ModuleType, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.nodes |= {N1: ["DOWN", "Not responding"], N2: ["DOWN", "Not responding"]}
    calls = []

    def fence(nodes: Any, *jobs: str) -> list[bool]:
        calls.append(({node.name for node in nodes}, jobs))
        return [node.name == N1 for node in nodes]

    monkeypatch.setattr(program.slurm, "fence", fence)
    look(watcher)
    assert calls == [({N1, N2}, ("all",))]
    assert [slurm.nodes[name][0] for name in (N1, N2)] == ["IDLE", "DOWN+DRAIN+DRAIN"]


def test_fence_request_differs_for_each_node(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program on a node could pass a request for all nodes on."""
    with ExitStack() as stack:
        pairs = {f"10.0.0.{i}": socket.socketpair() for i in (1, 2)}
        for _, far in pairs.values():
            stack.enter_context(far).sendall(b"ok\n")
        monkeypatch.setattr(program.slurm, "ask", lambda *argv: argv[-1])
        monkeypatch.setattr(
            program.slurm.socket, "create_connection", lambda to, _: pairs[to[0]][0]
        )
        nodes = [program.Node(N1, "10.0.0.1", "IDLE"), program.Node(N2, "10.0.0.2", "IDLE")]
        assert program.slurm.fence(nodes, "7", "8") == [True, True]
        requests = [far.recv(100) for _, far in pairs.values()]
    assert requests == [b"fence t-1 7 8", b"fence t-2 7 8"]


@pytest.mark.parametrize("reason", [FAN, "clusterctl: the machine shuts down"])
def test_node_that_is_down_for_another_reason_stays(
    watcher: Any, slurm: Slurm, reason: str
) -> None:
    slurm.nodes[N2] = ["DOWN", reason]
    look(watcher, 2)
    assert slurm.nodes[N2] == ["DOWN", reason]


def test_processes_on_other_nodes_are_killed_after_the_grace_time(
    watcher: Any, program: ModuleType, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have time to save their work if the node was shut down."""
    slurm.jobs = {"7": Job("t-[1-2]"), "8": Job("t-[1-2]")}
    look(watcher)
    slurm.nodes[N2] = ["DOWN", "clusterctl: the machine shuts down"]
    slurm.jobs = {"7": Job(N1, "COMPLETING"), "8": Job(N1, "COMPLETING", script="#!/bin/bash\n")}
    look(watcher)
    assert slurm.fenced == []
    monkeypatch.setattr(program, "GRACE_S", 0.0)
    begun = watcher.completing["7"]
    look(watcher)
    assert slurm.fenced == [(N1, "7")]
    # Otherwise, jobs would be read more often for as long as the job does not end.
    assert watcher.completing["7"] == begun


def test_next_kill_of_a_job_waits_as_long_as_the_first(
    watcher: Any, program: ModuleType, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.jobs = {"7": Job("t-[1-2]")}
    look(watcher)
    slurm.nodes[N2] = ["DOWN", "clusterctl: the machine shuts down"]
    slurm.jobs = {"7": Job(N1, "COMPLETING")}
    look(watcher)
    watcher.completing["7"] -= program.GRACE_S
    look(watcher, 2)
    assert slurm.fenced == [(N1, "7")]


def test_job_that_ends_without_a_lost_node_is_not_killed(
    watcher: Any, program: ModuleType, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "GRACE_S", 0.0)
    slurm.jobs = {"7": Job("t-[1-2]")}
    look(watcher)
    slurm.jobs = {"7": Job(N1, "COMPLETING")}
    look(watcher, 3)
    assert slurm.fenced == []


def test_job_that_started_again_meanwhile_is_not_killed(
    watcher: Any, program: ModuleType, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "GRACE_S", 0.0)
    slurm.jobs = {"7": Job("t-[1-2]")}
    look(watcher)
    slurm.nodes[N2] = ["DOWN", "clusterctl: the machine shuts down"]
    slurm.jobs = {"7": Job(N1, "COMPLETING")}
    watcher.read_jobs()
    slurm.jobs = {"7": Job(N1)}
    watcher.fence_other_nodes()
    assert slurm.fenced == []


@pytest.mark.parametrize(
    ("job", "starts"),
    [
        (Job("", "PENDING", "BeginTime", restarts=1), True),
        (Job("", "PENDING", "BeginTime", restarts=0), False),
        (Job("", "PENDING", "BeginTime", restarts=1, starts_in_s=3600), False),
        (Job("", "PENDING", "Resources", restarts=1), False),
    ],
)
def test_watcher_starts_requeued_jobs_at_once(
    watcher: Any, slurm: Slurm, job: Job, starts: bool
) -> None:
    slurm.jobs = {"7": job}
    look(watcher, 3)
    updates = [call for call in slurm.calls if call.startswith("scontrol update")]
    assert [call.split()[2:] for call in updates] == (
        [["jobid=7", "starttime=now"]] if starts else []
    )
    # A job that is not to start is looked at once.
    assert sum("show job" in call for call in slurm.calls) <= 1


@pytest.mark.parametrize(("delay", "fenced"), [(30, [(N1, "7"), (N2, "7")]), (9, [])])
def test_remaining_processes_are_killed_before_a_job_starts(
    watcher: Any, slurm: Slurm, delay: int, fenced: list[tuple[str, str]]
) -> None:
    """Slurm does not know of processes without slurmstepd. But a late request would kill the new
    start.
    """
    slurm.jobs = {"7": Job("t-[1-2]")}
    look(watcher)
    for reason in ("None", "BeginTime"):
        slurm.jobs = {"7": Job("", "PENDING", reason, restarts=1, starts_in_s=delay)}
        assert slurm.fenced == []
        watcher.look_at_jobs()
    assert sorted(slurm.fenced) == fenced
    assert slurm.jobs["7"].reason == "None"
    slurm.jobs["7"].reason = "BeginTime"
    watcher.look_at_jobs()
    assert sorted(slurm.fenced) == fenced


def test_job_does_not_start_in_the_second_in_which_it_ended(watcher: Any, slurm: Slurm) -> None:
    """slurmd would reject it: "Job credential revoked"."""
    slurm.jobs = {"7": Job("", "PENDING", "BeginTime", restarts=1)}
    ended = int(slurm.now)
    watcher.look_at_jobs()
    assert int(slurm.now) > ended


def test_requeued_jobs_share_one_wait(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {str(i): Job("", "PENDING", "BeginTime", restarts=1) for i in range(3)}
    begun = slurm.now
    watcher.look_at_jobs()
    assert {job.reason for job in slurm.jobs.values()} == {"None"}
    assert int(slurm.now) == int(begun) + 1


def test_tasks_of_arrays_that_never_started_wait(watcher: Any, slurm: Slurm) -> None:
    """scontrol would show all tasks of the array for such an id."""
    slurm.jobs = {"7_[2-4]": Job("", "PENDING", "BeginTime", restarts=1)}
    look(watcher)
    assert not any("show job" in call for call in slurm.calls)
    assert slurm.jobs["7_[2-4]"].reason == "BeginTime"


def test_expand_is_repeated_after_a_failure(program: ModuleType, slurm: Slurm) -> None:
    slurm.broken = "hostnames"
    assert program.slurm.expand("t-[1-2]") == ()
    slurm.broken = ""
    assert program.slurm.expand("t-[1-2]") == (N1, N2)
    assert program.slurm.expand("t-1,t-3") == (N1, N3)


def test_watcher_reads_job_text_that_is_not_utf8(program: ModuleType) -> None:
    assert program.slurm.ask("printf", r"a\377") == "a\ufffd"


def test_systemd_restarts_the_watcher_always() -> None:
    tasks = (data_folder("ansible") / "roles/slurmctld/tasks/configure.yml").read_text()
    unit = tasks.partition("[Unit]")[2].partition("[Service]")[0]
    assert "StartLimitIntervalSec=0" in unit.split()


def test_watcher_does_nothing_while_slurm_does_not_answer(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job(N2)}
    slurm.silent = {N2}
    look(watcher)
    slurm.jobs = {}
    slurm.nodes = {}
    slurm.calls.clear()
    look(watcher, 2 * LIMIT)
    assert slurm.fenced == []
    assert {call.partition(" ")[0] for call in slurm.calls} <= {"squeue", "scontrol"}
    assert not [call for call in slurm.calls if "update" in call or "requeue" in call]


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port on which the kernel accepts no further connection, like that of a lost host."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def test_refused_connection_is_an_answer(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(program.slurm, "ALIVE_PORT", unused.getsockname()[1])
        assert program.slurm.silent_nodes([program.Node(N1, "127.0.0.1", "IDLE")], 20.0) == set()


def test_connection_without_an_answer_is_a_miss(
    program: ModuleType, full_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program.slurm, "ALIVE_PORT", full_port)
    nodes = [program.Node(N1, "127.0.0.1", "IDLE"), program.Node(N2, "127.0.0.2", "IDLE")]
    # Nothing listens on the second address, so its kernel refuses.
    assert program.slurm.silent_nodes(nodes, 0.2) == {N1}


def test_job_is_requeued_if_slurmctld_has_forgotten_its_end(watcher: Any, slurm: Slurm) -> None:
    """A killed slurmctld starts with a state that is some seconds old. It sees its error after
    minutes.
    """
    slurm.jobs = {
        "7": Job("t-[1-2]"),
        "8": Job(N2),
        "9": Job(N2, start=1795714490),
        "10": Job(N2, script="#!/bin/bash\n"),
        "11": Job(N3, host=N3),
        "12": Job(N1, host=N1),
    }
    slurm.lists, slurm.boot, slurm.silent = {N2: ["8"], N3: None, N1: []}, int(slurm.now), {N1}
    look(watcher)
    slurm.now += 9
    look(watcher)
    assert not any("requeue" in call for call in slurm.calls)
    slurm.now += 1
    look(watcher, 2)
    assert [call for call in slurm.calls if "requeue" in call] == ["scontrol requeue 7"]
    slurm.jobs["7"].state = "RUNNING"
    slurm.boot = int(slurm.now)
    slurm.now += 10
    look(watcher)
    assert slurm.calls.count("scontrol requeue 7") == 2


def test_nodes_register_so_that_slurm_ends_a_job_that_may_not_restart(
    watcher: Any, slurm: Slurm
) -> None:
    """Slurm ends jobs that are missing on a registering node only 60 s after its own start."""
    slurm.jobs = {"10": Job(N2, script="#!/bin/bash\n")}
    slurm.lists, slurm.boot = {N2: []}, int(slurm.now)
    slurm.now += 10
    look(watcher)
    slurm.now += 69
    look(watcher)
    assert "scontrol reconfigure" not in slurm.calls
    slurm.now += 1
    look(watcher, 3)
    assert slurm.calls.count("scontrol reconfigure") == 1
    assert "scontrol requeue 10" not in slurm.calls


def test_nodes_do_not_register_again_if_no_job_is_missing(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"7": Job("t-[1-2]"), "8": Job(N2)}
    slurm.lists, slurm.boot = {N2: ["8"], N1: ["7"]}, int(slurm.now)
    for seconds in (10, 80):
        slurm.now += seconds
        look(watcher)
    assert "scontrol reconfigure" not in slurm.calls


def test_node_without_an_answer_about_its_jobs_is_asked_again(watcher: Any, slurm: Slurm) -> None:
    slurm.jobs = {"11": Job(N3, host=N3)}
    slurm.boot = int(slurm.now)
    slurm.now += 10
    look(watcher)
    assert "scontrol requeue 11" not in slurm.calls
    slurm.lists = {N3: []}
    look(watcher, 2)
    assert slurm.calls.count("scontrol requeue 11") == 1


def test_job_that_ends_while_nodes_are_asked_is_not_requeued(
    watcher: Any, program: ModuleType, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(node: Any) -> tuple[str, list[str]]:
        slurm.jobs["7"].state = "COMPLETING"
        return node.name, []

    monkeypatch.setattr(program.slurm, "request_list", answer)
    slurm.jobs, slurm.boot = {"7": Job(N2)}, int(slurm.now) - 10
    look(watcher)
    assert not any("requeue" in call for call in slurm.calls)


@pytest.mark.parametrize(
    ("answer", "jobs"),
    [("jobs 7 8", ["7", "8"]), ("jobs", []), ("ok", None), ("no", None), ("", None)],
)
def test_request_list_of_an_older_fence_program_is_unknown(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: str, jobs: list[str] | None
) -> None:
    """The program of an earlier version answers `ok`."""
    monkeypatch.setattr(
        program.slurm, "request", lambda words, _: answer.split() if words == "list" else []
    )
    assert program.slurm.request_list(program.Node(N1, "10.0.0.1", "IDLE")) == (N1, jobs)
