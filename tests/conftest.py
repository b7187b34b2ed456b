"""What all tests share: time limits, golden files, a workspace; for end-to-end tests a home of their
own, names, a runner of verbs, a look for residue.
"""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from pytest_timeout import Settings

from clusterctl.state.workspace import Workspace
from payload.device import choose
from tests.support import answers, remains
from tests.support.conditions import Limit, settle, without_autogroup
from tests.support.groups import GroupScheduling
from tests.support.residue import nothing_left
from tests.support.verbs import Clusterctl

END_TO_END = Path(__file__).parent / "e2e"


def pytest_report_header() -> str:
    """Tests of the payload's arithmetic run on a GPU where one is: say whether they did."""
    device = choose("auto", 0)
    where = (
        f"CuPy on {device.gpu['name']}"
        if device.gpu
        else f"NumPy, no GPU ({device.note or 'none here'})"
    )
    return f"payload: {where}"


# How long something takes is nothing that a test asserts.
settings.register_profile("some", parent=settings(), deadline=None, max_examples=20)


def pytest_configure(config: pytest.Config) -> None:
    """What holds for all workers of pytest-xdist is set once, in the process that starts them."""
    answers.watch_this_process()
    settings.load_profile("some")
    if getattr(config.option, "numprocesses", None):
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # what waiting threads of BLAS burn is more than they gain
        )
    else:
        settle()
    if not hasattr(config, "workerinput"):
        remains.begin()
        stack = ExitStack()
        stack.enter_context(without_autogroup())
        config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage during the imports of tests: it takes a third of the CPU time and frees
    nothing.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """Tests of a group share a cluster, so they stay together; all others go where there is
    time.
    """
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


_LIMIT = pytest.StashKey[Limit]()


def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool:
    """Take the place of pytest-timeout's own timer."""
    item.stash[_LIMIT] = Limit(item, settings)
    return True


def pytest_timeout_cancel_timer() -> bool:
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def _limited(item: pytest.Item) -> Generator[None, None, None]:
    with item.stash[_LIMIT].held() if _LIMIT in item.stash else nullcontext():
        yield


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _limited


@pytest.fixture(scope="session", autouse=True)
def state_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep tests from writing to the state folder of the user who runs them."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERCTL_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def state_folder(
    state_folders: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state folder of its own for each test, which clusterctl creates when it needs it."""
    monkeypatch.setenv(
        "CLUSTERCTL_HOME", str(state_folders / f"{abs(hash(request.node.nodeid)):x}")
    )


@pytest.fixture(scope="session")
def clusterctl_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty CLUSTERCTL_HOME for this session. Clusters that tests left up are taken down at its
    end.
    """
    home = tmp_path_factory.mktemp("home")
    with nothing_left(home):
        yield home
        clusterctl = Clusterctl(home, cwd=home)
        for spec in sorted(home.glob("*/spec.yaml")):
            clusterctl("down", "--yes", "--discard", "-f", spec)


@pytest.fixture(scope="module", autouse=True)
def no_residue(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every end-to-end module leaves the machine as it found it.

    As an autouse fixture it is set up before, and so looks after, the module's own clusters.
    """
    if END_TO_END not in request.path.parents:
        yield
        return
    with nothing_left(request.getfixturevalue("clusterctl_home")):
        yield


@pytest.fixture(scope="module")
def cluster_name() -> str:
    """A name that no other cluster has, and that a spec takes."""
    return f"t{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def clusterctl(clusterctl_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Clusterctl:
    """Runs verbs in an empty folder: `clusterctl("up", "-f", spec)`; see tests/support/verbs.py."""
    return Clusterctl(clusterctl_home, cwd=tmp_path_factory.mktemp("cwd"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Asserts that a text is what the file of that name in the folder `golden` beside the test
    holds.

    `UPDATE_GOLDEN=1 pytest ...` writes them anew; look at the diff before you commit it.
    """

    def same(name: str, text: str) -> None:
        path = request.path.parent / "golden" / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; UPDATE_GOLDEN=1 writes it anew"

    return same


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace of a cluster that is to be raised."""
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.create_secrets()
    return workspace
