"""The proof: every node as it should be, and an answer that is right, or an error that names the hosts."""

from __future__ import annotations

import json

import pytest

from clusterctl.errors import VerifyError
from clusterctl.inventory import COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.slurm.parse import FIELD, RECORD
from clusterctl.transport.scripted import ScriptedTransport, Step
from clusterctl.verify import verify

NAMES = ("d-train-1", "d-train-2")


def inventory() -> Inventory:
    hosts = [Host(name="d-ctl", address="10.0.0.2", role=CONTROLLER, host_key="k")]
    hosts += [Host(name=name, address="10.0.0.3", role=COMPUTE, host_key="k") for name in NAMES]
    fixed = {"cluster": "d", "cluster_id": "a1b2c3", "provider": "local", "network": "10.0.0.0/24"}
    return Inventory(**fixed, hosts=tuple(hosts), shared="/shared", baked=True)


def sinfo(**states: str) -> Step:
    rows = [
        FIELD.join(
            (name.replace("_", "-"), "train", state, state, "no reason", "2", "2000", "(null)", "slurm", "0")
        )
        + RECORD
        for name, state in states.items()
    ]
    return Step(("sinfo", "..."), "\n".join(rows))


def srun(*hosts: str, ok: bool = True, size: int | None = None) -> Step:
    answer = {"ok": ok, "world_size": len(hosts) if size is None else size}
    return Step(("srun", *["*"] * 4, f"--nodelist={','.join(hosts)}", "..."), json.dumps(answer))


BOTH = sinfo(d_train_1="idle", d_train_2="idle")
TAKEN = "srun: error: Unable to allocate resources: Requested nodes are busy\n"


def test_a_job_across_all_idle_nodes_is_the_proof() -> None:
    transport = ScriptedTransport([BOTH, srun(*NAMES)])
    proof = verify(inventory(), transport)
    assert (proof.probed, proof.busy, proof.ranks) == (NAMES, (), 2)
    assert transport.left == ()


def test_nodes_at_work_are_named_and_left_alone() -> None:
    transport = ScriptedTransport([sinfo(d_train_1="mixed", d_train_2="idle+planned"), srun(NAMES[1])])
    proof = verify(inventory(), transport)
    assert (proof.probed, proof.busy) == (NAMES[1:], NAMES[:1])


def test_with_all_nodes_at_work_there_is_no_job() -> None:
    transport = ScriptedTransport([sinfo(d_train_1="allocated", d_train_2="allocated")])
    assert verify(inventory(), transport).probed == ()


def test_a_node_that_a_users_job_took_meanwhile_counts_as_busy() -> None:
    late = Step(("srun", "..."), stderr=TAKEN, rc=1)
    busy = sinfo(d_train_1="allocated", d_train_2="idle")
    proof = verify(inventory(), ScriptedTransport([BOTH, late, busy, srun(NAMES[1])]))
    assert (proof.probed, proof.busy) == (NAMES[1:], NAMES[:1])


def test_nodes_that_slurm_never_gives_are_an_error() -> None:
    late = Step(("srun", "..."), stderr=TAKEN, rc=1)
    with pytest.raises(VerifyError, match="proof job failed") as caught:
        verify(inventory(), ScriptedTransport([BOTH, late, BOTH, late]))
    assert "busy" in caught.value.why


@pytest.mark.parametrize(
    ("states", "host", "cause"),
    [
        ({"d_train_1": "idle"}, NAMES[1], "does not know"),
        ({"d_train_1": "idle", "d_train_2": "idle+drain"}, NAMES[1], "IDLE+DRAIN: no reason"),
        ({"d_train_1": "down*", "d_train_2": "idle"}, NAMES[0], "DOWN"),
        ({"d_train_1": "idle*", "d_train_2": "idle"}, NAMES[0], "NOT_RESPONDING"),
        ({"d_train_1": "unknown", "d_train_2": "idle"}, NAMES[0], "UNKNOWN"),
        ({"d_train_1": "idle", "d_train_2": "idle", "d_train_3": "idle"}, "d-train-3", "is gone"),
    ],
)
def test_a_node_that_is_not_right_is_named_with_the_cause(
    states: dict[str, str], host: str, cause: str
) -> None:
    with pytest.raises(VerifyError, match="did not become ready") as caught:
        verify(inventory(), ScriptedTransport([sinfo(**states)]), timeout_s=-1)
    (failure,) = caught.value.failures
    assert (failure.host, failure.phase) == (host, "verify")
    assert cause in failure.cause


@pytest.mark.parametrize(
    "answer",
    [
        srun(*NAMES, ok=False),
        srun(*NAMES, size=1),
        Step(("srun", "..."), "[]"),
        Step(("srun", "..."), "no JSON"),
        Step(("srun", "..."), json.dumps({"ok": True, "world_size": 2}), rc=1),
        Step(("srun", "..."), rc=1),
    ],
)
def test_any_other_answer_is_no_proof(answer: Step) -> None:
    with pytest.raises(VerifyError, match="proof job failed"):
        verify(inventory(), ScriptedTransport([BOTH, answer]))


def test_the_hosts_that_the_proof_job_complains_of_are_named() -> None:
    said = "payload: error: allreduce: rank 1 on d-train-2: 3 of 8 sums are wrong\n"
    with pytest.raises(VerifyError) as caught:
        verify(inventory(), ScriptedTransport([BOTH, Step(("srun", "..."), stderr=said, rc=1)]))
    assert [failure.host for failure in caught.value.failures] == [NAMES[1]]
    assert said.strip() in caught.value.why
