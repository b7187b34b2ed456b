"""The verification job: all idle nodes take part, and an error names the faulty hosts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from clusterctl.cluster.verify import (
    FabricLink,
    Verification,
    credential_findings,
    doctor_request,
    drift_findings,
    examine_cluster,
    find_obstacles,
    reject_unfit_nodes,
    slurm_findings,
    trial_findings,
    wait_until_ready,
)
from clusterctl.cluster.verify import run_verification as verify_by
from clusterctl.errors import (
    Failure,
    MachineError,
    NotUpError,
    UnreachableError,
    UsageError,
    VerifyError,
)
from clusterctl.hosts.checks import DoctorReport, Finding
from clusterctl.hosts.probe import HostFacts, HostReport, ProbeRequest, Wanted
from clusterctl.providers.base import Provider
from clusterctl.scheduler.admin import SlurmNodes
from clusterctl.scheduler.base import NodeInfo
from clusterctl.scheduler.slurm.availability import find_unusable_nodes, kept_out, out_text
from clusterctl.spec.load import parse_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import HEALTH_PROGRAM, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from tests.support.inventories import inventory_of
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.support.scripted import Call, ScriptedTransport, Step, listed_nodes, queued
from tests.unit.hosts.test_doctor import WELL

NAMES = ("d-train-1", "d-train-2")
INVENTORY = inventory_of(*NAMES)


def verify(
    inventory: Inventory,
    controller: ScriptedTransport,
    nodes: Mapping[str, Transport] | None = None,
    *,
    prove: Callable[[Sequence[str]], None] = lambda _: None,
    reject_unreached: Callable[[], None] = lambda: None,
    timeout_s: float = 60,
) -> Verification:
    """Verify the nodes. Nodes without an entry in ``nodes`` lack nothing."""
    silent = {name: Node([report()]) for name in NAMES}
    hosts: dict[str, Transport] = {"d-ctl": controller, **silent, **(nodes or {})}
    return verify_by(
        inventory, hosts.__getitem__, NAMES, prove, reject_unreached, timeout_s=timeout_s
    )


def sinfo(reason: str = "no reason", by: str = "ada", **states: str) -> Step:
    facts = {"Reason": reason, "User": by, "CPUs": "2", "Memory": "2000"}
    return listed_nodes(
        *(
            {"NodeList": name.replace("_", "-"), "StateLong": state, **facts}
            for name, state in states.items()
        )
    )


def squeue(**jobs: str) -> Step:
    """Return the answer of squeue about pending jobs with these names, from job 7 on."""
    return queued(
        *(
            {"JobID": str(number), "Name": name, "State": "PENDING", "Reason": why}
            for number, (name, why) in enumerate(jobs.items(), start=7)
        )
    )


def running(*nodes: str, start: int, number: int = 7) -> Step:
    """Return the answer of squeue about a job that runs on these nodes. start: Unix seconds."""
    return queued(
        {
            "JobID": str(number),
            "Name": "train",
            "State": "RUNNING",
            "NodeList": ",".join(nodes),
            "StartTime": str(start),
        }
    )


NOW = Step(("date", "+%s"), "5000\n")
PS = ("ps", "-o", "etimes=", "-p", "1")


def booted(seconds_ago: int) -> Node:
    """Return a node that booted this long ago."""
    return Node([Step(PS, f"   {seconds_ago}\n")])


def facts(**changed: object) -> HostFacts:
    """Return the facts of a healthy host, except for these."""
    return HostFacts.model_validate(WELL | changed)


SRUN = ("sudo", "-n", "-H", "-u", "*", "timeout", "*", "*", "srun")


def report(*why: str) -> Step:
    """What a node lacks, as its health check reports it."""
    lacks = [{"code": "gpu-devices", "what": "x", "why": text, "fix": "y"} for text in why]
    return Step(("sudo", "-n", HEALTH_PROGRAM, "report"), json.dumps(lacks))


def srun(*hosts: str, ok: bool = True, size: int | None = None) -> Step:
    answer = {"ok": ok, "world_size": len(hosts) if size is None else size}
    return Step((*SRUN, *["*"] * 4, f"--nodelist={','.join(hosts)}", "..."), json.dumps(answer))


def alone(host: str, stderr: str = "") -> Step:
    good = srun(host)
    return Step(good.argv, "" if stderr else good.stdout, stderr, rc=1 if stderr else 0)


class InAnyOrder(ScriptedTransport):
    """A controller whose commands may come in any order, because single-host jobs run in parallel."""

    lock = threading.Lock()

    def _next(self, call: Call) -> Step:
        with self.lock:
            self.calls.append(call)
            step = next(step for step in self._steps if step.matches(call.argv))
            self._steps.remove(step)
        return step


class Node(InAnyOrder):
    """A node whose health program finds it healthy, or ``unhealthy``."""

    unhealthy = False

    def _next(self, call: Call) -> Step:
        if call.argv == ("sudo", "-n", HEALTH_PROGRAM):
            return Step(call.argv, rc=1 if self.unhealthy else 0)
        return super()._next(call)


BOTH = sinfo(d_train_1="idle", d_train_2="idle")
TAKEN = "srun: error: Unable to allocate resources: Requested nodes are busy\n"


def test_verify_runs_a_job_across_all_idle_nodes() -> None:
    transport = ScriptedTransport([BOTH, srun(*NAMES)])
    proof = verify(INVENTORY, transport)
    assert (proof.verified, proof.busy) == (NAMES, ())
    assert transport.left == ()


@pytest.mark.parametrize(("port", "code"), [("mlx5_0:1 InfiniBand", None), ("", "fabric-unused")])
def test_verify_names_the_port_or_warns_that_mpi_used_none(port: str, code: str | None) -> None:
    job = srun(*NAMES)
    link = {"hosts": list(NAMES), "gb_per_s": 23.125, "port": port}
    answer = json.dumps({**json.loads(job.stdout), "link": link})
    proof = verify(INVENTORY, ScriptedTransport([BOTH, replace(job, stdout=answer)]))
    assert proof.link == FabricLink((NAMES[0], NAMES[1]), 23.125, port)
    assert (proof.link.notice.code if proof.link.notice else None) == code


def test_verify_of_nodes_without_a_fast_network_has_no_link() -> None:
    job = srun(*NAMES)
    answer = json.dumps({**json.loads(job.stdout), "link": {}})
    assert verify(INVENTORY, ScriptedTransport([BOTH, replace(job, stdout=answer)])).link is None


def test_verify_names_busy_nodes_and_leaves_them() -> None:
    states = sinfo(d_train_1="mixed", d_train_2="idle+planned")
    transport = ScriptedTransport([states, running(NAMES[0], start=4000), NOW, srun(NAMES[1])])
    proof = verify(INVENTORY, transport, {NAMES[0]: booted(1000)})
    assert (proof.verified, proof.busy) == (NAMES[1:], NAMES[:1])
    assert transport.left == ()


def test_busy_node_of_unknown_age_keeps_its_job() -> None:
    states = sinfo(d_train_1="allocated", d_train_2="allocated")
    silent = ScriptedTransport([Step(PS, stderr="no ps", rc=127)])
    transport = ScriptedTransport([states, running(*NAMES, start=1), NOW])
    assert verify(INVENTORY, transport, {NAMES[0]: silent, NAMES[1]: booted(5000)}).verified == ()
    assert transport.left == ()


def test_busy_node_with_a_fast_clock_keeps_its_job() -> None:
    """Only slurmctld's clock and the node's age are compared."""
    states = sinfo(d_train_1="allocated", d_train_2="idle")
    transport = ScriptedTransport([states, running(NAMES[0], start=4040), NOW, srun(NAMES[1])])
    # It booted at 4000, and its clock is 100 s fast.
    its_clock = Step(("date", "..."), "5100\n")
    by_its_clock = Step(("sh", "..."), "4100\n")
    fast = Node([Step(PS, "1000\n"), its_clock, by_its_clock])
    proof = verify(INVENTORY, transport, {NAMES[0]: fast})
    assert (proof.busy, proof.resumed) == (NAMES[:1], {})
    assert fast.left == (its_clock, by_its_clock)


AWAY = Step(
    ("sinfo", "..."),
    stderr="slurm_load_node error: Unable to contact slurm controller (connect failure)\n",
    rc=1,
)
SHOW = ("systemctl", "show", "slurmctld", "--property=ActiveState,NRestarts")
TAIL = ("sudo", "-n", "tail", "-n", "200", "/var/log/slurm/slurmctld.log")
FATAL = "[2026-11-27T21:40:01.123] fatal: "


def away_controller(state: str, log: str, then: Sequence[Step] = ()) -> ScriptedTransport:
    """Return a controller whose slurmctld does not answer. state: systemd's state of it. log: its
    log.
    """
    unit = Step(SHOW, state)
    tail = [Step(TAIL, log)] if log else []
    return ScriptedTransport([AWAY, unit, *tail, *then])


def wait(controller: ScriptedTransport, timeout_s: float = 60) -> Verification:
    slurm = SlurmNodes(controller, patience_s=0)
    return wait_until_ready(INVENTORY, NAMES, slurm, lambda _: controller, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("fatal", "in_fix"),
    [
        ("Incomplete job state save file, start with '-i' to ignore this.", "job_state.old"),
        ("Incomplete node data checkpoint file, start with '-i' to ignore this.", "node_state.old"),
        ("Unable to process configuration file", "slurmctld.log"),
    ],
)
def test_verify_slurmctld_that_ends_at_each_start_is_named_with_its_words(
    fatal: str, in_fix: str
) -> None:
    log = f"[2026-11-27T21:40:00.001] error: x\n{FATAL}older\n{FATAL}{fatal}\n"
    controller = away_controller("ActiveState=activating\nNRestarts=7\n", log)
    with rejected("not-ready/slurmctld", VerifyError) as caught:
        wait(controller)
    (failure,) = caught.value.failures
    assert (failure.host, failure.cause) == ("d-ctl", fatal)
    assert in_fix in (caught.value.fix or "")
    assert controller.left == ()


@pytest.mark.parametrize(
    ("state", "log"),
    [
        ("ActiveState=active\nNRestarts=9\n", ""),
        ("ActiveState=activating\nNRestarts=2\n", ""),
        ("ActiveState=activating\nNRestarts=9\n", "[2026-11-27T21:40:00.001] error: x\n"),
        ("", ""),
    ],
    ids=["runs", "starts", "no-fatal", "no-systemd"],
)
def test_verify_slurmctld_that_may_start_is_waited_for(state: str, log: str) -> None:
    controller = away_controller(state, log, [BOTH])
    assert wait(controller).verified == NAMES
    assert controller.left == ()


OUT = sinfo("clusterctl: rebooted while jobs ran", d_train_1="down", d_train_2="idle")
RESUME = Step(("scontrol", "update", f"nodename={NAMES[0]}", "state=resume"))
# The node has registered before it was resumed.
IN_SERVICE = Step(RESUME.argv, stderr="slurm_update error: Invalid node state specified\n", rc=1)


@pytest.mark.parametrize(
    "then",
    [[OUT, RESUME, BOTH], [BOTH], [OUT, IN_SERVICE, BOTH]],
    ids=["resumed", "registered", "race"],
)
def test_node_booted_after_its_job_started_goes_down_and_back(then: list[Step]) -> None:
    """Slurm has not noticed that the node was off: it shows the job as running, without a
    process.
    """
    busy = sinfo(d_train_1="allocated", d_train_2="idle")
    down = Step(
        ("scontrol", "update", f"nodename={NAMES[0]}", "state=down", "reason=clusterctl: *")
    )
    lost = running(NAMES[0], start=4000)
    transport = ScriptedTransport([busy, lost, NOW, down, *then, srun(*NAMES)])
    proof = verify(INVENTORY, transport, {NAMES[0]: booted(900)})
    assert (proof.verified, proof.busy) == (NAMES, ())
    assert "job 7," in proof.resumed[NAMES[0]]
    assert transport.left == ()


def test_node_given_up_by_slurm_gets_its_slurmd_restarted() -> None:
    """slurmd is restarted once; a node that stays down after that is an error."""
    given_up = sinfo("Not responding", "slurm", d_train_1="down*", d_train_2="idle")
    node = Node([Step(("sudo", "-n", "systemctl", "--no-block", "restart", "slurmd"))])
    transport = ScriptedTransport([given_up, given_up, BOTH, srun(*NAMES)])
    proof = verify(INVENTORY, transport, {NAMES[0]: node})
    assert proof.verified == NAMES
    assert node.left == ()
    assert "Not responding" in proof.resumed[NAMES[0]]


def test_node_that_a_users_job_took_meanwhile_counts_as_busy() -> None:
    late = Step((*SRUN, "..."), stderr=TAKEN, rc=1)
    busy = sinfo(d_train_1="allocated", d_train_2="idle")
    steps = [BOTH, late, busy, running(NAMES[0], start=4990), NOW, srun(NAMES[1])]
    proof = verify(INVENTORY, ScriptedTransport(steps), {NAMES[0]: booted(1000)})
    assert (proof.verified, proof.busy) == (NAMES[1:], NAMES[:1])


def test_node_that_started_its_part_too_late_gets_another_job() -> None:
    slow = Step((*SRUN, "..."), stderr=f"srun: error: {NAMES[0]}: Job credential expired\n", rc=1)
    transport = ScriptedTransport([BOTH, slow, BOTH, srun(*NAMES)])
    assert verify(INVENTORY, transport).verified == NAMES
    assert transport.left == ()


def test_nodes_that_slurm_never_gives_are_an_error() -> None:
    late = Step((*SRUN, "..."), stderr=TAKEN, rc=1)
    with rejected("not-ready/verification", VerifyError) as caught:
        blameless = alone(NAMES[0]), alone(NAMES[1])
        verify(INVENTORY, InAnyOrder([BOTH, late, BOTH, late, *blameless]))
    assert "busy" in caught.value.why


@pytest.mark.parametrize(
    ("states", "host", "cause"),
    [
        ({"d_train_1": "idle"}, NAMES[1], "does not know"),
        ({"d_train_1": "down*", "d_train_2": "idle"}, NAMES[0], "DOWN"),
        ({"d_train_1": "idle*", "d_train_2": "idle"}, NAMES[0], "NOT_RESPONDING"),
        ({"d_train_1": "unknown", "d_train_2": "idle"}, NAMES[0], "UNKNOWN"),
        (
            {"d_train_1": "idle", "d_train_2": "idle", "d_train_3": "idle"},
            "d-train-3",
            "removed node",
        ),
    ],
)
def test_node_that_is_not_right_is_named_with_the_cause(
    states: dict[str, str], host: str, cause: str
) -> None:
    away = ScriptedTransport(
        [Step(("sudo", "..."), error=UnreachableError("no route")) for _ in range(2)]
    )
    with rejected("not-ready/cluster", VerifyError) as caught:
        verify(INVENTORY, ScriptedTransport([sinfo(**states)]), {NAMES[0]: away}, timeout_s=-1)
    (failure,) = caught.value.failures
    assert (failure.host, failure.phase) == (host, "verify")
    assert cause in failure.cause


def test_node_whose_slurmd_ends_is_named_with_what_it_lacks() -> None:
    fatal = "slurmd has ended 7 times: can't stat gres.conf file /dev/nvidia0"
    node = ScriptedTransport([Step(("sudo", "-n", "systemctl", "...")), report(fatal)])
    states = sinfo(d_train_1="down*", d_train_2="idle")
    with rejected("not-ready/cluster", VerifyError) as caught:
        verify(INVENTORY, ScriptedTransport([states]), {NAMES[0]: node}, timeout_s=-1)
    (failure,) = caught.value.failures
    assert fatal in failure.cause
    assert failure.fix == "y"


def test_controller_without_slurmctld_is_named_with_what_it_lacks() -> None:
    full = "/var has 0 MiB free, but needs 200"
    controller = away_controller("ActiveState=active\nNRestarts=0\n", "", [report(full)])
    with rejected("not-ready/cluster", VerifyError) as caught:
        wait(controller, timeout_s=-1)
    (failure,) = caught.value.failures
    assert failure.host == "d-ctl"
    assert full in failure.cause
    assert failure.fix == "y"


def test_idle_node_that_lacks_something_is_drained_and_not_verified() -> None:
    """Its health program, which Slurm runs each minute, is run at once."""
    unhealthy = Node([])
    unhealthy.unhealthy = True
    lack = "clusterctl health: the shared folder /shared is not mounted"
    drained = sinfo(lack, "root", d_train_1="idle+drain", d_train_2="idle")
    proof = verify(
        INVENTORY, ScriptedTransport([BOTH, drained, srun(NAMES[1])]), {NAMES[0]: unhealthy}
    )
    assert proof.verified == NAMES[1:]
    assert lack in proof.drained[NAMES[0]]


@pytest.mark.parametrize(
    ("answer", "code", "cause"),
    [
        (["/dev/nvidia0 is missing"], "gpu-devices", "/dev/nvidia0"),
        ([], "node-unfit", "GPU 0: 97 C"),
    ],
    ids=["lacks it", "is well by now"],
)
def test_up_ends_with_what_nodes_lack_that_their_health_check_drained(
    answer: list[str], code: str, cause: str
) -> None:
    node = ScriptedTransport([report(*answer)])
    drained = {
        NAMES[0]: "drained by root: clusterctl health: GPU 0: 97 C",
        NAMES[1]: "drained by ada: noisy disk",
    }
    with rejected("not-ready/nodes", VerifyError) as caught:
        reject_unfit_nodes(drained, {NAMES[0]: node}.__getitem__)
    (failure,) = caught.value.failures
    assert (failure.host, failure.about, cause in failure.cause) == (NAMES[0], code, True)


TOKENS = {name: f"MUNGE:{name}:" for name in ("d-ctl", *NAMES)}
DECODES = ("sh", "-c", "*", "sh")


def decodable(tokens: Mapping[str, str], decoded: Step) -> Sequence[Finding]:
    """Return the findings about credentials of hosts. decoded: the controller's step."""
    made = {host: facts(credential=token) for host, token in tokens.items()}
    hosts = {"d-ctl": ScriptedTransport([decoded])}
    return credential_findings(INVENTORY, hosts.__getitem__, DoctorReport((), made))


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("STATUS:          Success (0)", None),
        ("unmunge: Error: Invalid credential", "clusterctl up"),
        ("STATUS:          Expired credential (15)", "chronyc makestep"),
        ("STATUS:          Rewound credential (16)", "chronyc makestep"),
    ],
)
def test_doctor_has_the_controller_decode_a_credential_of_each_host(
    said: str, advice: str | None
) -> None:
    good = "STATUS:          Success (0)\n"
    decoded = Step((*DECODES, *TOKENS.values()), f"{good}{good}{said}\n")
    found = decodable(TOKENS, decoded)
    refused = [(one.host, condition(one)) for one in found]
    assert refused == ([(NAMES[1], "munge-refused")] if advice else [])
    assert all(advice in one.fix for one in found if advice)


