"""`down` collects runs, records what is discarded, removes the cluster, and lists leftovers with cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterctl.cli import down as cli_down
from clusterctl.cli.output import Screen
from clusterctl.cluster import down
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.down import (
    DownOptions,
    not_collected_error,
    remove_cluster,
    to_discard,
)
from clusterctl.cluster.losses import DISCARDED
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.cluster.status import status_of
from clusterctl.cluster.up import UpOptions, record_spec, up
from clusterctl.cluster.verify import examine_cluster
from clusterctl.errors import (
    CollectError,
    LeftoversError,
    Notice,
    NotUpError,
    OnlyCopyError,
    UnreachableError,
    UsageError,
)
from clusterctl.providers.base import HostPlan, Leftover, Orphan, OrphanSearch
from clusterctl.runs.saved_usage import ClusterUsage, saved_usages
from clusterctl.scheduler.base import AccountingAwayError
from clusterctl.scheduler.slurm.usage import AllocatedTime
from clusterctl.spec.load import dump_spec
from clusterctl.state.inventory import inventory_if_known
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.removal import BegunRemoval, begun_removal, record_machines, record_removal
from clusterctl.state.workspace import Workspace
from clusterctl.util.disk import read_rows
from clusterctl.util.progress import MessageLines
from tests.support.inventories import inventory_of
from tests.support.messages import condition, refused
from tests.support.providers import BareProvider, use_provider
from tests.support.scripted import ScriptedTransport, Step, use_hosts
from tests.unit.cluster.specs import spec_of

DISK = Leftover("disk d-ctl in us-central1-a", 0.0125)
RULE = Leftover("firewall rule d-a1b2c3-ssh")


@dataclass
class Cloud(BareProvider):
    """A provider with clusters.

    stubborn: clusters can't be removed. on_destroy: called before a cluster is removed.
    """

    clusters: dict[str, tuple[Leftover, ...]]
    stubborn: bool = False
    on_destroy: Callable[[], None] = lambda: None
    destroyed: list[tuple[str, Workspace | None]] = field(default_factory=list)

    def orphans(self, _: str) -> OrphanSearch:
        return OrphanSearch(tuple(map(Orphan, self.clusters)))

    def leftovers(self, cluster_id: str, **_: object) -> tuple[Leftover, ...]:
        return self.clusters.get(cluster_id, ())

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        self.on_destroy()
        self.destroyed.append((cluster_id, workspace))
        if not self.stubborn:
            self.clusters.pop(cluster_id, None)


def test_each_leftover_is_a_failure_with_its_price(tmp_path: Path) -> None:
    cloud = Cloud({"a1b2c3": (DISK, RULE)}, stubborn=True)
    with pytest.raises(LeftoversError) as caught:
        remove_cluster(cloud, "a1b2c3", Workspace(tmp_path))  # type: ignore[arg-type]
    assert cloud.destroyed == [("a1b2c3", Workspace(tmp_path))]
    assert [failure.cause for failure in caught.value.failures] == [
        "disk d-ctl in us-central1-a (0.0125 USD an hour)",
        "firewall rule d-a1b2c3-ssh",
    ]
    assert {condition(failure) for failure in caught.value.failures} == {"leftovers"}


def cluster_with_runs(tmp_path: Path) -> Workspace:
    """Return the workspace of a cluster with jobs 1 to 3. Only the run of job 1 is collected."""
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    (workspace.root / "id").write_text("ffffff\n")
    ledger = Ledger(workspace.jobs)
    for job_id in ("1", "2", "3"):
        entry = JobEntry(token=job_id, name="mine", user="ada", submitted_at=0, job_id=job_id)
        ledger.add(entry)
    ledger.update(ledger.entries()[0], run_dir="runs/d-1-mine", run_state="COMPLETED")
    return workspace


@pytest.mark.parametrize(
    ("ids", "everything", "discarded"),
    [
        ((), False, []),
        (("2",), False, ["2"]),
        (("1", "3", "1"), False, ["1", "3"]),
        ((), True, ["2", "3"]),
    ],
)
def test_discard_runs_names_runs_by_job_id(
    tmp_path: Path, ids: tuple[str, ...], discarded: list[str], *, everything: bool
) -> None:
    found = to_discard(cluster_with_runs(tmp_path), ids, everything=everything)
    assert [entry.job_id for entry in found] == discarded


@pytest.mark.parametrize("job_id", ["4", "2_1", "", "x", "--all"])
def test_discard_runs_with_an_unknown_job_is_refused(tmp_path: Path, job_id: str) -> None:
    workspace = cluster_with_runs(tmp_path)
    with refused("not-found/run", UsageError):
        down.down(PhaseRunner(workspace=workspace), DownOptions(discard_runs=["2", job_id]))
    assert not workspace.journal.exists()


@pytest.mark.parametrize("spec", [None, b"", b"\xff"])
@pytest.mark.parametrize("found", [(), ("a1b2c3",)])
def test_down_removes_a_cluster_with_damaged_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: tuple[str, ...], spec: bytes | None
) -> None:
    """The cluster is on the local machine, where it is found by its name."""
    cloud = Cloud(dict.fromkeys(found, (DISK,)))
    use_provider(monkeypatch, lambda *_: cloud)
    workspace = cluster_with_runs(tmp_path)
    (workspace.root / "id").write_text("")
    workspace.inventory.write_bytes(b"")
    workspace.munge_key.write_bytes(b"")
    workspace.key.write_bytes(b"")
    if spec is not None:
        workspace.spec.write_bytes(spec)
    with workspace.jobs.open("ab") as file:
        file.write(b'\xff{]\n{"token": "aa", "job_id": "9"}\n')
    down.down(PhaseRunner(workspace=workspace), DownOptions(discard=True))
    assert cloud.clusters == {}
    assert not workspace.root.exists()


def test_discarded_runs_are_journaled_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = Cloud({"ffffff": (DISK,)}, stubborn=True)
    use_provider(monkeypatch, lambda *_: cloud)
    workspace = cluster_with_runs(tmp_path)
    (workspace.root / "hosts.json").touch()
    with pytest.raises(LeftoversError):
        down.down(PhaseRunner(workspace=workspace), DownOptions(discard_runs=["2", "3"]))
    assert [row["phase"] for row in read_rows(workspace.journal)] == ["look", "destroy"]
    cloud.stubborn = False  # so that the same command continues
    done = down.down(PhaseRunner(workspace=workspace), DownOptions(discard_runs=["2", "3"]))
    assert [entry.job_id for entry in done.discarded] == ["2", "3"]
    assert [line[-12:] for line in done.lost.runs] == ["job 2 (mine)", "job 3 (mine)"]
    *_, row = read_rows(workspace.root.parent / DISCARDED)
    assert row["discarded"] == [*done.lost.runs]
    assert not workspace.root.exists()


@pytest.mark.parametrize("is_known", [True, False])
def test_down_writes_the_usage_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    """If the accounting does not answer, `down` says so and continues."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    saved: list[list[ClusterUsage]] = []
    cloud = Cloud({"ffffff": (DISK,)}, on_destroy=lambda: saved.append([*saved_usages({})]))
    use_provider(monkeypatch, lambda *_: cloud)
    workspace = cluster_with_runs(tmp_path)
    workspace.inventory.write_text(inventory_of(cluster="d").text)
    workspace.configured.write_text("inputs")
    held = AllocatedTime(
        job="1", user="ada", account="", partition="a", start=0, end=9, nodes=1, cluster="d"
    )
    usage = ClusterUsage(cluster="d", source="accounting", held=(held,))

    def usage_since(_: object, since: float, tokens: set[str]) -> ClusterUsage:
        assert (since, tokens) == (0, {"1", "2", "3"})
        if not is_known:
            raise AccountingAwayError("no accounting")
        return usage

    monkeypatch.setattr(down, "usage_since", usage_since)
    monkeypatch.setattr(down, "job_inventory", inventory_if_known)
    notes: list[str] = []
    runner = PhaseRunner(workspace=workspace, reporter=MessageLines(notes.append))
    done = down.down(runner, DownOptions(discard=True))
    assert saved == [[usage] if is_known else []]
    assert [phase.name for phase in done.phases] == ["look", "write_usage", "destroy"]
    told = [note.code for note in notes if isinstance(note, Notice)]
    assert told == ([] if is_known else ["usage-unknown"])


