"""A cluster without scheduler: mpirun over SSH, one job at a time, each a systemd unit."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, raised, records
from tests.support.messages import codes, condition
from tests.support.nvidia import machines
from tests.support.nvidia.machines import becomes
from tests.support.processes import eventually

pytestmark = pytest.mark.platform("real", "no-scheduler")

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions:
  - {{name: train, nodes: 2}}
scheduler: none
software: {{cupy: false}}
monitoring: {{interval: 1s}}
"""
# What the shell script starts must be ended with it, on the other node too.
SLEEPER = """\
#!/bin/bash
echo "first $(hostname)"
mpirun --map-by ppr:1:node bash -c 'echo "rank $(hostname)"; exec -a sleeper-of-the-test sleep 600'
"""
FAILS = """\
import sys
from mpi4py import MPI
sys.tracebacklimit = 0
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    raise KeyError("a bug")
MPI.COMM_WORLD.Barrier()
"""
SLURMS = ("slurmctld", "slurmd", "slurmdbd", "munge", "mariadb")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, the second with a GPU, up and verified by mpirun."""
    name = f"m{secrets.token_hex(3)}"
    home = tmp_path_factory.mktemp("plain home")
    cwd = tmp_path_factory.mktemp("plain cwd")
    cards = {f"{name}-train-2": machines.rtx_4070()}
    with raised(name, SPEC.format(name=name), home, cwd, cards) as one:
        (cwd / "work").mkdir()
        yield one


@pytest.fixture
def script(plain: Cluster) -> Any:
    def write(name: str, text: str) -> Path:
        path = plain.runner.cwd / "work" / name
        path.write_text(text)
        return path

    return write


def nodes(cluster: Cluster) -> list[str]:
    return [f"{cluster.name}-train-{i}" for i in (1, 2)]


def processes(cluster: Cluster, host: str) -> str:
    return cluster.ssh(host, "ps -e -o args=")


def test_up_was_proven_by_mpirun_and_nothing_of_slurm_runs(plain: Cluster) -> None:
    assert plain.raised["probed"] == plain.raised["nodes"] == nodes(plain)
    status = plain.json("status")
    assert status["ready"]
    assert [node["state"] for node in status["nodes"]] == ["idle", "idle"]
    for host in (f"{plain.name}-ctl", *nodes(plain)):
        running = processes(plain, host)
        assert not [word for word in SLURMS if word in running], running
        assert (
            "active"
            not in plain.ssh(host, f"systemctl is-active {' '.join(SLURMS)}", rc=None).split()
        )
        enabled = plain.ssh(host, f"systemctl is-enabled {' '.join(SLURMS)}", rc=None)
        assert set(enabled.split()) == {"disabled"}
        configured = "sudo ls /etc/slurm/slurm.conf /etc/slurm/gres.conf /etc/slurm/slurmdbd.conf"
        assert plain.ssh(host, configured, rc=None) == ""


def test_ssh_keys_of_job_users_reach_the_hosts_of_the_cluster_only(plain: Cluster) -> None:
    config = "/etc/clusterctl/mpi/ssh_config"
    one, two = nodes(plain)
    assert plain.ssh(one, f"ssh -F {config} {two} hostname", user=plain.user).strip() == two
    key = plain.ssh(one, "cat .ssh/authorized_keys", user=plain.user).splitlines()[-2]
    options = key.partition(" ssh-ed25519")[0]
    assert options.startswith('restrict,from="')
    assert len(options.split('"')[1].split(",")) == 3
    # The admin has no key, and an address of a host under another name is not trusted.
    as_admin = f"ssh -F {config} {two} true && echo in"
    assert plain.ssh(one, as_admin, rc=None) == ""
    unknown = f"ssh -F {config} -o HostKeyAlias=else {two} true 2>/dev/null && echo in"
    assert plain.ssh(one, unknown, user=plain.user, rc=None) == ""


def test_training_on_two_nodes_is_collected(plain: Cluster) -> None:
    done = plain.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "2")
    assert done["job_id"] == "m1"
    assert done["state"] == "COMPLETED"
    run = plain.run_of("m1")
    assert run.name == f"{plain.name}-m1-train"
    record = json.loads((run / "run.json").read_text())
    assert (record["scheduler"], record["state"], record["job_id"]) == ("none", "COMPLETED", "m1")
    assert record["nodes"] == nodes(plain)
    assert not (run / "sacct.json").exists()
    assert (run / "job.hosts").read_text() == "".join(f"{node} slots=1\n" for node in nodes(plain))
    (start,) = (line for line in records(run / "metrics.jsonl") if line["kind"] == "run")
    assert [rank["host"] for rank in start["ranks"]] == nodes(plain)
    for node in nodes(plain):
        assert records(run / "telemetry" / f"{node}.jsonl")[0]["host"] == node
    complaints = run / "telemetry.log"
    assert not complaints.exists(), complaints.read_text()


WHO = """\
import os, socket
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT TOKEN"
print("rank", socket.gethostname(), *(os.environ[name] for name in names.split()), flush=True)
"""


def test_ranks_find_each_other_by_their_variables(
    plain: Cluster, script: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("canary-here\n")
    words = ["submit", script("who.py", WHO), "--nodes", "2", "--tasks-per-node", "2", "--wait"]
    job = plain.json(*words, "--secret", f"TOKEN={tmp_path}/token")["job_id"]
    left = "find ~/clusterctl/secrets -type f"
    assert "".join(plain.ssh(node, left, user=plain.user) for node in nodes(plain)) == ""
    first = nodes(plain)[0]
    port = 65000 + int(job.removeprefix("m")) % 536
    assert set(plain("logs", job).stdout.splitlines()) == {
        f"rank {host} {2 * node + local} 4 {local} 2 {node} {first} {port} canary-here"
        for node, host in enumerate(nodes(plain))
        for local in (0, 1)
    }
    (third,) = plain("logs", job, "--rank", "2").stdout.splitlines()
    assert third.startswith(f"rank {nodes(plain)[1]} 2 4 ")


def test_unhealthy_node_gets_no_job_until_it_is_healthy(plain: Cluster, script: Any) -> None:
    path = script("says.sh", "#!/bin/bash\necho here\n")
    unhealthy = nodes(plain)[1]
    sh = partial(plain.ssh, unhealthy)
    becomes(sh, machines.hot())
    refused = plain("-o", "json", "submit", path, "--nodes", "2", rc=1)
    (failure,) = refused.json["failures"]
    assert (condition(failure), failure["host"]) == ("host-unfit/health", unhealthy)
    assert failure["cause"].startswith("GPU 0: 96 C")
    becomes(sh, machines.rtx_4070())
    assert plain.json("submit", path, "--nodes", "2", "--wait")["state"] == "COMPLETED"


def test_error_of_one_rank_ends_the_job(plain: Cluster, script: Any) -> None:
    path = script("fails.py", FAILS)
    flags = ("--nodes", "2", "--wait", "--timeout", "1m")
    failed = plain("-o", "json", "submit", path, *flags, rc=4)
    assert codes(failed) == ["job-failed"]
    found = failed.json["diagnosis"]
    # Without its traceback, an exception is a line like any other.
    assert (condition(found), found["rank"], found["host"]) == ("exit-code", 1, nodes(plain)[1])
    assert found["lines"] == ["KeyError: 'a bug'"]
    assert plain.job(failed.json["job_id"])["exit_code"] == found["exit_code"] == 1
    assert not [host for host in nodes(plain) if "fails.py" in processes(plain, host)]


def test_jobs_run_one_at_a_time_and_cancel_ends_all_ranks(plain: Cluster, script: Any) -> None:
    path = script("sleeper.sh", SLEEPER)
    first = plain.json("submit", path, "--nodes", "2")["job_id"]
    refused = plain("-o", "json", "submit", "train", rc=1)
    (failure,) = refused.json["failures"]
    assert condition(failure) == "in-use/hosts"
    assert first in failure["cause"]
    assert plain.user in failure["cause"]
    again = plain.json("up")
    assert (again["probed"], again["not_probed"]) == ([], nodes(plain))
    assert [node["state"] for node in plain.json("status")["nodes"]] == ["allocated", "allocated"]
    eventually(lambda: plain("logs", first).stdout.count("rank ") >= 2)
    assert set(plain("logs", first).stdout.split()) == {"first", "rank", *nodes(plain)}
    assert all("sleeper-of-the-test" in processes(plain, node) for node in nodes(plain))
    assert plain.json("cancel", first)["cancelled"] == [first]
    assert plain.job_in("CANCELLED", first)["reason"] == ""
    eventually(
        lambda: not any("sleeper-of-the-test" in processes(plain, node) for node in nodes(plain))
    )


def test_time_limit_and_a_lost_node_end_a_job(plain: Cluster, script: Any) -> None:
    path = script("sleeper.sh", SLEEPER)
    limited = plain("-o", "json", "submit", path, "--time", "0:03", "--wait", rc=5).json
    assert "TIMEOUT" in limited["failures"][0]["cause"]
    lost = plain.json("submit", path, "--nodes", "2")["job_id"]
    plain.ssh(nodes(plain)[0], "sudo systemctl reboot -ff", rc=None)
    assert plain.json("up")["probed"] == nodes(plain)
    ended = plain.job(lost)
    assert (ended["state"], ended["exit_code"]) == ("NODE_FAIL", None)
    assert plain.json("submit", "probe", "--nodes", "2", "--wait")["state"] == "COMPLETED"


def test_options_that_need_slurm_are_refused_by_name(plain: Cluster, script: Any) -> None:
    refused = plain("submit", "train", "--qos", "urgent", "--array", "1-3", rc=2).stderr
    assert "--qos, --array" in refused
    directives = script("directives.sh", "#!/bin/bash\n#SBATCH --nodes=2\ntrue\n")
    assert "#SBATCH --nodes=2" in plain("submit", directives, rc=2).stderr
    assert codes(plain("-o", "json", "submit", "train", "--nodes", "3", rc=2)) == [
        "job-unfit/nodes"
    ]
    assert "needs Slurm" in plain("shell", "--", "true", rc=2).stderr
    spec = plain.runner.cwd / "slurm.yaml"
    spec.write_text(plain.spec.read_text().replace("scheduler: none", "scheduler: slurm"))
    assert "`scheduler: none`" in plain.runner("-f", spec, "up", rc=2).stderr


SAVES = """\
#!/bin/bash
mkdir -p out/checkpoint-{1,3} ~/models
head -c 3000000 /dev/urandom >out/checkpoint-1/weights
head -c 2000000 /dev/urandom >out/checkpoint-3/weights
head -c 1000000 /dev/urandom >~/models/final.pt
echo kept >/var/tmp/kept.txt
"""


def test_down_refuses_only_copies_until_they_are_collected(
    plain: Cluster, script: Any, tmp_path: Path
) -> None:
    """A checkpoint that `collect` skips, a file in the home, one on the disk of a node, and a
    running job.
    """
    job = plain.json("submit", script("saves.sh", SAVES), "--wait")["job_id"]
    run = plain.run_of(job)
    assert (run / "out/checkpoint-3/weights").stat().st_size == 2000000
    (tmp_path / "set.txt").write_text("sent, so here already\n")
    plain("put", tmp_path / "set.txt")
    sleeper = plain.json("submit", script("sleeper.sh", SLEEPER), "--nodes", "2")["job_id"]

    refused = plain.json("down", "--yes", rc=1)["failures"]
    assert {condition(one) for one in refused} == {"would-lose/files"}
    causes = [one["cause"] for one in refused]
    assert causes[0].startswith(f"job {sleeper} (sleeper) of {plain.user} is RUNNING")
    assert causes[1].startswith(f"files of job {job} (saves): 2.9 MiB")
    assert causes[2].startswith(f"/shared/home/{plain.user}/models: 976.6 KiB")
    assert "/var/tmp/kept.txt on " in "".join(causes[3:])
    assert not any("set.txt" in cause for cause in causes)

    plain("cancel", sleeper)
    plain("logs", sleeper, "--follow", rc=5)
    folders = [Path(folder) for folder in plain.json("collect", "--all")["folders"]]
    assert folders[0].name == f"{plain.name}-home-{plain.user}"
    assert (run / "out/checkpoint-1/weights").stat().st_size == 3000000
    assert (folders[0] / "models/final.pt").stat().st_size == 1000000
    (disk,) = folders[1:]
    assert (disk / "var/tmp/kept.txt").read_text() == "kept\n"
    assert "cleanup verified" in plain("down", "--yes").stdout
    assert not plain.workspace.exists()
