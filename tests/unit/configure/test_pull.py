"""Playbooks that a host runs itself: this machine is the host, with Ansible's real run on both ways."""

from __future__ import annotations

import _thread
import json
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from clusterctl.configure import ansible, events, pull
from clusterctl.configure.ansible import PlaybookRun, run_playbook
from clusterctl.configure.events import TaskProgress
from clusterctl.configure.pull import Pull, Puller, pullers
from clusterctl.errors import ConfigureError, UnreachableError
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Conversation
from clusterctl.util.assets import asset
from clusterctl.util.process import Result
from tests.support.here import LocalTransport

PLAYBOOKS = Path(__file__).parent / "playbooks"
WriteInventory = Callable[..., Path]


class Unprivileged(LocalTransport):
    """This machine, where sudo is not needed. ``lost`` breaks the connection as soon as a task has begun."""

    def __init__(self, *, lost: bool = False) -> None:
        self._lost = lost

    @contextmanager
    def converse(
        self, argv: Sequence[str], *, bulk: bool = False, silence_s: float | None = None
    ) -> Iterator[Conversation]:
        assert argv[:2] == ["sudo", "-n"]
        with super().converse(argv[2:], bulk=bulk, silence_s=silence_s) as talk:
            yield Breaking(talk) if self._lost else talk


class Breaking:
    """A conversation whose connection breaks after the first task."""

    def __init__(self, talk: Conversation) -> None:
        self.send, self.finish, self._talk = talk.send, talk.finish, talk

    def receive(self) -> bytes:
        data = self._talk.receive()
        if b"runner_on_start" in data:
            raise UnreachableError("the cable was pulled", host="localhost")
        return data


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder on the host; the playbooks are those of the tests."""
    ours = tmp_path / "data" / "ansible"
    shutil.copytree(asset("ansible"), ours, ignore=shutil.ignore_patterns("roles", "__pycache__"))
    shutil.copytree(PLAYBOOKS, ours, dirs_exist_ok=True)
    monkeypatch.setattr(pull, "asset", lambda name: ours if name == "ansible" else asset(name))
    folder = tmp_path / "var" / "ansible"
    folder.parent.mkdir()
    monkeypatch.setattr(pull, "FOLDER", str(folder))
    return folder


def workspace_with(inventory: Path) -> Workspace:
    """A workspace whose Ansible inventory this is."""
    workspace = Workspace(inventory.parent / "state" / "demo")
    workspace.create()
    shutil.copy(inventory, workspace.ansible_inventory)
    return workspace


def pulled(
    workspace: Workspace,
    playbook: str,
    *hosts: str,
    transport: LocalTransport | None = None,
    check: bool = False,
) -> tuple[list[Mapping[str, Any]], Pull]:
    """The events of a playbook that these hosts run themselves."""
    taken: list[Mapping[str, Any]] = []
    here = transport or Unprivileged()
    found = [Puller(host, sys.executable) for host in hosts]
    return taken, Pull(playbook, found, workspace, lambda _: here, taken.append, check=check)


def runs_there(there: Path) -> bool:
    """Whether any process of the Ansible in this folder is left."""
    program, found = str(there / "ansible-playbook").encode(), False
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found |= program in line.read_bytes()
    return found


def told(progress: list[TaskProgress]) -> list[tuple[str, str, str]]:
    return sorted((one.host, one.task, one.status) for one in progress)


def test_its_events_are_those_of_a_run_from_here(local_inventory: WriteInventory, there: Path) -> None:
    inventory = local_inventory("good", "bad")
    pushed: list[TaskProgress] = []
    run = PlaybookRun(str(PLAYBOOKS / "report.yml"), inventory, 2, inventory.parent / "ansible.log")
    with pytest.raises(ConfigureError) as raised:
        run_playbook(run, pushed.append)
    there.mkdir()
    (there / "left").write_text("by a run that was killed")
    taken, both = pulled(workspace_with(inventory), "report.yml", "good", "bad")
    assert both.finish(ready=True) == ()
    assert told([one for event in taken if (one := events.progress_of(event))]) == told(pushed)
    assert events.failures_of(taken) == raised.value.failures
    assert "A play of every outcome" in "".join(event.get("stdout", "") for event in taken)
    assert not there.exists()


def test_what_needs_the_others_is_not_run_without_them(
    local_inventory: WriteInventory, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_STEPS", {"report.yml": (("report.yml",), ("forever.yml",))})
    taken, alone = pulled(workspace_with(local_inventory("one")), "report.yml", "one")
    assert alone.finish(ready=False) == ()
    plays = {event["event_data"]["play"] for event in taken if event["event_data"].get("play")}
    assert plays == {"A play of every outcome"}
    assert not there.exists()


def test_a_host_whose_connection_breaks_fails_alone_and_its_run_ends(
    local_inventory: WriteInventory, there: Path
) -> None:
    workspace = workspace_with(local_inventory("one"))
    _, broken = pulled(workspace, "forever.yml", "one", transport=Unprivileged(lost=True))
    (failure,) = broken.finish(ready=True)
    assert (failure.host, failure.code, failure.retryable) == ("one", "unreachable", True)
    taken, again = pulled(workspace, "report.yml", "one")  # which waits until nothing of the first one runs
    assert again.finish(ready=True) == ()
    assert taken
    assert not there.exists()
    assert not runs_there(there)


@pytest.fixture
def empty_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as hosts get, for those that do not look at it: to make it takes a second."""
    monkeypatch.setattr(pull, "bundle", lambda _: bytes(4 << 20))