def test_down_records_discarded_runs_before_it_removes_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed `down` then leaves the record, and the next `down` continues."""
    cloud = Cloud({"ffffff": (DISK,)})
    use_provider(monkeypatch, lambda *_: cloud)
    workspace = cluster_with_runs(tmp_path)
    file = workspace.root.parent / DISCARDED
    runs = ["the run of job 2 (mine)", "the run of job 3 (mine)"]
    seen: list[object] = []

    def kill() -> None:
        seen.extend(row["discarded"] for row in read_rows(file))
        assert workspace.removing.exists()
        raise KeyboardInterrupt

    cloud.on_destroy = kill
    with pytest.raises(KeyboardInterrupt):
        down.down(PhaseRunner(workspace=workspace), DownOptions(discard=True))
    assert seen == [runs]
    cloud.on_destroy = lambda: None
    down.down(PhaseRunner(workspace=workspace), DownOptions(discard=True))
    assert [row["discarded"] for row in read_rows(file)] == [runs, runs]


def test_next_down_continues_without_asking_about_discarded_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = Cloud({"ffffff": (DISK,)}, stubborn=True)
    use_provider(monkeypatch, lambda *_: cloud)
    workspace = cluster_with_runs(tmp_path)
    workspace.inventory.write_text(inventory_of("d-train-1").text)
    gone = Step(("true",), error=UnreachableError("no route"))
    use_hosts(monkeypatch, lambda _: ScriptedTransport([gone]))
    with pytest.raises(LeftoversError):
        down.down(PhaseRunner(workspace=workspace), DownOptions(discard=True))
    record_machines(workspace, released=["d-ctl"])
    with pytest.raises(NotUpError) as examined:
        examine_cluster(spec_of(), workspace, cloud)
    with pytest.raises(NotUpError) as caught:
        status_of(workspace)
    assert condition(examined.value) == condition(caught.value) == "not-up/leaving"
    assert "d-ctl" in caught.value.why.partition(";")[0]
    assert "d-train-1" in caught.value.why.partition(";")[2]
    assert "`clusterctl up`" in caught.value.fix
    cloud.stubborn = False
    done = down.down(PhaseRunner(workspace=workspace), DownOptions())
    assert [entry.job_id for entry in done.discarded] == ["2", "3"]


def test_next_down_asks_about_a_job_that_was_submitted_since(tmp_path: Path) -> None:
    workspace = cluster_with_runs(tmp_path)
    new = JobEntry(token=str(4), name="mine", user="ada", submitted_at=1, job_id="4")
    Ledger(workspace.jobs).add(new)
    record_removal(workspace, BegunRemoval(discarded=("2",)))
    found = to_discard(workspace, ("3",), everything=False)
    assert [entry.job_id for entry in found] == ["2", "3"]


@pytest.mark.parametrize("removed", [True, False])
def test_failed_down_is_marked_as_removing_only_if_hosts_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, removed: bool
) -> None:
    use_provider(monkeypatch, lambda *_: Cloud({"ffffff": (DISK,)}, stubborn=True))
    workspace = cluster_with_runs(tmp_path)
    workspace.inventory.write_text(inventory_of("d-train-1").text)
    answer = Step(("true",), error=UnreachableError("no route") if removed else None)
    use_hosts(monkeypatch, lambda _: ScriptedTransport([answer]))
    with pytest.raises(LeftoversError):
        down.down(PhaseRunner(workspace=workspace), DownOptions(discard=True))
    assert workspace.removing.exists() == removed


class DeclinedError(Exception):
    """The user declined the plan."""


def test_declined_up_keeps_the_records_of_unfinished_commands(tmp_path: Path) -> None:
    """Otherwise the cluster seems to be up, although `down` has removed some of its hosts.

    An approved `up` removes them: the next `image bake` would remove what `up` creates.
    """
    workspace = cluster_with_runs(tmp_path)
    workspace.baking.touch()
    record_removal(workspace, BegunRemoval(discarded=("2",)))

    def decline(_: object) -> None:
        raise DeclinedError

    class Planner(BareProvider):
        def check(self, _: object) -> None:
            pass

        def plan(self, *_: object) -> HostPlan:
            return HostPlan(())

    cluster = ClusterContext.of(spec_of(), workspace=workspace, provider=Planner())
    with pytest.raises(DeclinedError):
        up(cluster, UpOptions(approve=decline))
    assert begun_removal(workspace) == BegunRemoval(discarded=("2",))
    assert workspace.baking.exists()
    record_spec(cluster)
    assert begun_removal(workspace) is None
    assert not workspace.baking.exists()


@pytest.mark.parametrize("json", [True, False])
def test_refused_down_lists_the_runs_that_it_collected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    json: bool,
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    use_provider(monkeypatch, lambda *_: Cloud({"ffffff": (DISK,)}))
    collected = SimpleNamespace(directory=tmp_path / "runs/d-2-mine", not_here=())
    monkeypatch.setattr(down, "collect_all", lambda *_, **__: iter([collected]))
    workspace = cluster_with_runs(tmp_path)
    workspace.spec.write_text(dump_spec(spec_of()))
    # Users could log in, and without an inventory nobody knows where their files are.
    workspace.configured.write_text("inputs")
    screen = Screen(json=json, color=False, cluster="d")
    with pytest.raises(OnlyCopyError) as caught:
        cli_down.down(screen, yes=True)
    screen.error(caught.value)
    shown = capfd.readouterr()
    assert f"collected {collected.directory}\n" in shown.err
    assert not json or loads(shown.out)["runs"] == [str(collected.directory)]


def test_dry_run_of_a_down_that_would_stop_fails_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    use_provider(monkeypatch, lambda *_: Cloud({"ffffff": (DISK,)}))
    cluster_with_runs(tmp_path).configured.write_text("inputs")
    screen = Screen(json=True, color=False, cluster="d")
    with pytest.raises(OnlyCopyError) as caught:
        cli_down.down(screen, dry_run=True)
    screen.error(caught.value)
    answer = loads(capfd.readouterr().out)
    assert answer["collected"] == ["2", "3"]
    assert [failure["cause"] for failure in answer["failures"]] == answer["only_copies"]
    assert "--discard" in answer["failures"][0]["fix"]
    screen = Screen(json=True, color=False, cluster="d")
    cli_down.down(screen, dry_run=True, discard=True)
    assert loads(capfd.readouterr().out)["dry_run"] is True


def test_down_of_an_unknown_cluster_leaves_no_lock_file(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "d")
    with refused("not-found/cluster", NotUpError):
        down.down(PhaseRunner(workspace=workspace), DownOptions())
    assert list(tmp_path.iterdir()) == []


def test_preview_tells_what_would_be_collected_or_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_provider(monkeypatch, lambda *_: Cloud({"ffffff": (DISK,)}))
    workspace = cluster_with_runs(tmp_path)
    assert down.preview(workspace, DownOptions()).collected == ("2", "3")
    shown = down.preview(workspace, DownOptions(discard=True))
    assert (shown.collected, shown.discarded) == ((), ("2", "3"))


def test_down_that_can_not_collect_names_jobs_and_remedy() -> None:
    error = CollectError("2 of 3 runs could not be brought home", why="job 2: no; job 7: gone")
    error.jobs = ("2", "7")
    refusal = not_collected_error(error)
    assert "job 2: no; job 7: gone" in refusal.why
    assert refusal.fix.endswith("--discard-run 2 --discard-run 7")
    assert not_collected_error(error, ["9"]).fix.endswith(
        "--discard-run 9 --discard-run 2 --discard-run 7"
    )
    single = CollectError("it is not known where its files are")
    single.jobs = ("5",)
    assert not_collected_error(single).why.startswith("job 5: ")
    unknown = UnreachableError("no answer")
    assert not_collected_error(unknown).fix.endswith("--discard")
    assert "clusterctl up" in not_collected_error(unknown).fix
    assert "clusterctl up" not in not_collected_error(unknown, repair="").fix


@pytest.mark.parametrize("is_own", [True, False])
def test_up_is_no_remedy_for_a_machine_of_an_owner_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_own: bool
) -> None:
    workspace = cluster_with_runs(tmp_path)
    if is_own:
        workspace.access_config.touch()

    def silent(_: Workspace) -> None:
        raise UnreachableError("no answer", fix="check that the machine is on")

    monkeypatch.setattr(down, "applied_spec", silent)
    with refused("would-lose/runs", CollectError) as caught:
        down.collect_runs(PhaseRunner(workspace=workspace), DownOptions(), ())
    assert ("that the machine is on" in caught.value.fix) is is_own
    assert ("clusterctl up" in caught.value.fix) is not is_own


@pytest.mark.parametrize("recorded", ["torn", None])
def test_down_with_a_damaged_spec_keeps_the_terraform_state(
    tmp_path: Path, recorded: str | None
) -> None:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    if recorded is not None:
        workspace.spec.write_text(recorded)
    state = workspace.root / "terraform" / "terraform.tfstate"
    state.parent.mkdir()
    state.write_text("resources that cost money")
    with pytest.raises(UsageError):
        down.down(PhaseRunner(workspace=workspace), DownOptions(discard=True))
    assert state.read_text() == "resources that cost money"
