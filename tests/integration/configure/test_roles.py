"""Roles that need a real kernel or Google, with doubles of the programs that they call."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from clusterctl.cluster.hardware import mark_of_wheels
from clusterctl.hosts.remote_probe import rivals_mark
from clusterctl.util.assets import data_folder
from tests.support.plays import program, role_data, run_tasks
from tests.support.wheels import a_wheel

SCRATCH = data_folder("ansible") / "roles" / "scratch" / "files" / "clusterctl-scratch"


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """Programs that record their arguments in `calls`. Their exit code is in `NAME.status`."""
    for name in ("mount", "mdadm", "mkfs.ext4", "blkid", "mountpoint", "chmod", "lsblk"):
        program(
            tmp_path,
            name,
            f'cd {shlex.quote(str(tmp_path))}\necho {name} "$@" >>calls\ncat {name}.said 2>/dev/null\n'
            f"exit $(cat {name}.status 2>/dev/null || echo 0)",
        )
    return tmp_path / "bin"


def calls(tmp_path: Path) -> list[str]:
    found = tmp_path / "calls"
    return found.read_text().splitlines() if found.exists() else []


def play(tmp_path: Path, role: str, tasks: str, **variables: object) -> str:
    """Run one file of a role's tasks on this machine, as the only compute node; what Ansible
    said.
    """
    done = run_tasks(tmp_path, role, tasks, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_options_of_the_shared_folder_suit_each_server() -> None:
    known = role_data("shared_storage")["shared_storage_options"]
    versions = {"nfs": "vers=4.2,hard", "server": "hard", "filestore": "vers=3,hard"}
    assert [kind for kind, options in known.items() if not options.startswith(versions[kind])] == []
    # After the network, at boot; and `down` finds the line.
    assert all({"_netdev", "x-clusterctl"} < {*options.split(",")} for options in known.values())


def test_controller_exports_to_the_cluster_network_only() -> None:
    template = data_folder("ansible") / "roles/shared_storage/templates/clusterctl.exports.j2"
    variables = {"shared_storage_path": "/shared", "shared_storage_network": "10.80.0.0/20"}
    text = jinja2.Template(template.read_text(), undefined=jinja2.StrictUndefined).render(
        **variables, ansible_managed="a test"
    )
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == ["/shared 10.80.0.0/20(rw,sync,no_subtree_check,root_squash)"]


def test_bucket_is_mounted_for_all_users(tmp_path: Path, stand_ins: Path) -> None:
    fstab = tmp_path / "fstab"
    folder = tmp_path / "bucket"
    variables = {"bucket_name": "my-data", "bucket_path": str(folder), "bucket_fstab": str(fstab)}
    play(tmp_path, "bucket", "configure", **variables)
    source, where, fstype, options, *_ = fstab.read_text().split()
    assert (source, where, fstype) == ("my-data", str(folder), "gcsfuse")
    assert {"rw", "_netdev", "allow_other"} <= set(options.split(","))


def prolog(script: Path, **environ: str) -> list[str]:
    """Return the lines that Slurm reads from the TaskProlog of a job with these variables."""
    done = subprocess.run([script], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The TaskProlog of a node, whose other files lie beside it."""
    file = data_folder("ansible") / "roles/job_env/files/task-prolog"
    copy = Path(shutil.copy(file, tmp_path))
    copy.chmod(0o755)
    return copy


def test_task_prolog_exports_variables_that_the_job_does_not_set(
    tmp_path: Path, script: Path
) -> None:
    values = {"NCCL_SOCKET_IFNAME": "={interface}", "NCCL_DEBUG": "WARN", "ODD": 'a\'b $HOME "c"'}
    own = {"job_env_root": str(tmp_path), "job_env_network": "127.0.0.0/8"}
    play(tmp_path, "job_env", "variables", **own, job_env_variables=values)
    assert prolog(script) == [
        "export NCCL_DEBUG=WARN",
        "export NCCL_SOCKET_IFNAME==lo",
        'export ODD=a\'b $HOME "c"',
    ]
    assert prolog(script, NCCL_DEBUG="INFO", ODD="") == ["export NCCL_SOCKET_IFNAME==lo"]


