"""`down` and `up` refuse to remove hosts with the only copy of files or runs, unless --discard."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.down import DownOptions, down, preview
from clusterctl.cluster.dry_run import reject_up
from clusterctl.cluster.impact import free_changed_hosts
from clusterctl.cluster.losses import (
    DISCARDED,
    LOOK_VALID_S,
    LeavingHosts,
    check_leaving_hosts,
    check_only_copies,
    is_whole,
    note_removal,
)
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.cluster.plan import Plan
from clusterctl.cluster.up import UpOptions
from clusterctl.errors import OnlyCopyError, TransportError, UnreachableError
from clusterctl.providers.base import HostChange, HostPlan
from clusterctl.runs.only_copies import OnlyCopies, UncopiedFiles
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, Nodes
from clusterctl.spec.load import dump_spec
from clusterctl.state.inventory import Inventory, SharedFolder
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.removal import begun_removal, record_machines
from clusterctl.state.workspace import Workspace
from clusterctl.util.disk import read_rows
from clusterctl.util.progress import Clock
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.support.providers import BareProvider, use_provider
from tests.support.scripted import (
    Call,
    ScriptedTransport,
    Step,
    queued,
    use_hosts,
    without_sudo,
)
from tests.unit.cluster.specs import spec_of

HOME = "/shared/home/ada"
MODEL = UncopiedFiles(f"{HOME}/models", "ada", 2, 3 << 30, 7200, top=HOME, on_disk=3 << 30)
SCRATCH = UncopiedFiles(
    "/scratch/shards", "bob", 1, 5, 86400 * 3, host="d-train-1", top="/scratch", on_disk=5
)
LOST = UncopiedFiles(
    "files of job 2 (mine)", "ada", 1, 10, 60, top=HOME, why="the run is not collected",
    job_id="2", on_disk=10, token="2",  # noqa: S106
)  # fmt: skip
FOLDER_OF_JOB_2 = f"{HOME}/clusterctl/jobs/2"


def inventory(provider: str = "local", **more: Any) -> Inventory:
    return inventory_of("d-train-1", "d-train-2", provider=provider, **more)


def job(number: int, state: JobState, *nodes: str) -> JobInfo:
    return JobInfo(number=number, name="mine", user="ada", state=state, reason="", nodes=nodes)


class Slurm(Nodes):
    """A Slurm with these jobs and two idle nodes. resumed: the nodes of each resume."""

    drains_nodes = True
    clock = Clock(sleep=lambda _: None)

    def __init__(self, jobs: Sequence[JobInfo]) -> None:
        self.found = jobs
        self.resumed: list[Sequence[str]] = []

    def nodes(self) -> Sequence[NodeInfo]:
        names = ("d-train-1", "d-train-2")
        return [NodeInfo(name, "idle", "", 1, 1000, "", ("train",)) for name in names]

    def drain(self, names: Sequence[str], _: str) -> tuple[str, ...]:
        return tuple(names)

    def resume(self, names: Sequence[str]) -> None:
        self.resumed.append(names)

    def all_jobs(self) -> Sequence[JobInfo]:
        return self.found

    def jobs(self, ids: Sequence[str]) -> Sequence[JobInfo]:
        return [job for job in self.all_jobs() if job.whole_id in ids]


class Stage:
    """A running cluster, whose hosts are reached by ssh.

    files: those that exist only on the cluster. jobs: of squeue; None: slurmctld refuses to answer.
    silent: hosts that refuse the login. searches: host -> the latest request of a search there.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspace = Workspace(root / "d")
        self.workspace.create()
        self.workspace.configured.write_text("inputs")
        number = "2"
        entry = JobEntry(token=number, name="mine", user="ada", submitted_at=0.0, job_id=number)
        Ledger(self.workspace.jobs).add(replace(entry, remote_dir=FOLDER_OF_JOB_2))
        self.files: Sequence[UncopiedFiles] = ()
        self.jobs: Sequence[JobInfo] | None = ()
        self.silent: Collection[str] = ()
        self.searches: dict[str, dict[str, Any]] = {}
        use_hosts(monkeypatch, lambda host: StageHost(self, host))
        self.record(inventory())
        self.keep(False)

    def record(self, inventory: Inventory) -> None:
        self.workspace.inventory.write_text(inventory.text)

    def keep(self, keep: bool) -> None:
        """Record a spec with or without a storage of its own."""
        storage = {"name": "data"} if keep else {}
        spec = spec_of(storage=storage, users=[{"name": "ada", "uid": 2000}])
        self.workspace.spec.write_text(dump_spec(spec))

    def look(self, *discarded: str, discard: bool = False) -> OnlyCopies:
        entries = [
            JobEntry(token=i, name="mine", user="ada", submitted_at=0, job_id=i) for i in discarded
        ]
        runner = PhaseRunner(workspace=self.workspace)
        return runner.run("look", check_only_copies, entries, discard=discard)


