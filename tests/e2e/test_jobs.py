"""Jobs of a user: scripts, arrays, logs, waiting, cancelling, failures."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.local.image import DEBIAN, REDHAT
from clusterctl.spec.distributions import redhat_release
from tests.support.cluster import Cluster, records
from tests.support.messages import codes
from tests.support.processes import eventually
from tests.support.terminal import terminal

pytestmark = pytest.mark.platform("real", "debian-13")


def script(cluster: Cluster, name: str, text: str) -> Path:
    path = cluster.runner.cwd / name
    path.write_text(text)
    return path


def test_nodes_have_the_mount_options_of_their_distribution(cluster: Cluster) -> None:
    """systemd-nspawn's /run allows to execute programs, which hid that jobs could not start on real
    machines.
    """
    base = REDHAT if redhat_release() else DEBIAN
    for path, options in base.mounts.items():
        there = cluster.ssh(
            f"{cluster.name}-train-1", f"findmnt --noheadings --output OPTIONS {path}"
        ).strip()
        wanted = {option for option in options.split(",") if "=" not in option}
        assert wanted <= {*there.split(",")}, (path, there)
    release = cluster.ssh(
        f"{cluster.name}-train-1", ". /etc/os-release; echo $ID-$VERSION_ID"
    ).strip()
    kind, options = cluster.ssh(
        f"{cluster.name}-train-1", "findmnt --noheadings --output FSTYPE,OPTIONS --target /tmp"
    ).split()
    in_memory = release in base.tmp_in_memory
    assert (kind == "tmpfs", {"nosuid", "nodev"} <= {*options.split(",")}) == (
        in_memory,
        in_memory,
    ), release


def test_shell_script_runs_in_its_allocation(cluster: Cluster) -> None:
    path = script(
        cluster,
        "hello world.sh",
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --comment=mine\n"
        'srun -n2 --ntasks-per-node=1 hostname\nprintf "<%s>" "$@"\n',
    )
    done = cluster.json("submit", path, "--wait", "--", "a b", "$(id)", "'quoted'")
    run = cluster.run_of(done["job_id"])
    out = (run / "stdout.log").read_text()
    assert {f"{cluster.name}-train-1", f"{cluster.name}-train-2"} <= set(out.splitlines())
    assert "<a b><$(id)><'quoted'>" in out
    assert {p.name for p in (run / "telemetry").iterdir()} == {
        f"{cluster.name}-train-{i}.jsonl" for i in (1, 2)
    }


def test_python_script_gets_the_job_environment_and_all_ranks(cluster: Cluster) -> None:
    path = script(
        cluster,
        "ranks.py",
        "from mpi4py import MPI\nimport socket, sys\nw = MPI.COMM_WORLD\n"
        "print(w.gather((w.rank, w.size, socket.gethostname(), sys.argv[1:]), 0), flush=True)\n",
    )
    done = cluster.json("submit", path, "--nodes", "2", "--wait", "--", "--flag", "x y")
    out = (cluster.run_of(done["job_id"]) / "stdout.log").read_text()
    assert f"(0, 2, '{cluster.name}-train-1', ['--flag', 'x y'])" in out
    assert f"(1, 2, '{cluster.name}-train-2', ['--flag', 'x y'])" in out


CANARY = "hf_canary0123456789abcdefghij"
# Each rank waits, so that the test can search for its secret while it runs.
HAS_SECRET = f"""\
import os, time
while not os.path.exists("go"):
    time.sleep(0.1)
