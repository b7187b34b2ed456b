"""Images from a real registry: the controller's engine pulls them, or skopeo fetches them here."""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import MachineError, TransferError
from clusterctl.jobs import images, remote_pull
from clusterctl.spec.remote_reference import Reference
from clusterctl.state.workspace import holder
from clusterctl.transport.tree import Progress
from payload.node import images as node_images
from tests.support.disks import small_disk
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.registry import (
    LOGIN,
    PASSWORD,
    Answer,
    Asked,
    Faults,
    Image,
    Registry,
    basic,
    digest_of,
    faults,
    image,
    registry,
)

HALF = 1 << 20  # bytes of a layer that are sent before it is cut
DEMO = image("demo")
LARGE = max(DEMO.parts, key=lambda digest: len(DEMO.parts[digest]))
PATH = "/usr/bin:/bin"
# Writes a file, as `apptainer pull` and `enroot import` do.
ENGINE = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"$HOME/called"
[ -d "$XDG_RUNTIME_DIR" ] || { echo "no place for its own files"; exit 1; }
[ ! -e "$HOME/broken" ] || { echo starting; echo "FATAL: broken"; exit 255; }
while [ $# -gt 0 ]; do case $1 in *.sif | *.sqsh) echo image >"$1" ;; esac; shift; done
"""


@pytest.fixture(scope="module")
def is_open(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that wants no login, with demo:1 and the list both:1."""
    with registry(tmp_path_factory.mktemp("open")) as started:
        started.push("demo", "1", DEMO)
        both = {"arm64": image("arm", "arm64", 1), "amd64": image("amd", "amd64", 1)}
        started.push_index("both", "1", both)
        yield started


@pytest.fixture
def between(is_open: Registry) -> Iterator[Faults]:
    """A server before the open registry."""
    with faults(is_open.address) as server:
        yield server


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without logins."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE"):
        monkeypatch.delenv(name, raising=False)
    return home


class Host(LocalTransport):
    """A host with its own home and these engines, which log their calls in ``called``.

    is_cut: its network has no way to any other host. limits: a shell's command that sets limits.
    """

    def __init__(
        self, home: Path, *engines: str, is_cut: bool = False, limits: str = "true"
    ) -> None:
        (home / "bin").mkdir(parents=True)
        self.host = home.name
        self.home = home
        self._is_cut = is_cut
        self._limits = limits
        for engine in engines:
            (home / "bin" / engine).write_text(ENGINE)
            (home / "bin" / engine).chmod(0o755)

    def _local_command(self, argv: Sequence[str]) -> Sequence[str]:
        network = ["unshare", "--net"] if self._is_cut else []
        limited = ["sh", "-c", f'{self._limits}; exec "$@"', "sh"]
        own = ["env", f"HOME={self.home}", f"PATH={self.home}/bin:{PATH}"]
        return [*network, *own, *limited, *argv]

    @property
    def called(self) -> list[str]:
        path = self.home / "called"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def controller(tmp_path: Path) -> Host:
    """A controller without an engine."""
    return Host(tmp_path / "ctl")


def fetch(
    name: str, to: Host, nodes: Sequence[Host] = (), progress: Progress = lambda *_: None
) -> tuple[images.FetchedImage, list[str]]:
    """Return the image and what was reported."""
    said: list[str] = []
    session: Any = SimpleNamespace(transport=to, inventory=SimpleNamespace(folder="clusterctl"))
    found = images.fetch(session, nodes, f"docker://{name}", said.append, progress)
    return found, said


def assert_has(host: Host, found: images.FetchedImage, wanted: Image, work: Path) -> None:
    """Assert that a node can read the parts of the image, whose paths are those on ``host``."""
    content = json.loads(found.file)
    content["files"] = {name: str(host.home / path) for name, path in content["files"].items()}
    (work / "container.json").write_text(json.dumps(content))
    (work / "layout").mkdir()
    parts = node_images.linked(str(work / "container.json"), str(work / "layout"))
    layers = [digest_of(Path(layer).read_bytes()) for layer in parts.layers]
    variables = json.loads(list(wanted.parts.values())[-1])["config"]["Env"]
    assert [f"{name}={value}" for name, value in parts.variables.items()] == variables
    assert len(layers) == len(wanted.parts) - 1


# --- skopeo


def test_tag_and_digest_give_the_image_of_the_time(
    is_open: Registry, controller: Host, tmp_path: Path
) -> None:
    old, new = image("old", size=1), image("new", size=1)
    name = is_open.push("moving", "1", old)
    first, _ = fetch(name, controller)
    assert first.reference == f"docker://{is_open.address}/moving@{old.digest}"
    is_open.push("moving", "1", new)
    for place, wanted, reference in (
        ("moved", new, name),
        ("kept", old, first.reference.removeprefix("docker://")),
        ("both", old, f"{name}@{old.digest}"),
    ):
        (tmp_path / place).mkdir()
        found, _ = fetch(reference, controller)
        assert json.loads(found.file)["digest"] == wanted.digest
        assert_has(controller, found, wanted, tmp_path / place)


