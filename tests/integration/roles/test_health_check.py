"""The real health check, with doubles of nvidia-smi, dmesg, chronyc and scontrol."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from clusterctl.hosts.gpus import Driver, Gpu
from clusterctl.scheduler.slurm.conf import health_settings
from clusterctl.state.inventory import HEALTH_PROGRAM
from clusterctl.util.assets import data_folder
from tests.support.nvidia import machines
from tests.support.nvidia.nvidia_smi import SINCE
from tests.unit.scheduler.test_slurm_config import make_inventory, make_spec

pytestmark = pytest.mark.platform("stand-in", "nvidia-smi")

# What the check says.
HOT = "GPU 0: 96 C, the limit is 90 C"
LOST_LANES = "GPU 0: PCIe x4 instead of x16"
XID = "XID {} at PCI:0000:10:00 in the kernel's log"
HANGS = "nvidia-smi did not end"

OLD_DRIVER = "470.182.03"  # the last branch before those of today

_FILE = data_folder("ansible") / "roles" / "health" / "files" / "health.py"
_PROGRAM = compile(_FILE.read_text(), _FILE, "exec")

# It keeps the node's state and reason in files, and notes what it was told.
_SCONTROL = """#!/bin/sh
cd '{folder}' || exit 1
if [ -e away ]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi
echo "$@" >>calls
case "$*" in
*show*)
    by='[root@2026-11-20T20:00:00]'
    echo "NodeName=n1 CoresPerSocket=1 State=$(cat state) ThreadsPerCore=1 Reason=$(cat reason) $by Comment=x"
    ;;
*State=DRAIN*)
    for word in "$@"; do case "$word" in Reason=*) printf %s "${{word#Reason=}}" >reason ;; esac; done
    echo IDLE+DRAIN >state
    ;;
