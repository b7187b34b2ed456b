"""What exists only on what is removed stops the removal, unless it is to be discarded."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.cluster import impact
from clusterctl.cluster import look as looking
from clusterctl.cluster.context import ClusterContext, PhaseRunner
from clusterctl.cluster.impact import AffectedJob, Impact, make_way
from clusterctl.cluster.look import (
    DISCARDED,
    LOOK_VALID_S,
    all_answer,
    clear_removal,
    look,
    look_at_leaving,
    note_removal,
)
from clusterctl.errors import OnlyCopyError, SlurmError, UnreachableError
from clusterctl.providers.base import HostChange, HostPlan
from clusterctl.runs.only_copies import Found, OnlyCopy, Search
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec, LocalSettings
from clusterctl.state.inventory import Inventory, SharedFolder
from clusterctl.state.ledger import Journal
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.connections import Connections
from clusterctl.util.disk import read_rows
from tests.support.inventories import inventory_of
from tests.support.messages import refused as rejected

MODEL = OnlyCopy("/shared/home/ada/models", "ada", 2, 3 << 30, 7200, top="/shared/home/ada")
SCRATCH = OnlyCopy("/scratch/shards", "bob", 1, 5, 86400 * 3, host="d-train-1", top="/scratch")
LOST = OnlyCopy("out of job 2 (mine)", "ada", 1, 10, 60, top="/shared/home/ada", job_id="2")


def inventory(provider: str = "local", **more: Any) -> Inventory:
    return inventory_of("d-train-1", "d-train-2", provider=provider, **more)


def job(number: int, state: JobState, *nodes: str) -> JobInfo:
    return JobInfo(number=number, name="mine", user="ada", state=state, reason="", nodes=nodes)


class Slurm:
    """Knows these jobs, or does not answer."""

    def __init__(self, jobs: Sequence[JobInfo] | None) -> None:
        self.found = jobs

    def all_jobs(self) -> Sequence[JobInfo]:
        if self.found is None:
            raise SlurmError("slurmctld does not answer")
        return self.found

    def jobs(self, ids: Sequence[str]) -> Sequence[JobInfo]:
        return [one for one in self.all_jobs() if one.whole_id in ids]


class Stage:
    """A cluster that is up; what is searched is noted in ``searched``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspace = Workspace(root / "d")
        self.workspace.create()
        self.workspace.configured.touch()
        self.found = Found()
        self.jobs: Sequence[JobInfo] | None = ()
        self.searched: list[Search] = []

        def find(search: Search) -> Found:
            self.searched.append(search)
            return self.found

        monkeypatch.setattr(Search, "find", find)
        monkeypatch.setattr(looking, "scheduler_of", lambda *_, **__: Slurm(self.jobs))
        self.is_now(inventory())
        self.keep(False)

    def is_now(self, what: Inventory) -> None:
        self.workspace.inventory.write_text(what.model_dump_json())

    def keep(self, keep: bool) -> None:
        spec = {
            "version": 1,
            "name": "d",
            "partitions": [{"name": "train", "nodes": 2}],
            "provider": {"type": "local"},
        }
        made = ClusterSpec.model_validate(
            {**spec, "storage": {"keep": keep}, "users": [{"name": "ada", "uid": 2000}]}
        )
        self.workspace.spec.write_text(dump_spec(made))

    def look(self, *given_up: str, **flags: bool) -> Found:
        entries = [JobEntry(token=i, name="mine", user="ada", submitted_at=0, job_id=i) for i in given_up]
        runner = PhaseRunner(workspace=self.workspace)
        return runner.run("look", look, entries, **{"discard": False, **flags})


