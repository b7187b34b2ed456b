"""The probe of a host runs on the local machine, and its report is parsed."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.cluster.drift import drifted
from clusterctl.errors import ConfigureError, SlurmError, TransportError, UnreachableError
from clusterctl.hosts import remote_probe
from clusterctl.hosts.checks import reject_full_disks, reject_silent_folders, reject_taken_numbers
from clusterctl.hosts.probe import (
    NODE_ARGV,
    PROGRAM,
    NodeAnswer,
    ProbeRequest,
    StoppingError,
    parse_report,
    probe_hosts,
)
from clusterctl.hosts.roles import key_marks, required_accounts
from clusterctl.spec.common import Partition, User
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.scheduler import NEEDS
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import SILENT
from tests.support.messages import condition, refused
from tests.unit.hosts.answers import DISK, answer


def looked(question: ProbeRequest) -> dict[str, Any]:
    """Return the probe's answer on the local machine, run by a Python without packages."""
    argv = question.argv()
    done = subprocess.run(argv, input=PROGRAM, capture_output=True, check=True, timeout=60, cwd="/")
    return dict(json.loads(done.stdout)["node"])


def test_node_reads_each_fact_that_has_a_field() -> None:
    """A fact that the program does not read would keep its default, on each node."""
    assert set(looked(ProbeRequest())) == set(NodeAnswer.model_fields)


def test_file_mark_has_content_mode_owner_and_no_link(tmp_path: Path) -> None:
    plain = tmp_path / "it's $(x)"
    link = tmp_path / "link"
    missing = tmp_path / "gone"
    plain.write_text("secret")
    link.symlink_to(plain)
    request = ProbeRequest(files=(str(plain), str(link), str(missing), str(tmp_path)))

    def marks() -> list[str]:
        return list(looked(request)["checksums"].values())

    plain.chmod(0o640)
    first = marks()
    assert first[0].endswith(f" 640 {os.getuid()}:{os.getgid()}")
    assert first[1:] == ["no file", "missing", "no file"]
    plain.chmod(0o600)
    assert marks()[0].split()[0] == first[0].split()[0] != ""
    assert marks()[0] != first[0]
    plain.write_text("Secret")
    assert marks()[0].split()[0] != first[0].split()[0]
    assert "ecret" not in json.dumps(looked(request)["checksums"])