_BY_UUID = {
    False: [
        ({"CUDA_VISIBLE_DEVICES": "1"}, "MIG-b"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "GPU-c"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "MIG-a,MIG-b"),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1"},
            "MIG-b",
        ),
        ({"CUDA_VISIBLE_DEVICES": "7"}, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-b"}, None),
        ({}, None),
    ],
    # In control groups Slurm counts from the first of the job's own.
    True: [
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "1"}, "MIG-b"),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_GPUS": "1,2"}, "GPU-c"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
}


@pytest.mark.parametrize("constrains", _BY_UUID, ids=["shares", "control groups"])
def test_task_prolog_sets_cuda_visible_devices_to_uuids(
    tmp_path: Path, script: Path, constrains: bool
) -> None:
    (tmp_path / "gpus").write_text("MIG-a\nMIG-b\nGPU-c\n")
    (tmp_path / "cgroup.conf").write_text("ConstrainDevices=yes\n" if constrains else "")
    for environ, seen in _BY_UUID[constrains]:
        said = prolog(script, SLURM_CONF=str(tmp_path / "slurm.conf"), **environ)
        assert said == ([f"export CUDA_VISIBLE_DEVICES={seen}"] if seen else [])


@pytest.mark.parametrize("sent", [False, True], ids=["fetched", "sent"])
def test_node_with_cards_gets_the_wheels_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """Wheels are sent, or the node's own pip downloads them. Their hashes are checked in both
    cases.
    """
    index, house, site = (tmp_path / name for name in ("index", "house", "site"))
    index.mkdir()
    lock = tmp_path / "requirements-gpu.lock"
    lock.write_text(a_wheel(index, "cupy"))
    if sent:
        index.rename(house)
    else:
        monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_TARGET", str(site))
    (tmp_path / "env" / "bin").mkdir(parents=True)
    pip = tmp_path / "env" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    pip.chmod(0o755)
    # Left by a version that took the umask of the host.
    pip.parent.chmod(0o750)
    gpus = tmp_path / "gpus.json"
    gpus.write_text(json.dumps({"node": {"cupy": True, "uuids": []}}))
    variables = {
        "job_env_root": str(tmp_path),
        "job_env_gpus_src": str(gpus),
        "job_env_gpu_wheelhouse": str(house),
        "job_env_gpu_requirements": str(lock),
    }
    if not sent:
        (wheel,) = index.iterdir()
        locked = wheel.read_bytes()
        a_wheel(index, "cupy", files={"cupy.py": "another = True\n"})
        wheels = {"job_env_lock": str(lock), "job_env_fetches": True, **variables}
        done = run_tasks(tmp_path, "job_env", "install_wheels", **wheels)
        assert done.returncode != 0
        assert "DO NOT MATCH THE HASHES" in done.stdout
        assert not site.exists()
        wheel.write_bytes(locked)
    play(tmp_path, "job_env", "configure", **variables)
    assert (site / "cupy.py").read_text() == "version = '1.0'\n"
    assert (tmp_path / "env" / mark_of_wheels(lock)).exists()
    assert not (tmp_path / "wheelhouse").exists()
    assert pip.parent.stat().st_mode & 0o777 == 0o755


def scratch(tmp_path: Path, count: int) -> subprocess.CompletedProcess[str]:
    """Run the script that creates /scratch at boot, on a machine with this number of disks."""
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "CLUSTERCTL_DISKS": str(tmp_path / "disks"),
    }
    argv = [SCRATCH, str(count), str(tmp_path / "scratch")]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def disks(tmp_path: Path, stand_ins: Path) -> Path:
    """Two empty local disks with Google's names, beside a persistent disk."""
    folder = tmp_path / "disks"
    folder.mkdir()
    for name in ("google-local-nvme-ssd-0", "google-local-nvme-ssd-1", "google-persistent-disk-0"):
        (folder / name).touch()
    (tmp_path / "mountpoint.status").write_text("1")
    (tmp_path / "blkid.status").write_text("2")
    return folder


def test_local_disks_become_one_raid0_file_system(tmp_path: Path, disks: Path) -> None:
    (tmp_path / "mdadm.status").write_text("1")  # nothing to assemble; then creating fails as well
    assert scratch(tmp_path, 2).returncode != 0
    assembled, created = [call for call in calls(tmp_path) if call.startswith("mdadm")]
    both = f"{disks}/google-local-nvme-ssd-0 {disks}/google-local-nvme-ssd-1"
    assert assembled == f"mdadm --assemble --homehost=any /dev/md/scratch {both}"
    assert created == (
        "mdadm --create /dev/md/scratch --homehost=any --run --force --level=0 "
        f"--raid-devices=2 {both}"
    )
    assert not [call for call in calls(tmp_path) if call.startswith("mkfs")]


