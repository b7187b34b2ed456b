# ruff: noqa: ARG002 - a provider that does nothing
"""Kept storage of any provider: its users, its record, and its rows in `list` and `down`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import down as cli_down
from clusterctl.cli import listing
from clusterctl.cli.output import Screen
from clusterctl.cluster import down
from clusterctl.cluster.down import DownOptions
from clusterctl.cluster.losses import DISCARDED
from clusterctl.cluster.phases import PhaseRunner, workspace_copy
from clusterctl.errors import ClusterctlError, OnlyCopyError, UsageError
from clusterctl.providers.storage import (
    KeptStorage,
    StorageRecord,
    choose_storage_to_reuse,
    load_all_kept,
    load_record,
    notes_on_unused_storage,
    reject_storage_elsewhere,
    save_record,
)
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.copies import Copies, read_copies, record_copies
from clusterctl.util.disk import read_rows
from tests.support.messages import refused
from tests.support.providers import BareProvider, use_provider
from tests.unit.cluster.specs import spec_of

DISK = KeptStorage(
    cluster="d",
    id="d-a1b2c3-shared",
    what="disk d-a1b2c3-shared",
    size_mib=102400,
    usd_per_month=10,
    since=7,
)

OTHER_PLACE = GcpSettings(type="gcp", project="another-project", zone="us-central1-a")
OWN = {"type": "onprem", "controller": "n1", "hosts": {"n1": {"address": "192.0.2.1"}}}


def spec(*users: tuple[str, int], keep: bool = True) -> ClusterSpec:
    accounts = [{"name": name, "uid": uid} for name, uid in users or [("ada", 1001)]]
    return spec_of(users=accounts, storage={"keep": keep})


def kept(**homes: int) -> KeptStorage:
    return DISK.model_copy(update={"homes": homes})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    return tmp_path


def test_kept_storage_is_reused_if_the_spec_keeps_storage() -> None:
    one = kept(ada=1001, bob=1002)
    assert choose_storage_to_reuse(spec(("ada", 1001), ("new", 1003)), [one]) == one
    assert choose_storage_to_reuse(spec(keep=False), [one]) is None
    assert choose_storage_to_reuse(spec(), []) is None
    # Nothing is known of its homes.
    assert choose_storage_to_reuse(spec(), [kept()]) == kept()


@pytest.mark.parametrize(
    ("users", "whose"),
    [
        ([("ada", 1003)], ("ada", "1003", "1001")),
        ([("eve", 1001)], ("1001", "eve", "ada")),
        ([("new", 1003), ("bob", 1001)], ("bob", "1001", "1002")),
    ],
)
def test_kept_storage_is_refused_for_other_users(
    users: list[tuple[str, int]], whose: tuple[str, ...]
) -> None:
    with refused("storage-users-differ", UsageError, *whose, "storage remove d"):
        choose_storage_to_reuse(spec(*users), [kept(ada=1001, bob=1002)])


def test_several_kept_storages_are_refused_as_ambiguous() -> None:
    with refused("storage-name-ambiguous", UsageError):
        choose_storage_to_reuse(spec(), [kept(), kept()])


@pytest.mark.parametrize(
    "settings",
    [LocalSettings(), GcpSettings(type="gcp", project="my-project", zone="us-central1-a")],
)
def test_load_record_returns_what_was_saved(home: Path, settings: Any) -> None:
    assert load_record("d") is None
    noted = StorageRecord(provider=settings, users=("ada",), kept=(kept(ada=1001),))
    save_record("d", noted)
    assert load_record("d") == noted
    assert list(load_all_kept()) == [kept(ada=1001)]
    assert notes_on_unused_storage(spec()) == ()
    if settings.type == "local":
        reject_storage_elsewhere(spec())
    else:
        with refused("storage-elsewhere", UsageError):  # else it would be listed no more
            reject_storage_elsewhere(spec())
    reject_storage_elsewhere(spec(keep=False))
    (note,) = notes_on_unused_storage(spec(keep=False))
    assert "disk d-a1b2c3-shared (100GiB, 10.00" in note
    save_record("d", StorageRecord(provider=OTHER_PLACE, kept=()))
    assert load_record("d") == noted
    save_record("d", noted.model_copy(update={"kept": ()}))
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"provider": {"type": "moon"}, "kept": []}'])
def test_load_record_of_a_damaged_file_is_none(home: Path, text: str) -> None:
    (home / "d.storage.json").write_text(text)
    assert load_record("d") is None
    assert list(load_all_kept()) == []


@dataclass
class Stub(BareProvider):
    """A provider whose removed clusters leave storage."""

    storage: list[KeptStorage]
    did: list[str] = field(default_factory=list)
    refuses: ClusterctlError | None = None

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        self.did.append("destroy")

    def leftovers(self, cluster_id: str, **_: object) -> tuple[()]:
        return ()

    def kept_storage(self, name: str, users: tuple[str, ...]) -> tuple[KeptStorage, ...]:
        assert tuple(users) in {("ada",), ()}
        return tuple(self.storage)

    def refuse_used(self, kept: KeptStorage) -> None:
        if self.refuses:
            raise self.refuses

    def remove_storage(self, kept: KeptStorage) -> None:
        self.did.append(f"remove {kept.id}")
        self.storage = [storage for storage in self.storage if storage.id != kept.id]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub([DISK])
    use_provider(monkeypatch, lambda *_: stub)
    return stub


def cluster(*, keep: bool) -> PhaseRunner:
    workspace = Workspace.of("d")
    workspace.create()
    (workspace.root / "id").write_text("ffffff\n")
    workspace.spec.write_text(dump_spec(spec(keep=keep)))
    return PhaseRunner(workspace=workspace)


def test_down_with_keep_records_the_kept_storage(home: Path, stub: Stub) -> None:
    done = down.down(cluster(keep=True), DownOptions())
    assert done.kept == (DISK,)
    assert list(load_all_kept()) == [DISK]
    assert stub.did == ["destroy"]
    assert [phase.name for phase in done.phases] == ["look", "destroy", "keep_storage"]


@pytest.mark.parametrize("how", ["kept", "not kept", "kept before", "nothing was up"])
def test_list_of_copies_stays_while_storage_is_kept(home: Path, stub: Stub, how: str) -> None:
    """Collected runs are on the list, too, although until then only the workspace has them."""
    runner = cluster(keep=how == "kept")
    if how in {"kept before", "nothing was up"}:  # and not taken up
        save_record("d", StorageRecord(provider=LocalSettings(), kept=(DISK,)))
    if how == "nothing was up":
        runner.workspace.remove()
        runner.workspace.create()
    sent = Copies("d-ctl", "/shared/home/ada/set.csv", "/data/set.csv", sent=True)
    record_copies(runner.workspace, [sent])
    entry = JobEntry(
        token=str(1), name="mine", user="ada", submitted_at=0, job_id="1", remote_dir="/jobs/1"
    )
    entry = replace(entry, run_dir="/runs/d-1", run_state="COMPLETED")
    Ledger(runner.workspace.jobs).add(entry)
    was_up = how in {"not kept", "kept before"}
    if was_up:
        runner.workspace.configured.touch()
    down.down(runner, DownOptions(discard=was_up))
    assert not runner.workspace.root.exists()
    run = Copies("", "/jobs/1", "/runs/d-1", renamed=".from-job")
    there = {"kept": [sent, run], "kept before": [sent], "nothing was up": [sent]}.get(how, [])
    assert list(read_copies(runner.workspace)) == there
    if there:
        down.remove_storage(runner, down.find_storage(ChosenCluster(name="d")))
    assert {path.name for path in home.iterdir()} <= {DISCARDED, ".d.lock"}


def test_copies_are_recorded_in_a_temporary_workspace(home: Path) -> None:
    """`down` works on a temporary copy of the workspace if its disk is full."""
    workspace = cluster(keep=True).workspace
    sent = Copies("d-ctl", "/shared/home/ada/set.csv", "/data/set.csv", sent=True)
    record_copies(workspace, [sent])
    with workspace_copy(workspace, without=[]) as copy:
        assert list(read_copies(copy)) == [sent]


@pytest.mark.parametrize("was_up", [True, False])
def test_down_without_keep_keeps_storage_only_if_up_did_not_finish(
    home: Path, stub: Stub, *, was_up: bool
) -> None:
    """An unfinished `up` may have attached kept storage, which was not searched for files."""
    runner = cluster(keep=False)
    if was_up:
        runner.workspace.configured.touch()
    done = down.down(runner, DownOptions(discard=True))
    assert done.kept == (() if was_up else (DISK,))
    assert [phase.name for phase in done.phases] == ["look", "destroy", "keep_storage"][
        : 3 - was_up
    ]
    assert list(load_all_kept()) == ([] if was_up else [DISK])


def test_down_keeps_the_record_of_storage_at_another_place(home: Path, stub: Stub) -> None:
    noted = StorageRecord(provider=OTHER_PLACE, users=("ada",), kept=(DISK,))
    save_record("d", noted)
    stub.storage = []
    assert down.down(cluster(keep=False), DownOptions()).kept == ()
    assert load_record("d") == noted


def screen_verb(verb: Callable[..., None], **flags: bool) -> None:
    verb(Screen(json=False, color=False), "d", **flags)


def test_storage_remove_needs_discard_and_confirmation(
    home: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Storage without a cluster can't be searched for files."""
    save_record("d", StorageRecord(provider=LocalSettings(), kept=(DISK,)))
    with refused("only-copy", OnlyCopyError, DISK.what) as caught:
        screen_verb(cli_down.storage_remove, yes=True)
    assert all(word in caught.value.fix for word in ("collect --all", "--discard"))
    with refused("needs-confirmation", UsageError):
        screen_verb(cli_down.storage_remove, discard=True)
    assert stub.did == []
    listing.storage_list(Screen(json=False, color=False))
    assert "storage remove d`" in capsys.readouterr().out
    screen_verb(cli_down.storage_remove, yes=True, discard=True)
    assert stub.did == [f"remove {DISK.id}"]
    assert list(load_all_kept()) == []
    (row,) = read_rows(home / DISCARDED)
    assert row["discarded"][0].startswith(str(DISK))
    with refused("unknown-cluster"):
        screen_verb(cli_down.storage_remove, yes=True, discard=True)