*State=UNDRAIN*) echo IDLE >state; : >reason ;;
esac
"""


@dataclass
class Host:
    """A node on which the health check runs."""

    folder: Path
    # What statvfs says of each file system. None: what it really says.
    statvfs: SimpleNamespace | None = None

    def look(self, driver_s: int = 20, mode: str = "", folder_s: int = 15) -> list[str]:
        """Run the check anew; the problems that it names."""
        status, printed = self.run(mode, driver_s, folder_s)
        unhealthy = 3 if mode == "job" else 1
        assert status == (unhealthy if printed else 0)
        return printed.splitlines()

    def report(self) -> list[dict[str, str]]:
        """What it reports to `doctor`."""
        status, printed = self.run("report")
        assert status == 0
        found: list[dict[str, str]] = json.loads(printed)
        return found

    def run(self, mode: str, driver_s: int = 20, folder_s: int = 15) -> tuple[int, str]:
        health: Any = ModuleType("health")
        exec(_PROGRAM, health.__dict__)  # noqa: S102 - to start a Python for each look takes five times as long
        health.CONFIG = self.folder / "health.json"
        health.STATE = self.folder / "state.json"
        health.STOPPED_A_JOB = self.folder / "stopped"
        health.LOCK = self.folder / "lock"
        health.MOUNTS = self.folder / "mounts"
        health.FABRIC = self.folder / "sys"
        health.DPKG = (f"{self.folder}/info/{{}}.list", f"{self.folder}/alternatives/{{}}")
        health.PATH = f"{self.folder}:{health.PATH}"
        health.DRIVER_S = driver_s
        health.FOLDER_S = folder_s
        health.START_S = 0
        said = io.StringIO()
        with redirect_stdout(said):
            status = health.main(mode)
        return status, said.getvalue()

    def needs(self, check: str, **parameters: Any) -> None:
        """Have this need alone."""
        texts = {"code": check, "what": "what", "fix": "fix"}
        self.set(needs=[{"check": check, **texts, **parameters}])

    def program(self, name: str, text: str) -> None:
        """Replace a program of the node by a shell script."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def mounts(self, text: str) -> None:
        """Have the start of the folder's mount unit do this. mount(8) fails: a file system in user
        space would end with the unit that runs the check.
        """
        self.program("mount", "exit 99")
        self.program("systemd-escape", "echo shared.mount")
        cases = (
            "show) echo ActiveState=inactive ;;",
            "daemon-reload) ;;",
            f'start) [ "$2" = shared.mount ] || exit 98\n{text} ;;',
        )
        self.program("systemctl", "\n".join(['case "$1" in', *cases, "esac"]))

    def becomes(self, machine: machines.Machine) -> None:
        machines.describe(self.folder / "machine.json", machine)

    def has(self, problem: Problem) -> None:
        """Have this problem alone."""
        self.becomes(problem.machine)
        self.kernel_says(*problem.kernel)
        self.set(disk_free_mib=problem.disk_free_mib, disks=["/"])
        self.chrony_says(problem.clock_offset_s)

    def chrony_says(self, offset_s: float, leap: str = "Normal") -> None:
        said = (
            f"0A000001,10.0.0.1,3,1763668800.1,{offset_s},0.1,0.2,-1.0,0.0,0.1,0.0,0.0,64.0,{leap}"
        )
        chronyc = self.folder / "chronyc"
        chronyc.write_text(f"#!/bin/sh\necho {said}\n")
        chronyc.chmod(0o755)

    def kernel_says(self, *lines: str) -> None:
        (self.folder / "kernel.log").write_text("".join(f"{line}\n" for line in lines))

    def set(self, **settings: Any) -> None:
        file = self.folder / "health.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))

    def resumed_by_a_person(self) -> None:
        (self.folder / "state").write_text("IDLE")
        (self.folder / "reason").write_text("")

    @property
    def reason(self) -> str:
        """The reason of the drain. "" if the node is not drained."""
        drained = "DRAIN" in (self.folder / "state").read_text()
        return (self.folder / "reason").read_text() if drained else ""

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def _host(folder: Path, machine: machines.Machine, cards: int = 1) -> Host:
    machines.install(folder, machine)
    smi = folder / "nvidia-smi"
    smi.write_text(
        smi.read_text().replace("/etc/nvidia-stand-in.json", str(folder / "machine.json"))
    )
    for name, content in (("state", "IDLE"), ("reason", ""), ("calls", ""), ("mounts", "")):
        (folder / name).write_text(content)
    program = folder / "scontrol"
    program.write_text(_SCONTROL.format(folder=folder))
    program.chmod(0o755)
    spec = make_spec({"name": "train", "nodes": 1})
    inventory = make_inventory(spec)
    driver = Driver(cards, tuple(Gpu("x", i) for i in range(cards)))
    settings = health_settings(spec, inventory, {host.name: driver for host in inventory.compute})
    (folder / "health.json").write_text(json.dumps(settings[inventory.compute[0].name]))
    host = Host(folder)
    needs = json.loads((folder / "health.json").read_text())["needs"]
    of_machine = [need for need in needs if need["check"] in {"disks", "clock", "xids", "gpus"}]
    host.set(disk_free_mib=0, needs=of_machine)
    return host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A healthy workstation with an RTX 4070."""
    return _host(tmp_path / "host", machines.rtx_4070())


def test_healthy_node_is_left_alone_and_queried_once(host: Host) -> None:
    assert host.look() == []
    assert host.look() == []
    assert len(host.calls) == 1
    assert host.reason == ""


@dataclass(frozen=True)
class Problem:
    """A problem of a node, and its reason. lasting: it counts only if two consecutive checks find
    it.
    """

    says: str
    machine: machines.Machine = field(default_factory=machines.rtx_4070)
    kernel: tuple[str, ...] = ()
    disk_free_mib: int = 0
    clock_offset_s: float = 0.0
    lasting: bool = False


_PROBLEMS: Mapping[str, Problem] = {
    "too hot": Problem(HOT, machines.hot()),
    "an older driver": Problem(
        "GPU 0: slowed down (hardware slowdown)",
        machines.with_driver(machines.awake(throttle="0x08"), OLD_DRIVER),
        lasting=True,
    ),
    "memory errors": Problem(
        "GPU 0: 3 memory errors that ECC could not correct", machines.rtx_4070(ecc=3)
    ),
    "narrow link": Problem(
        "GPU 0: PCIe x4 instead of x16", machines.awake(pcie_width=4), lasting=True
    ),
    "slow link": Problem(
        "GPU 0: PCIe generation 2 instead of 4", machines.awake(pcie_gen=2), lasting=True
    ),
    "slowed down": Problem(
        "GPU 0: slowed down (hardware slowdown)", machines.awake(throttle="0x08"), lasting=True
    ),
    "no driver": Problem(
        "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate", machines.no_driver()
    ),
    "off the bus": Problem(
        "nvidia-smi: Unable to determine the device handle for GPU", machines.lost()
    ),
    "none": Problem("0 GPUs respond instead of 1", {"gpus": []}),
    "forbidden": Problem(
        "GPU 0: its compute mode forbids all work", machines.rtx_4070(compute_mode="Prohibited")
    ),
    **{
        name: Problem(
            state["health"],
            machines.unwell(name) if "says" in state or "cells" in state else machines.rtx_4070(),
            lasting=name.startswith(("fabric", "mig")),
        )
        for name, state in machines.STATES.items()
        if "says" in state or "cells" in state
    },
    "off the bus, without an XID": Problem(
        machines.STATES["off-the-bus-without-an-xid"]["health"],
        kernel=machines.kernel_log("off-the-bus-without-an-xid"),
    ),
    "an XID as drivers of 575 write it": Problem(
        XID.format(154), kernel=machines.kernel_log("off-the-bus")
    ),
    "an XID as drivers of 535 write it": Problem(
        XID.format(79), kernel=machines.kernel_log("off-the-bus-535")
    ),
    "grave XID": Problem(XID.format(79), kernel=(machines.xid(79),)),
    "full disk": Problem("/ has ", disk_free_mib=1 << 40),
    "clock": Problem("the clock is wrong by 61.5 s", clock_offset_s=-61.5),
}


# `test_health_check_finds_gpu_faults_with_every_driver` finds these too.
_SEEN = [name for name, state in machines.STATES.items() if "cells" in state]


@pytest.mark.parametrize("name", [name for name in _PROBLEMS if name not in _SEEN])
def test_unhealthy_node_is_drained_with_reason_then_resumed(host: Host, name: str) -> None:
    problem = _PROBLEMS[name]
    host.has(problem)
    if problem.lasting:
        assert (host.look(), host.reason) == ([], "")
    (found,) = host.look()
    assert found.startswith(problem.says)
    assert host.reason.startswith(f"clusterctl health: {problem.says}")
    assert len(host.look()) == 1
    assert sum("State=DRAIN" in call for call in host.calls) == 1
    host.has(Problem("nothing", machines.awake()))
    assert (host.look(), host.reason) == ([], "")


@pytest.mark.parametrize("name", ["driver-and-library-differ", "off-the-bus-while-asked"])
def test_health_check_advises_a_reboot(host: Host, name: str) -> None:
    host.becomes(machines.unwell(name))
    assert host.look()[0].endswith("boot the node")


@pytest.mark.parametrize("version", [OLD_DRIVER, machines.DRIVERS["535"]])
def test_health_check_queries_fields_unknown_to_an_old_driver_once(
    host: Host, version: str
) -> None:
    host.becomes(machines.with_driver(machines.hot(), version))
    (host.folder / "nvidia-smi").rename(host.folder / "smi")
    queries = host.folder / "queries"
    log = f'case "$1" in --query-gpu=*) echo "$1" >>{queries} ;; esac'
    host.program("nvidia-smi", f'{log}; exec {host.folder}/smi "$@"')
    assert host.look() == [HOT]
    unknown = {field for field, branch in SINCE.items() if branch > int(version[:3])}
    assert set(json.loads((host.folder / "state.json").read_text())["gone"]) == unknown
    assert all(field in queries.read_text() for field in unknown)
    queries.unlink()
    assert host.look() == [HOT]
    assert not [field for field in unknown if field in queries.read_text()]


@pytest.mark.parametrize("branch", ["535", "580"])
@pytest.mark.parametrize("name", _SEEN)
def test_health_check_finds_gpu_faults_with_every_driver(
    host: Host, name: str, branch: str
) -> None:
    host.becomes(machines.with_driver(machines.unwell(name), machines.DRIVERS[branch]))
    found = [*host.look(), *host.look()]  # what lasts is said at the second look
    assert machines.STATES[name]["health"] in found[-1]
    host.becomes(machines.with_driver(machines.rtx_4070(), machines.DRIVERS[branch]))
    assert host.look() == []


def test_health_check_finds_other_faults_beside_a_lost_gpu(tmp_path: Path) -> None:
    host = _host(
        tmp_path / "node",
        machines.h100_node(fabric_state="Completed", fabric_status="Success"),
        cards=8,
    )
    host.set(gpus={"cards": 8})
    assert host.look() == []
    node = machines.h100_node(fabric_state="Completed", fabric_status="Success")
    node["gpus"][3]["lost"], node["gpus"][5]["temperature"] = "[GPU is lost]", 97
    host.becomes({**node, "exit": 15})
    assert [said[:11] for said in host.look()] == ["GPU 3: GPU ", "GPU 5: 97 C"]


@pytest.mark.parametrize("link", [{"pcie_gen": 1}, {"pcie_width": 4}])
def test_health_check_accepts_a_narrow_link_of_an_idle_gpu(
    host: Host, link: dict[str, int]
) -> None:
    host.becomes(machines.rtx_4070(**link))
    assert [host.look(), host.look()] == [[], []]


@pytest.fixture
def without_lanes(host: Host) -> Host:
    """A node that was drained because its busy GPU had a narrow link, and whose GPU is idle now."""
    host.becomes(machines.awake(pcie_width=4))
    assert [host.look(), host.look()] == [[], [LOST_LANES]]
    host.becomes(machines.rtx_4070(pcie_width=4))
    return host


def test_narrow_link_keeps_an_idle_node_drained(without_lanes: Host) -> None:
    for _ in range(3):
        assert without_lanes.look() == [LOST_LANES]
    without_lanes.becomes(machines.awake(pcie_width=4))
    assert without_lanes.look() == [LOST_LANES]
    assert LOST_LANES in without_lanes.reason
    without_lanes.becomes(machines.awake())
    assert (without_lanes.look(), without_lanes.reason) == ([], "")
    without_lanes.becomes(machines.rtx_4070(pcie_width=4))
    assert (without_lanes.look(), without_lanes.reason) == ([], "")


def test_narrow_link_is_forgotten_after_a_manual_resume(without_lanes: Host) -> None:
    without_lanes.look()
    without_lanes.resumed_by_a_person()
    assert [without_lanes.look(), without_lanes.look(), without_lanes.reason] == [[], [], ""]
    without_lanes.becomes(machines.awake(pcie_width=4))
    assert [without_lanes.look(), without_lanes.look()] == [[], [LOST_LANES]]


def test_health_check_resumes_a_node_after_a_brief_narrow_link(host: Host) -> None:
    host.becomes(machines.awake(pcie_width=4, temperature=96))
    assert host.look() == [HOT]
    host.becomes(machines.rtx_4070(pcie_width=4))
    assert (host.look(), host.reason) == ([], "")


def test_health_check_keeps_a_hot_node_drained_until_it_stays_cool(host: Host) -> None:
    host.becomes(machines.hot())
    host.look()
    host.becomes(machines.rtx_4070(temperature=88))
    assert host.look()
    assert host.reason
    host.becomes(machines.rtx_4070(temperature=85))
    assert host.look() == []
    assert host.reason == ""


def test_health_check_drains_for_hardware_xids_and_not_for_application_xids(host: Host) -> None:
    host.kernel_says("[    1.000000] NVRM: loading NVIDIA UNIX", machines.xid(31), machines.xid(13))
    assert host.look() == []
    host.kernel_says(machines.xid(31), machines.xid(79, 2000.0))
    assert host.look() == [XID.format(79)]
    assert host.look()


def test_health_check_keeps_a_manually_resumed_node_until_the_next_xid(host: Host) -> None:
    host.look()
    host.kernel_says(machines.xid(79))
    host.look()
    host.resumed_by_a_person()
    assert [host.look(), host.look(), host.reason] == [[], [], ""]
    host.kernel_says(machines.xid(79), machines.xid(94, 5000.0))
    assert host.look() == [XID.format(94)]
    assert host.reason


def test_health_check_keeps_the_reason_of_a_manually_drained_node(host: Host) -> None:
    (host.folder / "state").write_text("IDLE+DRAIN")
    (host.folder / "reason").write_text("new fans")
    host.becomes(machines.hot())
    assert host.look()
    assert host.reason == "new fans"
    host.becomes(machines.rtx_4070())
    assert host.look() == []
    assert host.reason == "new fans"


def test_health_check_retries_an_unreachable_slurmctld(host: Host) -> None:
    (host.folder / "away").touch()
    host.becomes(machines.hot())
    assert host.look()
    assert host.reason == ""
    (host.folder / "away").unlink()
    host.look()
    assert "96 C" in host.reason


def test_health_check_does_not_wait_for_a_hung_driver(host: Host) -> None:
    host.becomes({**machines.rtx_4070(), "hangs_s": 50})
    assert host.look(driver_s=1) == [f"{HANGS} within 1 s"]
    assert HANGS in host.reason
    state = host.folder / "state.json"
    state.write_text(
        json.dumps({**json.loads(state.read_text()), "hanging": {"driver": os.getpid()}})
    )
    host.becomes(machines.rtx_4070())
    (found,) = host.look()
    assert "still hangs" in found


def test_disks_checks_each_file_system_once(host: Host) -> None:
    host.set(disk_free_mib=1 << 40, disks=["/", "/..", "/no/such"])
    (found,) = host.look()
    assert found.startswith("/ has ")


def test_disks_checks_shared_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is smaller than the limit is healthy while half of it is free."""
    room = SimpleNamespace(f_frsize=1 << 20, f_blocks=64, f_bavail=40, f_files=0, f_flag=0)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    host.set(disk_free_mib=1 << 10, disks=["/dev/shm"])
    assert host.look() == []
    room.f_bavail = 20
    assert host.look() == ["/dev/shm has 20 MiB free, but needs 32"]
    room.f_flag = os.ST_RDONLY
    assert host.look() == ["/dev/shm is mounted read-only"]


