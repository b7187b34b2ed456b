"""Images from a real registry, to this machine and to a controller; and what breaks on the way."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import TransferError, UsageError
from clusterctl.jobs import images, remote_registry
from clusterctl.jobs.remote_registry import fetch_image, login_of
from clusterctl.spec.remote_reference import Reference
from clusterctl.transport.base import remote_argv
from tests.support.clocks import replace_clock
from tests.support.disks import small_disk
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.processes import descendants
from tests.support.registry import (
    LOGIN,
    PASSWORD,
    TOKEN,
    USER,
    Answer,
    Asked,
    Fault,
    Faults,
    Image,
    Registry,
    basic,
    digest_of,
    faults,
    image,
    registry,
    token_service,
)

HALF = 1 << 20  # bytes of a layer that are sent before it is cut
DEMO = image("demo")
LARGE = max(DEMO.parts, key=lambda digest: len(DEMO.parts[digest]))
LARGE_FILE = LARGE.partition(":")[2]


@pytest.fixture(scope="module")
def is_open(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that wants no login, with demo:1 and the list both:1."""
    with registry(tmp_path_factory.mktemp("open")) as started:
        started.push("demo", "1", DEMO)
        both = {"arm64": image("arm", "arm64", 1), "amd64": image("amd", "amd64", 1)}
        started.push_index("both", "1", both)
        started.push_index("arm", "1", {"arm64": both["arm64"]})
        yield started


@pytest.fixture(scope="module")
def is_closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that wants a login, with demo:1."""
    with registry(tmp_path_factory.mktemp("closed"), LOGIN) as started:
        started.push("demo", "1", DEMO)
        yield started


@pytest.fixture
def between(is_open: Registry) -> Iterator[Faults]:
    """A server before the open registry."""
    with faults(is_open.address) as server:
        yield server


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without logins, and no pauses between tries."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE"):
        monkeypatch.delenv(name, raising=False)
    replace_clock(monkeypatch, remote_registry, sleep=lambda _: None)
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of layers, which does not exist yet."""
    return tmp_path / "layers"


def fetch(name: str, folder: Path, login: str = "", machine: str = "x86_64") -> Mapping[str, Any]:
    """Return the last line of the program."""
    *_, last = fetch_image(name, str(folder), login, machine)
    return last


def problem(name: str, folder: Path, login: str = "") -> str:
    return str(fetch(name, folder, login)["problem"])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_is(found: Mapping[str, Any], wanted: Image, folder: Path) -> None:
    """Assert that the image has been fetched, and that the folder has nothing else."""
    assert found["image"]["digest"] == wanted.digest
    paths = [*found["image"]["layers"], found["image"]["config"]]
    assert [Path(path).read_bytes() for path in paths] == list(wanted.parts.values())
    assert {str(folder / name) for name in names(folder)} == set(paths)


# --- a real registry


def test_image_is_fetched_by_its_tag_and_its_digest(is_open: Registry, folder: Path) -> None:
    for version in (":1", f"@{DEMO.digest}", f":other@{DEMO.digest}"):
        assert_is(fetch(f"{is_open.address}/demo{version}", folder), DEMO, folder)


def test_layers_are_fetched_once(between: Faults, folder: Path) -> None:
    name = f"{between.address}/demo:1"
    fetch(name, folder)
    between.asked.clear()
    assert_is(fetch(name, folder), DEMO, folder)
    assert [asked.part for asked in between.asked] == [""]


def test_list_has_an_image_for_each_processor(is_open: Registry, folder: Path) -> None:
    for machine, seed in (("x86_64", "amd"), ("aarch64", "arm")):
        found = fetch(f"{is_open.address}/both:1", folder, machine=machine)
        settings = json.loads(Path(found["image"]["config"]).read_text())
        assert settings["config"]["Env"] == [f"SEED={seed}"]