@pytest.mark.parametrize("is_shared", [True, False])
def test_image_of_the_hosts_processor_is_chosen_from_a_list(
    is_open: Registry, tmp_path: Path, *, is_shared: bool
) -> None:
    """Also if this machine has fetched the image of another processor before."""
    for machine, processor, seed in (("x86_64", "amd64", "amd"), ("aarch64", "arm64", "arm")):
        host, node = (Host(tmp_path / f"{name}-{machine}", "uname") for name in ("ctl", "n1"))
        for each in (host, node):
            (each.home / "bin/uname").write_text(f"#!/bin/sh\necho {machine}\n")
        found, _ = fetch(f"{is_open.address}/both:1", host, () if is_shared else [node])
        (tmp_path / machine).mkdir()
        assert_has(host, found, image(seed, processor, 1), tmp_path / machine)


def test_digest_is_that_of_the_manifests_bytes(is_open: Registry, controller: Host) -> None:
    """Programs on Windows write other ends of lines."""
    wanted = image("ends", size=1)
    wanted = replace(wanted, manifest=wanted.manifest.replace(b", ", b",\r\n"))
    found, _ = fetch(is_open.push("ends", "1", wanted), controller)
    assert json.loads(found.file)["digest"] == wanted.digest


def test_login_of_docker_is_used_and_shown_nowhere(
    tmp_path: Path, own_home: Path, controller: Host
) -> None:
    with registry(tmp_path / "closed", LOGIN) as closed:
        name = closed.push("demo", "1", DEMO)
        with refused("transfer-failed/image", TransferError):
            fetch(name, controller)
        auths = {closed.address: {"auth": basic(LOGIN).partition(" ")[2]}}
        (own_home / ".docker").mkdir()
        (own_home / ".docker/config.json").write_text(json.dumps({"auths": auths}))
        found, said = fetch(name, controller)
    assert_has(controller, found, DEMO, tmp_path)
    assert PASSWORD not in "".join([*said, found.reference, found.file.decode()])
    places = [own_home / ".cache", controller.home]
    words = ["grep", "-rlF", PASSWORD, *places]
    assert subprocess.run(words, stdout=subprocess.PIPE, check=False).stdout == b""


def test_layers_that_came_before_a_cut_are_kept(
    between: Faults, controller: Host, tmp_path: Path
) -> None:
    def cut(asked: Asked, passed: Answer) -> Answer:
        return replace(passed, cut=HALF) if asked.part == LARGE else passed

    between.fault = cut
    with refused("transfer-failed/image", TransferError, between.address):
        fetch(f"{between.address}/demo:1", controller)
    between.asked.clear()
    between.fault = lambda _, passed: passed
    found, _ = fetch(f"{between.address}/demo:1", controller)
    assert_has(controller, found, DEMO, tmp_path)
    small, _ = (digest for digest in DEMO.parts if digest != LARGE)
    assert small not in {asked.part for asked in between.asked}


def test_full_disk_is_named_and_leaves_nothing_wrong(
    is_open: Registry, controller: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(8) as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk.path))
        # skopeo resolves /proc/PID/root to / before it writes.
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/skopeo").write_text(
            f'#!/bin/sh\nexec nsenter --mount --target {disk.path.parts[2]} /usr/bin/skopeo "$@"\n'
        )
        (tmp_path / "bin/skopeo").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{PATH}")
        disk.fill(but=HALF)
        with refused("transfer-failed/image", TransferError, "no space left"):
            fetch(f"{is_open.address}/demo:1", controller)
        disk.recover()
        found, _ = fetch(f"{is_open.address}/demo:1", controller)
        assert_has(controller, found, DEMO, tmp_path)


@pytest.mark.parametrize("path", ["demo:2", "nothing:1", f"demo@sha256:{'0' * 64}"])
def test_missing_image_is_named(is_open: Registry, controller: Host, path: str) -> None:
    with refused("transfer-failed/image", TransferError, path.partition(":")[0]):
        fetch(f"{is_open.address}/{path}", controller)


def test_machine_without_skopeo_is_told_another_way(
    is_open: Registry, controller: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(controller.home))
    with refused("tool-missing/skopeo", MachineError, "docker save"):
        fetch(f"{is_open.address}/demo:1", controller)