def test_doctor_says_of_no_credential_that_it_is_right_which_was_not_decoded() -> None:
    decoded = Step((*DECODES, TOKENS["d-ctl"], TOKENS[NAMES[0]]), "one line\n")
    stopped = "munge: Error: Failed to access the socket"
    found = decodable(TOKENS | {NAMES[1]: stopped}, decoded)
    assert {one.why for one in found if one.host == NAMES[1]} == {stopped}
    assert codes_of(found) == {(name, "warning", "not-looked-at") for name in TOKENS}


def test_doctor_blames_no_node_if_munge_fails_on_the_controller() -> None:
    (one,) = decodable(TOKENS | {"d-ctl": ""}, Step(DECODES, ""))
    assert (one.host, condition(one)) == ("d-ctl", "not-looked-at")


def test_doctor_asks_for_nothing_that_changes_with_added_accounts() -> None:
    marks = ProbeRequest(
        files=("/etc/hosts",), accounting=(("user",),), units={"munge": ("/etc/passwd",)}
    )
    asked = doctor_request(ProbeRequest(host={"space": ("/",)}), marks)
    assert (asked.accounting, asked.units) == ((), {"munge": ()})
    assert (asked.files, asked.host) == (marks.files, {"space": ("/",)})


WRITTEN = {"file /etc/slurm/slurm.conf": "a1"}
LEFT = WRITTEN | {"unit munge": "running", "user slurm": "64030"}


