"""Storage of any provider: its users, its use, its removal, and `down` beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from clusterctl.cli import storage as cli_storage
from clusterctl.cli.output import Screen
from clusterctl.cluster import down
from clusterctl.cluster.down import DownOptions
from clusterctl.cluster.losses import DISCARDED
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.errors import NotUpError, OnlyCopyError, UsageError
from clusterctl.providers.storage import KeptStorage, storage_note, storage_of
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from clusterctl.transport.copies import LocalCopies, read_copies, record_copies
from clusterctl.util.disk import read_rows
from tests.support.messages import refused
from tests.support.providers import BareProvider, use_provider
from tests.unit.cluster.specs import spec_of

DISK = KeptStorage("data", "disks/data", "disk data", size_mib=102400, usd_per_month=10)


def spec(*users: tuple[str, int], name: str | None = "data") -> ClusterSpec:
    accounts = [{"name": user, "uid": uid} for user, uid in users or [("ada", 1001)]]
    return spec_of(users=accounts, storage={"name": name})


def test_storage_of_a_spec_is_that_of_its_name() -> None:
    one = replace(DISK, homes={"ada": 1001, "bob": 1002})
    other = replace(DISK, name="other")
    assert storage_of(spec(("ada", 1001), ("new", 1003)), [other, one]) == one
    assert storage_of(spec(), [other]) is None
    assert storage_of(spec(name=None), [one]) is None
    (note,) = storage_note(spec(), one)
    assert str(one) in note
    assert len(storage_note(spec(), None)) == 1
    assert storage_note(spec(name=None), None) == ()


@pytest.mark.parametrize(
    ("users", "whose"),
    [
        ([("ada", 1003)], ("ada", "1003", "1001")),
        ([("eve", 1001)], ("1001", "eve", "ada")),
        ([("new", 1003), ("bob", 1001)], ("bob", "1001", "1002")),
    ],
)
def test_storage_with_files_of_other_users_is_refused(
    users: list[tuple[str, int]], whose: tuple[str, ...]
) -> None:
    with refused("option-invalid/storage-users", UsageError, *whose):
        storage_of(spec(*users), [replace(DISK, homes={"ada": 1001, "bob": 1002})])


def test_several_storages_of_a_name_are_refused() -> None:
    with refused("ambiguous/storage", UsageError):
        storage_of(spec(), [DISK, DISK])


def test_storage_in_use_is_refused_except_for_its_user() -> None:
    used = replace(DISK, users={("d-ctl", "aaaaaa"), ("d-train-9", "aaaaaa")})
    used.reject_use("aaaaaa")
    DISK.reject_use()
    with refused("in-use/storage", UsageError, "d-ctl"):
        used.reject_use("bbbbbb")
    with refused("in-use/storage", UsageError, "d-ctl"):
        used.reject_use(None)


@dataclass
class Stub(BareProvider):
    """A provider with storages."""

    found: list[KeptStorage]
    did: list[str] = field(default_factory=list)

    def destroy(self, _: str, *, workspace: Workspace | None) -> None:
        assert workspace
        self.did.append("destroy")

    def leftovers(self, *_: object, **__: object) -> tuple[()]:
        return ()

    def storages(self) -> tuple[KeptStorage, ...]:
        return tuple(self.found)

    def remove_storage(self, storage: KeptStorage) -> None:
        self.did.append(f"remove {storage.id}")
        self.found.remove(storage)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub([DISK])
    use_provider(monkeypatch, lambda *_: stub)
    return stub


def test_down_leaves_the_storage_and_forgets_copies(home: Path, stub: Stub) -> None:
    workspace = Workspace.of("d")
    workspace.create()
    (workspace.root / "id").write_text("ffffff\n")
    workspace.spec.write_text(dump_spec(spec()))
    record_copies(workspace, [LocalCopies("d-ctl", "/shared/set.csv", "/data/set.csv", sent=True)])
    done = down.down(PhaseRunner(workspace=workspace), DownOptions())
    assert (done.storage, stub.did, stub.found) == ("data", ["destroy"], [DISK])
    assert [phase.name for phase in done.phases] == ["look", "destroy"]
    assert list(read_copies(workspace)) == []
    assert {path.name for path in home.iterdir()} <= {".d.lock"}


def remove(name: str = "data", *, yes: bool = False, discard: bool = False) -> None:
    cli_storage.storage_remove(Screen(json=False, color=False), name, yes=yes, discard=discard)


def test_storage_remove_needs_discard_and_confirmation(
    home: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Storage without a cluster can't be searched for files."""
    with refused("would-lose/files", OnlyCopyError, DISK.what) as caught:
        remove(yes=True)
    assert all(word in caught.value.fix for word in ("collect --all", "--discard"))
    with refused("confirmation-needed", UsageError):
        remove(discard=True)
    assert stub.did == []
    cli_storage.storage_list(Screen(json=False, color=False))
    assert "disk data (100GiB, 10.00 USD a month)" in capsys.readouterr().out
    remove(yes=True, discard=True)
    assert stub.did == [f"remove {DISK.id}"]
    (row,) = read_rows(home / DISCARDED)
    assert row["discarded"][0].startswith(str(DISK))
    with refused("not-found/storage", NotUpError, "'data'"):
        remove(yes=True, discard=True)


def test_storage_that_was_not_created_from_here_is_removed_by_discard(
    home: Path, stub: Stub
) -> None:
    """As from another laptop. What is known of its owner is said before."""
    del home
    stub.found = [replace(DISK, is_from_here=False, homes={"bob": 3001})]
    with refused("would-lose/files", OnlyCopyError, "bob"):
        remove(yes=True)
    remove(yes=True, discard=True)
    assert stub.did == [f"remove {DISK.id}"]


def test_storage_remove_refuses_storage_in_use(home: Path, stub: Stub) -> None:
    del home
    stub.found = [replace(DISK, users={("d-ctl", "aaaaaa")})]
    with refused("in-use/storage"):
        remove(yes=True, discard=True)
    assert stub.did == []