class StageHost(ScriptedTransport):
    """A host of a stage: it has a squeue, an empty /etc/passwd, and the search for files."""

    def __init__(self, stage: Stage, host: str) -> None:
        super().__init__(host=host)
        self.stage = stage

    def _next(self, call: Call) -> Step:
        if self.host in self.stage.silent:
            raise TransportError("it does not accept our key", host=self.host)
        if call.argv[0] == "cat":
            return Step(call.argv)
        if without_sudo(call.argv)[0] == "squeue":
            if self.stage.jobs is None:
                return Step(call.argv, stderr="Access/permission denied", rc=1)
            return queued(
                *(
                    {
                        "JobID": job.id,
                        "Name": job.name,
                        "State": job.state.value,
                        "NodeList": ",".join(job.nodes),
                    }
                    for job in self.stage.jobs
                )
            )
        request = json.loads(json.loads(call.argv[-1])[0])
        self.stage.searches[self.host] = request
        rows = [
            self._row(files)
            for files in self.stage.files
            if (request["local"] and files.host == self.host)
            or (request["look_at_shared"] and not files.host)
        ]
        return Step(call.argv, "".join(f"{json.dumps(row)}\n" for row in (*rows, {"end": True})))

    def _row(self, files: UncopiedFiles) -> dict[str, Any]:
        path = FOLDER_OF_JOB_2 if files.job_id else files.what
        names = {"top": files.top, "path": path.removeprefix(f"{files.top}/")}
        numbers = ("files", "bytes", "age_s", "on_disk", "changed_ns")
        return {
            **{key: base64.b64encode(name.encode()).decode() for key, name in names.items()},
            **{key: getattr(files, key) for key in numbers},
            "owner": files.owner,
        }


def context(stage: Stage) -> ClusterContext:
    return ClusterContext.of(spec_of(), workspace=stage.workspace)


def with_nodes(stage: Stage, slurm: Slurm) -> ClusterContext:
    """Return a cluster of two nodes, which stay."""
    two = spec_of({"name": "train", "nodes": 2})
    cluster: Any = ClusterContext.of(two, workspace=stage.workspace)
    cluster.scheduler = lambda *_, **__: slurm
    return cluster


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_losses_are_listed_with_size_owner_and_age(stage: Stage) -> None:
    stage.files = (MODEL, SCRATCH)
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
        "/shared/home/ada/models: 3 GiB in 2 files of ada, 2h old",
        "/scratch/shards on d-train-1: 5 B in 1 file of bob, 3d old",
    ]
    assert [(condition(failure), failure.phase) for failure in caught.value.failures] == [
        ("would-lose/files", "look")
    ] * 4
    for answer in (
        "`clusterctl cancel ID`",
        "`clusterctl collect --all`",
        "--discard",
    ):
        assert answer in caught.value.fix
    assert [failure.fix for failure in caught.value.failures] == [caught.value.fix, "", "", ""]
    (entry,) = read_rows(stage.workspace.journal)
    assert (entry["verb"], entry["phase"], entry["ok"]) == ("down", "look", False)
    assert entry["note"] == caught.value.what
    assert entry["seconds"] >= 0


def test_discarded_files_are_returned_and_journaled(stage: Stage) -> None:
    stage.files = (MODEL,)
    assert stage.look(discard=True).files == (MODEL,)
    (entry,) = read_rows(stage.workspace.journal)
    assert entry["note"].startswith("discarded: 3 GiB in 2 files; /shared/home/ada/models: ")


def test_run_given_up_by_name_does_not_stop_the_check(stage: Stage) -> None:
    stage.files = (LOST,)
    stage.jobs = [job(2, JobState.RUNNING)]
    with pytest.raises(OnlyCopyError):
        stage.look()
    (run,) = stage.look("2").lines
    assert run.endswith("job 2 (mine)")


def test_submission_without_an_id_hides_no_file(stage: Stage) -> None:
    """Files outside of job folders have no job id either."""
    stage.files = (MODEL, LOST)
    lost = JobEntry(token=str(7), name="mine", user="ada", submitted_at=0)
    runner = PhaseRunner(workspace=stage.workspace)
    assert runner.run("look", check_only_copies, [lost], discard=True).files == (MODEL, LOST)