def test_two_at_once_fetch_each_layer_once(between: Faults, tmp_path: Path) -> None:
    together = Barrier(2)

    def meet(asked: Asked, passed: Answer) -> Answer:
        if asked.path.endswith("/manifests/1"):
            together.wait(60)
        return passed

    between.fault = meet
    hosts = [Host(tmp_path / name) for name in ("a", "b")]
    threads = [Thread(target=fetch, args=(f"{between.address}/demo:1", host)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent = {part: count for part, count in between.sent.items() if part}
    assert sent == {digest: len(part) for digest, part in DEMO.parts.items()}


def test_cache_is_locked_while_an_image_is_fetched_but_not_while_it_is_sent(
    between: Faults, controller: Host, own_home: Path
) -> None:
    lock = own_home / ".cache/clusterctl/images.lock"
    fetching, sending = [], []

    def look(asked: Asked, passed: Answer) -> Answer:
        if asked.part:
            # `cache list` does not wait.
            images.cached_bytes()
            fetching.append(holder(lock))
        return passed

    between.fault = look
    fetch(f"{between.address}/demo:1", controller, progress=lambda *_: sending.append(holder(lock)))
    assert {of_lock and of_lock.verb for of_lock in fetching} == {"submit"}
    assert {*sending} == {None}


def test_nodes_without_a_shared_folder_are_sent_the_image(
    is_open: Registry, tmp_path: Path
) -> None:
    """No engine pulls it, since the nodes would not see its file."""
    hosts = [Host(tmp_path / name, "apptainer") for name in ("ctl", "n1", "n2")]
    found, _ = fetch(f"{is_open.address}/demo:1", hosts[0], hosts[1:])
    for host in hosts:
        (tmp_path / f"of-{host.host}").mkdir()
        assert_has(host, found, DEMO, tmp_path / f"of-{host.host}")
        assert host.called == []


def test_prune_removes_what_was_fetched(
    is_open: Registry, controller: Host, tmp_path: Path
) -> None:
    assert images.cached_bytes() == 0
    fetch(f"{is_open.address}/demo:1", controller)
    size = images.cached_bytes()
    assert size > len(DEMO.parts[LARGE])
    assert images.prune(print) == size
    assert images.cached_bytes() == 0
    found, _ = fetch(f"{is_open.address}/demo:1", controller)
    assert_has(controller, found, DEMO, tmp_path)


# --- the controller's engine


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("apptainer", "pull --disable-cache --no-https {new} docker://{registry}/demo@{digest}"),
        ("singularity", "pull --disable-cache --no-https {new} docker://{registry}/demo@{digest}"),
        ("enroot", "import -o {new} docker://{registry}#demo@{digest}"),
    ],
)
def test_engine_of_the_controller_pulls_once_what_the_nodes_look_for(
    is_open: Registry, tmp_path: Path, own_home: Path, engine: str, words: str
) -> None:
    controller = Host(tmp_path / "ctl", engine)
    for _ in range(2):
        found, _ = fetch(f"{is_open.address}/demo:1", controller)
    (call,) = controller.called
    new = next(word for word in call.split() if word.startswith(str(controller.home)))
    expected = words.format(new=new, registry=is_open.address, digest=DEMO.digest)
    assert call == f"{engine} {expected}"
    (tmp_path / "container.json").write_bytes(found.file)
    kept = str(controller.home / "clusterctl/images")
    path = node_images.made_path(str(tmp_path / "container.json"), "layers", kept, engine)
    assert Path(path).read_text() == "image\n"
    assert not (own_home / ".cache").exists()


@pytest.mark.parametrize(
    ("more", "calls"),
    [
        ({"is_cut": True}, 0),
        ({"limits": "ulimit -t 1000"}, 0),
        ({"limits": "ulimit -v 90000000"}, 0),
        ({"limits": ': >"$HOME/broken"'}, 1),
    ],
)
def test_controller_that_can_t_pull_is_sent_the_image(
    is_open: Registry, tmp_path: Path, more: dict[str, Any], calls: int
) -> None:
    controller = Host(tmp_path / "ctl", "apptainer", **more)
    found, said = fetch(f"{is_open.address}/demo:1", controller)
    assert_has(controller, found, DEMO, tmp_path)
    assert len(controller.called) == calls
    assert [line for line in said if "FATAL: broken" in line] or not calls
    assert not list((controller.home / "clusterctl/images").glob(".pull-*"))


def test_reasons_of_both_are_shown(is_open: Registry, tmp_path: Path) -> None:
    controller = Host(tmp_path / "ctl", "apptainer", limits=': >"$HOME/broken"')
    missing = f"{is_open.address}/demo@sha256:{'0' * 64}"
    with refused(
        "transfer-failed/image", TransferError, "ctl: apptainer: FATAL: broken", "skopeo:"
    ):
        fetch(missing, controller)


def test_pull_of_another_submission_is_waited_for_with_keep_alives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "lock").open("a") as other, (tmp_path / "lock").open("a") as own:
        fcntl.flock(other, fcntl.LOCK_EX)
        said = []

        def end_other(answer: Mapping[str, str]) -> None:
            said.append(answer)
            fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(remote_pull, "emit", end_other)
        monkeypatch.setattr(remote_pull, "PAUSE_S", 0)
        remote_pull.wait_for(own)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert said == [{}]


def test_charliecloud_pulls_by_ch_image() -> None:
    reference = Reference("quay.io", "x", "", DEMO.digest)
    name = f"quay.io/x@{DEMO.digest}"
    assert list(remote_pull.commands("ch-run", reference, "new")) == [
        ["ch-image", "pull", name],
        ["ch-convert", "-i", "ch-image", "-o", "dir", name, "new"],
    ]
    machine = platform.machine()
    assert remote_pull.SUFFIXES == node_images.SUFFIXES
    assert machine in node_images.PROCESSORS