@pytest.mark.parametrize("name", ["/dev/md127", "/dev/md/elsewhere:scratch"])
def test_array_assembled_by_udev_is_used(tmp_path: Path, disks: Path, name: str) -> None:
    """Its disks are busy then, so that the array can be neither assembled nor created."""
    (tmp_path / "mdadm.status").write_text("1")
    (tmp_path / "lsblk.said").write_text(f"{disks}/google-local-nvme-ssd-0 disk\n{name} raid0\n")
    (tmp_path / "blkid.status").write_text("0")
    done = scratch(tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert f"mount -o noatime,discard {name} {tmp_path}/scratch" in calls(tmp_path)


def test_single_local_disk_is_formatted_once_and_open_to_all(tmp_path: Path, disks: Path) -> None:
    (disks / "google-local-nvme-ssd-1").unlink()
    done = scratch(tmp_path, 1)
    assert done.returncode == 0, done.stderr
    device = f"{disks}/google-local-nvme-ssd-0"
    assert calls(tmp_path)[-3:] == [
        f"mkfs.ext4 -q -F -m 0 {device}",
        f"mount -o noatime,discard {device} {tmp_path}/scratch",
        f"chmod 1777 {tmp_path}/scratch",
    ]
    (tmp_path / "calls").unlink()
    (tmp_path / "blkid.status").write_text("0")  # a reboot: what is on it stays
    assert scratch(tmp_path, 1).returncode == 0
    assert not [call for call in calls(tmp_path) if call.startswith("mkfs")]
    (tmp_path / "calls").unlink()
    (tmp_path / "mountpoint.status").write_text("0")
    assert scratch(tmp_path, 1).returncode == 0
    assert [call.split()[0] for call in calls(tmp_path)] == ["mountpoint"]


def test_missing_local_disk_fails_without_a_change(tmp_path: Path, disks: Path) -> None:
    done = scratch(tmp_path, 4)
    assert done.returncode == 1
    assert "has 2" in done.stderr
    assert [call.split()[0] for call in calls(tmp_path)] == ["mountpoint"]


def test_wait_for_dnf_names_the_process(tmp_path: Path) -> None:
    """For example dnf-automatic, which Google's images of Rocky Linux start after a boot."""
    note = tmp_path / "metadata_lock.pid"
    with subprocess.Popen(["sleep", "60"]) as holder:
        note.write_text(str(holder.pid))
        waiting = {"packages_lock_notes": [f"{tmp_path}/*_lock.pid"]}
        done = run_tasks(tmp_path, "packages", "wait", **waiting, packages_lock_timeout_s=0)
        holder.terminate()
    assert done.returncode != 0
    assert f"process {holder.pid} (sleep 60 )" in " ".join(done.stdout.split())
    # A note that its holder left.
    play(tmp_path, "packages", "wait", **waiting, packages_lock_timeout_s=0)


def test_lower_limits_are_removed_from_files_read_later(tmp_path: Path) -> None:
    """Other lines, and files on the user's own machines, are kept."""
    named = role_data("common", "meta/touches.yml")["common_touches"]["drift"][1]
    ((default, pattern),) = named["rivals"].items()
    ours = tmp_path / Path(default).name
    others = "* soft memlock unlimited\n*    hard    memlock\t\tunlimited\n* hard core 0\n"
    less = f"# theirs\n* hard memlock 64\n  *  -  memlock 128 # less\n{others}"
    for name in ("10-sooner.conf", "99-later.conf"):
        (tmp_path / name).write_text(less)

    def play_limits(**more: object) -> None:
        play(tmp_path, "common", "limits", common_limits_file=str(ours), **more)

    play_limits(clusterctl_keeps=True)
    assert rivals_mark(str(ours), pattern) == str(tmp_path / "99-later.conf")
    play_limits()
    assert rivals_mark(str(ours), pattern) == "none"
    assert (tmp_path / "10-sooner.conf").read_text() == less
    assert (tmp_path / "99-later.conf").read_text() == f"# theirs\n{others}"
    assert [copy.read_text() for copy in tmp_path.glob("99-later.conf.*~")] == [less]
