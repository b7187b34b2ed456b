"""Of the jobs of a `submit --first`, a single job runs its program, whenever clusterctl is
killed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import (
    JobCancelledError,
    SlurmError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)
from clusterctl.jobs.first import (
    JobPlace,
    new_first,
    places_of,
    reject_unfit,
    submit_first,
    wait_for_first,
)
from clusterctl.jobs.queue import list_jobs
from clusterctl.jobs.source import source_of
from clusterctl.jobs.submit import PreparedJob, Submitter
from clusterctl.runs.collect import collect, uncollected
from clusterctl.scheduler.claims import FirstGroup, claim_of, settle
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.scheduler.slurm.records import DELAY_S
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import PartitionFacts
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.remote_copies import CLAIM
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock
from tests.support.inventories import inventory_with, with_inventory
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.played.cluster import PlayedCluster
from tests.support.processes import eventually

OTHER = {"token": "there"}


@pytest.fixture(autouse=True)
def other(cluster: PlayedCluster, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of another cluster of this account, called ``other``."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(cluster.root))
    for name in ("workspace", "other"):
        workspace = Workspace.of(name)
        workspace.root.mkdir(exist_ok=True)
        workspace.inventory.write_text("{}")
    return Ledger(Workspace.of("other").jobs)


def raced(session: Session, folder: Path, first: FirstGroup, count: int = 2) -> list[str]:
    """Submit jobs with --first, which add a line to the file ``ran``. Return their ids."""
    (script := folder / "job.sh").write_text('echo "$SLURM_JOB_ID" >>"$HOME/ran"\n')
    request = Request.read(JobSpec(name="mine", script=script))
    prepared = PreparedJob(request, session.site.render(request), source_of(request))
    jobs = [("here", prepared)] * count
    return [
        submitted.job_id for _, submitted in submit_first({"here": Submitter(session)}, jobs, first)
    ]


def jobs_that_ran(cluster: PlayedCluster) -> list[str]:
    path = cluster.home / "ran"
    return path.read_text().split() if path.exists() else []


def entry(session: Session, job_id: str) -> JobEntry:
    found = session.ledger.find(job_id)
    assert found is not None
    return found


def test_first_keeps_one_job_and_cancels_the_rest(session, cluster, tmp_path):
    first = new_first(["here", "here"])
    ids = raced(session, tmp_path, first, 3)
    is_kept = wait_for_first([session], first, 60).entry
    cluster.wait_until_ended(is_kept.job_id)
    lost = [job_id for job_id in ids if job_id != is_kept.job_id]
    assert jobs_that_ran(cluster) == [is_kept.job_id]
    assert {cluster.job(job_id)["state"] for job_id in lost} == {"CANCELLED"}
    assert {entry(session, job_id).lost_to for job_id in lost} == {f"job {is_kept.job_id}"}
    assert not any(Path(entry(session, job_id).remote_dir).exists() for job_id in lost)
    assert [job.id for job in list_jobs(session).jobs] == [is_kept.job_id]
    assert [one.job_id for one in uncollected(session.workspace)] == [is_kept.job_id]


def test_first_without_clusterctl_runs_one_job(session, cluster, tmp_path):
    """The jobs themselves decide on a single cluster. A later `jobs` records the decision."""
    ids = raced(session, tmp_path, new_first(["here"]))
    for job_id in ids:
        cluster.wait_until_ended(job_id)
    (only,) = jobs_that_ran(cluster)
    assert sorted(cluster.job(job_id)["state"] for job_id in ids) == ["CANCELLED", "COMPLETED"]
    assert [job.id for job in list_jobs(session).jobs] == [only]
    name = Path(claim_of(entry(session, only))).name
    assert CLAIM.fullmatch(f"clusterctl/jobs/{name}".encode())
    recorded = {
        job_id: (entry(session, job_id).kept, entry(session, job_id).lost_to) for job_id in ids
    }
    assert recorded == {
        job_id: (job_id == only, None if job_id == only else f"job {only}") for job_id in ids
    }


def test_first_claim_is_removed_after_the_jobs(session, cluster, tmp_path):
    (job_id,) = raced(session, tmp_path, FirstGroup("f", is_across=True), 1)
    claim = Path(claim_of(entry(session, job_id)))
    # The answer to another submission was lost, and its job may still wait.
    lost = session.ledger.add(replace(entry(session, job_id), **OTHER, job_id=None))
    eventually(lambda: settle(session.scheduler, session.ledger, "f")[0].kept)
    cluster.wait_until_ended(job_id)
    collect(session, [job_id], out=tmp_path / "runs")
    assert claim.exists()
    session.ledger.record(lost, refused=True)
    for _ in range(2):
        assert [one.job_id for one in settle(session.scheduler, session.ledger, "f")] == [job_id]
        assert not claim.exists()


def test_first_claim_is_removed_with_the_collected_run(session, cluster, tmp_path):
    (job_id,) = raced(session, tmp_path, FirstGroup("f", is_across=False), 1)
    claim = Path(claim_of(entry(session, job_id)))
    eventually(claim.exists)
    # The job runs, as far as Slurm says.
    cluster.wait_until_ended(job_id)
    ended = cluster.job(job_id)
    cluster.change(job_id, state="RUNNING", end=0)
    assert [one.kept for one in settle(session.scheduler, session.ledger, "f")] == [True]
    assert claim.exists()
    cluster.change(job_id, state=ended["state"], end=ended["end"])
    collect(session, [job_id], out=tmp_path / "runs")
    assert not claim.exists()


def test_first_claim_that_is_not_seen_yet_decides_nothing(session, cluster, tmp_path):
    """NFS may show the claim a minute late. Until then, the job that has ended may have run."""
    (job_id,) = raced(session, tmp_path, FirstGroup("f", is_across=False), 1)
    cluster.wait_until_ended(job_id)
    claim = Path(claim_of(entry(session, job_id)))
    claim.rename(cluster.home / "unseen")
    assert [one.kept for one in settle(session.scheduler, session.ledger, "f")] == [False]
    (cluster.home / "unseen").rename(claim)
    assert [one.kept for one in settle(session.scheduler, session.ledger, "f")] == [True]


def test_first_job_that_ended_long_ago_without_a_claim_lost(session, cluster, tmp_path):
    (job_id,) = raced(session, tmp_path, FirstGroup("f", is_across=False), 1)
    cluster.wait_until_ended(job_id)
    Path(claim_of(entry(session, job_id))).unlink()
    cluster.change(job_id, end=int(time.time()) - 2 * int(DELAY_S))
    assert settle(session.scheduler, session.ledger, "f") == ()
    assert entry(session, job_id).refused


def test_first_across_clusters_waits_for_the_choice(session, cluster, tmp_path):
    first = FirstGroup("f", is_across=True)
    (job_id,) = raced(session, tmp_path, first, 1)
    eventually((Path(entry(session, job_id).remote_dir) / "stdout.log").exists)
    assert (cluster.job(job_id)["state"], jobs_that_ran(cluster)) == ("RUNNING", [])
    assert [one.kept for one in settle(session.scheduler, session.ledger, "f")] == [True]
    cluster.wait_until_ended(job_id)
    assert jobs_that_ran(cluster) == [job_id]


@pytest.mark.parametrize("killed", ["after the choice", "after the claim"])
def test_first_across_killed_continues_its_choice(session, cluster, tmp_path, killed):
    """The job that was chosen runs, though another job has started too."""
    ids = raced(session, tmp_path, FirstGroup("f", is_across=True))
    chosen = entry(session, ids[1])
    session.ledger.record(chosen, chosen=True)
    if killed == "after the claim":
        Path(claim_of(chosen)).write_text(ids[1])
    list_jobs(session)
    for job_id in ids:
        cluster.wait_until_ended(job_id)
    assert jobs_that_ran(cluster) == [ids[1]]
    assert wait_for_first([session], FirstGroup("f", is_across=True), 60).entry.job_id == ids[1]


@pytest.mark.parametrize("is_kept", [False, True])
def test_first_job_chosen_elsewhere_does_not_run_here(session, cluster, other, tmp_path, is_kept):
    """While the other cluster may not know of the choice, the job here stays: it may be chosen
    yet.
    """
    (job_id,) = raced(session, tmp_path, FirstGroup("f", is_across=True), 1)
    there = entry(session, job_id)
    other.add(replace(there, **OTHER, job_id="7", chosen=True, kept=is_kept))
    left = settle(session.scheduler, session.ledger, "f")
    assert [one.job_id for one in left] == [job_id]
    if is_kept:
        cluster.wait_until_ended(job_id)
        assert settle(session.scheduler, session.ledger, "f") == ()
        assert "7" in entry(session, job_id).lost_to.split()
    assert (jobs_that_ran(cluster), Path(claim_of(there)).exists()) == ([], False)


def test_first_job_that_is_not_chosen_gives_up(session, cluster, tmp_path):
    """A job that gave up can't be chosen afterwards. A choice that came too late is taken back, so
    that another cluster can run its job.
    """
    first = FirstGroup("f", is_across=True, wait_s=0.1)
    (job_id,) = raced(session, tmp_path, first, 1)
    cluster.wait_until_ended(job_id)
    session.ledger.record(entry(session, job_id), chosen=True)
    with refused("job-cancelled/first", JobCancelledError):
        wait_for_first([session], first, 60)
    assert (jobs_that_ran(cluster), entry(session, job_id).chosen) == ([], False)


def test_first_chosen_job_was_cancelled_chooses_another(session, cluster, tmp_path):
    ids = raced(session, tmp_path, FirstGroup("f", is_across=True))
    session.ledger.record(entry(session, ids[0]), chosen=True)
    session.scheduler.cancel([ids[0]])
    cluster.wait_until_ended(ids[0])
    assert wait_for_first([session], FirstGroup("f", is_across=True), 60).entry.job_id == ids[1]
    cluster.wait_until_ended(ids[1])
    assert jobs_that_ran(cluster) == [ids[1]]


def test_first_time_out_leaves_the_jobs(session, cluster, other, tmp_path):
    (job_id,) = raced(session, tmp_path, FirstGroup("f", is_across=True), 1)
    other.add(JobEntry(**OTHER, name="n", user="u", submitted_at=0, first="f", chosen=True))
    with refused("wait-timeout/first", WaitTimeoutError):
        wait_for_first([session], FirstGroup("f", is_across=True), 0)
    assert cluster.job(job_id)["state"] == "RUNNING"


def test_first_rejected_job_cancels_the_submitted_jobs(session, cluster, tmp_path):
    (script := tmp_path / "job.sh").write_text("true\n")
    request = Request.read(JobSpec(name="mine", script=script))
    jobs = [
        (
            "here",
            PreparedJob(request, session.site.render(request), source_of(request)),
        )
        for _ in range(2)
    ]
    submissions = submit_first({"here": Submitter(session)}, jobs, FirstGroup("f", is_across=True))
    _, submitted = next(submissions)
    with cluster.state() as state:
        state["refuse"] = "sbatch: error: Batch job submission failed: Invalid account"
    with refused("slurm-refused/job", SlurmError):
        next(submissions)
    assert cluster.job(submitted.job_id)["state"] == "CANCELLED"


class CutOff(LocalTransport):
    """The controller of a cluster that can't be reached."""

    def run(self, *_: object, **__: object) -> Result:
        raise UnreachableError("no route", host="far")


