"""Jobs in container images on real nodes, with the nodes' engines and a registry with a password."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.container_image import apptainer_files, mpi_layer
from tests.support.cluster import Cluster
from tests.support.messages import codes
from tests.support.processes import eventually
from tests.support.registry import LOGIN, PASSWORD, Image, Registry, image_of, registry

pytestmark = pytest.mark.platform("real", "containers")

RANKS = """\
import json, os, sys
from mpi4py import MPI

world = MPI.COMM_WORLD
own = {name: os.environ.get(name) for name in ("IN_IMAGE", "TOKEN", "CHOSEN")}
own |= {"data": open("/data/text").read(), "python": sys.executable}
open(f"rank-{world.rank}", "w").close()
rows = world.gather(own)
if world.rank == 0:
    print(json.dumps(rows), flush=True)
"""


@pytest.fixture(scope="module")
def suite(cluster: Cluster) -> str:
    """The release of Debian on the nodes, whose MPI must fit that of the image."""
    look = ". /etc/os-release; echo $VERSION_CODENAME"
    return cluster.ssh(f"{cluster.name}-train-1", look).strip()


@pytest.fixture(scope="module")
def layer(suite: str) -> Path:
    return mpi_layer(suite)


@pytest.fixture(scope="module")
def own_registry(tmp_path_factory: pytest.TempPathFactory, layer: Path) -> Iterator[Registry]:
    """A registry that wants a password, with the images lab/mpi:1 and lab/mpi:2."""
    with registry(tmp_path_factory.mktemp("registry"), LOGIN) as one:
        for tag in ("1", "2"):
            one.push("lab/mpi", tag, mpi_image(layer, tag))
        yield one


def mpi_image(layer: Path, version: str) -> Image:
    return image_of([layer.read_bytes()], [f"IN_IMAGE={version}", "CHOSEN=no"])


@pytest.fixture
def login(own_registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `skopeo login` writes, and with this name `apptainer registry login`."""
    kept = {"auth": base64.b64encode(LOGIN.encode()).decode()}
    file = tmp_path / "docker-config.json"
    file.write_text(json.dumps({"auths": {own_registry.address: kept}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(file))
    return file


@pytest.fixture(scope="module")
def program(cluster: Cluster) -> Path:
    folder = cluster.runner.cwd / "containers"
    folder.mkdir()
    (folder / "ranks.py").write_text(RANKS)
    cluster("ssh", "--", "mkdir -p data && echo -n text >data/text")
    return folder / "ranks.py"


@contextmanager
def seen_by_controller(cluster: Cluster, address: str) -> Iterator[None]:
    """Let the controller reach a server of this machine at the same address."""
    _, _, port = address.rpartition(":")
    config = str(cluster.workspace / "ssh_config")
    argv = ["ssh", "-F", config, "-S", "none", "-o", "ExitOnForwardFailure=yes", "-N"]
    argv += ["-l", "clusterctl", "-R", f"127.0.0.1:{port}:{address}", f"{cluster.name}-ctl"]
    tunnel = subprocess.Popen(argv)
    try:
        look = f"timeout 1 bash -c '</dev/tcp/127.0.0.1/{port}' && echo yes || true"
        eventually(lambda: cluster.ssh(f"{cluster.name}-ctl", look).strip() == "yes")
        yield
    finally:
        tunnel.kill()
        tunnel.wait()


def ran(cluster: Cluster, job: str) -> list[dict[str, str]]:
    """What the ranks of a job in an image said."""
    return list(json.loads((cluster.run_of(job) / "stdout.log").read_text().splitlines()[-1]))


def expected(version: str) -> dict[str, str | None]:
    return {
        "IN_IMAGE": version,
        "TOKEN": "canary",
        "CHOSEN": "yes",
        "data": "text",
        "python": "/usr/bin/python3",
    }


FLAGS = ("--nodes", "2", "--mount", "~/data:/data", "--env", "CHOSEN=yes", "--secret", "TOKEN")


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "canary")


@pytest.mark.usefixtures("login", "token")
def test_ranks_run_in_an_image_of_a_registry_and_replay_uses_its_digest(
    cluster: Cluster, program: Path, own_registry: Registry, layer: Path
) -> None:
    name = f"docker://{own_registry.address}/lab/mpi:1"
    before = Path(cluster.runner.home)
    first = cluster.json("submit", program, *FLAGS, "--container", name, "--wait")
    assert ran(cluster, first["job_id"]) == [expected("1")] * 2
    own_registry.push("lab/mpi", "1", mpi_image(layer, "moved"))
    again = cluster.json("replay", first["job_id"], "--secret", "TOKEN", "--wait")
    assert ran(cluster, again["job_id"]) == [expected("1")] * 2
    moved = cluster.json("submit", program, *FLAGS, "--container", name, "--wait")
    assert ran(cluster, moved["job_id"]) == [expected("moved")] * 2
    found = subprocess.run(["grep", "-rlF", PASSWORD, before], capture_output=True, check=False)
    assert found.stdout == b""
    # sudo writes its command line to the journal, so the password is not in it.
    places = f"~{cluster.user} /tmp /var/log /run /var/spool"
    look = f"sudo grep -srlF -f - {places} <<<'{PASSWORD}' || true"
    for host in ("ctl", "train-1", "train-2"):
        assert cluster.ssh(f"{cluster.name}-{host}", look) == ""


@pytest.mark.usefixtures("login")
def test_wrong_images_are_refused_before_a_job(
    cluster: Cluster, program: Path, own_registry: Registry
) -> None:
    listed = cluster("jobs").stdout
    words = ("submit", program, "--container", f"docker://{own_registry.address}/lab/none:1")
    assert codes(cluster("-o", "json", *words, rc=1)) == ["transfer-failed/image"]
    assert cluster("jobs").stdout == listed


def test_missing_mount_is_named_with_its_node(cluster: Cluster, program: Path, layer: Path) -> None:
    archive = program.parent / "image.tar"
    mpi_image(layer, "archive").save(archive)
    words = ("submit", program, "--nodes", "2", "--mount", "/nowhere:/data", "--wait")
    answer = cluster.json(*words, "--container", archive, rc=4)
    assert answer["diagnosis"]["code"] == "image-unfit"
    (failure,) = answer["failures"]
    assert failure["host"].startswith(f"{cluster.name}-train-")


@pytest.mark.usefixtures("login", "token")
def test_shell_runs_in_an_image(
    cluster: Cluster, program: Path, own_registry: Registry, layer: Path
) -> None:
    """The first shell converts the image, and fetches it if it is in a registry."""
    archive = program.parent / "shell.tar"
    mpi_image(layer, "shell").save(archive)
    show = 'echo "$IN_IMAGE $CHOSEN $TOKEN $(cat /data/text)"; pwd; touch made'
    for image, version in (
        (str(archive), "shell"),
        (f"docker://{own_registry.address}/lab/mpi:2", "2"),
    ):
        ran = cluster("-o", "json", "shell", *FLAGS[2:], "--container", image, "--", show).json
        seen, folder = ran["stdout"].splitlines()
        assert (seen, ran["files"]) == (f"{version} yes canary text", ["made"])
        assert ran["dir"] == folder
    words = ("shell", *FLAGS, "--folder", program.parent, "--container", archive)
    shown = cluster(*words, "--", "launch", "python3", "ranks.py").stdout
    assert json.loads(shown.splitlines()[-1]) == [expected("shell")] * 2


@pytest.fixture
def apptainer(cluster: Cluster, suite: str) -> Iterator[None]:
    """Apptainer on the controller and both nodes."""
    nodes = [f"{cluster.name}-{host}" for host in ("ctl", "train-1", "train-2")]
    config = str(cluster.workspace / "ssh_config")
    with apptainer_files(suite) as files:
        for node in nodes:
            argv = ["ssh", "-F", config, "-l", "clusterctl", node, "sudo tar -xC /"]
            with files.open("rb") as tar:
                subprocess.run(argv, stdin=tar, check=True, timeout=120)
    yield
    for node in nodes:
        cluster.ssh(node, "sudo rm -rf /usr/bin/*apptainer* /usr/bin/*squash*s /etc/apptainer")


@pytest.mark.usefixtures("apptainer", "token")
def test_apptainer_runs_an_archive_and_pulls_from_a_registry(
    cluster: Cluster, program: Path, layer: Path, own_registry: Registry, login: Path
) -> None:
    archive = program.parent / "apptainer.tar"
    mpi_image(layer, "archive").save(archive)
    job = cluster.json("submit", program, *FLAGS, "--container", archive, "--wait")["job_id"]
    assert ran(cluster, job) == [expected("archive")] * 2
    own_registry.push("lab/mpi", "pulled", mpi_image(layer, "pulled"))
    cluster("put", login, ".apptainer/")
    words = ("--container", f"docker://{own_registry.address}/lab/mpi:pulled", "--wait")
    with seen_by_controller(cluster, own_registry.address):
        job = cluster.json("submit", program, *FLAGS, *words)["job_id"]
    assert ran(cluster, job) == [expected("pulled")] * 2
    # The controller's engine has pulled it, so no layers were sent.
    assert json.loads((cluster.run_of(job) / "container.json").read_text())["files"] == {}