def compared(
    root: Path,
    checksums: Mapping[str, Mapping[str, str]],
    inputs: str = "i1",
    here: str = "i1",
    new: Sequence[str] = (NAMES[1],),
) -> list[Finding]:
    """Return what doctor finds by comparing these hosts with what `up` wants there.

    root: folder for a workspace. inputs: the record's on the controller. here: those of the last `up`
    from this folder. new: hosts that no `up` has configured.
    """
    workspace = Workspace(root)
    workspace.create()
    workspace.configured.write_text(here)
    record = {"inputs": inputs, "by": "bob@lab", "people": {"user slurm": "64030"}}
    reports = {
        host: HostReport(
            None,
            marks,
            wanted=Wanted(
                marks={} if host in new else WRITTEN, cluster=record if host == "d-ctl" else {}
            ),
        )
        for host, marks in checksums.items()
    }
    report = DoctorReport((), {}, reports)
    return [*drift_findings(INVENTORY, workspace, report)]


def codes_of(found: Sequence[Finding]) -> set[tuple[str, str, str]]:
    return {(one.host, one.level, condition(one)) for one in found}


def test_doctor_names_hosts_that_are_not_as_up_left_them(tmp_path: Path) -> None:
    now = {"file /etc/slurm/slurm.conf": "b2", "unit munge": "stopped", "user slurm": "missing"}
    (found,) = compared(tmp_path, {"d-ctl": now, NAMES[0]: LEFT})
    assert (found.host, found.level, condition(found)) == ("d-ctl", "error", "drifted")
    assert all(text in found.why for text in ("/etc/slurm/slurm.conf", "munge", "slurm"))


