# ruff: noqa: ARG002 - a provider that does nothing
"""Kept storage, whichever its provider: who may take it up, its record, what `list` and `down` show of it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import pytest

from clusterctl.cli import down as cli_down
from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.cluster import down
from clusterctl.cluster.context import Outcome, PhaseRunner, workspace_copy
from clusterctl.cluster.down import DownOptions
from clusterctl.cluster.look import DISCARDED, look_at_storage, reject_lost_storage
from clusterctl.errors import ClusterctlError, OnlyCopyError, UsageError
from clusterctl.providers.storage import (
    KeptStorage,
    Record,
    all_recorded,
    record,
    recorded,
    storage_left_alone,
    to_take_up,
)
from clusterctl.runs.only_copies import Found
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec, LocalSettings
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.copies import Copies, note, read_copies
from clusterctl.util.progress import ProgressReporter
from tests.support.messages import refused

DISK = KeptStorage(
    cluster="d", id="d-a1b2c3-shared", what="disk d-a1b2c3-shared", size_mib=102400, usd_per_month=10, since=7
)

OTHER_PLACE = GcpSettings(type="gcp", project="another-project", zone="us-central1-a")
HOME = base64.b64encode(b"/shared/home/ada").decode()


def spec(*users: tuple[str, int], keep: bool = True) -> ClusterSpec:
    said: dict[str, Any] = {"version": 1, "name": "d", "partitions": [{"name": "train", "nodes": 1}]}
    accounts = [{"name": name, "uid": uid} for name, uid in users or [("ada", 1001)]]
    return ClusterSpec.model_validate({**said, "users": accounts, "storage": {"keep": keep}})


def kept(**homes: int) -> KeptStorage:
    return DISK.model_copy(update={"homes": homes})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    return tmp_path


def test_it_is_taken_up_where_the_spec_keeps_storage() -> None:
    one = kept(ada=1001, bob=1002)
    assert to_take_up(spec(("ada", 1001), ("new", 1003)), [one]) == one
    assert to_take_up(spec(keep=False), [one]) is None
    assert to_take_up(spec(), []) is None
    # Nothing is known of its homes.
    assert to_take_up(spec(), [kept()]) == kept()


@pytest.mark.parametrize(
    ("users", "whose"),
    [
        ([("ada", 1003)], ("ada", "1003", "1001")),
        ([("eve", 1001)], ("1001", "eve", "ada")),
        ([("new", 1003), ("bob", 1001)], ("bob", "1001", "1002")),
    ],
)
def test_files_do_not_change_hands(users: list[tuple[str, int]], whose: tuple[str, ...]) -> None:
    with refused("storage-users-differ", UsageError, *whose, "down --storage --cluster d"):
        to_take_up(spec(*users), [kept(ada=1001, bob=1002)])


def test_of_several_none_is_guessed() -> None:
    with refused("storage-name-ambiguous", UsageError):
        to_take_up(spec(), [kept(), kept()])


@pytest.mark.parametrize(
    "settings",
    [LocalSettings(), GcpSettings(type="gcp", project="my-project", zone="us-central1-a")],
)
def test_the_record_is_read_as_it_was_written(home: Path, settings: Any) -> None:
    assert recorded("d") is None
    noted = Record(provider=settings, users=("ada",), kept=(kept(ada=1001),))
    record("d", noted)
    assert recorded("d") == noted
    assert list(all_recorded()) == [kept(ada=1001)]
    if settings.type == "local":
        assert storage_left_alone(spec()) == ()
    else:
        with refused("storage-elsewhere", UsageError):  # else it would be listed no more
            storage_left_alone(spec())
    (note,) = storage_left_alone(spec(keep=False))
    assert "disk d-a1b2c3-shared (100GiB, 10.00" in note
    record("d", Record(provider=OTHER_PLACE, kept=()))
    assert recorded("d") == noted
    record("d", noted.model_copy(update={"kept": ()}))
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"provider": {"type": "moon"}, "kept": []}'])
def test_a_damaged_record_is_none(home: Path, text: str) -> None:
    (home / "d.storage.json").write_text(text)
    assert recorded("d") is None
    assert list(all_recorded()) == []


@dataclass
class Stub:
    """A provider whose clusters leave their storage."""

    storage: list[KeptStorage]
    did: list[str] = field(default_factory=list)
    rows: Sequence[Mapping[str, Any]] | None = None  # what is on it
    left: list[KeptStorage] = field(default_factory=list)  # what appears with `destroy`
    refuses: ClusterctlError | None = None

    def destroy(self, cluster_id: str, *, workspace: Workspace | None, report: ProgressReporter) -> None:
        self.did.append("destroy")
        self.storage += self.left

    def leftovers(self, cluster_id: str) -> tuple[()]:
        return ()

    def orphans(self, name: str) -> tuple[()]:
        return ()

    def kept_storage(self, name: str, users: tuple[str, ...]) -> tuple[KeptStorage, ...]:
        assert tuple(users) in {("ada",), ()}
        return tuple(self.storage)

    def files_of_storage(
        self, kept: KeptStorage, *, known: Sequence[int]
    ) -> Sequence[Mapping[str, Any]] | None:
        return self.rows

    def refuse_used(self, kept: KeptStorage) -> None:
        pass

    def remove_storage(self, kept: KeptStorage, *, report: ProgressReporter) -> None:
        if self.refuses:
            raise self.refuses
        self.did.append(f"remove {kept.id}")
        self.storage = [one for one in self.storage if one.id != kept.id]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub([DISK])
    for module in (down, cli_down):
        monkeypatch.setattr(module, "provider_of", lambda *_: stub)
    return stub


def cluster(*, keep: bool) -> PhaseRunner:
    workspace = Workspace.of("d")
    workspace.create()
    (workspace.root / "id").write_text("ffffff\n")
    workspace.spec.write_text(dump_spec(spec(keep=keep)))
    return PhaseRunner(workspace=workspace)


def test_down_leaves_it_and_notes_where(home: Path, stub: Stub) -> None:
    done = down.down(cluster(keep=True), DownOptions())
    assert (done.kept, done.removed) == ((DISK,), ())
    assert list(all_recorded()) == [DISK]
    assert stub.did == ["destroy"]
    assert [phase.name for phase in done.phases] == ["look", "destroy", "keep_storage"]


@pytest.mark.parametrize("how", ["kept", "not kept", "down --storage", "kept before", "nothing was up"])
def test_where_copies_are_is_known_as_long_as_the_storage_is_kept(home: Path, stub: Stub, how: str) -> None:
    """The runs, too, which the workspace alone knows until then."""
    runner = cluster(keep=how in {"kept", "down --storage"})
    if how in {"kept before", "nothing was up"}:  # and not taken up
        record("d", Record(provider=LocalSettings(), kept=(DISK,)))
    if how == "nothing was up":
        runner.workspace.remove()
        runner.workspace.create()
    sent = Copies("d-ctl", "/shared/home/ada/set.csv", "/data/set.csv", sent=True)
    note(runner.workspace, [sent])
    entry = JobEntry(token=str(1), name="mine", user="ada", submitted_at=0, job_id="1", remote_dir="/jobs/1")
    entry = replace(entry, run_dir="/runs/d-1", run_state="COMPLETED")
    Ledger(runner.workspace.jobs).add(entry)
    storage, was_up = how == "down --storage", how in {"not kept", "kept before"}
    if was_up:
        runner.workspace.configured.touch()
    down.down(runner, DownOptions(remove_storage=storage, discard=storage or was_up))
    assert not runner.workspace.root.exists()
    run = Copies("", "/jobs/1", "/runs/d-1", renamed=".from-job")
    there = {"kept": [sent, run], "kept before": [sent], "nothing was up": [sent]}.get(how, [])
    assert list(read_copies(runner.workspace)) == there
    if there:
        left = Record(provider=LocalSettings(), kept=())
        down.remove_storage(runner, stub, (DISK,), left)  # type: ignore[arg-type]
    assert [path.name for path in home.iterdir()] == [DISCARDED] * (storage or was_up)


def test_it_is_known_in_a_copy_of_the_workspace_too(home: Path) -> None:
    """Where the disk takes nothing more, `down` looks by that."""
    workspace = cluster(keep=True).workspace
    sent = Copies("d-ctl", "/shared/home/ada/set.csv", "/data/set.csv", sent=True)
    note(workspace, [sent])
    workspace.connections.mkdir(mode=0o700)
    with socket(AF_UNIX) as listening:  # connections that stay open have some, and they are no part of a copy
        listening.bind(str(workspace.connections / "s"))
        with workspace_copy(workspace, without=[]) as copy:
            assert list(read_copies(copy)) == [sent]


@pytest.mark.parametrize("was_up", [True, False])
def test_without_keep_only_an_earlier_up_can_have_asked_for_any(
    home: Path, stub: Stub, *, was_up: bool
) -> None:
    """Nobody has looked at the storage that an `up` took up which then failed."""
    runner = cluster(keep=False)
    if was_up:
        runner.workspace.configured.touch()
    done = down.down(runner, DownOptions(discard=True))
    assert done.kept == (() if was_up else (DISK,))
    assert [phase.name for phase in done.phases] == ["look", "destroy", "keep_storage"][: 3 - was_up]
    assert list(all_recorded()) == ([] if was_up else [DISK])


@pytest.mark.parametrize("keep", [True, False])
def test_down_storage_removes_it_after_the_cluster(home: Path, stub: Stub, keep: bool) -> None:
    record("d", Record(provider=LocalSettings(), kept=(DISK,)))
    done = down.down(cluster(keep=keep), DownOptions(remove_storage=True, discard=True))
    assert (done.kept, done.removed) == ((), (DISK,))
    assert stub.did == ["destroy", "remove d-a1b2c3-shared"]
    assert list(all_recorded()) == []
    # What is on it could not be told.
    assert "can" in (home / DISCARDED).read_text()


@pytest.mark.parametrize(
    ("keep", "mark", "why"),
    [
        (True, None, "what is on the shared folder can't be told: the last `up` or `down` has not ended"),
        (True, "removing", "what is on the shared folder can't be told"),
        (False, None, "disk d-a1b2c3-shared (100GiB, 10.00 USD a month), kept since 1970-01-01"),
        (False, "removing", "disk d-a1b2c3-shared"),
    ],
)
def test_down_storage_destroys_nothing_where_nobody_can_look(
    home: Path, stub: Stub, keep: bool, mark: str | None, why: str
) -> None:
    """An `up` that was to take it up failed; a `down` that was to keep it was killed; or it is older."""
    runner = cluster(keep=keep)
    if mark:
        (runner.workspace.root / mark).touch()
    with pytest.raises(OnlyCopyError) as caught:
        down.down(runner, DownOptions(remove_storage=True))
    assert why in caught.value.why
    assert stub.did == []
    assert runner.workspace.spec.exists()
    assert ("without --storage" in caught.value.fix) != keep


@pytest.mark.parametrize("text", ["torn", None])
def test_down_storage_stops_where_the_spec_is_lost_too(home: Path, stub: Stub, text: str | None) -> None:
    """The helper of local clusters keeps the folder by its own note, and this removes it then."""
    runner = cluster(keep=True)
    stub.storage, stub.rows = [], []
    runner.workspace.spec.write_text(text) if text else runner.workspace.spec.unlink()
    with refused("only-copy", OnlyCopyError):
        down.down(runner, DownOptions(remove_storage=True))
    assert stub.did == []


def test_down_storage_asks_for_no_discard_where_nothing_is_on_it(home: Path, stub: Stub) -> None:
    stub.rows = [{"end": True}]
    assert down.down(cluster(keep=False), DownOptions(remove_storage=True)).removed == (DISK,)


OWN = DISK.model_copy(update={"id": "d-ffffff-shared", "since": 8})


def test_down_storage_removes_nothing_that_nobody_looked_at(home: Path, stub: Stub) -> None:
    """Two are there when the cluster has left its own: the other one was not known to be another."""
    stub.left = [OWN]
    with refused("storage-name-ambiguous", UsageError) as caught:
        down.down(cluster(keep=True), DownOptions(remove_storage=True, discard=True))
    assert stub.did == ["destroy"]
    assert "--storage --cluster d" in caught.value.fix
    assert list(all_recorded()) == [DISK, OWN]
    assert not Workspace.of("d").root.exists()


@pytest.mark.parametrize("discard", [True, False])
def test_down_storage_removes_its_own_only_where_nothing_on_it_is_to_be_kept(
    home: Path, stub: Stub, *, discard: bool
) -> None:
    """The cluster was never up, so nobody has looked at what an earlier `up` took up."""
    stub.rows, stub.left = [{"end": True}], [OWN]
    options = DownOptions(remove_storage=True, discard=discard)
    if discard:
        assert down.down(cluster(keep=False), options).removed == (DISK, OWN)
        return
    with refused("storage-name-ambiguous", UsageError):
        down.down(cluster(keep=False), options)
    assert stub.did == ["destroy"]
    assert list(all_recorded()) == [DISK, OWN]


def test_down_storage_removes_its_own_with_others_that_were_looked_at(
    home: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "look", lambda *_, **__: Outcome(Found()))
    stub.rows, stub.left = [{"end": True}], [OWN]
    runner = cluster(keep=False)
    runner.workspace.configured.touch()
    assert down.down(runner, DownOptions(remove_storage=True)).removed == (DISK, OWN)


def test_a_down_forgets_no_storage_that_is_kept_elsewhere(home: Path, stub: Stub) -> None:
    noted = Record(provider=OTHER_PLACE, users=("ada",), kept=(DISK,))
    record("d", noted)
    stub.storage = []
    assert down.down(cluster(keep=False), DownOptions()).kept == ()
    assert recorded("d") == noted


def test_what_an_orphan_leaves_is_listed(
    home: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stub, "orphans", lambda _: ("ffffff",))
    screen = Screen(json=False, color=False)
    cli_down.down(screen, Options(cluster="d"), yes=True, orphans=True, discard=True)
    assert stub.did == ["destroy"]
    assert list(all_recorded()) == [DISK]
    assert f"kept storage of 'd': {DISK}" in capsys.readouterr().out


def test_down_storage_that_is_refused_leaves_the_storage_as_it_was(home: Path, stub: Stub) -> None:
    """Also if a provider says so only once the cluster is gone."""
    record("d", Record(provider=LocalSettings(), kept=(DISK,)))
    stub.refuses = UsageError("a cluster 'd' has it", code="storage-in-use")
    stub.storage = [DISK.model_copy(update={"since": None})]
    with refused("storage-in-use"):
        down.down(cluster(keep=False), DownOptions(remove_storage=True, discard=True))
    assert list(all_recorded()) == [DISK]
    assert (home / DISCARDED).read_text() == ""
    assert not Workspace.of("d").root.exists()
    for _ in range(2):
        with refused("storage-in-use"):
            cli_down.down(
                Screen(json=False, color=False), Options(cluster="d"), yes=True, storage=True, discard=True
            )
    assert (home / DISCARDED).read_text() == ""
    stub.refuses = None
    cli_down.down(Screen(json=False, color=False), Options(cluster="d"), yes=True, storage=True, discard=True)
    assert len((home / DISCARDED).read_text().splitlines()) == 1


def test_what_is_on_it_is_told_with_size_owner_and_age(home: Path, stub: Stub) -> None:
    models = {"top": HOME, "path": "bW9kZWxz", "owner": "ada", "files": 2, "age_s": 7200}
    stub.rows = [
        {**models, "bytes": 3 << 30, "on_disk": 1 << 30},
        {"unread": "L3NoYXJlZC94", "why": "Permission denied"},
        {"end": True},
    ]
    found = look_at_storage(stub, Workspace.of("d"), [DISK])  # type: ignore[arg-type]
    with pytest.raises(OnlyCopyError) as caught:
        reject_lost_storage(found, "d", user_owned=False)
    assert caught.value.why.splitlines() == [
        "/shared/home/ada/models: 3.0 GiB (1.0 GiB on disk) in 2 files of ada, 2 hours old",
        "/shared/x can't be looked at: Permission denied",
    ]
    assert all(
        word in caught.value.fix
        for word in ("clusterctl collect --all", "clusterctl down --storage --cluster d")
    )
    with refused("only-copy", OnlyCopyError) as caught:
        reject_lost_storage(found, "d", user_owned=True)
    assert "collect" not in caught.value.fix
    reject_lost_storage(Found(), "d", user_owned=True)


def test_since_when_it_is_kept_is_noted(home: Path, stub: Stub) -> None:
    stub.storage = [DISK.model_copy(update={"since": None})]
    (kept,) = down.down(cluster(keep=True), DownOptions()).kept
    assert [kept] == list(all_recorded())
    assert "since 20" in kept.dated
    assert "since" not in stub.storage[0].dated