def test_moved_tag_gives_the_new_image_and_a_digest_the_old(
    is_open: Registry, folder: Path, tmp_path: Path
) -> None:
    old, new = image("old", size=1), image("new", size=1)
    name = is_open.push("moving", "1", old)
    assert_is(fetch(name, folder), old, folder)
    is_open.push("moving", "1", new)
    assert fetch(name, folder)["image"]["digest"] == new.digest
    again = tmp_path / "again"
    assert_is(fetch(f"{name}@{old.digest}", again), old, again)


@pytest.mark.parametrize("path", ["demo:2", "nothing:1", f"demo@sha256:{'0' * 64}", "arm:1"])
def test_missing_image_is_named(is_open: Registry, folder: Path, path: str) -> None:
    assert problem(f"{is_open.address}/{path}", folder) == "no-such-image"
    assert names(folder) == set()


@pytest.mark.parametrize("login", ["", f"{USER}:wrong", f"other:{PASSWORD}"])
def test_wrong_login_is_refused(is_closed: Registry, folder: Path, login: str) -> None:
    assert problem(f"{is_closed.address}/demo:1", folder, login) == "registry-login"


# --- logins


def write_docker(home: Path, registry_name: str, **more: object) -> None:
    kept = {registry_name: {"auth": basic(LOGIN).partition(" ")[2]}}
    write_json(home / ".docker/config.json", {"auths": kept, **more})


def write_podman(home: Path, registry_name: str) -> None:
    kept = {registry_name: {"auth": basic(LOGIN).partition(" ")[2]}}
    write_json(home / ".config/containers/auth.json", {"auths": kept})


def write_https(home: Path, registry_name: str) -> None:
    """As `docker login https://NAME`, and with a helper that this machine lacks."""
    write_docker(home, f"https://{registry_name}", credsStore="missing")


def write_helper(home: Path, registry_name: str) -> None:
    helper = home / "bin/docker-credential-x"
    helper.parent.mkdir()
    answer = json.dumps({"Username": USER, "Secret": PASSWORD})
    helper.write_text(
        f"#!/bin/sh\nread -r name || true\n[ $1-$name = get-{registry_name} ] && echo '{answer}'\n"
    )
    helper.chmod(0o755)
    write_json(home / ".docker/config.json", {"credHelpers": {registry_name: "x"}})


def write_store(home: Path, registry_name: str) -> None:
    write_helper(home, registry_name)
    empty: Mapping[str, object] = {registry_name: {}}
    write_json(home / ".docker/config.json", {"auths": empty, "credsStore": "x"})


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "write", [write_docker, write_podman, write_https, write_helper, write_store]
)
def test_login_of_another_program_is_used_and_written_nowhere(
    is_closed: Registry, own_home: Path, write: Any
) -> None:
    """The program runs as on a controller. While it fetches a layer, its processes are looked at."""
    seen = []

    def look(asked: Asked, answer: Answer) -> Answer:
        if asked.part == LARGE:
            for pid in descendants(os.getpid()):
                for name in ("cmdline", "environ"):
                    seen.append(Path(f"/proc/{pid}/{name}").read_bytes())
        return answer

    with faults(is_closed.address) as between:
        between.fault = look
        write(own_home, between.address)
        path = f"{own_home}/bin:{os.environ['PATH']}"
        found = program(f"{between.address}/demo:1", own_home, PATH=path)
    layers = own_home / "layers"
    assert_is(found, DEMO, layers)
    secrets = [PASSWORD.encode(), basic(LOGIN).partition(" ")[2].encode()]
    seen += [path.read_bytes() for path in layers.iterdir()]
    assert len(seen) > len(DEMO.parts)
    assert [text for text in seen for secret in secrets if secret in text] == []


@pytest.mark.parametrize("text", ["", "[]", '{"auths": []}', '{"auths": {"a.b": {"auth": "%"}}}'])
def test_damaged_login_file_is_no_login(own_home: Path, text: str) -> None:
    (own_home / ".docker").mkdir()
    (own_home / ".docker/config.json").write_text(text)
    assert login_of("a.b") == ""
    write_podman(own_home, "a.b")
    assert login_of("a.b") == LOGIN