def test_doctor_names_the_up_of_another_administrator(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, {"d-ctl": LEFT}, here="i0")
    assert (found.host, found.level, condition(found)) == ("d-ctl", "warning", "another-up")
    assert "bob@lab" in found.why


def test_doctor_compares_no_host_that_up_has_yet_to_finish(tmp_path: Path) -> None:
    new = {"d-ctl": LEFT, NAMES[1]: LEFT}
    assert codes_of(compared(tmp_path / "new", new)) == {(NAMES[1], "error", "not-configured")}
    killed = compared(tmp_path / "killed", new, inputs="")
    assert codes_of(killed) == {("d-ctl", "error", "up-unfinished")}
    root = tmp_path / "running"
    with Workspace(root).lock("up", wait_s=0, waiting=print):
        found = compared(root, new)
    assert codes_of(found) == {("d-ctl", "warning", "not-looked-at")}


def doctor(
    nodes: Step, jobs: Step, *, age_s: int = 9000, **found: Finding
) -> dict[str, tuple[str, str]]:
    """Return host -> level and code of what Slurm reports, of hosts that have booted ``age_s`` ago.

    found: earlier findings.
    """
    hosts: dict[str, Transport] = {
        "d-ctl": ScriptedTransport([nodes, jobs, NOW]),
        **{name: booted(age_s) for name in NAMES},
    }
    report = DoctorReport(tuple(found.values()), dict.fromkeys(hosts, facts()))
    findings = slurm_findings(INVENTORY, hosts.__getitem__, report)
    return {each.host: (each.level, condition(each)) for each in findings}