@pytest.mark.parametrize("dead", ["hosts", "scheduler", "record", "no record"])
def test_check_stops_if_a_host_or_record_is_unknown(stage: Stage, dead: str) -> None:
    if dead == "hosts":
        stage.silent = ("d-train-2",)
    elif dead == "scheduler":
        stage.jobs = None
    elif dead == "record":
        stage.workspace.inventory.write_text("torn")
    else:
        stage.workspace.inventory.unlink()
    with rejected("would-lose/files", OnlyCopyError) as caught:
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
    stage.silent = ("d-ctl",)
    assert not stage.look()
    assert not preview(stage.workspace, DownOptions()).copies
    stage.silent = ("d-train-2",)
    stage.files = (MODEL,)
    with pytest.raises(OnlyCopyError) as caught:
        stage.look()
    assert "d-train-2" not in caught.value.why


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
    stage.silent = ("d-ctl",)
    with pytest.raises(OnlyCopyError):
        stage.look()


class KilledError(Exception):
    """`down` was killed."""


class Killed(BareProvider):
    """A provider whose `down` is killed while it removes hosts."""

    def destroy(self, *_: object, **__: object) -> NoReturn:
        raise KilledError


def test_down_asks_about_files_that_are_newer_than_an_unfinished_down_with_discard(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_provider(monkeypatch, lambda *_: Killed())
    runner = PhaseRunner(workspace=stage.workspace)
    with pytest.raises(KilledError):
        down(runner, DownOptions(discard=True))
    stage.silent = ("d-train-2",)
    stage.files = (MODEL,)
    with pytest.raises(OnlyCopyError) as caught:
        down(runner, DownOptions())
    assert [failure.cause for failure in caught.value.failures] == [str(MODEL)]


@pytest.mark.parametrize(
    ("gone", "provider"), [("d-ctl", "onprem"), ("d-ctl", "gcp"), ("d-train-1", "onprem")]
)
def test_no_job_is_asked_of_a_controller_that_its_owner_has_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, gone: str, provider: str
) -> None:
    """Slurm has gone with it. At Google, there may be its disk."""
    use_provider(monkeypatch, lambda *_: Killed())
    stage.record(inventory(provider))
    stage.silent = ("d-ctl",)
    is_lost = (gone, provider) == ("d-ctl", "onprem")
    options = DownOptions(gone=[gone], discard_runs=["2"])
    assert bool(preview(stage.workspace, options).copies.unknown) is not is_lost
    with pytest.raises(KilledError if is_lost else OnlyCopyError):
        down(PhaseRunner(workspace=stage.workspace), options)


def test_note_removal_records_discarded_files(stage: Stage) -> None:
    note_removal(stage.workspace, OnlyCopies(files=(MODEL, SCRATCH)))
    note_removal(stage.workspace, OnlyCopies())
    (row,) = read_rows(stage.workspace.root.parent / DISCARDED)
    assert (row["cluster"], row["discarded"]) == ("d", [str(MODEL), str(SCRATCH)])


def test_cluster_is_whole_while_each_host_answers_and_no_machine_was_changed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead: set[str] = set()

    def host(name: str) -> ScriptedTransport:
        error = UnreachableError("no route") if name in dead else None
        return ScriptedTransport([Step(("true",), error=error)])

    use_hosts(monkeypatch, host)
    assert is_whole(stage.workspace)
    dead.add("d-train-2")
    assert not is_whole(stage.workspace)
    stage.workspace.inventory.unlink()
    assert is_whole(stage.workspace)
    note_removal(stage.workspace, OnlyCopies())
    # Machines that had never joined.
    record_machines(stage.workspace, released=["d-train-2"])
    assert is_whole(stage.workspace)
    record_machines(stage.workspace, changed=["d-ctl"])
    assert not is_whole(stage.workspace)


def test_check_of_an_unconfigured_cluster_asks_nothing(stage: Stage) -> None:
    stage.workspace.configured.unlink()
    stage.files = (MODEL,)
    stage.jobs = None
    assert not stage.look()
    assert stage.searches == {}


def test_check_of_onprem_machines_stops_only_for_jobs(stage: Stage) -> None:
    """If the controller is off, jobs may run on the nodes. `down` has asked once it has begun."""
    stage.record(inventory("onprem"))
    stage.jobs = [job(7, JobState.RUNNING)]
    with rejected("would-lose/files", OnlyCopyError):
        stage.look()
    stage.jobs = None
    stage.workspace.access_config.touch()
    with rejected("would-lose/files", OnlyCopyError) as caught:
        stage.look()
    assert "clusterctl up" not in caught.value.fix
    note_removal(stage.workspace, stage.look(discard=True))
    with rejected("would-lose/files", OnlyCopyError):
        stage.look()
    record_machines(stage.workspace, changed=["d-train-1"])
    assert not stage.look()
    assert stage.searches == {}