def context(stage: Stage) -> ClusterContext:
    partitions = ({"name": "train", "nodes": 2},)
    spec = ClusterSpec.model_validate({"version": 1, "name": "d", "partitions": partitions})
    return ClusterContext.of(spec, workspace=stage.workspace)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_all_that_would_be_lost_is_listed_with_size_owner_and_age(stage: Stage) -> None:
    stage.found = Found(files=(MODEL, SCRATCH))
    stage.jobs = [job(7, JobState.RUNNING, "d-train-1"), job(8, JobState.PENDING), job(9, JobState.COMPLETED)]
    with pytest.raises(OnlyCopyError) as caught:
        stage.look()
    assert caught.value.exit_code == 1
    assert caught.value.why.splitlines() == [
        "job 7 (mine) of ada is RUNNING",
        "job 8 (mine) of ada is PENDING",
        "/shared/home/ada/models: 3.0 GiB in 2 files of ada, 2 hours old",
        "/scratch/shards on d-train-1: 5 B in 1 file of bob, 3 days old",
    ]
    assert [(one.code, one.phase) for one in caught.value.failures] == [("only-copy", "look")] * 4
    for answer in ("`clusterctl cancel`", "`clusterctl collect --all`", "storage: {keep: true}", "--discard"):
        assert answer in caught.value.fix
    assert [one.fix for one in caught.value.failures] == [caught.value.fix, "", "", ""]
    (entry,) = Journal(stage.workspace.journal).entries()
    assert (entry.verb, entry.ok) == ("down", False)
    assert entry.note == caught.value.what


def test_files_on_machines_of_the_users_own_are_to_be_copied(stage: Stage) -> None:
    """`collect --all` passes over the homes there."""
    stage.found = Found(files=(MODEL,))
    stage.workspace.access_config.touch()
    with pytest.raises(OnlyCopyError) as caught:
        stage.look(storage=True)
    assert "copy" in caught.value.fix
    assert "collect --all" not in caught.value.fix


def test_what_is_discarded_is_returned_and_journaled(stage: Stage) -> None:
    stage.found = Found(files=(MODEL,))
    assert stage.look(discard=True).files == (MODEL,)
    (entry,) = Journal(stage.workspace.journal).entries()
    assert entry.note.startswith("discarded: 3.0 GiB in 2 files; /shared/home/ada/models: ")


def test_an_empty_cluster_goes_without_a_word(stage: Stage) -> None:
    assert not stage.look()


def test_a_run_that_is_given_up_stops_nothing(stage: Stage) -> None:
    stage.found, stage.jobs = Found(files=(LOST,)), [job(2, JobState.RUNNING)]
    with pytest.raises(OnlyCopyError):
        stage.look()
    assert not stage.look("2")


def test_a_submission_that_got_no_id_hides_no_file(stage: Stage) -> None:
    """All that is in no job's folder has none either."""
    stage.found = Found(files=(MODEL, LOST))
    lost = JobEntry(token=str(7), name="mine", user="ada", submitted_at=0)
    runner = PhaseRunner(workspace=stage.workspace)
    assert runner.run("look", look, [lost], discard=True).files == (MODEL, LOST)


@pytest.mark.parametrize("dead", ["hosts", "scheduler", "record", "no record"])
def test_what_can_not_be_told_stops_it_too(stage: Stage, dead: str) -> None:
    if dead == "hosts":
        stage.found = Found(unknown=("what is on d-train-2 can't be told: no route",))
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


def test_a_down_that_was_killed_goes_on_where_hosts_are_gone(stage: Stage) -> None:
    note_removal(stage.workspace, (), looked=True)
    stage.found = Found(unknown=("what is on d-ctl can't be told: no route",))
    assert not stage.look()
    stage.found = Found(files=(MODEL,), unknown=stage.found.unknown)
    with pytest.raises(OnlyCopyError) as caught:
        stage.look()
    assert "d-ctl" not in caught.value.why


def test_it_passes_over_them_also_if_an_older_job_became_known_since(stage: Stage) -> None:
    """As `collect` does with one that was submitted elsewhere."""
    note_removal(stage.workspace, (), looked=True)
    entry = JobEntry(token=str(7), name="mine", user="ada", submitted_at=5.0, job_id="7")
    Ledger(stage.workspace.jobs).add(entry)
    stage.found = Found(unknown=("what is on d-ctl can't be told: no route",))
    assert not stage.look()


@pytest.mark.parametrize(
    "how", ["all answer", "some did not answer before", "a job was submitted since", "it was long ago"]
)
def test_it_passes_over_silent_hosts_only_if_it_has_just_looked_at_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    silent = Found(unknown=("what is on d-ctl can't be told: no route",))
    note_removal(stage.workspace, ("x: 1 B",), looked=how != "some did not answer before")
    if how == "all answer":  # nothing was removed, and the cluster is used again
        assert not stage.look()
        assert not discarded(stage)
    elif how == "a job was submitted since":
        job = JobEntry(token=str(7), name="mine", user="ada", submitted_at=time.time())
        Ledger(stage.workspace.jobs).add(job)
    elif how == "it was long ago":
        later = time.time() + LOOK_VALID_S
        monkeypatch.setattr(looking, "time", SimpleNamespace(time=lambda: later))
        note_removal(stage.workspace, (), looked=True)  # a second one that passed over them has not looked
    stage.found = silent
    with pytest.raises(OnlyCopyError):
        stage.look()