READ = "import tarfile; list(tarfile.open(fileobj=open(0, 'rb', buffering=0), mode='r|'))"


class Scripted(Unprivileged):
    """A host on which this shell script takes the place of the program."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self._script = script

    @contextmanager
    def converse(self, argv: Sequence[str], **how: Any) -> Iterator[Conversation]:
        with super().converse([*argv[:2], "sh", "-c", self._script], **how) as talk:
            yield talk


@pytest.mark.usefixtures("empty_bundle")
@pytest.mark.parametrize("says", ["Welcome", "42"])
def test_a_host_that_says_something_else_fails_alone(
    local_inventory: WriteInventory, there: Path, says: str
) -> None:
    workspace = workspace_with(local_inventory("one"))
    _, chatty = pulled(workspace, "report.yml", "one", transport=Scripted(f"echo {says}; cat >/dev/null"))
    (failure,) = chatty.finish(ready=True)
    assert (failure.host, failure.cause) == ("one", says)
    assert not there.exists()


@pytest.mark.usefixtures("empty_bundle")
def test_a_run_that_ends_early_is_a_failure_also_after_one_that_was_ignored(
    local_inventory: WriteInventory, there: Path
) -> None:
    """The host counted as configured."""
    assert not there.exists()
    ignored = {"host": "one", "task": "Try", "ignore_errors": True, "res": {}}
    said = json.dumps({"event": "runner_on_failed", "event_data": ignored})
    crash = Scripted(f"{sys.executable} -c \"{READ}\"; echo '{said}'; echo out of memory >&2; exit 3")
    _, crashed = pulled(workspace_with(local_inventory("one")), "report.yml", "one", transport=crash)
    (failure,) = crashed.finish(ready=True)
    assert (failure.host, failure.cause) == ("one", "out of memory")


@pytest.mark.usefixtures("empty_bundle")
def test_what_breaks_while_hosts_wait_is_told_beside_what_broke_here(
    local_inventory: WriteInventory, there: Path, tmp_path: Path
) -> None:
    """It was taken for the end of a host that had been told to end."""
    assert not there.exists()
    crash = Scripted(f"until [ -e {tmp_path}/go ]; do :; done; echo no space left >&2; exit 3")
    _, crashed = pulled(workspace_with(local_inventory("one")), "report.yml", "one", transport=crash)
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(crashed.finish, ready=False)
        assert crashed._others.wait(60)
        (tmp_path / "go").touch()
        (failure,) = ended.result()
    assert (failure.host, failure.cause) == ("one", "no space left")


def test_all_that_a_host_gets_is_its_own_to_know(
    local_inventory: WriteInventory, there: Path, tmp_path: Path
) -> None:
    inventory = local_inventory("one")
    workspace = workspace_with(inventory)
    (workspace.rendered / "slurmdbd.conf").write_text("StoragePass=secret\n")
    workspace.key.write_text("the admin's key\n")
    workspace.munge_key.write_bytes(b"munge")
    workspace.ansible_inventory.write_text(
        f"src: '{workspace.root}/rendered/x'\nother: {workspace.root}2/y\n"
    )
    made = tmp_path / "bundle.tgz"
    made.write_bytes(pull.bundle(workspace))
    with tarfile.open(made) as tar:
        assert {(one.uid, one.gid, one.uname) for one in tar} == {(0, 0, "")}
    out = tmp_path / "out"
    shutil.unpack_archive(made, out, "gztar", filter="data")
    assert (out / "workspace/munge.key").read_bytes() == b"munge"
    assert {path.name for path in (out / "workspace").rglob("*") if path.is_file()} == {"munge.key"}
    text = (out / "inventory.yml").read_text()
    assert text == f"src: '{there}/workspace/rendered/x'\nother: {workspace.root}2/y\n"
    assert (out / "site/ansible/cli/playbook.py").is_file()
    assert not (out / "site/cryptography").exists()


class Answering(LocalTransport):
    """A host with this ``python3`` alone, or none, whose shell greets whoever comes."""

    def __init__(self, python: str) -> None:
        self._python = python

    def run(self, argv: Sequence[str], **_: Any) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            if self._python:
                Path(folder, "python3").symlink_to(self._python)
            greeting = ["/bin/sh", "-c", 'printf "Welcome\n\nto it"; exec "$@"', "sh", "/bin/sh", *argv[1:]]
            return super().run(greeting, env={"PATH": folder})


@pytest.fixture
def owned(inventory: Inventory) -> Inventory:
    """A controller, and ten compute nodes that are to run their playbooks themselves."""
    first = inventory.hosts[1]
    nodes = tuple(first.model_copy(update={"name": f"n{number}"}) for number in range(10))
    controller: Host = inventory.hosts[0]
    return inventory.model_copy(update={"ansible": "nodes", "hosts": (controller, *nodes)})


def test_the_spec_and_the_hosts_decide_which_way_is_taken(owned: Inventory, tmp_path: Path) -> None:
    source = tmp_path / "inventory.yml"
    source.write_text("all: {}\n")
    workspace = workspace_with(source)

    def hosts(inventory: Inventory, *chosen: str, old: Sequence[str] = ()) -> list[str]:
        pythons = dict.fromkeys(old, "")
        to = {h.name: Answering(pythons.get(h.name, sys.executable)) for h in inventory.hosts}
        found = pullers(inventory, chosen, workspace, to.__getitem__)
        assert all(one.python.startswith("/") and one.python.endswith("/python3") for one in found)
        return [one.host for one in found]

    names = [f"n{number}" for number in range(10)]
    assert hosts(owned) == names
    assert hosts(owned, "demo-ctl", *names[1:]) == names[1:]
    assert hosts(owned, old=["n3"]) == [name for name in names if name != "n3"]
    assert hosts(owned, "n3") == ["n3"]
    assert hosts(owned.model_copy(update={"scheduler": "none"})) == []  # ranks reach each other by their keys
    assert hosts(owned.model_copy(update={"ansible": "here"})) == []


def test_wheels_go_to_those_that_lack_them(owned: Inventory, tmp_path: Path) -> None:
    source = tmp_path / "inventory.yml"
    source.write_text("all: {}\n")
    workspace = workspace_with(source)
    workspace.wheels.mkdir()
    workspace.gpu_wheels.mkdir()
    gpus = {host.name: {"cupy": host.name == "n1", "uuids": []} for host in owned.hosts}
    (workspace.rendered / "gpus.json").write_text(json.dumps(gpus))
    found = pullers(owned, (), workspace, lambda _: Answering(sys.executable))
    wheels = {one.host: one.wheels for one in found}
    assert wheels["n1"] == (workspace.wheels, workspace.gpu_wheels)
    assert wheels["n2"] == (workspace.wheels,)


@pytest.mark.usefixtures("empty_bundle")
@pytest.mark.parametrize(("controller", "goes_on"), [("bad", False), ("other", True)])
def test_a_failure_of_the_controller_alone_keeps_nodes_from_going_on(
    local_inventory: WriteInventory,
    there: Path,
    monkeypatch: pytest.MonkeyPatch,
    controller: str,
    goes_on: bool,
) -> None:
    """As `up` does it: one host from here, a node by itself."""
    monkeypatch.setattr(ansible, "asset", lambda _: there.parents[1] / "data" / "ansible")
    workspace = workspace_with(local_inventory("good", "bad"))
    run = PlaybookRun("report.yml", workspace.ansible_inventory, 2, workspace.logs / "ansible.log")
    event = json.dumps({"event": "runner_on_ok", "event_data": {"host": "good", "task": "Go on"}})
    node = f"""{sys.executable} -c "{READ}"; echo '{{"waits": 1}}'; read said && echo '{event}'"""
    seen: list[TaskProgress] = []

    def begin(take: Callable[[Mapping[str, Any]], None]) -> Pull:
        good = [Puller("good", sys.executable)]
        return Pull("report.yml", good, workspace, lambda _: Scripted(node), take, check=False)

    with pytest.raises(ConfigureError) as raised:
        ansible._run_with_pullers(run, seen.append, ("bad",), begin, controller)
    assert [one.host for one in raised.value.failures] == ["bad"]
    assert [one.task for one in seen if one.host == "good"] == ["Go on"] * goes_on
    assert run.log.stat().st_mode & 0o077 == 0


class Waited(Breaking):
    """We are interrupted when the host has said three times during its second task that it is there."""

    _tasks = _alive = 0

    def receive(self) -> bytes:
        data = self._talk.receive()
        self._tasks += data.count(b'"runner_on_start"')
        self._alive += data.count(b'"alive"') if self._tasks > 1 else 0
        if self._alive >= 3:
            self._alive = -sys.maxsize  # once
            _thread.interrupt_main()
        return data


def test_while_a_task_says_nothing_its_host_says_that_it_is_there_and_an_interrupt_ends_it(
    local_inventory: WriteInventory, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task was given up after half an hour; an interrupted one went on until the end of our process."""
    monkeypatch.setattr(pull, "_ALIVE_S", 0.05)
    workspace = workspace_with(local_inventory("one", never=tmp_path / "never"))
    run = PlaybookRun("forever.yml", workspace.ansible_inventory, 1, workspace.logs / "ansible.log")

    class Slow(Unprivileged):
        @contextmanager
        def converse(self, argv: Sequence[str], **how: Any) -> Iterator[Conversation]:
            with super().converse(argv, **how) as talk:
                yield Waited(talk)

    def begin(take: Callable[[Mapping[str, Any]], None]) -> Pull:
        hosts = [Puller("one", sys.executable)]
        return Pull("forever.yml", hosts, workspace, lambda _: Slow(), take, check=False)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            ansible._run_with_pullers(run, lambda _: None, (), begin, "lead")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not runs_there(there)
    assert not there.exists()