ALLOCATED = sinfo(d_train_1="allocated", d_train_2="allocated")


@pytest.mark.parametrize(("age_s", "lost"), [(60, NAMES), (9000, ())])
def test_doctor_names_nodes_that_booted_while_their_job_ran(
    age_s: int, lost: Sequence[str]
) -> None:
    found = doctor(ALLOCATED, running(*NAMES, start=1000), age_s=age_s)
    assert found == dict.fromkeys(lost, ("error", "job-lost"))


@pytest.mark.parametrize(
    ("state", "reason", "by", "found"),
    [
        ("down*", "Not responding", "slurm", ("error", "node-out")),
        ("idle*", "", "", ("error", "node-out")),
        ("idle+drain", "Kill task failed", "root", ("error", "node-out")),
        ("idle+drain", "noisy disk", "ada", ("warning", "node-drained")),
        ("idle+drain", "clusterctl health: no room", "root", ("warning", "node-drained")),
    ],
)
def test_doctor_says_of_no_node_that_it_is_well_which_slurm_does_not_use(
    state: str, reason: str, by: str, found: tuple[str, str]
) -> None:
    nodes = sinfo(reason, by, d_train_1="idle", d_train_2=state)
    assert doctor(nodes, queued()) == {NAMES[1]: found}
    known = Finding(NAMES[1], "error", "munge-failed", "", "", "")
    assert doctor(nodes, queued(), known=known) == {}


