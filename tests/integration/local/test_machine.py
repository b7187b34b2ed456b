"""The helper's changes to files and processes of nodes, as root."""

import os
import subprocess
import sys
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import yaml

from clusterctl.errors import ProvisionError
from clusterctl.hosts.remote_host_files import with_block
from clusterctl.providers.local import layout, machine, system
from clusterctl.providers.local.layout import NspawnNode
from clusterctl.util.assets import data_folder
from tests.support.messages import refused

THREADS = """
import threading, time
started = threading.Barrier(4)
for _ in range(3):
    threading.Thread(target=lambda: (started.wait(), time.sleep(60)), daemon=True).start()
started.wait()
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/etc/ssh").mkdir(parents=True)
    return tmp_path / "root"


def test_place_replaces_a_link_of_the_node(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "passwd"
    victim.write_text("root")
    (root / "etc/hostname").symlink_to(victim)
    machine._place(root, "etc/hostname", "node\n")
    assert victim.read_text() == "root"
    assert (root / "etc/hostname").read_text() == "node\n"
    assert not (root / "etc/hostname").is_symlink()


def test_place_refuses_a_folder_that_is_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "etc/systemd").symlink_to(tmp_path / "outside")
    with refused("host-unfit/folder-link", ProvisionError):
        machine._place(root, "etc/systemd/network/10-host0.network", "x")
    assert not list((tmp_path / "outside").iterdir())


def test_place_creates_secrets_private(root: Path) -> None:
    path = machine._place(root, "etc/ssh/key", "secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_pin_moves_all_threads() -> None:
    process = subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        core = min(os.sched_getaffinity(0))
        machine.pin(
            machine.Machine("abcdef", NspawnNode(name="n", cores=(core,)), 1), [process.pid]
        )
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        assert len(threads) == 4
        assert all(os.sched_getaffinity(int(thread.name)) == {core} for thread in threads)
    finally:
        process.kill()
        process.communicate()


def test_alive_finds_processes_by_control_group() -> None:
    name = "cfffff0-099"
    process = subprocess.Popen([*machine.enter_cgroup(name), "sleep", "60"])
    try:
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert process.poll() is None
        assert machine.alive()[name] == (process.pid,)
        machine.stop([name])
        assert name not in machine.alive()
        assert not machine.cgroups(name)
    finally:
        process.kill()
        process.wait()
        machine.remove_cgroups(name)


@pytest.mark.parametrize(
    ("files", "systemd", "limits"),
    [
        ({"memory.limit_in_bytes": "9223372036854771712\n"}, False, True),
        ({"memory.limit_in_bytes": "9223372036854771712\n"}, True, False),
        ({}, False, False),
    ],
)
def test_kernel_limits_memory_where_groups_have_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    *,
    systemd: bool,
    limits: bool,
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_hierarchies", lambda: [tmp_path])
    monkeypatch.setattr(machine, "booted_with_systemd", lambda: systemd)
    assert machine.limits_memory() == limits


def test_end_rooted_ends_processes_on_the_file_system_of_a_node(tmp_path: Path) -> None:
    """The machine may be unknown, and its overlay no longer mounted."""
    root = system.mount_overlay((Path("/"),), tmp_path / "nodes" / "n")
    process = subprocess.Popen(["unshare", "--mount", "chroot", root, "sleep", "60"])
    try:
        while not (found := system.rooted_under(tmp_path)):
            assert process.poll() is None
        assert found == (process.pid,)
        subprocess.run(["umount", "--lazy", root], check=True)
        assert system.rooted_under(tmp_path) == found
        assert system.rooted_under(tmp_path / "other") == ()
        machine.end_rooted(tmp_path)
        assert process.wait(timeout=60) == -9
    finally:
        process.kill()
        process.wait()
        system.erase(tmp_path / "nodes")


def test_place_does_not_rewrite_unchanged_files(root: Path) -> None:
    path = machine._place(root, "etc/hostname", "n\n")
    before = path.stat().st_ino
    assert machine._place(root, "etc/hostname", "n\n").stat().st_ino == before
    path.chmod(0o666)
    assert machine._place(root, "etc/hostname", "n\n").stat().st_mode & 0o777 == 0o644
    path.write_bytes(b"\xff\n")
    assert machine._place(root, "etc/hostname", "n\n").read_text() == "n\n"


def test_address_of_a_node_depends_on_its_number() -> None:
    subnet = IPv4Network("10.7.0.0/24")
    assert layout.address(subnet, 1) == "10.7.0.2"
    assert layout.address(subnet, 250) == "10.7.0.251"


def test_running_ignores_machines_of_containers() -> None:
    """Otherwise, the image build of a container would be ended."""
    name = f"clusterctl-bake-{os.getpid()}"
    called = f'exec -a systemd-nspawn bash -c "echo up; read" bash --machine={name}'
    for within, seen in (([], True), (["unshare", "--pid", "--fork", "--kill-child"], False)):
        argv = [*within, "bash", "-c", called]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            assert (name in machine.running()) == seen
            process.communicate()


def test_running_includes_a_machine_that_is_starting() -> None:
    """On a busy machine, it takes long until the command has become systemd-nspawn."""
    name = f"clusterctl-bake-{os.getpid()}"
    argv = ["sh", "-c", "echo up; read line", "sh", "/usr/bin/systemd-nspawn", f"--machine={name}"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert machine.running()[name] == process.pid
        process.communicate()


def test_hosts_file_names_each_address_once():
    """The role `common` replaces the block with all hosts of the cluster, the node itself
    included.
    """
    touches = yaml.safe_load((data_folder("ansible") / "roles/common/meta/touches.yml").read_text())
    ((edges),) = [
        part["blocks"]["/etc/hosts"]
        for part in touches["common_touches"]["drift"]
        if "blocks" in part
    ]
    first = machine.first_hosts_file("demo-ctl", "10.0.0.2")
    assert first.splitlines().count("10.0.0.2 demo-ctl") == 1
    configured = with_block(first, "10.0.0.2 demo-ctl\n10.0.0.3 demo-train-1\n", *edges)
    assert configured.splitlines()[0] == "127.0.0.1 localhost"
    assert sorted(line for line in configured.splitlines() if line.startswith("10.")) == [
        "10.0.0.2 demo-ctl",
        "10.0.0.3 demo-train-1",
    ]