def test_first_rejected_job_cancels_what_can_be_cancelled(session, cluster, tmp_path):
    """The error is that of the submission, also if another cluster can't be reached by then."""
    (script := tmp_path / "job.sh").write_text("true\n")
    request = Request.read(JobSpec(name="mine", script=script))
    prepared = PreparedJob(request, session.site.render(request), source_of(request))
    submitters = {"far": Submitter(session), "here": Submitter(session)}
    jobs = [(where, prepared) for where in ("far", "here", "here")]
    submissions = submit_first(submitters, jobs, FirstGroup("f", is_across=True))
    ids = [next(submissions)[1].job_id for _ in range(2)]
    submitters["far"] = Submitter(replace(session, scheduler=SlurmClient(CutOff(), patience_s=0)))
    with cluster.state() as state:
        state["refuse"] = "sbatch: error: Batch job submission failed: Invalid account"
    with refused("slurm-refused/job", SlurmError):
        next(submissions)
    assert cluster.job(ids[1])["state"] == "CANCELLED"


def test_first_unreachable_cluster_does_not_delay_the_job(session, other, tmp_path):
    first = FirstGroup("f", is_across=True)
    (job_id,) = raced(session, tmp_path, first, 1)
    other.add(replace(entry(session, job_id), **OTHER, job_id="7"))
    away = replace(session, scheduler=SlurmClient(CutOff(), patience_s=0), ledger=other)
    away = with_inventory(away, cluster="other")
    is_kept = wait_for_first([away, session], first, 60)
    assert (is_kept.entry.job_id, is_kept.not_cancelled) == (job_id, (("other", "7"),))