def test_doctor_says_that_slurm_does_not_answer_unless_it_has_the_reason() -> None:
    silent = Step(("sinfo", "..."), stderr="slurm_load_partitions: Unable to contact slurm", rc=1)
    ((host, (level, _)),) = doctor(silent, queued()).items()
    assert (host, level) == ("d-ctl", "error")
    known = Finding("d-ctl", "error", "disk-full", "", "", "")
    assert doctor(silent, queued(), known=known) == {}


RECORD = Step(("sudo", "-n", "python3", "..."))


def tried(
    *steps: Step,
    prove: Callable[[Sequence[str]], None] = lambda _: None,
    hosts: Sequence[str] = ("d-ctl", *NAMES),
    **found: Finding,
) -> dict[str | None, tuple[str, str]]:
    """Return host -> level and code of what the trial of `doctor` finds on the nodes.

    steps: the commands to Slurm. hosts: those that are examined. found: earlier findings.
    """
    tries = any("srun" in step.argv and "busy" not in step.stderr for step in steps)
    controller = ScriptedTransport([*steps, *([RECORD] if tries else [])])
    report = DoctorReport(tuple(found.values()), dict.fromkeys(hosts, facts()))
    findings = trial_findings(INVENTORY, lambda _: controller, report, prove)
    assert controller.left == ()
    return {each.host: (each.level, condition(each)) for each in findings}


IDLE = sinfo(d_train_1="idle", d_train_2="idle")


def test_doctor_tries_a_job_on_idle_nodes_and_says_where_it_tried_none() -> None:
    assert tried(IDLE, srun(*NAMES)) == {}
    half = sinfo(d_train_1="idle", d_train_2="mixed")
    assert tried(half, srun(NAMES[0])) == {NAMES[1]: ("warning", "not-looked-at")}
    assert tried(ALLOCATED) == dict.fromkeys(NAMES, ("warning", "not-looked-at"))
    taken = Step((*SRUN, "..."), stderr="srun: error: Requested nodes are busy", rc=1)
    assert tried(IDLE, taken) == dict.fromkeys(NAMES, ("warning", "not-looked-at"))
    silent = Step(("sinfo", "..."), stderr="slurm_load_partitions: Unable to contact slurm", rc=1)
    assert tried(silent) == dict.fromkeys(NAMES, ("warning", "not-looked-at"))


def test_doctor_of_one_node_tries_it() -> None:
    assert tried(IDLE, srun(NAMES[1]), hosts=NAMES[1:]) == {}


def test_doctor_names_the_node_on_which_the_job_fails() -> None:
    failed = json.dumps({"ok": False, "failures": [{"host": NAMES[1], "cause": "wrong sums"}]})
    job = Step((*SRUN, "..."), failed, rc=1)
    assert tried(IDLE, job) == {NAMES[1]: ("error", "trial-failed")}


def test_doctor_names_the_node_on_which_the_users_part_fails() -> None:
    def prove(_: Sequence[str]) -> None:
        failure = Failure("host-unfit", "mpirun: Permission denied", NAMES[0], "verify")
        raise VerifyError("jobs of ada would fail", about="job-user", failures=(failure,))

    assert tried(IDLE, srun(*NAMES), prove=prove) == {NAMES[0]: ("error", "trial-failed")}


def test_doctor_tries_nothing_where_a_cause_is_known() -> None:
    known = Finding(NAMES[1], "error", "drifted", "", "", "")
    assert tried(IDLE, srun(NAMES[0]), known=known) == {}
    drained = sinfo("noisy disk", "ada", d_train_1="idle", d_train_2="idle+drain")
    said = Finding(NAMES[1], "warning", "node-drained", "", "", "")
    assert tried(drained, srun(NAMES[0]), said=said) == {}
    assert tried(known=Finding("d-ctl", "error", "disk-full", "", "", "")) == {}


def test_up_accepts_nodes_that_a_person_drained() -> None:
    reject_unfit_nodes({NAMES[0]: "drained by ada: noisy disk"}, {}.__getitem__)


def test_node_that_a_person_drained_is_left_and_named() -> None:
    states = sinfo("noisy disk", "ada", d_train_1="idle+drain", d_train_2="idle")
    proof = verify(INVENTORY, ScriptedTransport([states, srun(NAMES[1])]))
    assert proof.verified == NAMES[1:]
    assert proof.drained.keys() == {"d-train-1"}
    assert proof.drained["d-train-1"].endswith("ada: noisy disk")
    assert not proof.resumed


