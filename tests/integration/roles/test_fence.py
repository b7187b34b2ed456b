"""The real fence program, which kills processes of lost jobs, on a played /proc and files."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest

from clusterctl.spec.names import FENCE_PORT
from clusterctl.util.assets import data_folder
from tests.support.hostile import nest
from tests.support.played.batch import play
from tests.support.plays import load_module

# What unmunge 0.5.16 prints for a credential that only root may decode.
DECODED = """\
STATUS:          Success (0)
ENCODE_HOST:     t-ctl (10.80.123.2)
ENCODE_TIME:     2026-11-26 17:34:40 +0000 (1795714480)
TTL:             10
UID:             {user}
GID:             {user}
UID_RESTRICTION: root (0)
LENGTH:          {length}

{text}"""
# pid -> parent, cmdline, environ
TREE = {
    1: (0, "/sbin/init", ""),
    10: (1, "/usr/sbin/slurmd -D", ""),
    # Job 7: a batch script, a rank, and an orphan of a slurmstepd with its child.
    20: (10, "slurmstepd: [7.batch]", ""),
    21: (20, "bash slurm_script", "SLURM_JOB_ID=7"),
    22: (10, "slurmstepd: [7.1]", ""),
    23: (22, "python train.py", ""),
    24: (1, "python train.py", "A=1 SLURM_JOB_ID=7 B=2"),
    25: (24, "python worker.py", ""),
    # Other jobs, and a shell of salloc.
    30: (10, "slurmstepd: [70.0]", ""),
    31: (1, "python other.py", "SLURM_JOB_ID=17"),
    40: (41, "bash", "SLURM_JOB_ID=7"),
    41: (1, "salloc", ""),
    # A daemon that has cleared its environment, with a child. A user's ssh login, and a program
    # left by it.
    50: (1, "env -i", "A=1"),
    51: (50, "sleep 9", "A=1"),
    60: (1, "sshd", ""),
    61: (60, "bash", ""),
    62: (1, "tmux", "SLURM_JOB_ID=7"),
}
OF_LOGINS = {41, 60, 61, 62}
OF_ROOT = {1, 10, 20, 22, 30, 60}
NAMELESS = {50, 51}
OF_JOB_7 = {20, 21, 22, 23, 24, 25}
SPOOL = "var/spool/clusterctl-slurmd/"
OF_STEPS_OF_JOB_7 = (
    *(
        f"{SPOOL}{name}"
        for name in ("stepd.slurm.pmix.7.1", "pmix.7.1/", "t-2_7.1", "hwloc_topo_7.1.xml")
    ),
    f"{SPOOL}job00007/",
    "tmp/spmix_appdir_2001_7.1/",
)
OF_STEPS_OF_JOB_70 = (
    f"{SPOOL}stepd.slurm.pmix.70.7",
    f"{SPOOL}hwloc_topo_70.7.xml",
    f"{SPOOL}t-2_70.7",
)
USER = os.getuid()
MPIRUN_OF_JOB_7 = f"tmp/prterun.t-2.23.{USER}/"
DEAD_MPIRUN = f"tmp/prted.t-2.99.{USER}/"
OF_USERS = (
    "tmp/prte-results.2024.11/",
    f"tmp/prterun-x.t-2.99.{USER}/",
    f"tmp/prterun.t-2.98.{USER}",
    f"tmp/prterun.t-2.99.{USER + 1}/",
    f"tmp/prterun.t-2.99.{USER}.old/",
)
OF_STEPS = {*OF_STEPS_OF_JOB_7, *OF_STEPS_OF_JOB_70, "tmp/spmix_appdir_2001_8.1/"}
FILES = {
    *OF_STEPS,
    MPIRUN_OF_JOB_7,
    DEAD_MPIRUN,
    *OF_USERS,
    *(f"{SPOOL}{name}" for name in ("joblist", "cred_state.old", "hwloc_topo_whole.xml")),
}


@pytest.fixture
def fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    program = load_module("fence", "roles/slurmd/files")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(
        program.os, "kill", lambda pid, _: shutil.rmtree(tmp_path / "proc" / str(pid))
    )
    monkeypatch.setattr(program.signal, "alarm", lambda _: None)
    for pid, (parent, cmdline, environ) in TREE.items():
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1 0")
        (folder / "cmdline").write_text(cmdline.replace(" ", "\0") if parent != 10 else cmdline)
        (folder / "environ").write_text(environ.replace(" ", "\0") + "\0")
        uid = 0 if pid in OF_ROOT else 2001
        (folder / "status").write_text(f"Name:\tUid:\nUid:\t{uid}\t0\t0\t0\n")
        group = "ssh" if pid in OF_LOGINS else "slurmd"
        (folder / "cgroup").write_text(f"1:name=systemd:/system.slice/{group}.service\n0::/\n")
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    return program


def removed(root: Path) -> set[str]:
    return {name for name in FILES if not (root / name).exists()}


def killed(root: Path) -> set[int]:
    return TREE.keys() - {int(folder.name) for folder in (root / "proc").iterdir()}


def answers(
    fence: ModuleType, monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str]
) -> list[str]:
    """Have each program answer this, except rm. Return the list of calls."""
    calls: list[str] = []
    monkeypatch.setattr(fence.signal, "alarm", lambda seconds: calls.append(f"alarm {seconds}"))

    def ask(*argv: str, text: str = "") -> str:
        calls.append(" ".join(argv))
        if argv[0] == "rm":
            subprocess.run(argv, check=True)
        return outputs.get(argv[0], "")

    monkeypatch.setattr(fence, "ask", ask)
    return calls


def requested(
    fence: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str, user: str = "root (0)"
) -> str:
    """Return the program's answer to this request of this user."""
    decoded = DECODED.format(user=user, text=text, length=len(text))
    answers(fence, monkeypatch, {"unmunge": decoded, "scontrol": node_line("MIXED")})
    monkeypatch.setattr(fence.sys, "stdin", io.StringIO("MUNGE:AwQ=:\n"))
    monkeypatch.setattr(fence.sys, "stdout", answer := io.StringIO())
    assert fence.main([]) == 0
    return answer.getvalue()


