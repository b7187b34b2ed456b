"""`down` and `up` refuse to remove hosts with the only copy of files or runs, unless --discard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster import impact, losses
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.impact import AffectedJob, Impact, free_leaving_hosts
from clusterctl.cluster.losses import (
    DISCARDED,
    LOOK_VALID_S,
    LeavingHosts,
    all_answer,
    check_leaving_hosts,
    check_only_copies,
    note_removal,
)
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.errors import OnlyCopyError, SlurmError, UnreachableError
from clusterctl.providers.base import HostChange, HostPlan
from clusterctl.runs.only_copies import OnlyCopies, Search, UncopiedFiles
from clusterctl.scheduler.base import JobInfo, JobState, Nodes
from clusterctl.spec.load import dump_spec
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.state.inventory import Inventory, SharedFolder
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.util.disk import read_rows
from tests.support.inventories import inventory_of
from tests.support.messages import refused as rejected
from tests.support.scripted import ScriptedTransport, Step, use_hosts
from tests.unit.cluster.specs import spec_of

MODEL = UncopiedFiles("/shared/home/ada/models", "ada", 2, 3 << 30, 7200, top="/shared/home/ada")
SCRATCH = UncopiedFiles("/scratch/shards", "bob", 1, 5, 86400 * 3, host="d-train-1", top="/scratch")
LOST = UncopiedFiles("out of job 2 (mine)", "ada", 1, 10, 60, top="/shared/home/ada", job_id="2")


def inventory(provider: str = "local", **more: Any) -> Inventory:
    return inventory_of("d-train-1", "d-train-2", provider=provider, **more)


def job(number: int, state: JobState, *nodes: str) -> JobInfo:
    return JobInfo(number=number, name="mine", user="ada", state=state, reason="", nodes=nodes)


class Slurm(Nodes):
    """A Slurm with these jobs; without an answer if they are None. resumed: nodes of each resume."""

    drains_nodes = True

    def __init__(self, jobs: Sequence[JobInfo] | None) -> None:
        self.found = jobs
        self.resumed: list[Sequence[str]] = []

    def resume(self, names: Sequence[str]) -> None:
        self.resumed.append(names)

    def all_jobs(self) -> Sequence[JobInfo]:
        if self.found is None:
            raise SlurmError("slurmctld does not answer")
        return self.found

    def jobs(self, ids: Sequence[str]) -> Sequence[JobInfo]:
        return [job for job in self.all_jobs() if job.whole_id in ids]


class Stage:
    """A running cluster. found: what a search for files finds. searched: all searches."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspace = Workspace(root / "d")
        self.workspace.create()
        self.workspace.configured.touch()
        self.found = OnlyCopies()
        self.jobs: Sequence[JobInfo] | None = ()
        self.searched: list[Search] = []

        def find(search: Search) -> OnlyCopies:
            self.searched.append(search)
            return self.found

        monkeypatch.setattr(Search, "find", find)
        monkeypatch.setattr(losses, "scheduler_of", lambda *_, **__: Slurm(self.jobs))
        self.record(inventory())
        self.keep(False)

    def record(self, inventory: Inventory) -> None:
        self.workspace.inventory.write_text(inventory.text)

    def keep(self, keep: bool, **settings: Any) -> None:
        """Record a spec with or without kept storage. settings: other keys of the spec."""
        spec = spec_of(storage={"keep": keep}, **settings, users=[{"name": "ada", "uid": 2000}])
        self.workspace.spec.write_text(dump_spec(spec))

    def look(self, *discarded: str, discard: bool = False) -> OnlyCopies:
        entries = [
            JobEntry(token=i, name="mine", user="ada", submitted_at=0, job_id=i) for i in discarded
        ]
        runner = PhaseRunner(workspace=self.workspace)
        return runner.run("look", check_only_copies, entries, discard=discard)