print(os.environ["TOKEN"] == "{CANARY[::-1]}"[::-1], flush=True)
"""
# Prints the processes and the new files of a host that contain a word, as lines of JSON.
SEARCH = """\
import json, os, sys
word = bytes.fromhex(sys.argv[1])
since = float(sys.argv[2])
def content(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        if word in content(f"/proc/{pid}/{name}"):
            print(json.dumps([name, content(f"/proc/{pid}/cmdline").decode(errors="replace")]))
for top, folders, names in os.walk("/"):
    if top == "/":
        folders[:] = {*folders} - {"proc", "sys", "usr"}
    for path in (os.path.join(top, name) for name in names):
        if os.path.isfile(path) and os.stat(path).st_mtime > since and word in content(path):
            print(json.dumps(["file", path]))
"""


def places_of(cluster: Cluster, word: str, since: float) -> list[tuple[str, str]]:
    """Where a word is on the cluster's hosts, in Slurm's records, and on this machine: what, which."""
    hosts = [f"{cluster.name}-{end}" for end in ("ctl", "train-1", "train-2")]
    command = f"sudo python3 -c {shlex.quote(SEARCH)} {word.encode().hex()} {since}"
    found = [
        tuple(json.loads(line))
        for host in hosts
        for line in cluster.ssh(host, command).splitlines()
    ]
    slurm = "scontrol show job --details; sacct --format=ALL --parsable; squeue --format=%all"
    found += [("Slurm", "")] if word in cluster.ssh(hosts[0], slurm) else []
    folders = (cluster.workspace, cluster.runner.cwd)
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return found + [("here", str(path)) for path in files if word.encode() in path.read_bytes()]


def test_secret_is_only_in_the_ranks_and_is_gone_with_the_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Searched on all hosts, in Slurm's records and on this machine, while the job runs and after it."""
    (tmp_path / "token").write_text(f"{CANARY}\n")
    since = time.time() - 1
    words = ["submit", script(cluster, "has_secret.py", HAS_SECRET), "--nodes", "2"]
    job_id = cluster.json(*words, "--secret", f"TOKEN={tmp_path}/token")["job_id"]

    def ranks() -> list[tuple[str, str]]:
        places = places_of(cluster, CANARY, since)
        return places if [what for what, _ in places].count("environ") == 2 else []

    places = eventually(ranks)
    (folder,) = {Path(which).parent for what, which in places if what == "file"}
    assert folder.parent.name == "secrets"
    modes = f"stat --format=%a {folder.parent} {folder} {folder}/environ"
    assert cluster.ssh(f"{cluster.name}-ctl", f"sudo {modes}").split() == ["700", "700", "600"]
    assert {what for what, _ in places} == {"environ", "file"}
    assert all(which.endswith("has_secret.py\0") for what, which in places if what == "environ")
    # A job that is cancelled before its start never runs what removes its values.
    other = cluster.json(*words, "--secret", f"TOKEN={tmp_path}/token", "--slurm=--hold")["job_id"]
    cluster.json("cancel", other)
    assert len({which for what, which in places_of(cluster, CANARY, since) if what == "file"}) == 1
    remote_dir = cluster.job(job_id)["work_dir"]
    cluster.ssh(f"{cluster.name}-ctl", f"sudo touch {remote_dir}/files/go")
    cluster("logs", "-f", job_id)
    run = cluster.run_of(job_id)
    assert (run / "stdout.log").read_text() == "True\nTrue\n"
    assert places_of(cluster, CANARY, since) == []
    assert json.loads((run / "environment.json").read_text())["client"]["job"]["secret"] == [
        "TOKEN"
    ]


LEAVES = """\
#!/bin/bash
setsid --fork sleep 7001 &>/dev/null
env -i setsid --fork sleep 7002 &>/dev/null
"""


def test_daemons_end_with_their_job_and_logins_stay(cluster: Cluster) -> None:
    node = f"{cluster.name}-train-1"
    left = "pgrep -x --list-full sleep | cut -d' ' -f2-"
    cluster.ssh(node, "setsid --fork sleep 7003 &>/dev/null", user="hpc")
    cluster.json(
        "submit", script(cluster, "leaves.sh", LEAVES), "--wait", "--slurm", f"--nodelist={node}"
    )
    try:
        eventually(lambda: cluster.ssh(node, left) == "sleep 7003\n")
    finally:
        cluster.ssh(node, "pkill -x sleep", user="hpc")


LEAVES_FILES = """\
#!/bin/bash
#SBATCH --nodes=2
srun --overlap bash -c 'echo x >/dev/shm/left; mkdir /tmp/left; echo x >/tmp/left/part'
kill -KILL $$
"""


def test_files_in_memory_end_with_their_job(cluster: Cluster) -> None:
    """Also on other nodes of the job. A file that existed before the job stays."""
    nodes = [f"{cluster.name}-train-{number}" for number in (1, 2)]

    def files() -> list[str]:
        look = "cd / && find dev/shm tmp -maxdepth 1 -user hpc"
        return [cluster.ssh(node, look) for node in nodes]

    # Files stay while their owner is logged in, as an earlier test was.
    eventually(lambda: not any(cluster.ssh(node, "pgrep -u hpc || true") for node in nodes))
    # The second in which an earlier job ended counts as that job's.
    idle = cluster.ssh(nodes[0], "date +%s")
    eventually(lambda: cluster.ssh(nodes[0], "date +%s") > idle)
    created = cluster.ssh(nodes[0], "sudo -u hpc touch /dev/shm/staged; date +%s")
    try:
        # Slurm's start of a job is a whole second, and files of that second count as the job's.
        eventually(lambda: cluster.ssh(nodes[0], "date +%s") > created)
        cluster.json("submit", script(cluster, "fills.sh", LEAVES_FILES), "--wait", rc=4)
        eventually(lambda: "left" not in "".join(files()), timeout_s=20)
        assert files() == ["dev/shm/staged\n", ""]
    finally:
        cluster.ssh(nodes[0], "sudo rm -f /dev/shm/staged")


# Names that clusterctl uses, too.
CARRIED = ("telemetry/__init__.py", "hostfile", "job.sbatch")
PROJECT = {
    "proj/job.yaml": "job: scripts/run.sh\n",
    "proj/pyproject.toml": "",
    "proj/config.txt": "lr 0.1\n",
    "proj/src/pkg/__init__.py": "import numpy\n",
    "proj/src/pkg/train.py": "print(open('config.txt').read())\n",
    "proj/scripts/run.sh": """\
#!/bin/bash -l
#SBATCH --nodes=1
srun bash -c 'cd "$SLURM_SUBMIT_DIR" && cat telemetry/__init__.py hostfile job.sbatch'
srun python -m pkg.train
sbatch --wait --output=worker.log --wrap 'echo "inherited <$OMP_NUM_THREADS$MASTER_ADDR>"'
cat worker.log
rm -rf -- *
echo mine >stdout.log
""",
    **{f"proj/{name}": f"{name}\n" for name in CARRIED},
}


def test_project_runs_from_its_own_folder(cluster: Cluster) -> None:
    """Its login shell finds the job's Python, and the job that it submits does not inherit its
    variables.

    It removes and overwrites files in its own folder. clusterctl keeps its logs and records.
    """
    for name, text in PROJECT.items():
        path = cluster.runner.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = cluster.json("submit", "proj/job.yaml", "--wait")
    assert done["source"]["folder"] == str(cluster.runner.cwd / "proj")
    run = cluster.run_of(done["job_id"])
    lines = (run / "stdout.log").read_text().splitlines()
    assert (lines[:4], lines[-1]) == ([*CARRIED, "lr 0.1"], "inherited <>")
    assert (run / "stdout.log.from-job").read_text() == "mine\n"
    assert {path.suffix for path in (run / "telemetry").iterdir()} == {".jsonl"}
    again = cluster.json("replay", done["job_id"], "--wait")["job_id"]
    assert (cluster.run_of(again) / "stdout.log").read_text().splitlines()[:4] == lines[:4]


VARIABLES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT".split()
WHO = f"""\
import os, socket
print("rank", socket.gethostname(), *(os.environ[name] for name in {VARIABLES}), flush=True)
"""


def test_ranks_find_each_other_by_their_variables(cluster: Cluster) -> None:
    """test_no_scheduler.py has the same with mpirun."""
    path = script(cluster, "who.py", WHO)
    job = cluster.json("submit", path, "--nodes", "2", "--wait")["job_id"]
    lines = cluster("logs", job).stdout.splitlines()
    port = 65000 + int(job) % 536
    nodes = [f"{cluster.name}-train-{i}" for i in (1, 2)]
    assert set(lines) == {
        f"rank {node} {i} 2 0 1 {i} {nodes[0]} {port}" for i, node in enumerate(nodes)
    }
    labelled = cluster("logs", job, "--label").stdout.splitlines()
    assert labelled == [
        f"{line.split()[2]}: {line}" for line in sorted(lines, key=lambda line: line.split()[2])
    ]
    assert cluster("logs", job, "--rank", "1", "--follow").stdout.splitlines() == [
        line for line in lines if line.split()[2] == "1"
    ]
    assert "no such rank" in cluster("logs", job, "--rank", "2", rc=2).stderr


@pytest.mark.story
def test_failed_rank_ends_the_job(cluster: Cluster) -> None:
    """test_failures.py has more cases, also with mpirun."""
    path = script(
        cluster,
        "fails.py",
        "from mpi4py import MPI\n"
        "import sys\n"
        "sys.tracebacklimit = 0\n"
        "w = MPI.COMM_WORLD\n"
        "w.Barrier()\n"
        "if w.rank == 1:\n"
        "    raise KeyError('a bug')\n"
        "w.Barrier()\n",
    )
    flags = ("--nodes", "2", "--wait", "--timeout", "1m")
    answer = cluster.json("submit", path, *flags, rc=4)
    (failed,) = answer["failures"]
    assert "KeyError: 'a bug'" in failed["cause"]
    assert "exit code 1" in failed["cause"]
    assert "pmix" not in cluster("logs", answer["job_id"]).stderr.lower()


ENDS = """\
import os, signal, sys, time
from mpi4py import MPI
def save(*_):
    time.sleep(1.5)
    os._exit(75)
world, how = MPI.COMM_WORLD, sys.argv[1]
if how != "end":
    signal.signal(signal.SIGTERM, save)
world.Barrier()
print("ready", flush=True)
if how == "fail" and world.rank == 1:
    os._exit(3)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("launcher", "how", "code"), [("srun", "save", 75), ("mpirun", "end", 143)]
)
def test_exit_code_of_a_job_is_that_of_its_ranks(
    cluster: Cluster, launcher: str, how: str, code: int
) -> None:
    """srun itself would end with 75 after the failure and with 137 after the signal, mpirun with 3
    and 1.
    """
    words = ("submit", script(cluster, "ends.py", ENDS), "--nodes", "2", "--launcher", launcher)
    failed = cluster.json(*words, "--wait", "--", "fail", rc=4)["job_id"]
    assert cluster.json("jobs", failed)["jobs"][0]["exit_code"] == 3
    signalled = cluster.json(*words, "--", how)["job_id"]
    eventually(lambda: cluster("logs", signalled).stdout.count("ready") == 2)
    cluster.ssh(f"{cluster.name}-ctl", f"sudo scancel --batch --signal=TERM {signalled}")
    cluster("logs", signalled, "--follow", rc=4)
    assert cluster.json("jobs", signalled)["jobs"][0]["exit_code"] == code


MAPS_A_FILE = """
import mmap, os, time
with open("data.bin", "wb") as file:
    for _ in range(600):
        file.write(bytes(2**20))
with open("data.bin", "rb") as file:
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
# Longer than the time between two looks of Slurm.
until = time.monotonic() + 12
while time.monotonic() < until:
    assert not any(data[at] for at in range(0, len(data), mmap.PAGESIZE))
os.remove("data.bin")
"""
# Its pages count once, however many processes share them.
FORKS = """
import os, time
data = bytearray(150 * 2**20)
for at in range(0, len(data), 4096):
    data[at] = 1
for _ in range(4):
    if not os.fork():
        sum(data[at] for at in range(0, len(data), 4096))
        time.sleep(12)
        os._exit(0)
assert [os.wait()[1] for _ in range(4)] == [0] * 4
"""


@pytest.mark.parametrize("program", [MAPS_A_FILE, FORKS], ids=["maps", "forks"])
def test_pages_of_files_and_of_other_processes_are_not_a_jobs_memory(
    cluster: Cluster, program: str
) -> None:
    path = script(cluster, "holds.py", program)
    answer = cluster.json("submit", path, "--mem", "300MiB", "--wait")
    assert answer["state"] == "COMPLETED"


@pytest.mark.story
def test_job_out_of_memory_names_the_cause(cluster: Cluster) -> None:
    """test_failures.py has more causes."""
    program = (
        "import time; x = bytearray(10**9); x[::4096] = bytes(len(x) // 4096 + 1); time.sleep(60)"
    )
    answer = cluster.json(
        "submit", script(cluster, "cause.py", program), "--mem", "100MiB", "--wait", rc=4
    )
    assert answer["diagnosis"]["code"] == "out-of-memory"
    assert "100 MiB" in answer["diagnosis"]["cause"]
    # The kernel has ended it.
    assert (answer["state"], answer["exit"]) == ("OUT_OF_MEMORY", "SIGKILL")


def test_job_over_its_time_limit_names_the_cause(cluster: Cluster) -> None:
    path = script(cluster, "slow.sh", "sleep 600\n")
    job = cluster.json("submit", path)["job_id"]
    # Slurm's smallest limit is a minute: shorten the wait by its own means, as the controller's
    # root.
    cluster.ssh(f"{cluster.name}-ctl", f"sudo scontrol update jobid={job} timelimit=0")
    ran = cluster("logs", job, "--follow", rc=5, timeout_s=150)
    assert "TIMEOUT" in ran.stderr


def test_wait_that_times_out_leaves_the_job_running(cluster: Cluster) -> None:
    path = script(cluster, "long.sh", "echo started\nsleep 600\n")
    ran = cluster("submit", path, "--wait", "--timeout", "2s", rc=6)
    (job,) = (job for job in cluster.json("jobs")["jobs"] if job["name"] == "long")
    assert job["state"] in {"RUNNING", "PENDING"}
    assert job["job_id"] in ran.stderr
    cluster("cancel", job["job_id"])
    assert "started" in cluster("logs", job["job_id"], "--follow", rc=5).stdout
    assert cluster.json("jobs", job["job_id"])["jobs"][0]["state"] == "CANCELLED"


HANG = """\
from mpi4py import MPI
import time
world = MPI.COMM_WORLD
for step in range(4):
    print(step, flush=True)
    time.sleep(1)
def wait_for_no_message():
    world.recv(source=1, tag=7)
if world.rank == 0:
    wait_for_no_message()
world.Barrier()
"""


def test_hang_is_reported_with_the_stacks_of_all_ranks(cluster: Cluster) -> None:
    path = script(cluster, "hang.py", HANG)
    job_id = cluster.json("submit", path, "--nodes", "2", "--hang", "warn@2")["job_id"]
    assert eventually(lambda: cluster.json("jobs", job_id)["jobs"][0]["hang"], 90)
    # A pause of the whole machine is also called a hang.
    # That a rank waits in MPI is seen in its stack.
    expected = [(0, "running", "hang.py:8", True), (1, "running", "hang.py:11", True)]

    def places() -> list[tuple[object, ...]]:
        ranks = cluster.json("logs", "--stacks", job_id)["ranks"]
        return [
            (rank["rank"], rank["state"], rank["place"], "libmpi" in "".join(rank["stack"]))
            for rank in ranks
        ]

    eventually(lambda: places() == expected, 90, pause_s=1)
    hanging = eventually(lambda: [job for job in cluster.json("status")["jobs"] if job["hang"]])
    assert [job["job_id"] for job in hanging] == [job_id]
    assert hanging[0]["hang"]["summary"] in cluster("logs", job_id).stderr
    cluster("cancel", job_id)


def test_alarm_of_waiting_for_data_ends_the_job(cluster: Cluster) -> None:
    path = script(
        cluster,
        "waits.py",
        "import json, time\n"
        "while True:\n"
        "    time.sleep(0.5)\n"
        "    with open('metrics.jsonl', 'a') as file:\n"
        "        file.write(json.dumps({'seconds': 0.5, 'data_ms': 400}) + '\\n')\n",
    )
    options = ("--requeue", "--set", "alarm=data=end@12s", "--time", "5m")
    done = cluster.json("submit", path, *options, "--wait", rc=4)
    assert done["diagnosis"]["code"] == "alarm"
    job = cluster.job(done["job_id"])
    assert job["restarts"] == []
    (event,) = [
        event
        for event in records(cluster.run_of(done["job_id"]) / "job.events")
        if event["event"] == "alarm"
    ]
    assert (event["kind"], event["action"]) == ("data", "end")


def test_top_shows_what_each_rank_does(cluster: Cluster) -> None:
    path = script(
        cluster,
        "steps.py",
        "import json, time\nfrom mpi4py import MPI\nw = MPI.COMM_WORLD\n"
        "file = open('metrics.jsonl', 'a') if w.rank == 0 else None\n"
        "for step in range(6000):\n"
        "    end = time.monotonic() + 0.1\n"
        "    while w.rank == 1 and time.monotonic() < end:\n        pass\n"
        "    time.sleep(0.1 if w.rank == 0 else 0)\n"
        "    if file:\n"
        "        print(json.dumps({'step': step, 'loss': 1 / (step + 1)}), file=file, flush=True)\n",
    )
    job_id = cluster.json("submit", path, "--nodes", "2")["job_id"]

    def use() -> dict[str, Any]:
        (found,) = cluster.json("top", job_id)["clusters"]
        return found["jobs"][0]["use"] or {"ranks": [], "progress": {"step": None}}

    def is_shown() -> bool:
        shown = use()
        busy = [rank["cpu_percent"] or 0 for rank in shown["ranks"]]
        return len(busy) == 2 and busy[1] > 5 * busy[0] and shown["progress"]["step"] is not None

    eventually(is_shown)
    nodes = [rank["node"] for rank in use()["ranks"]]
    assert nodes == [f"{cluster.name}-train-{number}" for number in (1, 2)]
    with terminal(cluster.runner, "top", size=(24, 80)) as window:
        window.read_until("RANK")
        window.type("q")
        assert window.end() == 0
    cluster("cancel", job_id)


def test_job_that_renames_itself_hides_no_other(cluster: Cluster) -> None:
    # slurmdbd names a job `allocation` where a step's record came first, so the job waits for its
    # own name.
    ask = "sacct --noheader --jobs=$SLURM_JOB_ID --format=jobname"
    known = f"until {ask} | grep --quiet rename; do sleep 0.2; done\n"
    rename = (
        f"{known}scontrol update jobid=$SLURM_JOB_ID jobname=$'a\\nb|y\\x1f\\x1e\\x1b[31m\\xff'\n"
    )
    job = cluster.json("submit", script(cluster, "rename.sh", rename), "--wait")["job_id"]
    # A submission that was never answered is looked for among all that the accounting has.
    lost = {"token": "lost", "name": "x", "user": cluster.user, "submitted_at": time.time() - 700}
    with (cluster.workspace / "jobs.jsonl").open("a") as ledger:
        ledger.write(json.dumps(lost) + "\n")
    named = {one["job_id"]: one["name"] for one in cluster.json("jobs")["jobs"]}
    name = "a\nb|y\x1f\x1e\x1b[31m"
    assert named[job] == name + "\N{REPLACEMENT CHARACTER}"
    assert job in cluster("jobs").stdout
    cluster("status")
    (accounted,) = json.loads((cluster.run_of(job) / "sacct.json").read_text())["jobs"]
    assert accounted["name"] == name + "?"


@pytest.fixture
def no_accounting(cluster: Cluster) -> Iterator[None]:
    """slurmdbd is stopped, and slurmctld forgets a job two seconds after its end."""
    controller = f"{cluster.name}-ctl"
    conf = "/etc/slurm/slurm.conf"
    cluster.ssh(controller, f"echo MinJobAge=2 | sudo tee -a {conf} && sudo scontrol reconfigure")
    cluster.ssh(controller, "sudo systemctl stop slurmdbd")
    yield
    cluster.ssh(controller, "sudo systemctl start slurmdbd")
    cluster.ssh(controller, f"sudo sed -i '$d' {conf} && sudo scontrol reconfigure")
    eventually(lambda: not cluster.json("status")["accounting_failure"])


def test_final_states_without_accounting(cluster: Cluster, no_accounting: None) -> None:
    """States are read from the records of jobs, also for arrays, cancelled jobs, and after a node
    was down.
    """
    endless = "trap '' TERM; touch ready; while :; do sleep 1; done\n"
    bodies = {
        "good": "true\n",
        "bad": "exit 3\n",
        "killed": "kill -9 $PPID\n",
        "endless": endless,
        "tasks": "exit $SLURM_ARRAY_TASK_ID\n",
        "late": "#!/bin/bash\n#SBATCH --begin=now+1hour\ntrue\n",
    }
    jobs = {
        name: cluster.json("submit", script(cluster, f"{name}.sh", body), *flags)["job_id"]
        for name, body in bodies.items()
        for flags in [["--array", "0-1"] if name == "tasks" else []]
    }
    restarted = cluster.json(
        "submit", script(cluster, "again.sh", "[ -e ran ] || { touch ran; sleep 600; }\n")
    )["job_id"]
    states = lambda job: [one["state"] for one in cluster.json("jobs", job)["jobs"]]  # noqa: E731
    eventually(lambda: states(jobs["endless"]) == states(restarted) == ["RUNNING"])
    (node,) = cluster.json("jobs", restarted)["jobs"][0]["nodes"]
    ended = cluster.json("jobs", jobs["endless"])["jobs"][0]
    folder = ended["work_dir"]
    eventually(
        lambda: cluster.ssh(f"{cluster.name}-ctl", f"ls {folder}/files", user=cluster.user, rc=None)
    )
    cluster("cancel", jobs["endless"], jobs["late"])
    eventually(lambda: states(jobs["endless"]) != ["RUNNING"])
    cluster.ssh(
        f"{cluster.name}-ctl", f"sudo scontrol update nodename={node} state=down reason=test"
    )
    eventually(lambda: cluster.json("jobs", restarted)["jobs"][0]["restarts"])
    queued = "squeue --noheader --states=all"
    eventually(lambda: not cluster.ssh(f"{cluster.name}-ctl", queued).strip(), 300)
    ends = {
        job["job_id"]: (job["state"], job["exit_code"])
        for job_id in (*jobs.values(), restarted)
        for job in cluster.json("jobs", job_id)["jobs"]
    }
    assert ends == {
        jobs["good"]: ("COMPLETED", 0),
        jobs["bad"]: ("FAILED", 3),
        jobs["killed"]: ("FAILED", None),
        jobs["endless"]: ("CANCELLED", None),
        f"{jobs['tasks']}_0": ("COMPLETED", 0),
        f"{jobs['tasks']}_1": ("FAILED", 1),
        jobs["late"]: ("CANCELLED", None),
        restarted: ("COMPLETED", 0),
    }
    assert cluster.json("jobs")["unlisted"] == 0
    assert cluster.json("collect", jobs["good"])["runs"][0]["state"] == "COMPLETED"


def test_array_keeps_its_tasks_apart(cluster: Cluster) -> None:
    path = script(
        cluster,
        "sweep.sh",
        'echo "task $SLURM_ARRAY_TASK_ID"; echo x > result.txt\n'
        'echo "{\\"loss\\": $SLURM_ARRAY_TASK_ID}" >metrics.jsonl\n',
    )
    done = cluster.json("submit", path, "--array", "1-3", "--wait")
    run = cluster.run_of(done["job_id"])
    for i in (1, 2, 3):
        assert (run / f"stdout-{i}.log").read_text() == f"task {i}\n"
        assert (run / f"task-{i}" / "result.txt").is_file()
    tasks = json.loads((run / "run.json").read_text())["tasks"]
    assert {task["id"]: task["metrics"]["loss"]["last"] for task in tasks} == {
        f"{done['job_id']}_{i}": float(i) for i in (1, 2, 3)
    }


TRIES = """\
import argparse, json, os, random
parser = argparse.ArgumentParser()
for name in ("base", "lr", "seed"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
values = {"lr": args.lr, "seed": args.seed}
assert os.environ["SWEEP_LR"] == args.lr
if "SLURM_ARRAY_TASK_ID" in os.environ:
    assert json.load(open("sweep-values.json")) == values
if args.lr == "1" and not os.path.exists(os.path.expanduser("~/ready")):
    raise SystemExit(3)
noise = random.Random(args.seed)
with open("metrics.jsonl", "w") as file:
    for step in range(1, 41):
        loss = float(args.lr) + int(args.seed) + noise.random() * (40 - step)
        file.write(json.dumps({"step": step, "val_loss": loss}) + "\\n")
"""


def test_sweep_reruns_failed_tasks_and_replays_the_best_one(cluster: Cluster) -> None:
    path = script(cluster, "tries.py", TRIES)
    grid = ("--sweep", "lr=0.1,0.01,1", "--sweep", "seed=0..1")
    ran = cluster("submit", path, *grid, "--wait", "--", "--base", "7", rc=4)
    job = ran.stderr.partition("submitted job ")[2].split()[0]
    assert f"best: {job}_2 lr=0.01 seed=0: val_loss 0.01" in ran.stdout
    assert f"job {job}_4 (tries) failed: " in ran.stderr
    line = next(
        one for one in cluster("jobs").stdout.splitlines() if one.startswith(f"{job} (6 tasks)")
    )
    assert "4 COMPLETED, 2 FAILED" in line
    ranking = cluster.json("runs", "--sweep", job)["runs"]
    assert [row["job"] for row in ranking] == [f"{job}_{task}" for task in (2, 0, 3, 1, 4, 5)]
    assert (ranking[0]["config"], ranking[-1]["state"]) == (
        {"base": 7, "lr": 0.01, "seed": 0},
        "FAILED",
    )
    assert not_the_same(cluster, f"{job}_0", f"{job}_1") == ["seed"]

    path.write_text("raise SystemExit('this is not what was sent')\n")
    cluster("ssh", "--", "touch", "ready")
    again = cluster.json("replay", job, "--failed", "--wait")
    rerun = again["job_id"]
    jobs = [f"{job}_2", f"{job}_0", f"{rerun}_4", f"{job}_3", f"{job}_1", f"{rerun}_5"]
    for ranking in (again["sweep"]["runs"], cluster.json("runs", "--sweep", job)["runs"]):
        assert [row["job"] for row in ranking] == jobs
        assert {row["state"] for row in ranking} == {"COMPLETED"}
    assert "nothing was submitted" in cluster("replay", job, "--failed").stdout

    winner = cluster("replay", f"{job}_2", "--wait")
    assert winner.stdout.endswith("identical over 40 steps\n")
    assert not_the_same(cluster, f"{job}_2", winner.stdout.split()[1]) == []
    changed = cluster.json("replay", f"{job}_2", "--set", "seed=1", "--wait")
    assert (changed["losses"]["identical"], changed["losses"]["first"]) == (False, 1)
    assert not_the_same(cluster, f"{job}_2", changed["job_id"]) == ["seed"]


def test_staged_files_are_on_the_disk_of_each_node(cluster: Cluster) -> None:
    path = script(
        cluster, "staged.sh", 'srun -n2 sh -c "readlink /var/tmp/data; cat /var/tmp/data/a"\n'
    )
    cluster("ssh", "--", "mkdir -p data && echo first >data/a && mkdir data/deep")
    flags = ("--nodes", "2", "--set", "stage=~/data:/var/tmp/data", "--wait")
    submitted = [cluster.json("submit", path, *flags) for _ in range(2)]
    first, again = (cluster.run_of(job["job_id"]) for job in submitted)
    for run in (first, again):
        links = [line for line in (run / "stdout.log").read_text().splitlines() if line[:1] == "/"]
        assert len(links) == 2
        assert all("/.clusterctl-staged-" in link for link in links)
        assert (run / "stdout.log").read_text().count("first\n") == 2
    assert (first / "stdout.log").read_text().count(", copied in ") == 2
    assert (again / "stdout.log").read_text().count("by an earlier job") == 2
    assert [one for one in records(first / "job.events") if one["event"] == "staged"]
    missing = cluster.json("submit", path, "--set", "stage=/nowhere:/var/tmp/data", "--wait", rc=4)
    assert missing["diagnosis"]["code"] == "not-staged"


def test_each_node_gets_its_share_of_staged_shards(cluster: Cluster) -> None:
    prints = 'srun -n2 sh -c "cat /var/tmp/shards/*.tar | paste -sd,"\n'
    path = script(cluster, "shards.sh", prints)
    make = "mkdir -p shards && for n in 0 1 2 3 4; do echo $n >shards/s-$n.tar; done"
    cluster("ssh", "--", make)
    stage = "~/shards/s-{0..4}.tar:/var/tmp/shards:by-node"
    run = cluster.run_of(
        cluster.json("submit", path, "--nodes", "2", "--set", f"stage={stage}", "--wait")["job_id"]
    )
    lines = (run / "stdout.log").read_text().splitlines()
    assert sorted(line for line in lines if line[:1].isdigit()) == ["0,2,4", "1,3"]


PACKED = """\
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=int)
lr = parser.parse_args().lr
assert json.load(open("sweep-values.json")) == {"lr": str(lr)} == {"lr": os.environ["SWEEP_LR"]}
assert (os.environ["SLURM_NTASKS"], os.environ["WORLD_SIZE"]) == ("1", "1")
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
if not os.path.exists("seen"):
    open("seen", "w")
    if lr == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if lr == 4:
        open(os.path.expanduser("~/packed-waits"), "w")
        time.sleep(300)
if lr == 3:
    raise SystemExit(5)
print("task", os.environ["SLURM_ARRAY_TASK_ID"], "of", lr)
with open("metrics.jsonl", "w") as file:
    file.write(json.dumps({"step": 1, "val_loss": lr}) + "\\n")
"""


def test_packed_sweep_goes_on_after_a_requeue_and_ranks_its_tasks(cluster: Cluster) -> None:
    path = script(cluster, "packed.py", PACKED)
    flags = ("--sweep", "lr=0..7", "--pack", "--nodes", "2", "--requeue")
    job = cluster.json("submit", path, *flags)["job_id"]
    # As Slurm does before the time limit.
    notice = f"sudo scancel --batch --signal=USR1 {job}"
    waits = f"until sudo test -e ~{cluster.user}/packed-waits; do sleep 0.1; done"
    cluster.ssh(f"{cluster.name}-ctl", f"{waits}; {notice}")
    cluster.job_in("PENDING", job)
    cluster("logs", job, "--follow", rc=4, timeout_s=180)
    run = cluster.run_of(job)
    ends = records(run / "packed.jsonl")
    succeeded = [end["task"] for end in ends if end["status"] == 0]
    assert sorted(succeeded) == [0, 1, 2, 4, 5, 6, 7]
    assert {end["node"] for end in ends} == {f"{cluster.name}-train-{number}" for number in (1, 2)}
    assert [end["status"] for end in ends if end["task"] == 2] == [-9, 0]
    assert {end["status"] for end in ends if end["task"] == 3} == {5}
    ranking = cluster.json("runs", "--sweep", job)["runs"]
    order = [(row["job"], row["state"]) for row in ranking]
    assert order == [
        *((f"{job}_{task}", "COMPLETED") for task in (0, 1, 2, 4, 5, 6, 7)),
        (f"{job}_3", "FAILED"),
    ]
    assert cluster("logs", f"{job}_5").stdout == "task 5 of 5\n"
    record = json.loads((run / "run.json").read_text())
    assert record["diagnosis"]["facts"]["not_restarted"] == "no-progress"


def not_the_same(cluster: Cluster, a: str, b: str) -> list[str]:
    """Return the differences that `runs diff` names, without the results."""
    found = cluster.json("runs", "diff", a, b)["differences"]
    return [one["key"] for one in found if one["section"] != "result"]


def test_submit_flags_replace_only_the_same_options_of_a_script(cluster: Cluster) -> None:
    lines = (
        "#SBATCH -N2 -n1 --time=7 --mem-per-cpu=300M\n"
        "#SBATCH --gres=gpu:1 --nice=3  # one line more"
    )
    body = "echo $SLURM_JOB_NUM_NODES $SLURM_NTASKS $SLURM_MEM_PER_NODE $(hostname) | tee facts; sleep 2"
    path = script(cluster, "own.sh", f"#!/bin/bash\n{lines}\n{body}\n")
    assert "--ntasks=1" in cluster("submit", path, "--nodes", "2", rc=2).stderr
    node, other = (f"{cluster.name}-train-{number}" for number in (2, 1))
    assert f"--slurm --exclude={other}" in cluster("submit", path, "--exclude", other, rc=2).stderr
    flags = "--nodes 1 --tasks-per-node 1 --mem 200M --gpus 0".split()
    first = cluster.json("submit", path, *flags, "--slurm", f"--exclude={other}")["job_id"]
    reader = script(cluster, "reader.sh", '#!/bin/bash\nsrun cat "$CLUSTERCTL_AFTER_1/facts"\n')
    second = cluster.json("submit", reader, "--after", first, "--slurm", f"-w {node}", "--wait")[
        "job_id"
    ]
    for job_id in (first, second):
        assert (cluster.run_of(job_id) / "stdout.log").read_text() == f"1 1 200 {node}\n"
    assert cluster.sacct(first, "Timelimit") == "00:07:00"
    assert cluster.sacct(second, "Start") >= cluster.sacct(first, "End")
    assert cluster.sacct(second, "NodeList") == node
    impossible = cluster("-o", "json", "submit", "probe", "--after", f"{first}:notok", rc=2)
    assert codes(impossible) == ["job-unfit/dependency"]


def test_submit_of_a_job_that_slurm_cannot_run_is_refused_with_a_fix(cluster: Cluster) -> None:
    refusal = cluster("submit", "probe", "--account", "nope", "--gpus", "1", rc=1).stderr.lower()
    assert [word for word in ("sacctmgr", "leave out --gpus") if word not in refusal] == []
    old = script(cluster, "old.sh", "#SBATCH --cpus-per-task=9999\n#SBATCH -N9 -p gone\ntrue\n")
    unfit = cluster("-o", "json", "submit", old, rc=2)
    assert codes(unfit) == ["not-found/partition", "job-unfit/nodes", "job-unfit/node-size"]


def test_qos_account_and_resources_reach_slurm(cluster: Cluster) -> None:
    flags = [
        "--qos",
        "urgent",
        "--account",
        "default",
        "--cpus",
        "1",
        "--mem",
        "200M",
        "--time",
        "5m",
    ]
    done = cluster.json(
        "submit", "probe", *flags, "--partition", "train", "--constraint", "train", "--wait"
    )
    shown = cluster.sacct(done["job_id"], "QOS,Account,ReqMem,Timelimit,Partition")
    assert shown == "urgent|default|200M|00:05:00|train"


def test_status_list_and_ssh(cluster: Cluster) -> None:
    status = cluster.json("status")
    assert status["ready"]
    other, node = (f"{cluster.name}-train-{i}" for i in (1, 2))
    assert {one["name"] for one in status["nodes"]} == {other, node}
    assert status["kept"]["store"]["number"] > 0
    assert cluster.name in cluster("list").stdout
    assert cluster("ssh", node, "--", "hostname").stdout.strip() == node
    assert cluster("ssh", "--", "echo", "a  b").stdout == "a  b\n"
    assert cluster("ssh", node, "--", "id -un | cat").stdout == f"{cluster.user}\n"
    assert cluster("ssh", "--admin", "id -un | cat").stdout == "clusterctl\n"
    assert node in cluster("ssh", "nowhere", rc=2).stderr


def test_proof_partition_is_hidden_and_closed_to_users(cluster: Cluster) -> None:
    controller = f"{cluster.name}-ctl"
    assert "clusterctl-proof" not in cluster.ssh(controller, "sinfo -h -o %R", user=cluster.user)
    done = cluster.ssh(
        controller, "srun -p clusterctl-proof hostname 2>&1", user=cluster.user, rc=None
    )
    assert "access" in done.lower() or "invalid" in done.lower() or "not permitted" in done.lower()