def test_onprem_homes_are_only_copies(stub: Stub) -> None:
    left = StorageRecord(provider=OnpremSettings.model_validate(OWN), kept=())
    storage = down.Storage("d", stub, left, (DISK,))  # type: ignore[arg-type]
    with refused("only-copy", OnlyCopyError) as caught:
        down.reject_storage(storage, discard=False)
    assert "collect" not in caught.value.fix


def test_storage_remove_refuses_storage_in_use(home: Path, stub: Stub) -> None:
    save_record("d", StorageRecord(provider=LocalSettings(), kept=(DISK,)))
    stub.refuses = UsageError("a cluster 'd' has it", code="storage-in-use")
    with refused("storage-in-use"):
        screen_verb(cli_down.storage_remove, yes=True, discard=True)
    stub.refuses = None
    cluster(keep=True)
    with refused("storage-in-use"):
        screen_verb(cli_down.storage_remove, yes=True, discard=True)
    assert stub.did == []
    assert list(load_all_kept()) == [DISK]


def test_record_of_manually_removed_storage_is_deleted(home: Path, stub: Stub) -> None:
    save_record("d", StorageRecord(provider=LocalSettings(), kept=(DISK,)))
    stub.storage = []
    screen_verb(cli_down.storage_remove)
    assert load_record("d") is None


def test_cluster_that_is_up_keeps_the_record_of_copies(
    home: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage is its own, and no storage was kept before."""
    monkeypatch.chdir(home)
    stub.storage = []
    workspace = cluster(keep=False).workspace
    workspace.inventory.touch()
    sent = Copies("d-ctl", "/shared/home/ada/set.csv", "/data/set.csv", sent=True)
    record_copies(workspace, [sent])
    storage = down.find_storage(ChosenCluster())
    assert (storage.name, storage.record.users) == ("d", ("ada",))
    down.remove_storage(PhaseRunner(workspace=workspace), storage)
    assert list(read_copies(workspace)) == [sent]


def test_down_records_the_date_of_kept_storage(home: Path, stub: Stub) -> None:
    stub.storage = [DISK.model_copy(update={"since": None})]
    (kept,) = down.down(cluster(keep=True), DownOptions()).kept
    assert [kept] == list(load_all_kept())
    assert "since 20" in kept.dated
    assert "since" not in stub.storage[0].dated