@pytest.mark.parametrize("keep", [True, False])
def test_check_does_not_search_a_storage(stage: Stage, *, keep: bool) -> None:
    stage.keep(keep)
    stage.look()
    assert {host: request["local"] for host, request in stage.searches.items()} == dict.fromkeys(
        ("d-ctl", "d-train-1", "d-train-2"), True
    )
    of_shared = [host for host, request in stage.searches.items() if request["look_at_shared"]]
    assert of_shared == ([] if keep else ["d-ctl"])


def change(name: str, action: Any, **more: Any) -> HostChange:
    return HostChange(name, action, "2 CPUs", **more)


@pytest.mark.parametrize(
    ("changes", "emptied"),
    [
        ([change("d-train-2", "remove")], ["d-train-2"]),
        ([change("d-train-1", "replace")], ["d-train-1"]),
        ([change("d-train-3", "make"), change("d-train-1", "change", ends_jobs=True)], []),
    ],
)
def test_emptied_has_only_leaving_hosts(changes: list[HostChange], emptied: list[str]) -> None:
    assert LeavingHosts(inventory(), HostPlan(tuple(changes))).emptied == emptied


@pytest.mark.parametrize("stops", [True, False])
def test_local_ssds_lose_their_files_only_if_their_host_stops(stops: bool) -> None:
    was = inventory_of(host_of("d-train-1", local_ssds=1), provider="gcp")
    changed = change(
        "d-train-1", "change", ends_jobs=True, stops=stops, detached_disks=("another",)
    )
    emptied = LeavingHosts(was, HostPlan((changed,))).emptied
    assert emptied == (["d-train-1"] if stops else [])


def test_node_with_only_copies_is_resumed_unless_they_are_discarded(stage: Stage) -> None:
    slurm = Slurm([])
    session = with_nodes(stage, slurm)
    plan = HostPlan((change("d-train-1", "replace"),))
    free_changed_hosts(session, plan)
    stage.files = (SCRATCH,)
    with rejected("would-lose/files", OnlyCopyError):
        free_changed_hosts(session, plan)
    assert slurm.resumed == [("d-train-1",)]
    free_changed_hosts(session, plan, discard=True)
    entry = list(read_rows(stage.workspace.journal))[-1]
    assert (entry["verb"], entry["phase"]) == ("up", "check_leaving_nodes")
    assert entry["note"].startswith("discarded: 5 B")
    assert "/scratch/shards on d-train-1" in entry["note"]


def test_dry_run_of_up_stops_for_what_up_would_lose(stage: Stage) -> None:
    stage.files = (SCRATCH,)
    session = with_nodes(stage, Slurm([]))
    plan = Plan(HostPlan((change("d-train-1", "replace"),)))
    with rejected("would-lose/files", OnlyCopyError) as caught:
        reject_up(session, plan, UpOptions())
    assert "/scratch/shards on d-train-1" in caught.value.why
    reject_up(session, plan, UpOptions(discard=True))
    reject_up(session, Plan(HostPlan((change("d-train-1", "keep"),))), UpOptions())
    assert not stage.workspace.journal.exists()


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
    with rejected("would-lose/files", OnlyCopyError) as caught:
        check_leaving_hosts(session, LeavingHosts(before, plan), slurm)
    assert "d-train-2" in caught.value.why
    with pytest.raises(OnlyCopyError):
        check_leaving_hosts(session, LeavingHosts(before, HostPlan(()), ["d-train-2"]), slurm)
    ledger.update(entry, run_dir="/runs/d-7-mine", run_state="COMPLETED")
    assert not check_leaving_hosts(session, LeavingHosts(before, plan), slurm).value


def test_machine_that_is_half_given_back_keeps_the_name_of_the_unfinished_down(
    stage: Stage,
) -> None:
    """Machines of an owner answer also after `down` has removed the cluster from them."""
    stage.record(inventory("onprem"))
    note_removal(stage.workspace, OnlyCopies())
    record_machines(stage.workspace, changed=["d-ctl", "d-train-2"], released=["d-ctl"])
    assert not stage.look()
    begun = begun_removal(stage.workspace)
    assert begun is not None
    assert (begun.changed, begun.released) == (("d-ctl", "d-train-2"), ("d-ctl",))