def context(stage: Stage) -> ClusterContext:
    return ClusterContext.of(spec_of(), workspace=stage.workspace)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_losses_are_listed_with_size_owner_and_age(stage: Stage) -> None:
    stage.found = OnlyCopies(files=(MODEL, SCRATCH))
    stage.jobs = [
        job(7, JobState.RUNNING, "d-train-1"),
        job(8, JobState.PENDING),
        job(9, JobState.COMPLETED),
    ]
    with pytest.raises(OnlyCopyError) as caught:
        stage.look()
    assert caught.value.exit_code == 1
    assert caught.value.why.splitlines() == [
        "job 7 (mine) of ada is RUNNING",
        "job 8 (mine) of ada is PENDING",
        "/shared/home/ada/models: 3.0 GiB in 2 files of ada, 2 hours old",
        "/scratch/shards on d-train-1: 5 B in 1 file of bob, 3 days old",
    ]
    assert [(failure.code, failure.phase) for failure in caught.value.failures] == [
        ("only-copy", "look")
    ] * 4
    for answer in (
        "`clusterctl cancel`",
        "`clusterctl collect --all`",
        "storage: {keep: true}",
        "--discard",
    ):
        assert answer in caught.value.fix
    assert [failure.fix for failure in caught.value.failures] == [caught.value.fix, "", "", ""]
    (entry,) = read_rows(stage.workspace.journal)
    assert (entry["verb"], entry["phase"], entry["ok"]) == ("down", "look", False)
    assert entry["note"] == caught.value.what
    assert entry["seconds"] >= 0


def test_discarded_files_are_returned_and_journaled(stage: Stage) -> None:
    stage.found = OnlyCopies(files=(MODEL,))
    assert stage.look(discard=True).files == (MODEL,)
    (entry,) = read_rows(stage.workspace.journal)
    assert entry["note"].startswith("discarded: 3.0 GiB in 2 files; /shared/home/ada/models: ")


def test_run_given_up_by_name_does_not_stop_the_check(stage: Stage) -> None:
    stage.found = OnlyCopies(files=(LOST,))
    stage.jobs = [job(2, JobState.RUNNING)]
    with pytest.raises(OnlyCopyError):
        stage.look()
    (run,) = stage.look("2").lines
    assert run.endswith("job 2 (mine)")


def test_submission_without_an_id_hides_no_file(stage: Stage) -> None:
    """Files outside of job folders have no job id either."""
    stage.found = OnlyCopies(files=(MODEL, LOST))
    lost = JobEntry(token=str(7), name="mine", user="ada", submitted_at=0)
    runner = PhaseRunner(workspace=stage.workspace)
    assert runner.run("look", check_only_copies, [lost], discard=True).files == (MODEL, LOST)


@pytest.mark.parametrize("dead", ["hosts", "scheduler", "record", "no record"])
def test_check_stops_if_a_host_or_record_is_unknown(stage: Stage, dead: str) -> None:
    if dead == "hosts":
        stage.found = OnlyCopies(unknown=("what is on d-train-2 can't be told: no route",))
    elif dead == "scheduler":
        stage.jobs = None
    elif dead == "record":
        stage.workspace.inventory.write_text("torn")
    else:
        stage.workspace.inventory.unlink()
    with rejected("only-copy", OnlyCopyError) as caught:
        stage.look()
    assert "clusterctl up" in caught.value.fix
    assert stage.look(discard=True).unknown


def discarded(stage: Stage) -> list[dict[str, Any]]:
    return list(read_rows(stage.workspace.root.parent / DISCARDED))


SILENT = OnlyCopies(unknown=("what is on d-ctl can't be told: no route",))