@pytest.mark.parametrize("prefix", ["/etc/openmpi-x86_64", "/usr/mpi/gcc/openmpi-4.1.7rc1/etc"])
def test_openmpi_folder_is_that_of_the_installed_package(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = f"{prefix}\n{prefix}/openmpi-default-hostfile\n{prefix}/openmpi-mca-params.conf\n"
    monkeypatch.setattr(remote_probe, "OPENMPI_LIST", "/nonexistent")
    monkeypatch.setattr(remote_probe, "OPENMPI_RPM", ["echo", listed])
    assert remote_probe.openmpi_folder() == prefix
    monkeypatch.setattr(remote_probe, "OPENMPI_RPM", ["false"])
    assert remote_probe.openmpi_folder() == ""


def test_files_beside_open_mpis_parameters_have_marks() -> None:
    answer = looked(ProbeRequest(openmpi=("openmpi-mca-params.conf",)))
    assert answer["openmpi"].startswith("/etc/openmpi")
    assert answer["checksums"].keys() == {f"file {answer['openmpi']}/openmpi-mca-params.conf"}
    assert looked(ProbeRequest())["openmpi"] == ""


def test_block_mark_ignores_lines_outside_the_block(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    request = ProbeRequest(blocks={str(hosts): ("# BEGIN", "# END")})

    def mark(text: str) -> str:
        hosts.write_text(text)
        return str(looked(request)["checksums"][f"block {hosts}"])

    own_mark = mark("# BEGIN\n10.0.0.1 a\n# END\n")
    assert mark("mine\n# BEGIN\n10.0.0.1 a\n# END\nmine\n") == own_mark
    assert mark("# BEGIN\n10.0.0.2 a\n# END\n") != own_mark
    assert mark("# BEGIN\n10.0.0.1 a\n") == "missing"


def test_fast_network_is_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {
        "mlx5_0/ports/1": "4: ACTIVE",
        "mlx5_1/ports/1": "1: DOWN",
        "mlx5_2/ports/2": "4: ACTIVE",
    }
    for port, state in states.items():
        (tmp_path / "class" / port).mkdir(parents=True)
        (tmp_path / "class" / port / "state").write_text(f"{state}\n")
    for name, path in {"ADAPTERS": "class", "NVIDIA_VERSION": "version"}.items():
        monkeypatch.setattr(remote_probe, name, str(tmp_path / path))
    monkeypatch.setattr(remote_probe, "PEER_MEMORY", (str(tmp_path / "nvidia_peermem"),))

    def read() -> tuple[list[str], str]:
        return [port["name"] for port in remote_probe.fabric_ports()], remote_probe.gpudirect()

    assert read() == (["mlx5_0:1", "mlx5_2:2"], "")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n")
    assert read()[1] == ""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64\n")
    assert read()[1] == "dma-buf"
    (tmp_path / "nvidia_peermem").mkdir()
    assert read()[1] == "nvidia_peermem"


def test_absent_mark_sees_a_dangling_link(tmp_path: Path) -> None:
    stray = tmp_path / "slurm.conf"
    request = ProbeRequest(absent=(str(stray),))
    assert looked(request)["checksums"] == {f"absent {stray}": "absent"}
    stray.symlink_to("/nowhere")
    assert looked(request)["checksums"] == {f"absent {stray}": "there"}


@pytest.mark.parametrize(
    ("file", "folder", "mark"),
    [
        (0o644, 0o755, "there"),
        (0o755, 0o755, "there"),
        (0o640, 0o755, "unreadable 640"),
        (0o754, 0o711, "unreadable 711 754"),
        (0o600, 0o700, "unreadable 600 700"),
    ],
)
def test_readable_mark_has_the_modes_that_keep_users_out(
    tmp_path: Path, file: int, folder: int, mark: str
) -> None:
    """A link counts as what it leads to; links that lead nowhere don't count."""
    (tmp_path / "python").touch(file)
    (tmp_path / "python").chmod(file)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin").chmod(folder)
    (tmp_path / "python3").symlink_to("python")
    (tmp_path / "lost").symlink_to("nowhere")
    asked = ProbeRequest(readable=(f"{tmp_path}/*", f"{tmp_path}/none/*"))
    marks = {f"readable {tmp_path}/*": mark, f"readable {tmp_path}/none/*": "missing"}
    assert looked(asked)["checksums"] == marks


def test_rivals_mark_counts_only_later_files(tmp_path: Path) -> None:
    ours = tmp_path / "60-ours.conf"
    request = ProbeRequest(rivals={str(ours): "[*] hard (?!unlimited)"}, alone=(str(ours),))
    ours.write_text("")
    assert looked(request)["checksums"] == {f"alone {ours}": "none", f"rivals {ours}": "none"}
    request = replace(request, alone=())
    for name in ("10-sooner.conf", "60-ours.conf", "70-other.txt"):
        (tmp_path / name).write_text("* hard 64\n")
    (tmp_path / "90-more.conf").write_text("# * hard 64\n* hard unlimited\n")
    (tmp_path / "85-link.conf").symlink_to("10-sooner.conf")  # Ansible changes files alone
    assert looked(request)["checksums"] == {f"rivals {ours}": "none"}
    (tmp_path / "80-later.conf").write_text("# less\n* hard 64\n")
    assert looked(request)["checksums"] == {f"rivals {ours}": str(tmp_path / "80-later.conf")}
    others = ", ".join(
        str(tmp_path / name)
        for name in ("10-sooner.conf", "80-later.conf", "85-link.conf", "90-more.conf")
    )
    assert looked(replace(request, alone=(str(ours),)))["checksums"][f"alone {ours}"] == others


DPKG = """\
Package: munge
Status: install ok installed
Version: 0.5

Package: slurmd
Status: deinstall ok config-files
Description: not what it says
 Package: slurmctld
 Status: install ok installed

Package: slurmdbd
Status: install reinstreq half-installed

Package: slurm-client
Status: install ok unpacked

Package: procps
Essential: yes
Status: hold ok installed
Version: 4
"""


def test_package_marks_names_missing_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dpkg also lists removed packages with settings. Half-installed packages count as installed."""
    (tmp_path / "status").write_text(DPKG)
    monkeypatch.setattr(remote_probe, "DPKG_STATUS", tmp_path / "status")
    there = ["munge", "procps", "slurm-client", "slurmdbd"]
    missing = ["slurmctld", "slurmd"]
    wanted = dict.fromkeys(there, "installed") | dict.fromkeys(missing, "not installed")
    assert remote_probe.package_marks([*there, *missing]) == wanted
    assert remote_probe.packages(["munge", "slurmd"]) == ["munge"]


def test_package_marks_without_dpkg_asks_rpm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package may be provided by another one. The message is that of rpm 4.19."""
    rpm = tmp_path / "rpm"
    rpm.write_text(
        '#!/bin/sh\n[ "$LC_ALL $1 $2 $3" = "C --query --whatprovides --queryformat=" ] || exit 9\n'
        "echo no package provides slurm-slurmd\nexit 1\n"
    )
    monkeypatch.setattr(remote_probe, "DPKG_STATUS", tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    request = ["slurm", "slurm-slurmd"]
    assert remote_probe.package_marks(request) == dict.fromkeys(request, "no answer")
    rpm.chmod(0o755)
    marks = {"slurm": "installed", "slurm-slurmd": "not installed"}
    assert remote_probe.package_marks(request) == marks
    assert remote_probe.packages(request) == ["slurm"]
    (tmp_path / "none").write_text("")  # of a dpkg that has installed nothing here
    assert remote_probe.package_marks(request) == marks


PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAKEeQlcH+GwmzgE/RlWAKNrD2K+DSBNoCnvcOgaXFev"
OTHER = "no-pty ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIm2Z7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5d"


def test_key_mark_finds_the_key_among_others(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    keys = tmp_path / ".ssh/authorized_keys"
    request = ProbeRequest(
        homes={"root": str(tmp_path)}, keys={"root": "ssh-ed25519 AAAA clusterctl"}
    )
    assert looked(request)["checksums"]["key root"] == "missing"
    keys.write_text("ssh-rsa BBBB mine\nssh-ed25519 AAAA renamed\n")
    assert looked(request)["checksums"]["key root"] == "there"


def test_key_marks_compare_only_keys_of_the_spec(tmp_path: Path) -> None:
    """The order of the keys does not matter."""
    account = pwd.getpwnam("root")
    user = User(name="ada", uid=2001, ssh_keys=(PUBLIC, OTHER))
    spec = ClusterSpec(
        version=1, name="demo", partitions=(Partition(name="train", nodes=1),), users=(user,)
    )
    (tmp_path / ".ssh").mkdir()
    keys = tmp_path / ".ssh/authorized_keys"
    request = ProbeRequest(
        homes={account.pw_name: str(tmp_path)}, keys={"root": "-"}, key_end=spec.key_mark
    )
    edges = [f"# {word}{spec.key_mark}" for word in ("BEGIN", "END")]
    keys.write_text("\n".join(["ssh-rsa BBBB mine", *edges, *reversed(spec.key_lines(user))]))
    assert looked(request)["checksums"]["keys root"] == key_marks(spec)["keys ada"]
    keys.write_text("\n".join([PUBLIC, *spec.key_lines(user)[1:]]))
    assert looked(request)["checksums"]["keys root"] != key_marks(spec)["keys ada"]


@pytest.mark.parametrize("made", ["pipe", "zeros", "too large"])
def test_key_mark_does_not_hang_on_files_of_a_job(tmp_path: Path, made: str) -> None:
    (tmp_path / ".ssh").mkdir()
    keys = tmp_path / ".ssh/authorized_keys"
    if made == "pipe":
        os.mkfifo(keys)
    elif made == "zeros":
        keys.symlink_to("/dev/zero")
    else:
        keys.write_text("ssh-ed25519 AAAA\n")
        os.truncate(keys, 1 << 40)
    request = ProbeRequest(
        homes={"root": str(tmp_path)},
        keys={"root": "ssh-ed25519 AAAA clusterctl"},
        blocks={str(keys): ("# BEGIN", "# END")},
    )
    assert looked(request)["checksums"]["key root"] == "missing"
    assert looked(request)["checksums"][f"block {keys}"] == "missing"


def test_keys_are_read_with_their_accounts_rights(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/authorized_keys").write_text("ssh-ed25519 AAAA\n")
    tmp_path.chmod(0o700)
    request = ProbeRequest(
        homes={"nobody": str(tmp_path)}, keys={"nobody": "ssh-ed25519 AAAA clusterctl"}
    )
    assert looked(request)["checksums"]["key nobody"] == "missing"


def test_key_in_a_far_home_is_not_checked(tmp_path: Path) -> None:
    home = pwd.getpwnam("root").pw_dir
    request = ProbeRequest(far_homes={"root": home}, keys={"root": "ssh-ed25519 AAAA no such key"})
    assert "key root" not in looked(request)["checksums"]
    own = ProbeRequest(
        far_homes={"root": str(tmp_path)}, keys={"root": "ssh-ed25519 AAAA no such key"}
    )
    assert looked(own)["checksums"]["key root"] == "missing"


@pytest.mark.parametrize(
    ("unit", "mark"),
    [
        ({"ActiveState": "active"}, "running"),
        ({"ActiveState": "active", "UnitFileState": "disabled"}, "running disabled"),
        ({"ActiveState": "failed"}, "failed"),
        ({"ActiveState": "inactive"}, "stopped"),
        ({"LoadState": "masked", "ActiveState": "active"}, "masked"),
        ({"ActiveState": "active", "InactiveExitTimestampMonotonic": "1"}, "running outdated"),
        # It executed itself anew.
        (
            {
                "ActiveState": "active",
                "InactiveExitTimestampMonotonic": "1",
                "ExecMainStartTimestampMonotonic": str(10**15),
            },
            "running",
        ),
    ],
)
def test_unit_mark_of_each_state(unit: dict[str, str], mark: str, tmp_path: Path) -> None:
    (tmp_path / "conf").touch()
    fine = {"LoadState": "loaded", "UnitFileState": "enabled"}
    fine["InactiveExitTimestampMonotonic"] = str(10**15)
    assert remote_probe._unit_mark({**fine, **unit}, [str(tmp_path / "conf")]) == mark


def test_unit_marks_without_an_answer_are_drift(tmp_path: Path) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho Id=munge.service; exit 1\n")
    systemctl.chmod(0o755)
    units: dict[str, list[str]] = {"munge": [], "slurmd": []}
    unknown = {"munge": "no answer", "slurmd": "no answer"}
    assert remote_probe.unit_marks(units, str(systemctl)) == unknown
    assert drifted({}, {f"unit {name}": mark for name, mark in unknown.items()})


# The end of a program that the kernel may not end is not awaited.
leaves_a_program = pytest.mark.filterwarnings(
    "ignore:subprocess .* is still running:ResourceWarning"
)


@leaves_a_program
def test_probe_gives_up_a_file_server_that_does_not_answer(tmp_path: Path) -> None:
    hangs = tmp_path / "stat"
    hangs.write_text("#!/bin/sh\nexec sleep 30\n")
    hangs.chmod(0o755)
    assert not remote_probe.answers("/", str(hangs), timeout_s=0.1)
    assert remote_probe.answers("/no/such")


@leaves_a_program
def test_probe_asks_a_file_system_that_does_not_answer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "stat"
    hangs.write_text(f"#!/bin/sh\necho >>{tmp_path}/asked\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(remote_probe, "SILENT", set())
    monkeypatch.setattr(remote_probe, "mount_point", lambda path: "/".join(path.split("/")[:2]))
    for path in ("/shared/mark", "/shared", "/shared/home/ada"):
        # Time for its start on a busy machine; only the first look waits.
        assert not remote_probe.answers(path, str(hangs), timeout_s=15.0)
    assert (tmp_path / "asked").read_text() == "\n"
    assert remote_probe.answers("/etc/passwd")
    assert remote_probe.home_mark("root", "/shared/home/ada") == "no answer"
    marks = remote_probe.key_marks("root", "/shared/home/ada", "ssh-ed25519 AAAA", "end")
    assert set(marks.values()) == {"no answer"}


def test_mount_point_is_the_last_one_above_the_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nfiles:/a /srv nfs rw\nfiles:/b /srv/my\\040b nfs rw\n")
    found = [remote_probe.mount_point(path, str(mounts)) for path in ("/srv/a/b", "/srv/my b/c")]
    assert found == ["/srv", "/srv/my b"]
    assert remote_probe.mount_point("/srvx", str(mounts)) == "/"


@leaves_a_program
def test_run_does_not_wait_for_a_program_that_the_kernel_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one that waits for a file server."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    begun = time.monotonic()
    assert remote_probe.run(["sleep", "120"], 0.1) is None
    assert time.monotonic() - begun < 60


def test_reject_silent_folders_names_the_host_and_the_folder() -> None:
    silent = parse_report(answer(checksums={"path /shared/x": "no answer", "unit a": "no answer"}))
    with refused("host-unfit/file-server", ConfigureError, "n2") as caught:
        reject_silent_folders({"n1": parse_report(answer()), "n2": silent})
    (failure,) = caught.value.failures
    assert (failure.host, condition(failure)) == ("n2", "host-unfit/folder-silent")
    assert "/shared/x" in failure.cause


def test_parse_report_reads_an_answer() -> None:
    full = DISK | {"free": 0}
    view = parse_report(answer(checksums={"unit munge": "running"}, space=[DISK, full]))
    assert view.facts is not None
    assert view.facts.cpus == 2
    assert view.checksums == {"unit munge": "running"}
    assert view.distribution == "debian-12"
    with refused("disk-full/host", ConfigureError, "d-train-1") as caught:
        reject_full_disks({"d-train-1": view, "d-train-2": parse_report(answer())})
    (failure,) = caught.value.failures
    assert (failure.host, condition(failure)) == ("d-train-1", "disk-full")
    assert all(word in failure.cause for word in ("/ ", " of 512 MiB"))


def test_reject_taken_numbers_names_all_hosts_and_accounts() -> None:
    """New instances at Google have a group of the guest agent and the admin account before users
    are created.
    """
    root = looked(ProbeRequest(numbers={"nobody-yet": 0}))
    assert (root["accounts"], root["groups"]) == ({"root": 0}, {"root": 0})
    agent = {
        "accounts": {"clusterctl": 1001},
        "groups": {"google-sudoers": 1000, "clusterctl": 1001},
    }
    reports = {
        "ctl": parse_report(answer(**agent)),
        "train-1": parse_report(answer(**agent)),
        "new": parse_report(answer()),
    }
    with refused("host-unfit/accounts", ConfigureError, "train-1") as caught:
        reject_taken_numbers(reports, {"ada": 1000, "bob": 1001})
    found = {(failure.host, condition(failure), failure.cause) for failure in caught.value.failures}
    assert found == {
        (host, code, cause)
        for host in ("ctl", "train-1")
        for code, cause in (
            ("host-unfit/gid-taken", "gid 1000, which ada needs, belongs to google-sudoers"),
            ("host-unfit/uid-taken", "uid 1001, which bob needs, belongs to clusterctl"),
        )
    }
    # An account of ours is set right later.
    reject_taken_numbers(reports, {"ada": 10000, "clusterctl": 7})


def test_taken_uids_of_slurm_and_munge_are_found() -> None:
    """The role creates these accounts before it installs their packages, so groupadd would fail."""
    partitions = [{"name": "t", "nodes": 1}]
    document = {"version": 1, "name": "d", "provider": {"type": "local"}, "partitions": partitions}
    spec = ClusterSpec.model_validate(document)
    reports = {
        "fine": parse_report(
            answer(accounts={"slurm": 64030, "munge": 997}, groups={"munge": 995})
        ),
        # Of a package that was removed.
        "left": parse_report(answer(accounts={}, groups={"slurm": 990})),
        "one": parse_report(answer(accounts={"lims": 64030}, groups={"lims": 64030})),
        "two": parse_report(answer(accounts={}, groups={"lab": 64031})),
        "three": parse_report(answer(accounts={}, groups={"slurm": 990, "lab": 64030})),
    }
    with refused("host-unfit/accounts", ConfigureError) as caught:
        reject_taken_numbers(reports, required_accounts(spec))
    changes = ("uid: `usermod --uid UID", "gid: `groupmod --gid GID")
    user, group = (f"give that account another {change}" for change in changes)
    found = {
        (failure.host, condition(failure), failure.cause, failure.fix)
        for failure in caught.value.failures
    }
    assert found == {
        (
            "one",
            "host-unfit/uid-taken",
            "uid 64030, which slurm needs, belongs to lims",
            f"{user} lims`",
        ),
        (
            "two",
            "host-unfit/gid-taken",
            "gid 64031, which munge needs, belongs to lab",
            f"{group} lab`",
        ),
        (
            "three",
            "host-unfit/gid-taken",
            "gid 64030, which slurm needs, belongs to lab",
            f"{group} lab`",
        ),
    }


LED_BY_CTL: Any = SimpleNamespace(controller=SimpleNamespace(name="ctl"), baked=False)


def session_of(tmp_path: Path, hosts: dict[str, Any], *, is_cloud: bool) -> Any:
    return SimpleNamespace(
        spec=SimpleNamespace(
            users=(),
            scheduler_needs=NEEDS["slurm"],
            provider=SimpleNamespace(is_cloud=is_cloud, shares_kernel=False),
        ),
        workspace=Workspace(tmp_path),
        reporter=SILENT,
        connections=SimpleNamespace(to=hosts.__getitem__),
        probe=lambda _, names: probe_hosts(dict.fromkeys(names, ProbeRequest()), hosts.__getitem__),
    )


def test_full_disk_without_inodes_names_inodes() -> None:
    (full,) = parse_report(answer(space=[DISK | {"inodes": 0}])).full
    assert "no inodes free" in str(full)


def test_system_reads_distribution_from_os_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = tmp_path / "os-release"
    monkeypatch.setattr(remote_probe, "OS_RELEASE", str(release))

    def distribution() -> str:
        return parse_report(answer(system=remote_probe.system())).distribution

    release.write_text(
        'NAME="Rocky Linux"\nID="rocky"\n\nVERSION_ID="9.6"\nHOME_URL="https://a/?b=c"\n'
    )
    assert distribution() == "rocky-9.6"
    release.write_text("ID=arch\n")
    assert distribution() == "arch"
    release.unlink()
    assert distribution() == "linux"


@pytest.mark.parametrize(("kernel", "file"), [("v2", "cgroup_v2.so"), ("v1", "cgroup_v1.so")])
def test_probe_reports_the_cgroup_plugin_of_slurm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: str, file: str
) -> None:
    plugins = tmp_path / "slurm-wlm"
    slurmd = tmp_path / "slurmd"
    controllers = tmp_path / "controllers"
    plugins.mkdir()
    if kernel == "v2":
        controllers.touch()
    monkeypatch.setattr(remote_probe, "SLURMD", str(slurmd))
    monkeypatch.setattr(remote_probe, "CGROUPS_V2", str(controllers))
    monkeypatch.setattr(remote_probe, "SLURM_PLUGINS", (f"{tmp_path}/none", f"{tmp_path}/slurm*"))
    assert remote_probe.cgroup_plugin() is None
    slurmd.touch()
    (plugins / "cgroup_v9.so").touch()
    assert remote_probe.cgroup_plugin() is False
    without = parse_report(answer(cgroup_plugin=False)).facts
    (plugins / file).touch()
    assert remote_probe.cgroup_plugin() is True
    having = parse_report(answer(cgroup_plugin=True)).facts
    assert (without and without.cgroups, having and having.cgroups) == (False, True)


def test_parse_report_of_another_answer_is_an_error() -> None:
    with pytest.raises(StoppingError):
        parse_report('{"state": "stopping"}')
    with refused("unreachable", UnreachableError):  # so it is asked again
        parse_report(answer(said=""))
    assert parse_report(answer(said=None)).facts is None
    for text in (
        "",
        "[]",
        "{}",
        '{"state": "running"}',
        '{"state": "running", "node": {"said": "@node"}}',
    ):
        with refused("internal/answer", TransportError):
            parse_report(text)


def test_probe_of_a_host_without_slurmd_succeeds() -> None:
    done = subprocess.run(
        NODE_ARGV, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    absent = done.stdout if shutil.which("slurmd") is None else "@node\nabsent\n@gpus\n@mpi\n"
    assert parse_report(answer(said=absent)).facts is None
    with pytest.raises(SlurmError):
        parse_report(answer(said="@node\n@gpus\n@mpi\n"))


def test_accounts_of_a_directory_service_are_asked_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sssd answers for one name or uid, and lists none. A missing account does not hide others."""
    getent = tmp_path / "getent"
    getent.write_text(
        "#!/bin/sh\n"
        "shift; [ $# = 0 ] && echo root:x:0:0::/root:/bin/sh && exit\n"
        "for key; do case $key in\n"
        "  anna | 10001) echo anna:x:10001:10001::/home/anna:/bin/sh ;; *) missing=2 ;; esac; "
        "done\n"
        "exit $missing\n"
    )
    getent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert remote_probe.accounts(["nobody-there", "anna"], set()) == {"anna": 10001}
    assert remote_probe.accounts(["root"], {10000, 10001}) == {"root": 0, "anna": 10001}
    assert remote_probe.accounts(["root"], set()) == {"root": 0}
