"""The upgrade in place from Debian 13's Slurm 24.11 to 26.05, its failures, and the way back."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.cluster import Cluster, raised
from tests.support.cut_off import POINTS, cut_off, held_at
from tests.support.sweeps import in_sweep

pytestmark = pytest.mark.platform("real", "slurm-26.05")
SPEC = """\
version: 1
name: {name}
provider: {{type: local, distribution: debian-13}}
partitions:
  - {{name: train, nodes: 2}}
monitoring: {{interval: 1s}}
slurm: {{qos: [{{name: urgent, priority: 100}}]{version}}}
"""


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"t{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("newer home"), tmp_path_factory.mktemp("newer cwd")
    with raised(name, SPEC.format(name=name, version=""), home, cwd) as one:
        assert one.sacct("1", "State") == "COMPLETED"  # what the accounting is to keep
        yield one


WAITS = """\
#!/bin/bash
until [[ -e $HOME/go ]]; do sleep 0.2; done
srun --version
"""
UNTIL = "timeout 90 bash -c 'until [[ {} ]]; do sleep 0.3; done'"
RANKS = """\
#!/bin/bash
srun {options} python3 -c '
import os, time
from mpi4py import MPI
world = MPI.COMM_WORLD
while not os.path.exists(os.path.expanduser("~/go")):
    time.sleep(0.2)
print("a world of", world.allreduce(1))'
"""
ENDED = """
select id_step, step_name, step.state, step.exit_code, step.time_start, step.time_end, id_job, job_name,
    account, `partition`, job.nodelist, cpus_req, job.state, job.exit_code, time_submit, job.time_start,
    job.time_end