def test_health_check_counts_gpus_and_mig_devices(tmp_path: Path) -> None:
    host = _host(tmp_path / "node", machines.h100_node(parts=2), cards=8)
    host.set(gpus={"cards": 8, "parts": 4})
    assert host.look() == []
    host.becomes(machines.h100_node(parts=1))
    assert [said.split()[:2] for said in host.look()] == [["2", "MIG"]]
    host.becomes({"gpus": machines.h100_node(parts=2)["gpus"][:7]})
    assert host.look()[0].startswith("7 GPUs respond")


# --- What jobs need besides hardware -------------------------------------------------------------
MARK = "home/.clusterctl-abc123"


def _shared(host: Host) -> Path:
    """A shared folder that is mounted, and is the host's only need. The folder's mark."""
    shared = host.folder / "shared"
    mark = shared / MARK
    mark.mkdir(parents=True)
    host.needs("folder", mark=str(mark), mount=str(shared))
    (host.folder / "mounts").write_text(f"server:/x {shared} nfs4 rw 0 0\n")
    host.program("findmnt", "exit 1")
    return mark


def test_lost_shared_folder_drains_the_node_until_it_is_back(host: Host) -> None:
    mark = _shared(host)
    assert host.look() == []
    mark.rmdir()
    (host.folder / "mounts").write_text("")
    (found,) = host.look()
    assert found == f"the shared folder {host.folder}/shared is not mounted"
    assert host.reason == f"clusterctl health: {found}"
    mark.mkdir()
    assert (host.look(), host.reason) == ([], "")