def test_fence_removes_processes_and_files_of_a_job(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requested(fence, monkeypatch, "fence t-2 7 8") == "ok\n"
    assert killed(tmp_path) == OF_JOB_7
    assert removed(tmp_path) == {
        *(*OF_STEPS_OF_JOB_7, MPIRUN_OF_JOB_7),
        *("tmp/spmix_appdir_2001_8.1/", DEAD_MPIRUN),
    }
    assert list(tmp_path.rglob("clusterctl-old*")) == []


def test_fence_answers_despite_a_very_deep_folder(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's functions recurse. Users can create such folders in /tmp."""
    nest(tmp_path / "tmp/spmix_appdir_2001_7.1/deep")
    answer = requested(fence, monkeypatch, "fence t-2 7")
    left = [folder.name for folder in (tmp_path / "tmp").iterdir()]
    subprocess.run(["rm", "-rf", tmp_path / "tmp"], check=True)
    assert answer == "ok\n"
    assert set(left) == {"spmix_appdir_2001_8.1", *(Path(name).name for name in OF_USERS)}


def test_fence_list_has_jobs_with_a_script_on_the_node(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requested(fence, monkeypatch, "fence t-2 list") == "jobs 7\n"
    assert killed(tmp_path) == set()
    shutil.rmtree(tmp_path / "proc/20")
    assert requested(fence, monkeypatch, "fence t-2 list") == "jobs\n"


def test_fence_removes_files_after_its_answer(
    fence: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not wait for folders that a user has filled."""
    answers_then = []
    monkeypatch.setattr(
        fence, "remove_old_files", lambda: answers_then.append(fence.sys.stdout.getvalue())
    )
    requested(fence, monkeypatch, "fence t-2 7")
    assert answers_then == ["ok\n"]


def test_fence_client_has_a_second_to_send_a_credential(
    fence: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = answers(fence, monkeypatch, {})
    monkeypatch.setattr(fence.sys, "stdin", io.StringIO("MUNGE:AwQ=:\n"))
    fence.main([])
    assert calls == ["alarm 1", "unmunge", "alarm 15"]


def test_fence_all_ends_all_jobs_of_a_lost_node(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requested(fence, monkeypatch, "fence t-2 all") == "ok\n"
    assert killed(tmp_path) == OF_JOB_7 | {30, 31} | NAMELESS
    assert removed(tmp_path) == OF_STEPS | {MPIRUN_OF_JOB_7, DEAD_MPIRUN}


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("fence t-2 7", "ada (2001)"),
        ("fence t-9 7", "root (0)"),
        ("fence 7", "root (0)"),
        ("fence t-2 7\nUID: root (0)\n", "??? (2001)"),
        ("fence", "root (0)"),
        ("drain t-2 7", "root (0)"),
        ("", "root (0)"),
    ],
)
def test_fence_refuses_other_requests(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, user: str
) -> None:
    assert requested(fence, monkeypatch, text, user) == "no\n"
    assert killed(tmp_path) == set()


def test_fence_ignores_a_credential_that_munge_refuses(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test calls the real function, with an unmunge that fails."""
    decoded = DECODED.format(user="root (0)", length=11, text="fence t-2 7")
    (tmp_path / "unmunge").write_text(f"#!/bin/sh\necho '{decoded}'\nexit $(cat {tmp_path}/rc)\n")
    (tmp_path / "unmunge").chmod(0o755)
    monkeypatch.setattr(fence, "PATH", f"{tmp_path}:{os.environ['PATH']}")
    for code, request in (("0", ("t-2", ["7"])), ("16", ("", []))):
        (tmp_path / "rc").write_text(code)
        assert fence.decode("MUNGE:AwQ=:\n") == request


def node_line(state: str) -> str:
    name = os.uname().nodename.partition(".")[0]
    other = f"NodeName=t-9 NodeHostName=x{name} State=DOWN X=1"
    return f"{other}\nNodeName=t-2 NodeHostName={name} State={state} X=1\n"


@pytest.mark.parametrize(
    ("state", "expected"),
    [("IDLE", set()), ("ALLOCATED", set()), ("DOWN+DRAIN", OF_JOB_7 | {30, 31} | NAMELESS)],
)
def test_fence_start_kills_old_processes_only_on_a_down_node(
    fence: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    expected: set[int],
) -> None:
    answers(fence, monkeypatch, {"scontrol": node_line(state)})
    fence.main(["start"])
    assert killed(tmp_path) == expected
    # Job 8 has no processes.
    assert removed(tmp_path) == (
        OF_STEPS | {MPIRUN_OF_JOB_7, DEAD_MPIRUN}
        if expected
        else {"tmp/spmix_appdir_2001_8.1/", DEAD_MPIRUN}
    )


def test_fence_start_without_job_processes_does_not_ask_slurm(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a boot of the node, the controller may be off."""
    shutil.rmtree(tmp_path / "proc")
    calls = answers(fence, monkeypatch, {})
    fence.main(["start"])
    assert [call for call in calls if call.startswith("scontrol")] == []


@pytest.mark.parametrize(
    ("system", "state", "sets_down"),
    [
        ("stopping", "ALLOCATED", True),
        ("stopping", "IDLE", True),
        ("running", "ALLOCATED", False),
        ("stopping", "IDLE+DRAIN", False),
        ("stopping", "ALLOCATED+REBOOT_ISSUED", False),
    ],
)
def test_fence_stop_sets_the_node_down_only_at_shutdown(
    fence: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, state: str, sets_down: bool
) -> None:
    calls = answers(fence, monkeypatch, {"systemctl": f"{system}\n", "scontrol": node_line(state)})
    fence.main(["stop"])
    update = "scontrol update nodename=t-2 state=down reason=clusterctl: the machine shuts down"
    assert [call for call in calls if "update" in call] == ([update] if sets_down else [])


def after_job(
    fence: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    *,
    ended: tuple[int, ...],
    uid: int = 2001,
) -> set[int]:
    """Kill processes ``ended``, run the program as the Epilog of job 7, and return which it
    kills.
    """
    for pid in ended:
        shutil.rmtree(root / f"proc/{pid}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_UID", str(uid))
    assert fence.main([]) == 0
    return killed(root) - {*ended}


def test_epilog_kills_processes_that_a_job_left(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's job 17 still runs, and the daemon without job variables may belong to it."""
    assert after_job(fence, monkeypatch, tmp_path, ended=(20, 21, 22, 23)) == {24, 25}
    assert removed(tmp_path) == {"tmp/spmix_appdir_2001_7.1/", MPIRUN_OF_JOB_7, DEAD_MPIRUN}


def test_epilog_that_takes_too_long_does_not_fail(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may wait for a dead file system longer than the Epilog may take."""
    alarms: list[int] = []
    monkeypatch.setattr(fence.signal, "alarm", alarms.append)
    monkeypatch.setattr(fence.os, "kill", lambda *_: None)
    monkeypatch.setattr(fence, "END_S", 0.0)
    handler = signal.getsignal(signal.SIGALRM)
    try:
        assert after_job(fence, monkeypatch, tmp_path, ended=(20, 21, 22, 23)) == set()
        assert signal.getsignal(signal.SIGALRM) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert alarms == [15]


@pytest.mark.parametrize(("uid", "nameless"), [(2001, NAMELESS), (2002, set()), (0, set())])
def test_epilog_of_the_users_last_job_kills_daemons_without_job_variables(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, nameless: set[int]
) -> None:
    ended = (20, 21, 22, 23, 31)
    assert after_job(fence, monkeypatch, tmp_path, ended=ended, uid=uid) == {24, 25} | nameless


def test_epilog_keeps_daemons_without_job_variables_while_the_user_has_steps(
    fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of job 70 has cleared its own environment too."""
    shutil.copytree(tmp_path / "proc/23", tmp_path / "proc/32")
    (tmp_path / "proc/32/stat").write_text("32 (a) S 30 1 1 0")
    assert after_job(fence, monkeypatch, tmp_path, ended=(20, 21, 22, 23, 31)) == {24, 25}


def test_fence_socket_unit_has_the_port_of_the_watcher() -> None:
    socket = data_folder("ansible") / "roles/slurmd/files/clusterctl-fence.socket"
    assert f"ListenStream={FENCE_PORT}\n" in socket.read_text()


JOB_STARTED = int(time.time()) - 60
SHM = "dev/shm"
TMP = "tmp"


class Scratch:
    """A node after job 7, with /tmp in memory, and the real programs find, stat and rm."""

    def __init__(self, fence: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fence = fence
        self.root = root
        self.monkeypatch = monkeypatch
        for folder in ("proc", TMP):
            shutil.rmtree(root / folder)
        (root / "proc").mkdir()
        (root / "proc/mounts").write_text("tmpfs /dev/shm tmpfs rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n")
        for folder in (SHM, TMP, "run", "bin"):
            (root / folder).mkdir(parents=True)
        monkeypatch.setattr(fence, "PATH", f"{root}/bin:{os.environ['PATH']}")
        self.slurm_has((7, "COMPLETING", JOB_STARTED))
        self.slurm_recorded()

    def slurm_recorded(self, *periods: tuple[object, object]) -> None:
        """Start and end of jobs, as Slurm's accounting has them."""
        rows = "".join(f"{start}|{end}\n" for start, end in periods)
        play(self.root / "bin/sacct", f"cat <<'END'\n{rows}END")

    def slurm_has(self, *jobs: tuple[int, str, object]) -> None:
        rows = "".join(f"{number} {state} {start}\n" for number, state, start in jobs)
        self.slurm_answers(f"cat <<'END'\n{rows}END")

    def slurm_answers(self, body: str) -> None:
        play(self.root / "bin/squeue", body)

    def has_process(
        self, pid: int, uid: int = USER, command: str = "bash", state: str = "S"
    ) -> None:
        folder = self.root / f"proc/{pid}"
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a) S 1 1 1 0")
        (folder / "cmdline").write_text(command)
        (folder / "environ").write_text("")
        (folder / "cgroup").write_text("0::/user.slice\n")
        (folder / "status").write_text(f"State:\t{state} (x)\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")

    def write(self, *names: str) -> None:
        for name in names:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text("x")

    def left(self, job: int = 7) -> set[str]:
        """Run the Epilog of this job. The files in /dev/shm and /tmp that remain."""
        self.monkeypatch.setenv("SLURM_JOB_ID", str(job))
        self.monkeypatch.setenv("SLURM_JOB_UID", str(USER))
        self.monkeypatch.setenv("SLURMD_NODENAME", "t-2")
        assert self.fence.main([]) == 0
        folders = [self.root / SHM, self.root / TMP]
        return {str(path.relative_to(self.root)) for folder in folders for path in folder.iterdir()}


@pytest.fixture
def scratch(fence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    return Scratch(fence, tmp_path, monkeypatch)


def test_epilog_removes_what_the_job_left_in_memory(scratch: Scratch) -> None:
    scratch.write(
        f"{SHM}/cache.bin", f"{SHM}/torch_1/deep/a b\nc", f"{TMP}/data/part", f"{TMP}/-rf"
    )
    (scratch.root / SHM / "link").symlink_to(scratch.root / "run")
    (scratch.root / SHM / os.fsdecode(b"\xff")).touch()
    nest(scratch.root / SHM / "deep")
    scratch.write(f"{TMP}/ompi.n1.{USER}/pid.1/session")
    assert scratch.left() == set()
    assert (scratch.root / "run").exists()


def test_epilog_keeps_files_that_are_older_than_the_job(scratch: Scratch) -> None:
    """For example, a data set that several jobs use."""
    scratch.write(f"{SHM}/staged", f"{TMP}/staged/part")
    scratch.slurm_has((7, "COMPLETING", int(time.time()) + 60))
    assert scratch.left() == {f"{SHM}/staged", f"{TMP}/staged"}


def test_epilog_removes_files_with_an_old_time_of_modification(scratch: Scratch) -> None:
    """tar and rsync set such a time."""
    scratch.write(f"{SHM}/extracted")
    os.utime(scratch.root / SHM / "extracted", (1, 1))
    assert scratch.left() == set()


KEPT = {
    "another job": [(7, "COMPLETING", JOB_STARTED), (8, "RUNNING", JOB_STARTED)],
    "a suspended job": [(7, "COMPLETING", JOB_STARTED), (8, "SUSPENDED", JOB_STARTED)],
    "an unknown start": [(7, "COMPLETING", "N/A")],
    "a job that Slurm does not list": [(8, "COMPLETING", JOB_STARTED)],
    "no job at all": [],
}


@pytest.mark.parametrize("jobs", KEPT.values(), ids=KEPT.keys())
def test_epilog_keeps_files_with(scratch: Scratch, jobs: list[tuple[int, str, object]]) -> None:
    scratch.write(f"{SHM}/cache.bin")
    scratch.slurm_has(*jobs)
    assert scratch.left() == {f"{SHM}/cache.bin"}


def test_epilog_keeps_files_if_slurm_does_not_answer(scratch: Scratch) -> None:
    scratch.write(f"{SHM}/cache.bin")
    scratch.slurm_answers(f"echo 7 COMPLETING {JOB_STARTED}; exit 1")
    assert scratch.left() == {f"{SHM}/cache.bin"}


@pytest.mark.parametrize(("state", "is_kept"), [("S", True), ("D", True), ("Z", False)])
def test_epilog_keeps_files_while_their_owner_has_a_process(
    scratch: Scratch, state: str, is_kept: bool
) -> None:
    """For example, a login by ssh."""
    scratch.write(f"{SHM}/cache.bin", f"{TMP}/ompi.n1.{USER}/pid.1/session")
    scratch.has_process(60, state=state)
    kept = {f"{SHM}/cache.bin", f"{TMP}/ompi.n1.{USER}"}
    assert scratch.left() == (kept if is_kept else set())


@pytest.mark.parametrize(
    "period",
    [(JOB_STARTED, JOB_STARTED + 86_400), (JOB_STARTED, "Unknown")],
    ids=["an earlier job", "an unknown end"],
)
def test_epilog_removes_files_of(scratch: Scratch, period: tuple[int, object]) -> None:
    """Files of an earlier attempt are removed, too: squeue has the time of the requeue."""
    scratch.write(f"{SHM}/earlier")
    later = int(time.time()) + 60
    scratch.slurm_has((7, "COMPLETING", later))
    assert scratch.left() == {f"{SHM}/earlier"}
    scratch.slurm_recorded(("Unknown", "Unknown"), period)
    assert scratch.left() == set()


def test_epilog_keeps_files_that_were_created_between_two_jobs(scratch: Scratch) -> None:
    """A logged-in person may have created them."""
    scratch.write(f"{SHM}/between")
    now = int(time.time())
    scratch.slurm_has((7, "COMPLETING", now + 60))
    scratch.slurm_recorded((now - 900, now - 600), (now + 60, "Unknown"))
    assert scratch.left() == {f"{SHM}/between"}


def test_epilogs_of_two_jobs_that_end_together_remove_the_files_of_both(scratch: Scratch) -> None:
    scratch.write(f"{SHM}/of-8")
    later = int(time.time()) + 60
    scratch.slurm_has((7, "COMPLETING", later), (8, "COMPLETING", JOB_STARTED))
    scratch.has_process(30, uid=USER + 1, command="slurmstepd: [8.batch]")
    assert scratch.left() == {f"{SHM}/of-8"}
    shutil.rmtree(scratch.root / "proc/30")
    assert scratch.left() == set()


def test_epilog_on_the_users_own_machine_keeps_files_in_tmp(scratch: Scratch) -> None:
    """People may work on their own machine beside the jobs."""
    (scratch.root / "var/lib").mkdir(parents=True, exist_ok=True)
    (scratch.root / "var/lib/clusterctl-host.json").touch()
    scratch.write(f"{SHM}/cache.bin", f"{TMP}/notes")
    assert scratch.left() == {f"{TMP}/notes"}


def test_epilog_keeps_files_in_tmp_on_a_disk(scratch: Scratch) -> None:
    (scratch.root / "proc/mounts").write_text(
        "/dev/vda1 / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
    )
    scratch.write(f"{SHM}/cache.bin", f"{TMP}/results", f"{TMP}/ompi.n1.{USER}/pid.1/session")
    assert scratch.left() == {f"{TMP}/results"}


def test_epilog_keeps_a_folder_if_it_can_not_be_read(
    scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch.write(f"{SHM}/folder/part")
    real = shutil.which("find")
    play(scratch.root / "bin/find", f'[[ $* != *newerct* ]] || exit 1; exec {real} "$@"')
    assert scratch.left() == {f"{SHM}/folder"}


@pytest.mark.parametrize(("created", "expected"), [(100, 100), (0, 200)])
def test_entries_of_has_creation_time_or_change_time(
    scratch: Scratch, created: int, expected: int
) -> None:
    """A kernel before 5.19 does not know when a file in memory was created."""
    scratch.write(f"{SHM}/file")
    play(scratch.root / "bin/stat", f"printf '{created} 200 %s\\0' \"${{@: -1}}\"")
    entries = [*scratch.fence.entries_of(str(USER), scratch.root / SHM)]
    assert entries == [(f"{scratch.root}/{SHM}/file", expected)]


def test_epilog_of_a_job_without_files_does_not_ask_slurm(scratch: Scratch) -> None:
    """Otherwise, a job of thousands of nodes would send that many requests to the controller."""
    scratch.slurm_answers(f"touch {scratch.root}/asked")
    assert scratch.left() == set()
    assert not (scratch.root / "asked").exists()


def test_without_others_leaves_out_folders_with_older_files_or_other_owners(
    scratch: Scratch,
) -> None:
    scratch.write(f"{SHM}/folder/part")
    since = int(time.time()) + 60
    paths = [str(scratch.root / SHM / "folder")]
    user = str(USER)
    assert scratch.fence.without_others(paths, user, since=JOB_STARTED) != []
    assert scratch.fence.without_others(paths, user, since=since) == []
    assert scratch.fence.without_others(paths, str(USER + 1), since=JOB_STARTED) == []