def test_killed_down_continues_if_hosts_are_gone(stage: Stage) -> None:
    """Also if `collect` has recorded an older job since, which another machine submitted."""
    note_removal(stage.workspace, OnlyCopies())
    entry = JobEntry(token=str(7), name="mine", user="ada", submitted_at=5.0, job_id="7")
    Ledger(stage.workspace.jobs).add(entry)
    stage.found = SILENT
    assert not stage.look()
    stage.found = replace(SILENT, files=(MODEL,))
    with pytest.raises(OnlyCopyError) as caught:
        stage.look()
    assert "d-ctl" not in caught.value.why


@pytest.mark.parametrize(
    "how",
    ["all answer", "some did not answer before", "a job was submitted since", "it was long ago"],
)
def test_silent_hosts_are_ignored_only_after_recent_search(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    note_removal(stage.workspace, SILENT if how == "some did not answer before" else OnlyCopies())
    if how == "all answer":  # nothing was removed, and the cluster is used again
        assert not stage.look()
        assert not stage.workspace.removing.exists()
    elif how == "a job was submitted since":
        job = JobEntry(token=str(7), name="mine", user="ada", submitted_at=time.time())
        Ledger(stage.workspace.jobs).add(job)
    elif how == "it was long ago":
        later = time.time() + LOOK_VALID_S
        monkeypatch.setattr(time, "time", lambda: later)
        # Another `down` that ignored silent hosts has not searched them.
        note_removal(stage.workspace, OnlyCopies())
    stage.found = SILENT
    with pytest.raises(OnlyCopyError):
        stage.look()


def test_note_removal_records_discarded_files(stage: Stage) -> None:
    note_removal(stage.workspace, OnlyCopies(files=(MODEL, SCRATCH)))
    note_removal(stage.workspace, OnlyCopies())
    (row,) = read_rows(stage.workspace.root.parent / DISCARDED)
    assert (row["cluster"], row["discarded"]) == ("d", [str(MODEL), str(SCRATCH)])


def test_all_answer_asks_each_host(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    dead: set[str] = set()

    def host(name: str) -> ScriptedTransport:
        error = UnreachableError("no route") if name in dead else None
        return ScriptedTransport([Step(("true",), error=error)])

    use_hosts(monkeypatch, host)
    assert all_answer(stage.workspace)
    dead.add("d-train-2")
    assert not all_answer(stage.workspace)
    stage.workspace.inventory.unlink()
    assert all_answer(stage.workspace)


def test_check_of_an_unconfigured_cluster_asks_nothing(stage: Stage) -> None:
    stage.workspace.configured.unlink()
    stage.found = OnlyCopies(files=(MODEL,))
    stage.jobs = None
    assert not stage.look()


def test_check_of_onprem_machines_stops_only_for_running_jobs(stage: Stage) -> None:
    stage.record(inventory("onprem"))
    stage.jobs = None
    assert not stage.look()
    stage.jobs = [job(7, JobState.RUNNING)]
    with rejected("only-copy", OnlyCopyError):
        stage.look()
    assert {(len(search.hosts), search.shared) for search in stage.searched} == {(0, False)}


@pytest.mark.parametrize("keep", [True, False])
def test_check_does_not_search_kept_storage(stage: Stage, *, keep: bool) -> None:
    stage.keep(keep)
    stage.look()
    assert [(search.shared, len(search.hosts)) for search in stage.searched] == [(not keep, 3)]


def test_fix_does_not_advise_keep_if_it_is_too_late(stage: Stage) -> None:
    gcp = {"type": "gcp", "project": "my-project", "zone": "us-central1-a"}
    assert GcpSettings.keeps_from_start
    stage.keep(False, provider=gcp)
    stage.found = OnlyCopies(files=(MODEL,))
    with pytest.raises(OnlyCopyError) as caught:
        stage.look()
    assert "keep" not in caught.value.fix


def change(name: str, action: Any, **more: Any) -> HostChange:
    return HostChange(name, action, "2 CPUs", **more)


@pytest.mark.parametrize(
    ("changes", "more", "keep", "lost"),
    [
        ([change("d-train-2", "remove")], {}, False, (["d-train-2"], False)),
        ([change("d-train-1", "replace")], {}, False, (["d-train-1"], False)),
        ([change("d-ctl", "replace")], {}, False, (["d-ctl"], True)),
        ([change("d-ctl", "replace")], {}, True, (["d-ctl"], False)),
        ([], {"other_lost": ("a Filestore instance",)}, False, ([], True)),
        (
            [change("d-train-3", "make"), change("d-train-1", "change", restarts=True)],
            {},
            False,
            ([], False),
        ),
    ],
)
def test_places_lost_has_only_leaving_hosts(
    changes: list[HostChange], more: dict[str, Any], lost: object, *, keep: bool
) -> None:
    assert (
        LeavingHosts(inventory(), HostPlan(tuple(changes), **more)).places_lost(keep=keep) == lost
    )


@pytest.mark.parametrize("affected", [True, False])
def test_check_leaving_hosts_searches_again_after_jobs_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, affected: bool
) -> None:
    """Drained nodes are resumed if the change is refused."""

    def end(*_: object, **__: object) -> None:
        stage.found = OnlyCopies(files=(SCRATCH,))

    slurm = Slurm(())
    jobs = (AffectedJob(job(7, JobState.RUNNING, "d-train-1"), "it leaves"),) * affected
    found = Impact(drained=("d-train-1",), affected=jobs)
    for name, function in (
        ("reject_changed_users", lambda *_: None),
        ("impact_of", lambda *_, **__: found),
        ("cancel_jobs", end),
    ):
        monkeypatch.setattr(impact, name, function)
    session: Any = context(stage)
    session.scheduler = lambda *_, **__: slurm
    session.inventory = inventory()
    plan = HostPlan((change("d-train-1", "remove"),))
    if affected:
        with rejected("only-copy", OnlyCopyError):
            free_leaving_hosts(session, plan, force=True)
    else:
        assert free_leaving_hosts(session, plan, force=True) == {}
    assert slurm.resumed == [("d-train-1",)] * affected
    stage.found = OnlyCopies(files=(SCRATCH,))
    free_leaving_hosts(session, plan, force=True, discard=True)
    entry = list(read_rows(stage.workspace.journal))[-1]
    assert (entry["verb"], entry["phase"]) == ("up", "check_leaving_nodes")
    assert entry["note"].startswith("discarded: 5 B")
    assert "/scratch/shards on d-train-1" in entry["note"]


@pytest.mark.parametrize(
    ("kind", "nodes", "stops"),
    [("none", ["d-train-2"], True), ("none", ["d-train-1"], False), ("nfs", ["d-train-2"], False)],
)
def test_own_machine_leaves_only_after_its_runs_are_collected(
    stage: Stage, kind: Any, nodes: list[str], *, stops: bool
) -> None:
    before = inventory("onprem", shared_folder=SharedFolder(kind=kind))
    ledger = Ledger(stage.workspace.jobs)
    entry = ledger.add(JobEntry(token=str(7), name="mine", user="ada", submitted_at=0, job_id="7"))
    session = context(stage)
    slurm: Any = Slurm([job(7, JobState.COMPLETED, *nodes)])
    plan = HostPlan((change("d-train-2", "remove", released=True),))
    if not stops:
        assert not check_leaving_hosts(session, LeavingHosts(before, plan), slurm).value
        return
    with rejected("only-copy", OnlyCopyError) as caught:
        check_leaving_hosts(session, LeavingHosts(before, plan), slurm)
    assert "d-train-2" in caught.value.why
    with pytest.raises(OnlyCopyError):
        check_leaving_hosts(session, LeavingHosts(before, HostPlan(()), ["d-train-2"]), slurm)
    ledger.update(entry, run_dir="/runs/d-7-mine", run_state="COMPLETED")
    assert not check_leaving_hosts(session, LeavingHosts(before, plan), slurm).value