def test_another_folder_in_place_of_the_shared_folder_is_named(host: Host) -> None:
    mark = _shared(host)
    mark.rmdir()
    assert host.look() == [f"{mark} is missing"]


def test_stale_shared_folder_is_named_in_the_words_of_the_system(host: Host) -> None:
    mark = _shared(host)
    host.program("stat", f"echo \"stat: cannot statx '{mark}': Stale file handle\" >&2; exit 1")
    assert host.look() == [f"the shared folder {host.folder}/shared: Stale file handle"]


def test_folder_in_fstab_is_mounted_again(host: Host) -> None:
    mark = _shared(host)
    mark.rmdir()
    (host.folder / "mounts").write_text("")
    host.program("findmnt", "exit 0")
    host.program("journalctl", "echo 'mount.nfs: Connection refused'")
    host.mounts("exit 1")
    (found,) = host.look()
    assert found.endswith("is not mounted (mount.nfs: Connection refused)")
    host.mounts(
        f'mkdir -p {mark}; echo "x {host.folder}/shared nfs4 rw 0 0" >>{host.folder}/mounts'
    )
    assert (host.look(), host.reason) == ([], "")


@pytest.mark.parametrize("mode", ["report", "job"])
def test_report_and_prolog_repair_nothing(host: Host, mode: str) -> None:
    mark = _shared(host)
    mark.rmdir()
    (host.folder / "mounts").write_text("")
    host.program("findmnt", "exit 0")
    host.mounts(f"mkdir -p {mark}")
    assert host.run(mode)[1]
    assert not mark.exists()