def test_what_is_discarded_is_noted_once_a_cluster(stage: Stage) -> None:
    """However often `down` is run again: what is told again is as it is now, what is gone stays."""
    other = {"time": 1, "cluster": "other", "discarded": ["y"]}
    (stage.workspace.root.parent / DISCARDED).write_text(f"{json.dumps(other)}\n")
    note_removal(stage.workspace, (str(MODEL), str(SCRATCH), "the run of job 2 (mine)"), looked=True)
    older = replace(SCRATCH, age_s=86400 * 4)
    note_removal(stage.workspace, (str(older), "the run of job 2 (mine)"), looked=True)
    first, row = discarded(stage)
    assert first == other
    *files, run = row["discarded"]
    assert (row["cluster"], files) == ("d", [str(MODEL), str(older)])
    assert run.endswith("job 2 (mine)")
    clear_removal(stage.workspace)
    assert discarded(stage) == [other]
    assert not stage.workspace.removing.exists()
    note_removal(stage.workspace, (), looked=True)
    assert discarded(stage) == [other]


def test_whether_hosts_answer_is_asked_of_each(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    dead: set[str] = set()

    def run(name: str, *_: object) -> None:
        if name in dead:
            raise UnreachableError("no route")

    monkeypatch.setattr(Connections, "to", lambda _, name: SimpleNamespace(run=partial(run, name)))
    assert all_answer(stage.workspace)
    dead.add("d-train-2")
    assert not all_answer(stage.workspace)
    stage.workspace.inventory.unlink()
    assert all_answer(stage.workspace)


def test_where_no_user_could_log_in_yet_nothing_is_asked(stage: Stage) -> None:
    stage.workspace.configured.unlink()
    stage.found, stage.jobs = Found(files=(MODEL,)), None
    assert not stage.look()


def test_on_machines_of_the_users_own_only_jobs_end(stage: Stage) -> None:
    stage.is_now(inventory("onprem"))
    stage.jobs = None
    assert not stage.look()
    stage.jobs = [job(7, JobState.RUNNING)]
    with rejected("only-copy", OnlyCopyError):
        stage.look()
    assert {(len(one.hosts), one.shared) for one in stage.searched} == {(0, False)}


@pytest.mark.parametrize(
    ("keep", "storage", "shared"), [(True, False, False), (True, True, True), (False, True, True)]
)
def test_storage_that_is_kept_is_looked_at_where_it_is_removed(
    stage: Stage, *, keep: bool, storage: bool, shared: bool
) -> None:
    stage.keep(keep)
    stage.look(storage=storage)
    assert [(one.shared, len(one.hosts)) for one in stage.searched] == [(shared, 3)]


@pytest.mark.parametrize(
    ("keep", "storage", "said"),
    [
        (False, False, "or keep the shared folder: `storage: {keep: true}` in the spec, `clusterctl up`"),
        (False, True, "`storage: {keep: true}` in the spec, `clusterctl up`, without --storage"),
        (True, True, "or keep the shared folder: leave out --storage"),
    ],
)
def test_how_to_keep_the_shared_folder_is_said_as_it_is(
    stage: Stage, keep: bool, storage: bool, said: str
) -> None:
    stage.keep(keep)
    stage.found = Found(files=(MODEL,))
    with pytest.raises(OnlyCopyError) as caught:
        stage.look(storage=storage)
    (line,) = (line for line in caught.value.fix.splitlines() if "keep the shared folder" in line)
    assert line.endswith(said)


def test_nothing_is_said_of_keeping_where_it_is_too_late(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSettings, "keeps_from_start", True)
    stage.found = Found(files=(MODEL,))
    with pytest.raises(OnlyCopyError) as caught:
        stage.look()
    assert "keep" not in caught.value.fix


def change(name: str, action: Any, **more: Any) -> HostChange:
    return HostChange(name, action, "2 CPUs", **more)


@pytest.mark.parametrize(
    ("changes", "more", "hosts", "shared", "keep"),
    [
        ([change("d-train-2", "remove")], {}, ["d-train-2"], False, False),
        ([change("d-train-1", "replace")], {}, ["d-train-1"], False, False),
        ([change("d-ctl", "replace")], {}, ["d-ctl"], True, False),
        ([change("d-ctl", "replace")], {}, ["d-ctl"], False, True),
        ([], {"other_lost": ("a Filestore instance",)}, [], True, False),
        ([change("d-train-3", "make"), change("d-train-1", "change", restarts=True)], {}, None, False, False),
    ],
)
def test_a_change_looks_at_what_it_removes_and_at_nothing_else(
    stage: Stage,
    changes: list[HostChange],
    more: dict[str, Any],
    hosts: list[str] | None,
    *,
    shared: bool,
    keep: bool,
) -> None:
    stage.found = Found(files=(SCRATCH,))
    session, slurm = context(stage), Slurm(())
    plan = HostPlan(tuple(changes), **more)
    stage.keep(keep)
    if hosts is None:
        assert not look_at_leaving(session, inventory(), plan, slurm).value
        assert not stage.searched
        return
    with rejected("only-copy", OnlyCopyError) as caught:
        look_at_leaving(session, inventory(), plan, slurm)
    assert "/scratch/shards on d-train-1" in caught.value.why
    assert [(list(one.hosts), one.shared) for one in stage.searched] == [(hosts, shared)]
    assert look_at_leaving(session, inventory(), plan, slurm, discard=True).value


@pytest.mark.parametrize("affected", [True, False])
def test_what_a_job_writes_until_it_is_ended_is_looked_for_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, affected: bool
) -> None:
    """The nodes that were drained are resumed where the change is refused."""

    def end(*_: object, **__: object) -> None:
        stage.found = Found(files=(SCRATCH,))

    resumed: list[Sequence[str]] = []
    slurm = Slurm(())
    monkeypatch.setattr(slurm, "resume", resumed.append, raising=False)
    jobs = (AffectedJob(job(7, JobState.RUNNING, "d-train-1"), "it leaves"),) * affected
    found = Impact(drained=("d-train-1",), affected=jobs)
    for name, does in (
        ("reject_changed_users", lambda *_: None),
        ("impact_of", lambda *_, **__: found),
        ("end_jobs", end),
    ):
        monkeypatch.setattr(impact, name, does)
    session: Any = context(stage)
    session.scheduler, session.inventory = lambda *_, **__: slurm, inventory()
    plan = HostPlan((change("d-train-1", "remove"),))
    if affected:
        with rejected("only-copy", OnlyCopyError):
            make_way(session, plan, force=True)
    else:
        assert make_way(session, plan, force=True) == {}
    assert resumed == [("d-train-1",)] * affected
    stage.found = Found(files=(SCRATCH,))
    make_way(session, plan, force=True, discard=True)
    entry = Journal(stage.workspace.journal).entries()[-1]
    assert (entry.verb, entry.phase) == ("up", "look_at_leaving")
    assert entry.note.startswith("discarded: 5 B")
    assert "/scratch/shards on d-train-1" in entry.note