def test_first_all_failed_names_the_jobs_and_states(session, cluster, tmp_path):
    first = FirstGroup("f", is_across=True)
    (job_id,) = raced(session, tmp_path, first, 1)
    cluster.change(job_id, state="FAILED", end=1)
    with refused("job-cancelled/first", JobCancelledError, job_id, "FAILED"):
        wait_for_first([session], first, 60)


def test_first_asks_a_foreign_slurm_rarely(cluster, tmp_path):
    slept: list[float] = []
    now = lambda: sum(slept)  # noqa: E731
    session = cluster.session(clock=Clock(now, slept.append))
    session = with_inventory(session, is_foreign=True)
    with cluster.state() as state:
        state["hold"] = True
    raced(session, tmp_path, first := FirstGroup("f", is_across=True))
    slept.clear()
    with refused("wait-timeout/first", WaitTimeoutError):
        wait_for_first([session], first, 200)
    pace = session.site.pace
    assert (min(slept[:-1]), max(slept)) == (pace.changed_s, pace.pending_s)


INVENTORY = inventory_with(
    PartitionFacts("short", ("d-short-1",)), PartitionFacts("long", ("d-long-1",)), job_user="ada"
)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("short,long", [("d", "short", None), ("d", "long", None)]),
        ("short,short@proj", [("d", "short", None), ("d", "short", "proj")]),
        ("@one,@two", [("d", None, "one"), ("d", None, "two")]),
        (
            "short,campus,campus/gpu@p",
            [("d", "short", None), ("campus", None, None), ("campus", "gpu", "p")],
        ),
    ],
)
def test_places_are_partitions_accounts_and_clusters(text, places):
    assert places_of(text, INVENTORY, ["campus", "d"]) == tuple(
        JobPlace(*place) for place in places
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("short", "option-invalid/first-places"),
        ("short,short", "option-invalid/first-places"),
        ("short,lnog", "not-found/place"),
    ],
)
def test_places_wrong_are_refused(text, code):
    with refused(code, UsageError):
        places_of(text, INVENTORY, ["campus", "d"])


def test_place_sets_partition_and_account_of_a_job(tmp_path):
    job = JobSpec(name="mine", script=tmp_path / "job.sh", account="mine")
    here = JobPlace("d", "short").of(Request(job)).job
    there = JobPlace("d", None, "proj").of(Request(job)).job
    assert (here.partition, here.account) == ("short", "mine")
    assert (there.partition, there.account) == (None, "proj")


def test_first_of_an_array_is_refused(session, tmp_path):
    job = JobSpec(name="mine", script=tmp_path / "job.sh", array="1-2")
    with refused("option-invalid/first-array", UsageError):
        reject_unfit(session, job)