def test_node_drained_by_a_person_is_not_repaired(host: Host) -> None:
    mark = _shared(host)
    mark.rmdir()
    (host.folder / "mounts").write_text("")
    host.program("findmnt", "exit 0")
    host.mounts(f"mkdir -p {mark}")
    (host.folder / "state").write_text("IDLE+DRAIN")
    (host.folder / "reason").write_text("new switch")
    assert host.look()
    assert (mark.exists(), host.reason) == (False, "new switch")


def test_shared_folder_that_hangs_is_given_up_and_asked_once(host: Host) -> None:
    _shared(host)
    host.program("stat", "exec sleep 100")
    (found,) = host.look(folder_s=1)
    assert found.endswith("does not answer within 1 s")
    assert found in host.reason
    (host.folder / "stat").unlink()
    state = host.folder / "state.json"
    state.write_text(
        json.dumps({**json.loads(state.read_text()), "hanging": {"folder": os.getpid()}})
    )
    (found,) = host.look()
    assert found.endswith("still does not answer")


def test_prolog_drains_the_node_and_the_check_resumes_it(host: Host) -> None:
    mark = _shared(host)
    assert (host.look(), host.look(mode="job")) == ([], [])
    mark.rmdir()
    (found,) = host.look(mode="job")
    assert host.reason == f"clusterctl health: {found}"
    mark.mkdir()
    assert (host.look(), host.reason) == ([], "")


def test_node_that_slurm_drained_for_the_prolog_is_resumed(host: Host) -> None:
    """The Prolog could not reach the controller, so that Slurm gave a reason of its own."""
    mark = _shared(host)
    host.look()
    mark.rmdir()
    (host.folder / "away").touch()
    assert host.look(mode="job")
    (host.folder / "away").unlink()
    (host.folder / "state").write_text("IDLE+DRAIN")
    (host.folder / "reason").write_text("Prolog error")
    mark.mkdir()
    assert (host.look(), host.reason) == ([], "")


def test_prolog_of_somebody_else_that_failed_keeps_the_node_drained(host: Host) -> None:
    (host.folder / "state").write_text("IDLE+DRAIN")
    (host.folder / "reason").write_text("Prolog error")
    assert (host.look(), host.reason) == ([], "Prolog error")


def test_prolog_runs_only_quick_checks(host: Host) -> None:
    host.becomes(machines.hot())
    assert host.look(mode="job") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the check runs a program as another user")
def test_python_that_users_may_not_run_is_named(host: Host) -> None:
    # Other users may not enter the folders of pytest.
    with TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        python = Path(folder) / "env" / "python"
        python.parent.mkdir()
        # The epilog would kill a process of the user.
        python.write_text('#!/bin/sh\ntest "$(id -u)" != 2345\n')
        python.chmod(0o755)
        host.needs("python", python=str(python))
        host.set(accounts={"ada": 2345})
        assert host.look() == []
        python.parent.chmod(0o750)
        (found,) = host.look()
        assert found.startswith(f"{python} does not run for users: ")
        assert "Permission denied" in found
        assert host.look(mode="job") == [found]
        python.parent.chmod(0o755)
        python.write_text("#!/bin/sh\nexec sleep 60\n")
        # As the first time after a boot: the next check of the node tells.
        assert host.look(mode="job") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the check writes as another user")
def test_folder_that_users_may_not_write_to_is_named(host: Host) -> None:
    """Also the folder of jobs, in which only the user may write."""
    # Other users may not enter the folders of pytest.
    with TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tmp").mkdir()
        (folder / "ada").mkdir(mode=0o700)
        os.chown(folder / "ada", 2345, 2345)
        host.needs("writable", folders=[f"{folder}/tmp"], homes=str(folder))
        host.set(accounts={"ghost": 2346, "ada": 2345})
        (folder / "tmp").chmod(0o1777)
        assert host.look() == []
        (folder / "tmp").chmod(0o755)
        os.chown(folder / "ada", 2347, 2347)
        found = host.look()
        assert [
            f"{folder}/{name}" in text for name, text in zip(("tmp", "ada"), found, strict=True)
        ] == [True, True]
        assert host.look(mode="job") == found
        assert [*(folder / "ada").iterdir(), *(folder / "tmp").iterdir()] == []


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ("ada:x:2345:2345::/home/ada:/bin/bash", []),
        ("", ["the account ada is missing"]),
        ("ada:x:9:9::/home/ada:/bin/bash", ["the account ada has uid 9 instead of 2345"]),
    ],
)
def test_accounts_of_users_are_compared(host: Host, rows: str, found: list[str]) -> None:
    host.needs("accounts")
    host.set(accounts={"ada": 2345})
    host.program("getent", f"echo '{rows}'; exit 2")
    assert host.look() == found