def test_docker_hub_has_its_own_name_for_a_login(own_home: Path) -> None:
    write_docker(own_home, "https://index.docker.io/v1/")
    assert login_of("docker.io") == LOGIN
    assert login_of("quay.io") == ""


def program(name: str, home: Path, **environment: str) -> Mapping[str, Any]:
    """Run the program as on a controller, and return its last line."""
    wanted = json.dumps({"name": name, "folder": "layers", "login": ""})
    result = subprocess.run(
        remote_argv("clusterctl.jobs.remote_registry"),
        input=f"{wanted}\n".encode(),
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "HOME": str(home), **environment},
    )
    found: Mapping[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


# --- faults


def on_layer(change: Fault, times: int = 1000) -> Fault:
    """A fault of the large layer alone, for its first requests."""
    asked_before: list[Asked] = []

    def answer(asked: Asked, passed: Answer) -> Answer:
        if asked.part != LARGE or len(asked_before) >= times:
            return passed
        asked_before.append(asked)
        return change(asked, passed)

    return answer


def on_manifest(change: Fault, times: int = 1000) -> Fault:
    left = [None] * times

    def answer(asked: Asked, passed: Answer) -> Answer:
        if "/manifests/" not in asked.path or not left:
            return passed
        left.pop()
        return change(asked, passed)

    return answer


def cut(_: Asked, passed: Answer) -> Answer:
    return replace(passed, cut=HALF)


def reset(_: Asked, passed: Answer) -> Answer:
    return replace(passed, is_reset=True)


def status(code: int) -> Fault:
    return lambda _, __: Answer(code, {}, b"{}")


def test_cut_layer_goes_on_where_it_ended(between: Faults, folder: Path) -> None:
    between.fault = on_layer(cut, times=2)
    assert_is(fetch(f"{between.address}/demo:1", folder), DEMO, folder)
    assert between.sent[LARGE] == len(DEMO.parts[LARGE])
    asked = [asked.headers.get("Range") for asked in between.asked if asked.part == LARGE]
    assert asked == [None, f"bytes={HALF}-", f"bytes={2 * HALF}-"]


def test_layer_that_is_cut_again_and_again_is_fetched_in_pieces(
    between: Faults, folder: Path
) -> None:
    sixth = len(DEMO.parts[LARGE]) // 6
    between.fault = on_layer(lambda _, passed: replace(passed, cut=sixth))
    assert_is(fetch(f"{between.address}/demo:1", folder), DEMO, folder)


def test_layer_that_does_not_go_on_is_kept_for_the_next_call(between: Faults, folder: Path) -> None:
    cuts = iter([1000])
    between.fault = on_layer(lambda _, passed: replace(passed, cut=next(cuts, 0)))
    assert problem(f"{between.address}/demo:1", folder) == "image-not-fetched"
    kept = folder / f"{LARGE_FILE}.partial"
    assert names(folder) == DEMO.names - {LARGE_FILE} | {kept.name}
    have = between.sent[LARGE]
    assert kept.read_bytes() == DEMO.parts[LARGE][:have]
    between.fault = lambda _, passed: passed
    assert_is(fetch(f"{between.address}/demo:1", folder), DEMO, folder)
    assert between.sent[LARGE] == len(DEMO.parts[LARGE])


def test_registry_without_ranges_sends_the_layer_anew(between: Faults, folder: Path) -> None:
    def whole(asked: Asked, passed: Answer) -> Answer:
        body = DEMO.parts[LARGE]
        return Answer(200, {}, body, cut=None if "Range" in asked.headers else HALF)

    between.fault = on_layer(whole)
    assert_is(fetch(f"{between.address}/demo:1", folder), DEMO, folder)


def test_altered_layer_is_not_kept(between: Faults, folder: Path) -> None:
    def altered(_: Asked, passed: Answer) -> Answer:
        return replace(passed, body=passed.body[:-1] + bytes([passed.body[-1] ^ 1]))

    between.fault = on_layer(altered)
    assert problem(f"{between.address}/demo:1", folder) == "wrong-digest"
    assert names(folder) == DEMO.names - {LARGE_FILE}


def test_layer_without_an_end_does_not_fill_the_disk(between: Faults, folder: Path) -> None:
    body = DEMO.parts[LARGE]
    between.fault = on_layer(lambda _, passed: replace(passed, body=body * 3))
    assert_is(fetch(f"{between.address}/demo:1", folder), DEMO, folder)


def test_manifest_with_another_digest_is_refused(between: Faults, folder: Path) -> None:
    other = image("other", size=1).manifest
    between.fault = on_manifest(lambda _, passed: replace(passed, body=other))
    assert problem(f"{between.address}/demo@{DEMO.digest}", folder) == "wrong-digest"
    assert names(folder) == set()


@pytest.mark.parametrize(
    ("code", "wanted"),
    [(429, "registry-busy"), (500, "image-not-fetched"), (503, "image-not-fetched")],
)
@pytest.mark.parametrize("where", [on_manifest, on_layer])
def test_answer_with_an_error_is_one_problem(
    between: Faults, folder: Path, code: int, wanted: str, where: Any
) -> None:
    between.fault = where(status(code))
    assert problem(f"{between.address}/demo:1", folder) == wanted
    assert LARGE_FILE not in names(folder)


@pytest.mark.parametrize(
    ("where", "fault"),
    [(on_manifest, status(503)), (on_layer, status(503)), (on_layer, reset)],
)
def test_registry_with_a_fault_is_asked_again(
    between: Faults, folder: Path, where: Any, fault: Fault
) -> None:
    between.fault = where(fault, times=2)
    assert_is(fetch(f"{between.address}/demo:1", folder), DEMO, folder)


MANIFESTS = [DEMO.manifest[:-9], b"", b"null", b"[]", b'{"layers": 1, "config": {}}', b"\xff"]
MANIFESTS += [DEMO.manifest.replace(b'"size"', b'"sise"')]


@pytest.mark.parametrize("text", MANIFESTS, ids=lambda text: repr(text[-12:]))
def test_damaged_manifest_is_one_problem(between: Faults, folder: Path, text: bytes) -> None:
    between.fault = on_manifest(lambda _, passed: replace(passed, body=text))
    assert problem(f"{between.address}/demo:1", folder) == "image-not-fetched"


def test_image_in_the_first_format_is_refused(between: Faults, folder: Path) -> None:
    old = b'{"schemaVersion": 1, "name": "demo", "fsLayers": []}'
    between.fault = on_manifest(lambda _, passed: replace(passed, body=old))
    assert problem(f"{between.address}/demo:1", folder) == "no-such-image"


def test_digest_in_a_manifest_is_no_path(between: Faults, folder: Path) -> None:
    text = DEMO.manifest.replace(LARGE.encode(), b"sha256:../../evil")
    between.fault = on_manifest(lambda _, passed: replace(passed, body=text))
    assert problem(f"{between.address}/demo:1", folder) == "wrong-digest"


def test_connection_that_is_reset_is_unreachable(between: Faults, folder: Path) -> None:
    between.fault = on_manifest(reset)
    assert problem(f"{between.address}/demo:1", folder) == "image-registry-unreachable"


def test_other_host_of_a_layer_gets_no_login(is_closed: Registry, folder: Path) -> None:
    with faults(is_closed.address) as between, faults(is_closed.address) as other:
        place = f"http://{other.address}/there"
        between.fault = on_layer(lambda *_: Answer(307, {"Location": place}, b""))
        other.fault = lambda *_: Answer(200, {}, DEMO.parts[LARGE])
        assert_is(fetch(f"{between.address}/demo:1", folder, LOGIN), DEMO, folder)
        assert [asked.path for asked in other.asked] == ["/there"]
        assert [asked for asked in other.asked if "Authorization" in asked.headers] == []
        assert basic(LOGIN) in [asked.headers.get("Authorization") for asked in between.asked]


def test_host_of_layers_without_a_way_is_unreachable(between: Faults, folder: Path) -> None:
    """As a firewall that lets only the registry itself through: this machine is then tried."""
    between.fault = on_layer(lambda *_: Answer(307, {"Location": "http://127.0.0.1:1/"}, b""))
    assert problem(f"{between.address}/demo:1", folder) == "image-registry-unreachable"


def test_proxy_does_not_see_the_login_for_this_machine(
    is_closed: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faults(is_closed.address) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy.address}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert_is(fetch(f"{is_closed.address}/demo:1", folder, LOGIN), DEMO, folder)
        assert proxy.asked == []


@pytest.mark.parametrize(("login", "code"), [(LOGIN, ""), (f"{USER}:no", "registry-login")])
def test_token_service_permits_and_refuses(
    between: Faults, folder: Path, login: str, code: str
) -> None:
    between.fault = token_service(f"http://{between.address}/token", LOGIN)
    found = fetch(f"{between.address}/demo:1", folder, login)
    assert found.get("problem", "") == code
    given = {asked.headers.get("Authorization", "") for asked in between.asked if asked.part}
    assert given == (set() if code else {f"Bearer {TOKEN} repository:demo:pull"})


IDENTITY = "identity+token=&"


@pytest.mark.parametrize(("kept", "code"), [(IDENTITY, ""), ("other", "registry-login")])
def test_identity_token_of_docker_is_exchanged(
    between: Faults, folder: Path, own_home: Path, kept: str, code: str
) -> None:
    """Beside an identity token, Docker keeps a user without a password."""
    user = base64.b64encode(b"00000000-0000-0000-0000-000000000000:").decode()
    entry = {"auth": user, "identitytoken": kept}
    (own_home / ".docker").mkdir()
    config = own_home / ".docker/config.json"
    config.write_text(json.dumps({"auths": {between.address: entry}}))
    between.fault = token_service(f"http://{between.address}/token", LOGIN, IDENTITY)
    found = fetch(f"{between.address}/demo:1", folder, "")
    assert found.get("problem", "") == code
    # The registry itself never gets the identity token.
    given = {asked.headers.get("Authorization", "") for asked in between.asked if asked.body == ""}
    assert given == ({""} if code else {"", f"Bearer {TOKEN} repository:demo:pull"})


def test_identity_token_of_a_helper_is_exchanged(between: Faults, folder: Path) -> None:
    between.fault = token_service(f"http://{between.address}/token", LOGIN, IDENTITY)
    assert_is(fetch(f"{between.address}/demo:1", folder, f"<token>:{IDENTITY}"), DEMO, folder)


@pytest.mark.parametrize(
    "realm",
    ["http://elsewhere.example/token", "file:///etc/passwd", "http://127.0.0.1@e.example", ""],
)
def test_login_is_not_sent_without_encryption(
    between: Faults, folder: Path, monkeypatch: pytest.MonkeyPatch, realm: str
) -> None:
    """A proxy would get the request to another host, if there was one."""
    with faults(between.address) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        between.fault = token_service(realm, LOGIN)
        assert problem(f"{between.address}/demo:1", folder, LOGIN) == "registry-login"
        assert proxy.asked == []


def test_registry_elsewhere_gets_no_login_sent_to_this_machine(between: Faults) -> None:
    other = remote_registry.Registry(Reference.parse("a.example/demo"), LOGIN, "x86_64")
    with pytest.raises(remote_registry.ProblemError) as caught:
        other._log_in(f'Bearer realm="http://{between.address}/token",service="double"')
    assert caught.value.code == "registry-login"
    assert between.asked == []


def test_full_disk_is_named_and_its_part_is_used(between: Faults) -> None:
    with small_disk(8) as disk:
        disk.fill(but=HALF)
        folder = disk.path / "layers"
        assert problem(f"{between.address}/demo:1", folder) == "no-room-for-image"
        disk.recover()
        kept = (folder / f"{LARGE_FILE}.partial").read_bytes()
        assert DEMO.parts[LARGE].startswith(kept)
        between.asked.clear()
        assert_is(fetch(f"{between.address}/demo:1", folder), DEMO, folder)
        asked = [asked.headers.get("Range") for asked in between.asked if asked.part == LARGE]
        assert kept
        assert asked == [f"bytes={len(kept)}-"]


def test_folder_that_can_t_be_written_is_named(is_open: Registry) -> None:
    with small_disk() as disk:
        disk.suffer("read-only")
        assert problem(f"{is_open.address}/demo:1", disk.path / "layers") == "no-room-for-image"


def test_two_programs_fetch_each_layer_once(between: Faults, own_home: Path) -> None:
    together = Barrier(2)

    def slow(asked: Asked, passed: Answer) -> Answer:
        if not asked.part:
            together.wait(60)
        return replace(passed, pause_s=0.01)

    between.fault = slow
    wanted = json.dumps({"name": f"{between.address}/demo:1", "folder": "layers", "login": ""})
    argv = remote_argv("clusterctl.jobs.remote_registry")
    pipe = subprocess.PIPE
    running = [subprocess.Popen(argv, stdin=pipe, stdout=pipe) for _ in range(2)]
    for process in running:
        assert process.stdin
        process.stdin.write(f"{wanted}\n".encode())
        process.stdin.flush()
    for process in running:
        lines = process.communicate()[0].splitlines()
        assert_is(json.loads(lines[-1]), DEMO, own_home / "layers")
    del between.sent[""]
    assert between.sent == {digest: len(part) for digest, part in DEMO.parts.items()}


@pytest.mark.parametrize("end", ["kept", "removed"])
def test_program_that_waited_uses_what_the_other_left(
    between: Faults, folder: Path, end: str
) -> None:
    """The other program has the lock, and has written half a layer when it ends."""
    folder.mkdir()
    path = folder / f"{LARGE_FILE}.partial"
    with remote_registry.locked(str(path)) as file:
        lines = fetch_image(f"{between.address}/demo:1", str(folder), "", "x86_64")
        assert "bytes" in next(lines)  # it waits
        file.write(DEMO.parts[LARGE][:HALF])
        file.flush()
        if end == "removed":
            path.unlink()
    *_, found = lines
    assert_is(found, DEMO, folder)
    sent = len(DEMO.parts[LARGE]) - (HALF if end == "kept" else 0)
    assert between.sent[LARGE] == sent


def test_interrupted_client_stops_transfers(between: Faults, folder: Path) -> None:
    between.fault = on_layer(lambda _, passed: replace(passed, pause_s=0.2))
    lines = fetch_image(f"{between.address}/demo:1", str(folder), "", "x86_64")
    assert "bytes" in next(lines)
    lines.close()
    assert between.sent[LARGE] < len(DEMO.parts[LARGE])
    assert not (folder / LARGE_FILE).exists()


# --- submit: the controller, and this machine


class Host(LocalTransport):
    """A host with its own home. is_cut: its network has no way to any other host."""

    def __init__(self, home: Path, *, is_cut: bool = False) -> None:
        home.mkdir()
        self.host = home.name
        self._home = home
        self._is_cut = is_cut

    def _local_command(self, argv: Sequence[str]) -> Sequence[str]:
        network = ["unshare", "--net"] if self._is_cut else []
        return [*network, "env", f"HOME={self._home}", *argv]


def fetch_for_job(
    name: str, controller: Host, nodes: Sequence[Host] = ()
) -> tuple[images.FetchedImage, list[str]]:
    """Return the image and what was reported."""
    said: list[str] = []
    session: Any = SimpleNamespace(
        transport=controller, inventory=SimpleNamespace(folder="clusterctl")
    )
    found = images.fetch(session, nodes, f"docker://{name}", said.append, lambda *_: None)
    return found, said


def assert_on(host: Host, found: images.FetchedImage, name: str) -> None:
    """Assert that a job on the host finds the image."""
    content = json.loads(found.file)
    assert (content["name"], content["digest"]) == (f"docker://{name}", DEMO.digest)
    assert found.reference == f"docker://{name.rpartition(':')[0]}@{DEMO.digest}"
    argv = ["cat", *content["layers"], content["config"]]
    read = subprocess.run(host._local_command(argv), stdout=subprocess.PIPE, check=True, cwd="/")
    assert digest_of(read.stdout) == digest_of(b"".join(DEMO.parts.values()))


def test_controller_fetches_with_the_login_that_it_has(
    is_closed: Registry, own_home: Path, tmp_path: Path
) -> None:
    name = f"{is_closed.address}/demo:1"
    controller = Host(tmp_path / "ctl")
    # A server at this address there is not that of this machine.
    write_docker(own_home, is_closed.address)
    with refused("registry-login", UsageError):
        fetch_for_job(name, controller)
    write_docker(tmp_path / "ctl", is_closed.address)
    found, said = fetch_for_job(name, controller)
    assert_on(controller, found, name)
    assert names(tmp_path / "ctl/clusterctl/layers") == DEMO.names
    assert not (own_home / ".cache").exists()
    assert PASSWORD not in "".join([*said, found.reference, found.file.decode()])


def test_controller_without_a_way_is_sent_the_image(
    is_open: Registry, own_home: Path, tmp_path: Path
) -> None:
    name = f"{is_open.address}/demo:1"
    found, _ = fetch_for_job(name, controller := Host(tmp_path / "ctl", is_cut=True))
    assert_on(controller, found, name)
    assert names(own_home / ".cache/clusterctl/images") == DEMO.names


def test_silent_network_of_the_controller_is_no_way(
    between: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's request is not answered, as behind a firewall that drops packets."""
    monkeypatch.setattr(images, "_SILENCE_S", 1.0)
    is_over = Event()

    def hang(*_: object) -> Answer:
        is_over.wait(60)
        return Answer(500, {}, b"")

    between.fault = on_manifest(hang, times=1)
    name = f"{between.address}/demo:1"
    found, _ = fetch_for_job(name, controller := Host(tmp_path / "ctl"))
    is_over.set()
    assert_on(controller, found, name)


def test_nodes_without_a_shared_folder_are_sent_the_image(
    is_open: Registry, tmp_path: Path
) -> None:
    hosts = [Host(tmp_path / name, is_cut=True) for name in ("ctl", "n1", "n2")]
    name = f"{is_open.address}/demo:1"
    found, _ = fetch_for_job(name, hosts[0], hosts[1:])
    for host in hosts:
        assert any((tmp_path / host.host / "clusterctl/store").iterdir())
    assert_on(hosts[0], found, name)


@pytest.mark.parametrize("is_cut", [False, True])
def test_registry_that_nobody_reaches_is_named(tmp_path: Path, is_cut: bool) -> None:
    controller = Host(tmp_path / "ctl", is_cut=is_cut)
    with refused("image-registry-unreachable", TransferError, "127.0.0.1:1", where="ctl"):
        fetch_for_job("127.0.0.1:1/demo:1", controller)


def test_problem_of_this_machine_is_shown_if_the_controller_has_no_way(
    is_closed: Registry, tmp_path: Path
) -> None:
    controller = Host(tmp_path / "ctl", is_cut=True)
    with refused("registry-login", UsageError, is_closed.address, where="this machine"):
        fetch_for_job(f"{is_closed.address}/demo:1", controller)