@pytest.mark.parametrize(
    ("kind", "nodes", "stops"),
    [("none", ["d-train-2"], True), ("none", ["d-train-1"], False), ("nfs", ["d-train-2"], False)],
)
def test_a_machine_of_the_users_own_leaves_once_its_runs_are_collected(
    stage: Stage, kind: Any, nodes: list[str], *, stops: bool
) -> None:
    before = inventory("onprem", shared_folder=SharedFolder(kind=kind))
    ledger = Ledger(stage.workspace.jobs)
    entry = ledger.add(JobEntry(token=str(7), name="mine", user="ada", submitted_at=0, job_id="7"))
    session = context(stage)
    slurm: Any = Slurm([job(7, JobState.COMPLETED, *nodes)])
    plan = HostPlan((change("d-train-2", "remove", released=True),))
    if not stops:
        assert not look_at_leaving(session, before, plan, slurm).value
        return
    with rejected("only-copy", OnlyCopyError) as caught:
        look_at_leaving(session, before, plan, slurm)
    assert "d-train-2" in caught.value.why
    with pytest.raises(OnlyCopyError):
        look_at_leaving(session, before, HostPlan(()), slurm, replaced=["d-train-2"])
    ledger.update(entry, run_dir="/runs/d-7-mine", run_state="COMPLETED")
    assert not look_at_leaving(session, before, plan, slurm).value
