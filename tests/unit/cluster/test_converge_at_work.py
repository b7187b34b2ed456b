"""Jobs on nodes whose hardware is to be taken up: who waits for them, and that none begins meanwhile."""

from __future__ import annotations

from clusterctl.cluster.hardware import nodes_with_jobs
from tests.support.inventories import ONE, TWO
from tests.support.scripted import Step
from tests.unit.cluster.test_impact import asked_in_order, sinfo, squeue

AT_WORK = "job 7 is at work there, which Slurm would end; run `clusterctl up` again afterwards"
REFUSED = Step(("squeue", "..."), stderr="slurm_load_jobs error: refused", rc=1)


def asked(*steps: Step, drain: bool = True) -> dict[str, str]:
    """What it says of both nodes; every command is in ``steps``."""
    with asked_in_order(*steps) as slurm:
        return nodes_with_jobs(slurm, {ONE, TWO}, drain=drain)


def drain(*nodes: str) -> Step:
    words = "reason=clusterctl: the cluster changes"
    return Step(("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", words))


def resume(*nodes: str) -> Step:
    return Step(("scontrol", "update", f"nodename={','.join(nodes)}", "state=resume"))


def test_no_job_begins_where_none_is_at_work_and_the_other_is_put_back_at_once() -> None:
    steps = sinfo(TWO, ONE), drain(ONE, TWO), squeue((7, "train", TWO)), resume(TWO)
    assert asked(*steps) == {TWO: AT_WORK}


def test_what_a_person_drained_keeps_that_reason() -> None:
    assert asked(sinfo(ONE, TWO, state="drained"), squeue((7, "train", ONE))) == {ONE: AT_WORK}


def test_where_slurm_does_not_answer_nothing_is_risked() -> None:
    found = asked(sinfo(ONE, TWO), drain(ONE, TWO), REFUSED, resume(ONE, TWO))
    assert sorted(found) == [ONE, TWO]
    assert "slurm_load_jobs error: refused" in found[ONE]


def test_a_look_ahead_drains_nothing() -> None:
    assert asked(sinfo(ONE, TWO), squeue((7, "train", TWO)), drain=False) == {TWO: AT_WORK}
    assert sorted(asked(sinfo(ONE, TWO), REFUSED, drain=False)) == [ONE, TWO]