def test_missing_device_is_created_by_the_first_client(host: Host) -> None:
    device = host.folder / "nvidia0"
    host.needs("devices")
    host.set(gpus={"cards": 1, "files": [str(device)]})
    host.program("nvidia-smi", "exit 9")
    assert host.look() == [f"{device} of gres.conf is missing"]
    host.program("nvidia-smi", f"touch {device}")
    assert (host.look(), host.reason) == ([], "")


def test_devices_of_mig_that_a_boot_has_removed_are_named(host: Host) -> None:
    host.needs("devices")
    caps = [f"{host.folder}/nvidia-caps/nvidia-cap{number}" for number in (12, 13)]
    host.set(gpus={"cards": 1, "files": caps})
    host.program("nvidia-smi", "exit 0")
    (found,) = host.look()
    assert found.startswith(f"{caps[0]} and 1 more of gres.conf is missing; MIG devices")


@pytest.mark.parametrize(
    ("devices", "down"),
    [
        ("mlx5_0:1", []),
        ("mlx5_0:1,mlx5_1:1", ["mlx5_1:1"]),
        ("eth0", []),
        ("eth1", ["eth1"]),
        ("eth9", ["eth9"]),
    ],
)
def test_network_devices_of_ucx_are_looked_at(host: Host, devices: str, down: list[str]) -> None:
    for path, text in (
        ("infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
        ("infiniband/mlx5_1/ports/1/state", "1: DOWN"),
        ("net/eth0/operstate", "up"),
        ("net/eth1/operstate", "down"),
    ):
        file = host.folder / "sys" / "class" / path
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")
    variables = host.folder / "job-variables"
    variables.write_text(f"NCCL_DEBUG=WARN\nUCX_NET_DEVICES={devices}\n")
    host.needs("fabric", file=str(variables))
    assert [found.split()[3].rstrip(",") for found in host.look()] == down


def test_slurmd_is_restarted_if_its_folder_is_gone(host: Host) -> None:
    cache = host.folder / "spool" / "conf-cache"
    host.needs("spool", cache=str(cache), prolog="/bin/sh")
    host.program("systemctl", "exit 0")
    (said,) = host.look()
    assert said.startswith(f"{cache} is missing")
    assert "conf-cache" in host.reason
    host.program("systemctl", f'[ "$*" = "--no-block restart slurmd" ] && mkdir -p {cache}')
    assert (host.look(), host.reason) == ([], "")


def packages(host: Host, **files: tuple[Path, ...]) -> None:
    """Have dpkg list these files of installed packages."""
    for folder in ("info", "alternatives"):
        (host.folder / folder).mkdir()
    for name, paths in files.items():
        (host.folder / "info" / f"{name}:amd64.list").write_text(
            "\n".join(["/.", *map(str, paths)])
        )


def test_package_without_its_files_drains_the_node(host: Host) -> None:
    program, library, other = (host.folder / name for name in ("slurmd-x", "libx", "other"))
    packages(host, slurmd=(program, library, Path("/usr/share/doc/no-such")), other=(other,))
    host.needs("packages", packages=["slurm*"])
    (said,) = host.look()
    assert said == f"the package slurmd lacks {program} and 1 more"
    assert said in host.reason
    program.touch()
    library.touch()
    assert (host.look(), host.reason) == ([], "")
    # The link that dpkg has made for a program that several packages offer.
    link = host.folder / "slurmd"
    (host.folder / "alternatives" / "slurmd").write_text(f"auto\n{link}\n\n{program}\n50\n")
    assert host.look(mode="job") == [f"the package slurmd lacks {link}"]


def test_rpm_is_asked_for_the_files_of_packages(host: Host) -> None:
    """Documents may be left out of an image, and a ghost is only owned."""
    files = {"d": "no-doc", "g": "no-ghost", "": "libmpi"}
    rows = "".join(rf"openmpi\t{flag}\t{host.folder}/{name}\n" for flag, name in files.items())
    host.program("rpm", f"[ \"$4\" = '*mpi*' ] && printf '{rows}'")
    host.needs("packages", packages=["*mpi*"])
    assert host.look() == [f"the package openmpi lacks {host.folder}/libmpi"]


@pytest.mark.parametrize("rpm", ["echo rpmdb open failed; exit 1", "exit 0"])
def test_packages_that_could_not_be_looked_at_are_reported_and_change_nothing(
    host: Host, rpm: str
) -> None:
    files = rf"printf 'openmpi\t\t{host.folder}/libmpi\n'"
    host.program("rpm", files)
    host.needs("packages", packages=["*mpi*"])
    assert host.look() != []
    reason = host.reason
    host.program("rpm", rpm)
    status, said = host.run("")
    assert (status, "packages" in said, host.reason) == (0, True, reason)
    host.resumed_by_a_person()
    host.run("")
    assert (host.run("job"), host.reason) == ((0, ""), "")
    (told,) = host.report()
    assert told["code"] == "not-looked-at"


def test_failed_unit_is_started_again(host: Host) -> None:
    host.needs("units", units=["munge.service"])
    started = host.folder / "started"
    shown = f"if [ -e {started} ]; then echo ActiveState=failed; else echo ActiveState=active; fi"
    host.program("systemctl", shown)
    started.touch()
    assert host.look() == ["munge.service has failed"]
    host.program("systemctl", f"case $1 in show) {shown} ;; start) rm {started} ;; esac")
    assert (host.look(), host.reason) == ([], "")


def test_units_of_all_needs_are_asked_at_once(host: Host) -> None:
    texts = {"code": "", "what": "", "fix": ""}
    daemon = {"check": "restarts", "unit": "slurmd", "many": 3, "steady_s": 60, "log": "/no/such"}
    munge = {"check": "units", "units": ["munge.service", "mariadb.service"]}
    host.set(needs=[{**daemon, **texts}, {**munge, **texts}])
    asked = host.folder / "asked"
    failed = "ActiveState=active\\n\\nActiveState=failed\\n\\nActiveState=failed\\nNRestarts=3\\n"
    host.program("systemctl", f"echo \"$@\" >>{asked}; printf '{failed}'")
    whys = [problem["why"] for problem in host.report()]
    assert whys == ["mariadb.service has failed", "slurmd has ended 3 times"]
    assert len(asked.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("count", "state", "is_named"),
    [(5, "activating", True), (5, "failed", True), (2, "activating", False), (0, "active", False)],
)
def test_slurmd_that_ends_at_each_start_is_reported(
    host: Host, count: int, state: str, *, is_named: bool
) -> None:
    host.needs("restarts", unit="slurmd", many=3, steady_s=60, log="/no/such")
    shown = f"ActiveState={state}\\nNRestarts={count}\\nActiveEnterTimestampMonotonic=0\\n"
    host.program("systemctl", f"printf '{shown}'")
    fatal = "can't stat gres.conf file /dev/nvidia0: No such file or directory"
    host.program("journalctl", f'echo "slurmd: fatal: {fatal}"')
    whys = [problem["why"] for problem in host.report()]
    assert whys == ([f"slurmd has ended 5 times: {fatal}"] if is_named else [])
    # A daemon that ends runs no check, so the check of a running one can't mean itself.
    assert (host.look(), host.reason) == ([], "")


def test_report_has_code_and_fix_and_changes_nothing(host: Host) -> None:
    mark = _shared(host)
    mark.rmdir()
    (found,) = host.report()
    assert (found["code"], found["what"], found["fix"]) == ("folder", "what", "fix")
    assert (host.calls, host.reason, (host.folder / "state.json").exists()) == ([], "", False)


def test_boot_waits_for_the_shared_folder(host: Host) -> None:
    """slurmd starts once the file server has answered."""
    mark = _shared(host)
    mark.rmdir()
    (host.folder / "mounts").write_text("")
    host.program("findmnt", "exit 0")
    tries = host.folder / "tries"
    host.mounts(f"echo x >>{tries}; [ $(wc -l <{tries}) -lt 2 ] || mkdir {mark}")
    assert host.look(mode="boot") == []
    assert tries.read_text() == "x\nx\n"
    assert host.calls == []


def _has_mounts(host: Host, *points: str) -> None:
    (host.folder / "mounts").write_text("".join(f"x {point} ext4 rw 0 0\n" for point in points))


def _folder_below_a_mount(host: Host) -> None:
    _shared(host)
    _has_mounts(host, "/", str(host.folder))


def _folder_of_each_node(host: Host) -> None:
    mark = _shared(host)
    host.needs("folder", mark=str(mark), mount="")
    _has_mounts(host, "/")


def _slow_server(host: Host) -> None:
    _shared(host)
    host.program("stat", 'sleep 1; exec /usr/bin/stat "$@"')


def _accounts_of_a_directory(host: Host) -> None:
    host.needs("accounts")
    host.set(accounts={"ada": 2345, "bob": 2346})
    rows = "ada:*:2345:100:Ada, L.:/home/ada:/bin/bash\\nbob:*:2346:100::/home/bob:/bin/sh\\n"
    host.program("getent", f"sleep 1; printf '{rows}'")


def test_missing_homes_of_users_are_named_but_drain_no_node(host: Host) -> None:
    host.needs("homes")
    host.set(accounts={"ada": 2345, "bob": 2346})
    gone = host.folder / "ada"
    rows = (f"ada:*:2345:100::{gone}:/bin/sh", f"bob:*:2346:100::{host.folder}:/bin/sh")
    host.program("getent", "\n".join(f"echo '{row}'" for row in rows))
    (found,) = host.report()
    assert found["why"].startswith(f"{gone}, the home of ada,")
    assert (host.look(), host.reason) == ([], "")
    gone.mkdir()
    assert host.report() == []
    away = host.folder / "away" / "ada"
    host.program("getent", f"echo 'ada:*:2345:100::{away}:/bin/sh'")
    assert host.report() == []


def _no_accounts(host: Host) -> None:
    host.needs("python", python="/no/such")
    host.set(accounts={})


def _network(devices: str, path: str, state: str) -> Callable[[Host], None]:
    def arrange(host: Host) -> None:
        file = host.folder / "sys" / "class" / path
        file.parent.mkdir(parents=True)
        file.write_text(f"{state}\n")
        variables = host.folder / "job-variables"
        variables.write_text(f"UCX_NET_DEVICES={devices}\n")
        host.needs("fabric", file=str(variables))

    return arrange


def _room(**values: int) -> Callable[[Host], None]:
    room = {
        "f_frsize": 1 << 20,
        "f_blocks": 500,
        "f_bavail": 51,
        "f_files": 0,
        "f_favail": 0,
        "f_flag": 0,
    }

    def arrange(host: Host) -> None:
        host.needs("disks")
        host.set(disk_free_mib=50, disks=["/dev/shm", "/no/such"])
        host.statvfs = SimpleNamespace(**{**room, **values})

    return arrange


def _slurmd(count: int, state: str, since_s: float) -> Callable[[Host], None]:
    def arrange(host: Host) -> None:
        host.needs("restarts", unit="slurmd", many=3, steady_s=60, log="/no/such")
        since_us = int((time.monotonic() - since_s) * 1e6)
        shown = (
            f"ActiveState={state}\\nNRestarts={count}\\nActiveEnterTimestampMonotonic={since_us}"
        )
        host.program("systemctl", f"printf '{shown}\\n'")
        host.program("journalctl", "echo 'slurmd: fatal: an old one'")

    return arrange


def _clock(cells: str) -> Callable[[Host], None]:
    def arrange(host: Host) -> None:
        host.needs("clock")
        host.program("chronyc", cells)

    return arrange


_TRACKING = "echo 0A000001,10.0.0.1,3,1763668800.1,{},0.1,0.2,-1.0,0.0,0.1,0.0,0.0,64.0,{}"


def _xid(number: int) -> Callable[[Host], None]:
    def arrange(host: Host) -> None:
        host.kernel_says(machines.xid(number))

    return arrange


def _card(**values: Any) -> Callable[[Host], None]:
    return lambda host: host.becomes(machines.rtx_4070(**values))


def _unit(host: Host) -> None:
    host.needs("units", units=["munge.service"])
    host.program("systemctl", "echo ActiveState=inactive")


def _device(host: Host) -> None:
    host.needs("devices")
    host.set(gpus={"cards": 1, "files": ["/dev/null"]})


HEALTHY: Mapping[str, Callable[[Host], None]] = {
    "shared folder below a mount": _folder_below_a_mount,
    "folder of each node": _folder_of_each_node,
    "file server under load": _slow_server,
    "accounts of a directory": _accounts_of_a_directory,
    "no accounts": _no_accounts,
    "InfiniBand": _network("mlx5_0:1", "infiniband/mlx5_0/ports/1/state", "4: ACTIVE"),
    "interface without a state": _network("tun0", "net/tun0/operstate", "unknown"),
    "little more than the least room": _room(),
    "file system without a limit of inodes": _room(f_files=0, f_favail=0),
    "small shared memory in use": _room(f_blocks=64, f_bavail=33),
    "slurmd restarted twice": _slurmd(2, "active", 5),
    "slurmd restarted often, long ago": _slurmd(9, "active", 3600),
    "slurmd that a person stopped": _slurmd(0, "inactive", 0),
    "chrony that has no server yet": _clock(_TRACKING.format(99, "Not synchronised")),
    "chrony in step": _clock(_TRACKING.format(0.02, "Normal")),
    "no chrony": _clock("exit 127"),
    "XID of a program": _xid(31),
    "idle card": _card(pcie_gen=1),
    "warm card": _card(temperature=89),
    "unit that a person stopped": _unit,
    "device": _device,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_node_is_neither_drained_nor_reported(
    host: Host, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    HEALTHY[name](host)
    if host.statvfs is not None:
        monkeypatch.setattr(os, "statvfs", lambda _: host.statvfs)
    assert [host.look(), host.look(), host.report(), host.look(mode="job")] == [[], [], [], []]
    assert host.reason == ""


@pytest.mark.parametrize(("status", "starts"), [(0, True), (3, False), (1, True), (126, True)])
def test_prolog_stops_a_job_only_if_the_check_says_so(
    tmp_path: Path, status: int, *, starts: bool
) -> None:
    """A check that fails itself, as without its settings, must not drain all nodes."""
    health = tmp_path / "health"
    health.write_text(f"#!/bin/sh\nexit {status}\n")
    health.chmod(0o755)
    prolog = (_FILE.parent / "prolog").read_text().replace(HEALTH_PROGRAM, str(health))
    done = subprocess.run(["sh", "-c", prolog], check=False)
    assert (done.returncode == 0) is starts