from {cluster}_job_table job left join {cluster}_step_table step using (job_db_inx) where job.time_end > 0
"""
QUICK = "for i in {{1..{count}}}; do sbatch --parsable --output=/dev/null --wrap='srun hostname'; done"


def version_of(cluster: Cluster, host: str) -> str:
    """The release of the daemon that runs on a host, by the program that it was started from."""
    daemon = "slurmctld" if host == f"{cluster.name}-ctl" else "slurmd"
    said = cluster.ssh(host, f"sudo /proc/$(systemctl show -P MainPID {daemon})/exe -V")
    return said.split()[1].rpartition(".")[0]


def with_release(cluster: Cluster, release: str) -> None:
    cluster.spec.write_text(SPEC.format(name=cluster.name, version=f', version: "{release}"'))


def accounting(cluster: Cluster) -> tuple[set[str], str]:
    """What slurmdbd knows: jobs that have ended with their steps; associations and qualities of service.

    Jobs as its tables have them: sacct of two releases says the same row in different words.
    """
    steps = shlex.quote(ENDED.format(cluster=cluster.name))
    kept = (
        "sacctmgr -nP show assoc format=cluster,account,user,partition,share,qos,defaultqos",
        "sacctmgr -nP show qos format=name,priority,maxwall,flags",
        "sacctmgr -nP show user format=user,admin",
    )
    asked = (f"sudo mariadb --batch --skip-column-names slurm_acct_db --execute {steps}", "; ".join(kept))
    ran, rest = (cluster.ssh(f"{cluster.name}-ctl", one) for one in asked)
    assert "urgent|100" in rest
    assert "\n0\t" in f"\n{ran}"  # a step
    return {*ran.splitlines()}, rest


@contextmanager
def jobs_at_work(
    cluster: Cluster, *, waiting: int, by_pmix: bool = False, may_restart: bool = False
) -> Iterator[list[str]]:
    """Two jobs that run and others that wait; after the body they go on, and all must complete, once.

    The accounting keeps what it had. ``by_pmix``: the second that runs is an MPI program under PMIx.
    ``may_restart``: those that ran may wait, or run again.
    """
    controller, cwd = f"{cluster.name}-ctl", cluster.runner.cwd
    scripts = [cwd / "waits.sh", cwd / ("ranks.sh" if by_pmix else "waits.sh")]
    (cwd / "ranks.sh").write_text(RANKS.format(options="--mpi=pmix"))
    scripts[0].write_text(WAITS)
    cluster.ssh(controller, UNTIL.format("-z $(squeue -h)"))  # after a way back, jobs run again
    cluster.ssh(controller, "rm -f go", user=cluster.user)
    before, kept = accounting(cluster)
    running = [cluster.json("submit", script, "--nodes", "1")["job_id"] for script in scripts]
    cluster.ssh(controller, UNTIL.format("$(squeue -h -t running | wc -l) == 2"))
    queued = cluster.ssh(controller, QUICK.format(count=waiting), user=cluster.user).split()
    yield running
    states = {job["job_id"]: job["state"] for job in cluster.json("jobs", *running, *queued)["jobs"]}
    if not may_restart:
        assert states == dict.fromkeys(running, "RUNNING") | dict.fromkeys(queued, "PENDING")
    cluster.ssh(controller, "touch go", user=cluster.user)
    cluster.ssh(controller, UNTIL.format("-z $(squeue -h)"))
    for job in (*running, *queued):
        state, restarts = cluster.sacct(job, "State,Restarts").split("|")
        assert (state, may_restart or restarts == "0") == ("COMPLETED", True), job
    after, still = accounting(cluster)
    assert before <= after, before - after
    assert still == kept


def test_slurm_is_upgraded_in_place_and_no_job_is_lost(newer: Cluster) -> None:
    hosts = [f"{newer.name}-{host}" for host in ("ctl", "train-1", "train-2")]
    with_release(newer, "26.05")
    with jobs_at_work(newer, waiting=20, by_pmix=True) as running:
        by_pmix = newer.json("submit", "train", "--nodes", "2")["job_id"]
        (failure,) = newer.json("up", rc=2)["failures"]
        named = f"{running[1]} (ranks, running)", f"{by_pmix} (train, waiting)"
        assert failure["cause"].startswith("jobs start ranks by PMIx: ")
        assert all(one in failure["cause"] for one in named), failure
        assert {version_of(newer, host) for host in hosts} == {"24.11"}
        newer("cancel", by_pmix)

        planned = newer.json("plan")
        steps = [row["what"] for row in planned["changes"] if row["kind"] == "slurm"]
        assert steps[0] == "Slurm 24.11 is upgraded to 26.05 in place: waiting and running jobs are kept"
        (refused,) = (note for note in planned["notes"] if "`up` refuses this" in note)
        assert named[0] in refused
        assert any("a plain srun starts fails in MPI_Init" in note for note in planned["notes"])
        newer("up", "--force")  # a step that runs goes on
        assert {version_of(newer, host) for host in hosts} == {"26.05"}
        newer("plan", "--check")
    assert "slurm-wlm 26.05" in newer("logs", running[0]).stdout  # a step of a job that began before
    assert "a world of 1" in newer("logs", running[1]).stdout
    assert newer.json("up")["probed"] == hosts[1:]  # by mpirun
    job = newer.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "2")["job_id"]
    assert json.loads((newer.run_of(job) / "environment.json").read_text())["slurm"].startswith("26.05")


def test_without_pmix_srun_does_not_start_ranks_alone(newer: Cluster) -> None:
    script = newer.runner.cwd / "ranks.sh"
    script.write_text(RANKS.format(options="--mpi=pmix"))
    (failure,) = newer.json("submit", script, "--nodes", "2", rc=2)["failures"]
    assert "ranks.sh starts ranks by PMIx" in failure["cause"]
    assert "mpirun" in failure["fix"]
    script.write_text(RANKS.format(options=""))
    said = newer("submit", script, "--nodes", "2", "--wait", rc=4)
    assert "MPI programs fail so in MPI_Init" in said.stderr
    shown = newer("logs")
    assert "a world of" not in shown.stdout
    assert 'use "mpirun"' in " ".join(shown.stderr.split())


def test_an_upgrade_is_taken_back(newer: Cluster) -> None:
    with_release(newer, "24.11")
    (failure,) = newer.json("up", rc=2)["failures"]
    assert "only under --force" in failure["cause"]
    nodes = [f"{newer.name}-train-{number}" for number in (1, 2)]
    newer.ssh(f"{newer.name}-ctl", "rm -f go", user=newer.user)
    newer.json("submit", newer.runner.cwd / "waits.sh", "--nodes", "2")
    newer.ssh(f"{newer.name}-ctl", UNTIL.format("$(squeue -h -t running | wc -l) == 1"))
    at_work = {host: newer.ssh(host, "pgrep slurmstepd").split() for host in nodes}
    newer("up", "--force")
    assert {version_of(newer, host) for host in (f"{newer.name}-ctl", *nodes)} == {"24.11"}
    for host, pids in at_work.items():  # Slurm knows nothing of that job any more
        assert newer.ssh(host, f"ps -o pid= -p {','.join(pids)}", rc=None) == ""
    newer.ssh(f"{newer.name}-ctl", "touch go", user=newer.user)
    newer.ssh(f"{newer.name}-ctl", UNTIL.format("-z $(squeue -h)"))  # those of the upgrade's day run again
    newer("plan", "--check")
    newer.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "2")


NO_DPKG = "echo pre-invoke=/bin/false >/etc/dpkg/dpkg.cfg.d/broken"
NO_DUMP = "printf '#!/bin/sh\\nexit 1\\n' >/usr/local/bin/mariadb-dump; chmod 755 /usr/local/bin/mariadb-dump"
NO_START = (
    "printf '[Service]\\nExecStartPre=/bin/sh -c \"! {0} -V | grep 26.05\"\\n' "
    ">/run/systemd/system/{0}.service.d/broken.conf; systemctl daemon-reload"
)
BREAKS = {
    "packages": ("ctl", NO_DPKG, "installing the packages failed"),
    "copy": ("ctl", NO_DUMP, "copying the accounting and the state of slurmctld failed"),
    "slurmdbd": ("ctl", NO_START.format("slurmdbd"), "starting slurmdbd failed"),
    "slurmctld": ("ctl", NO_START.format("slurmctld"), "starting slurmctld failed"),
    "packages of a node": ("train-2", NO_DPKG, "installing the packages failed"),
    "slurmd": ("train-2", NO_START.format("slurmd"), "starting slurmd failed"),
}
REPAIR = (
    "rm -f /etc/dpkg/dpkg.cfg.d/broken /usr/local/bin/mariadb-dump /run/systemd/system/*/broken.conf; "
    "systemctl daemon-reload"
)


@pytest.mark.sweep
@pytest.mark.parametrize("step", BREAKS)
def test_where_a_step_fails_the_former_slurm_runs_again(newer: Cluster, step: str) -> None:
    which, breaks, told = BREAKS[step]
    host = f"{newer.name}-{which}"
    with_release(newer, "24.11")
    newer("up", "--force")
    with_release(newer, "26.05")
    with jobs_at_work(newer, waiting=3):
        folders = "mkdir -p /run/systemd/system/slurm{dbd,ctld,d}.service.d; "
        newer.ssh(host, f"sudo bash -c {shlex.quote(folders + breaks)}")
        try:
            (failure,) = newer.json("up", rc=1)["failures"]
        finally:
            newer.ssh(host, f"sudo bash -c {shlex.quote(REPAIR)}")
        assert (failure["host"], told in failure["cause"]) == (host, True), failure
        assert "the former Slurm runs again" in failure["cause"]
        assert version_of(newer, host) == "24.11"
    newer("up")  # nothing stands in its way now
    assert version_of(newer, host) == "26.05"


def brought_to(cluster: Cluster, release: str) -> None:
    """By `up`, on all hosts; in a state that `plan` finds nothing in."""
    with_release(cluster, release)
    cluster("up", "--force")
    for host in ("ctl", "train-1", "train-2"):
        assert version_of(cluster, f"{cluster.name}-{host}") == release
    assert (
        cluster.ssh(f"{cluster.name}-ctl", "sudo ls /etc/systemd/system/slurmdbd.service.d")
        == "clusterctl.conf\n"
    )
    assert cluster.ssh(f"{cluster.name}-ctl", "sinfo -h -o %a").split() == ["up"]


KILLED = ["packages", *in_sweep("accounting", "conversion", "packages of a node")]


@pytest.mark.parametrize("point", KILLED)
def test_where_a_program_of_an_upgrade_is_killed_the_former_slurm_runs_again(
    newer: Cluster, point: str
) -> None:
    brought_to(newer, "24.11")
    with jobs_at_work(newer, waiting=3):
        with_release(newer, "26.05")
        with held_at(newer, POINTS[point]):
            failure = json.loads(cut_off(newer, POINTS[point], "program").stdout)["failures"][0]
        assert "the former Slurm runs again" in failure["cause"], failure
        assert failure["host"] == f"{newer.name}-{POINTS[point].host}"
        assert version_of(newer, failure["host"]) == "24.11"
        brought_to(newer, "26.05")


CUT_OFF = [
    ("packages", "power", "24.11"),
    ("packages unpacked", "exchange", "26.05"),
    ("accounting", "power", "26.05"),
    ("state", "exchange", "24.11"),
    ("conversion", "power", "26.05"),
    ("conversion", "exchange", "24.11"),
    ("packages of a node", "exchange", "24.11"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("point", "how", "then"), CUT_OFF)
def test_an_upgrade_that_was_cut_off_goes_on_or_back(newer: Cluster, point: str, how: str, then: str) -> None:
    brought_to(newer, "24.11")
    # What runs under a newer controller that goes back runs again.
    with jobs_at_work(newer, waiting=3, may_restart=POINTS[point].host != "ctl" and then == "24.11"):
        with_release(newer, "26.05")
        with held_at(newer, POINTS[point]):
            cut_off(newer, POINTS[point], how)
            brought_to(newer, then)
    newer("plan", "--check")


WAYS_BACK = [
    ("accounting brought back", "power", "24.11"),
    ("accounting brought back", "exchange", "26.05"),
    ("packages", "power", "26.05"),
    ("packages of a node", "exchange", "24.11"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("point", "how", "then"), WAYS_BACK)
def test_a_way_back_that_was_cut_off_goes_on_or_is_given_up(
    newer: Cluster, point: str, how: str, then: str
) -> None:
    brought_to(newer, "24.11")
    with jobs_at_work(newer, waiting=3, may_restart=True):
        brought_to(newer, "26.05")
        with_release(newer, "24.11")
        with held_at(newer, POINTS[point]):
            cut_off(newer, POINTS[point], how, "--force")
            brought_to(newer, then)
    newer("plan", "--check")


@pytest.mark.sweep
@pytest.mark.parametrize("phase", ["upgrade_controller", "upgrade_nodes"])
def test_an_upgrade_that_was_killed_goes_on(newer: Cluster, phase: str) -> None:
    with_release(newer, "24.11")
    newer("up", "--force")
    with_release(newer, "26.05")
    with jobs_at_work(newer, waiting=3):
        with newer.runner.start("-f", newer.spec, "up", "-v") as up:
            assert up.stderr is not None
            begun = f"{phase.replace('_', ' ')}: "
            next(line for line in up.stderr if begun in line and "Place what exchanges them" in line)
            up.kill()
        newer("up")
        assert version_of(newer, f"{newer.name}-ctl") == version_of(newer, f"{newer.name}-train-2") == "26.05"
