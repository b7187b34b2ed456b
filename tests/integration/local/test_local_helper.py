"""The helper ends with its caller, and is closed to other accounts."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.errors import LockedError, MachineError, ProvisionError
from clusterctl.providers.local import helper, image, layout, system
from tests.support.messages import refused
from tests.unit.local.states import a_state

ASKS = """
import select, sys
from clusterctl.errors import ProvisionError
from clusterctl.providers.local import helper, image
sys.stdin.readline()
try:
    helper._check_caller()
    print("goes on", flush=True)
    select.select([0], [], [], 30)
    helper._check_caller()
except ProvisionError as exc:
    print(exc.why, flush=True)
"""


def test_helper_notices_the_callers_end_between_nodes() -> None:
    argv = [sys.executable, "-c", ASKS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as helper:
        assert helper.stdin is not None
        assert helper.stdout is not None
        helper.stdin.write("{}\n")
        helper.stdin.flush()
        assert helper.stdout.readline() == "goes on\n"
        helper.stdin.close()
        assert helper.stdout.readline() == "clusterctl has ended\n"


def test_helper_makes_existing_folders_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root of a node can create setuid programs in them, and a readable lock file could be held."""
    run = tmp_path / "run"
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    monkeypatch.setattr(layout, "RUN", run)
    monkeypatch.setattr(layout, "STATE", state)
    with helper.state_lock("up"):
        assert {stat.S_IMODE(path.stat().st_mode) for path in (run, state)} == {0o700}
        (lock,) = run.iterdir()
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        with pytest.raises(LockedError) as caught, helper.state_lock("down", wait_s=0):
            pass
    assert "'clusterctl up' of " in caught.value.why


def test_passwords_are_not_on_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All accounts can read command lines, and the URL of a mirror or a proxy may have a password."""
    ran: list[tuple[list[str], str]] = []

    def run(argv: list[str], *, stdin: str, **_: str) -> None:
        (settings,) = (word.partition("=")[2] for word in argv if word.startswith("--aptopt=/"))
        ran.append((argv, stdin + Path(settings).read_text()))
        assert stat.S_IMODE(Path(settings).stat().st_mode) == 0o600

    monkeypatch.setattr(image, "run", run)
    monkeypatch.setattr(
        image, "apt_proxy", lambda: 'Acquire::http::Proxy "http://me:secret@proxy";'
    )
    left = tmp_path / "etc/apt/apt.conf.d/99mmdebstrap"
    left.parent.mkdir(parents=True)
    image.debootstrap(tmp_path, "http://me:secret@mirror", ["sudo"], "trixie")
    ((argv, told),) = ran
    assert "secret" not in " ".join(argv)
    assert "secret@mirror" in told
    assert "secret@proxy" in told
    # Nor on the nodes.
    assert "secret" not in left.read_text()


def test_subnet_in_use_is_refused_before_the_image_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUN", "STATE", "CACHE"):
        monkeypatch.setattr(layout, name, tmp_path / name)
    monkeypatch.setattr(helper, "_check_tools", lambda: None)
    monkeypatch.setattr(system, "check_overlay", lambda _: None)
    built: list[object] = []
    monkeypatch.setattr(helper, "_bake_missing", built.append)
    asked = {
        "key": "1" * 16,
        "base_key": "2" * 16,
        "distribution": "debian-13",
        "mirror": "https://debian",
    }
    asked |= {"id": "a1b2c3", "subnet": "127.0.0.0/24", "admin_key": "ssh-ed25519 AAAA"}
    with refused("in-use/subnet", MachineError):
        helper.bake(asked)
    assert not built
    helper.bake(asked | {"subnet": None})
    assert built


def test_up_notes_settings_that_existing_nodes_ignore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `up` is asked for, they keep their network and their image; without that nothing is
    begun.
    """
    for name in ("RUN", "STATE", "CACHE"):
        monkeypatch.setattr(layout, name, tmp_path / name)
    state = a_state(distribution="debian-13")
    layout.state_file(state.id).parent.mkdir(parents=True)
    layout.state_file(state.id).write_text(state.model_dump_json())
    begun: list[str] = []
    monkeypatch.setattr(helper, "_check_tools", lambda: None)
    monkeypatch.setattr(helper, "_prepare_this_machine", lambda *_: begun.append("network") or ())
    monkeypatch.setattr(helper, "_remove_nodes", lambda *_: begun.append("removal") or ((), ()))
    monkeypatch.setattr(helper, "_start_nodes", lambda *_: ())
    asked = {
        key: getattr(state, key) for key in ("id", "name", "owner", "workspace", "distribution")
    }
    asked |= {
        "image": "1" * 16,
        "subnet": "10.7.7.0/24",
        "admin_key": "ssh-ed25519 AAAA",
        "homes": [],
    }
    asked["nodes"] = [{"name": "d-ctl"}]
    with refused("internal/image-cache", ProvisionError):
        helper.up(asked)
    assert not begun
    monkeypatch.setattr(image, "layers", lambda _: ())
    network, older = helper.up(asked)["notes"]
    assert "10.9.8.0/24" in network
    assert "older image" in older
    # With other packages, another image is no newer one.
    monkeypatch.setattr(image, "install_packages", lambda *request: (repr(request),))
    notes = helper.up(asked | {"packages": ["git"]})["notes"]
    assert notes[0] == network
    assert notes[1:] == [repr(({layout.machine_name(state.id, 1): "d-ctl"}, ["git"]))]


def test_packages_are_installed_without_secrets_in_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[list[str], str]] = []

    def run(argv: list[str], *, stdin: str, **_: object) -> str:
        ran.append((argv, stdin))
        return "git\n" if "--target=7" in argv else ""

    monkeypatch.setattr(image, "run", run)
    monkeypatch.setattr(
        image, "apt_proxy", lambda: 'Acquire::http::Proxy "http://me:secret@proxy";'
    )
    monkeypatch.setattr(image, "first_process", {"m1": 7, "m2": 8}.get)
    (note,) = image.install_packages({"m1": "d-ctl", "m2": "d-train-1"}, ["git"])
    assert note.split() == ["installed", "on", "d-ctl:", "git"]
    assert len(ran) == 2
    for argv, stdin in ran:
        assert argv[-1] == "git"
        assert "secret" not in " ".join(argv)
        assert "secret@proxy" in stdin.splitlines()[0]