@pytest.mark.parametrize(
    ("state", "reason", "by"),
    [
        ("idle+drain", "Low RealMemory", "slurm"),
        ("idle+drain", "Kill task failed", "root"),
        ("idle+drain", "clusterctl: the cluster changes", "clusterctl"),
        ("down", "Not responding", "slurm"),
    ],
)
def test_node_that_slurm_gave_up_is_resumed_and_named(state: str, reason: str, by: str) -> None:
    states = sinfo(reason, by, d_train_1=state, d_train_2="idle")
    resume = Step(("scontrol", "update", "nodename=d-train-1", "state=resume"))
    proof = verify(INVENTORY, ScriptedTransport([states, resume, BOTH, srun(*NAMES)]))
    assert proof.verified == NAMES
    assert reason in proof.resumed[NAMES[0]]


def test_jobs_that_slurm_held_for_a_nodes_sake_wait_again() -> None:
    why = "launch failure limit exceeded requeued held"
    held = squeue(held=why, waits="Priority", by_its_owner="JobHeldUser", cancelled_by_now=why)
    gone = Step(
        ("scontrol", "release", "10"), stderr="Job/step already completing or completed", rc=1
    )
    transport = ScriptedTransport([held, Step(("scontrol", "release", "7")), gone])
    assert SlurmNodes(transport).release_held_jobs() == ("7",)
    assert transport.left == ()
    assert SlurmNodes(ScriptedTransport([squeue(waits="Priority")])).release_held_jobs() == ()


def test_node_drained_again_after_resume_raises_with_reason() -> None:
    states = sinfo("Low RealMemory", "slurm", d_train_1="idle+drain", d_train_2="idle")
    resume = Step(("scontrol", "..."))
    with rejected("not-ready/cluster", VerifyError) as caught:
        verify(INVENTORY, ScriptedTransport([states, resume, states]), timeout_s=0.1)
    assert "d-train-1" in caught.value.why


@pytest.mark.parametrize(
    "answer",
    [
        srun(*NAMES, ok=False),
        srun(*NAMES, size=1),
        Step((*SRUN, "..."), "[]"),
        Step((*SRUN, "..."), "no JSON"),
        Step((*SRUN, "..."), json.dumps({"ok": True, "world_size": 2}), rc=1),
        Step((*SRUN, "..."), rc=1),
    ],
)
def test_verify_refuses_any_other_answer(answer: Step) -> None:
    blameless = alone(NAMES[0]), alone(NAMES[1])
    with rejected("not-ready/verification", VerifyError) as caught:
        verify(INVENTORY, InAnyOrder([BOTH, answer, *blameless]))
    assert [failure.host for failure in caught.value.failures] == list(NAMES)


def test_verify_names_hosts_that_the_job_reports() -> None:
    found = {"rank": 1, "host": "d-train-2", "cause": "3 of 8 sums are wrong"}
    answer = json.dumps({"ok": False, "world_size": 2, "failures": [found]})
    with pytest.raises(VerifyError) as caught:
        verify(INVENTORY, ScriptedTransport([BOTH, Step((*SRUN, "..."), answer, rc=1)]))
    assert [failure.host for failure in caught.value.failures] == [NAMES[1]]
    assert caught.value.why.startswith("d-train-2: 3 of 8")


@pytest.mark.parametrize(
    ("ok", "code"), [(True, "host-unfit/job-user"), (False, "not-ready/verification")]
)
def test_failed_proof_of_the_job_user_comes_after_a_failed_job(*, ok: bool, code: str) -> None:
    def prove(nodes: Sequence[str]) -> None:
        raise VerifyError(f"no home on {nodes[1]}", code="host-unfit/job-user")

    job = Step((*SRUN, "..."), srun(*NAMES, ok=ok).stdout, rc=0 if ok else 1)
    blameless = alone(NAMES[0]), alone(NAMES[1])
    with rejected(code, VerifyError):
        verify(INVENTORY, InAnyOrder([BOTH, job, *blameless]), prove=prove)


def test_verify_of_many_failed_hosts_shows_eight_causes() -> None:
    found = [{"host": f"d-train-{n}", "cause": f"sum {n} is wrong"} for n in range(1, 21)]
    answer = json.dumps({"ok": False, "world_size": 2, "failures": found})
    with pytest.raises(VerifyError) as caught:
        verify(INVENTORY, ScriptedTransport([BOTH, Step((*SRUN, "..."), answer, rc=1)]))
    assert caught.value.what.endswith("d-train-[1-20]")
    assert caught.value.why.startswith("d-train-20: sum 20 ")
    assert "; d-train-13: sum 13 " in caught.value.why
    assert caught.value.why.endswith(" 12 more causes")
    assert len(caught.value.failures) == 20


HUNG = Step((*SRUN, "..."), stderr="srun: error: task 0: Exited with exit code 124", rc=124)


def test_nodes_that_do_not_reach_each_other_are_the_cause() -> None:
    def reject() -> None:
        raise VerifyError("hosts can't reach each other", code="network")

    transport = ScriptedTransport([BOTH, HUNG])
    with pytest.raises(VerifyError) as caught:
        verify(INVENTORY, transport, reject_unreached=reject)
    assert caught.value.code == "network"


def test_node_that_fails_by_itself_is_the_cause() -> None:
    transport = InAnyOrder(
        [BOTH, HUNG, alone(NAMES[0]), alone(NAMES[1], "No module named 'numpy'")]
    )
    with pytest.raises(VerifyError) as caught:
        verify(INVENTORY, transport)
    assert caught.value.why.endswith("'numpy'")
    assert "d-train-2: " in caught.value.why
    assert [failure.host for failure in caught.value.failures] == [NAMES[1]]


def test_verify_of_a_hung_job_names_the_time_limit() -> None:
    transport = InAnyOrder([BOTH, HUNG, alone(NAMES[0]), alone(NAMES[1])])
    with pytest.raises(VerifyError) as caught:
        verify(INVENTORY, transport)
    assert "in time" in caught.value.why


def test_verify_leaves_out_the_advice_of_mpirun() -> None:
    rule = "-" * 74
    message = (
        "ada@10.0.0.4: Permission denied (publickey).\n"
        f"{rule}\n"
        "ORTE was unable to\n"
        "  start.\n"
        f"{rule}\n"
    )
    denied = Step((*SRUN, "..."), stderr=message, rc=255)
    with pytest.raises(VerifyError) as caught:
        verify(INVENTORY, InAnyOrder([BOTH, denied, alone(NAMES[0]), alone(NAMES[1])]))
    assert caught.value.why.endswith("Permission denied (publickey).")


def test_nodes_that_a_person_wants_out_are_no_fault() -> None:
    def node(name: str, reason: str, by: str) -> NodeInfo:
        return NodeInfo(name, "idle+drain", reason, 2, 2000, "", (), reason_by=by)

    nodes = [node("n1", "noisy disk", "ada"), node("n2", "clusterctl health: no room", "root")]
    out = kept_out([*nodes, node("n3", "Kill task failed", "root")])
    assert [*out] == ["n1"]
    assert "ada: noisy disk" in out_text(out)
    assert out_text({}) == ""


def test_unusable_nodes_are_listed_unless_an_admin_drained_them() -> None:
    def node(shown: str, reason: str = "", by: str = "") -> NodeInfo:
        return NodeInfo(shown, shown, reason, 1, 1, "", (), by)

    nodes = [
        *(node("idle"), node("mixed"), node("idle+drain", "noisy fan", "ada"), node("maint")),
        *(
            node("down", "Not responding", "slurm"),
            node("idle*"),
            node("idle+drain", "Low RealMemory", "root"),
        ),
    ]
    assert find_unusable_nodes(nodes) == (
        ("down", "Slurm reports DOWN: Not responding"),
        ("idle*", "Slurm reports IDLE+NOT_RESPONDING"),
        ("idle+drain", "Slurm reports IDLE+DRAIN: Low RealMemory"),
    )


class Looks:
    """A provider with a missing tool on this machine and a quota that is too small."""

    def check(self, spec: ClusterSpec) -> None:  # noqa: ARG002
        raise MachineError("missing tool: gcloud", why="it carries SSH")

    def preflight(self, spec: ClusterSpec, workspace: Workspace) -> DoctorReport:  # noqa: ARG002
        return DoctorReport(
            (Finding("z", "error", "quota", "too little quota", "0 are left", "ask"),), {}
        )


def test_find_obstacles_has_those_of_machine_and_provider(tmp_path: Path) -> None:
    spec = parse_spec("{version: 1, name: d, partitions: [{name: t, nodes: 1}]}", "cluster.yaml")
    found = find_obstacles(spec, Workspace(tmp_path / "d"), cast("Provider", Looks())).findings
    assert [finding.what for finding in found] == ["missing tool: gcloud", "too little quota"]


def test_doctor_before_the_first_up_has_the_obstacles_of_the_chosen_machines(
    tmp_path: Path,
) -> None:
    """Machines of an owner exist then; others do not."""
    text = """
    {version: 1, name: d, partitions: [{name: t, hosts: n1}],
    provider: {type: onprem, controller: n0, hosts: {n0: 10.0.0.1, n1: 10.0.0.2}}}
    """
    own = parse_spec(text, "cluster.yaml")
    others = parse_spec("{version: 1, name: d, partitions: [{name: t, nodes: 1}]}", "cluster.yaml")
    lacks = tuple(Finding(host, "error", "disk-full", "full", "", "") for host in ("n0", "n1"))
    looks = SimpleNamespace(preflight=lambda *_: DoctorReport(lacks, {}))
    provider = cast("Provider", looks)
    workspace = Workspace(tmp_path / "d")
    assert examine_cluster(own, workspace, provider).findings == lacks
    assert examine_cluster(own, workspace, provider, hosts=["n1"]).findings == lacks[1:]
    with rejected("not-found/name", UsageError, "n9"):
        examine_cluster(own, workspace, provider, hosts=["n9"])
    with rejected("not-up", NotUpError):
        examine_cluster(others, workspace, provider)
