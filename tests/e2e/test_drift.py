"""Faults on a live cluster, alone or many at once: `up` repairs and names them, or gives the
reason.

Meanwhile a job runs on an unaffected node. At the end its output proves that it was never
disturbed: a single process, which counted on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, local_spec, raised
from tests.support.messages import condition, shows
from tests.support.processes import eventually

PARTITION = "{{name: train, nodes: {}, cpus: 1, memory: 2GiB}}"
OTHER = "{name: other, nodes: 1, memory: 1GiB}"
COUNTER = """\
#!/bin/bash
#SBATCH --nodelist={node} --mem=100M
echo "process $$ restarted ${{SLURM_RESTART_COUNT-never}}"
for ((i = 1; ; i++)); do echo "$i"; sleep 0.2; done
"""
PATIENCE_S = 120
SLURMS_REASON = "Kill task failed"  # Slurm's own, for which it drains a node
AS_CLASS = "already up to date"  # of converge without Ansible
SPOOL = "/var/spool/clusterctl-slurmd"


@pytest.fixture(scope="module")
def drift_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes. On the first, a job counts until the end of the module, and must not be
    disturbed.
    """
    name = f"d{secrets.token_hex(3)}"
    home = tmp_path_factory.mktemp("home")
    cwd = tmp_path_factory.mktemp("cwd")
    with raised(name, local_spec(name, PARTITION.format(3)), home, cwd) as cluster:
        job = begin(cluster, "counter", COUNTER.format(node=node(cluster, 1)))
        yield cluster
        state = cluster.json("jobs", job)["jobs"][0]["state"]
        cluster("cancel", job)
        cluster("logs", job, "--follow", rc=5)
        head, *numbers = (cluster.run_of(job) / "stdout.log").read_text().splitlines()
        assert state == "RUNNING"
        assert head.endswith("restarted never")
        assert numbers == [str(i) for i in range(1, len(numbers) + 1)]


def node(cluster: Cluster, number: int) -> str:
    return f"{cluster.name}-train-{number}"


def ctl(cluster: Cluster) -> str:
    return f"{cluster.name}-ctl"


def begin(cluster: Cluster, name: str, text: str) -> str:
    """Submit a script and wait until it runs."""
    script = cluster.runner.cwd / f"{name}.sh"
    script.write_text(text)
    job = str(cluster.json("submit", script)["job_id"])
    cluster.job_in("RUNNING", job)
    return job


def mended(answer: dict[str, Any]) -> set[str]:
    return {f"{row['host']}: {row['what']}: {row['action']}" for row in answer["repaired"]}


def failure(answer: Any) -> dict[str, Any]:
    assert not answer["ok"]
    return dict(answer["failures"][0])


def test_up_restores_and_names_files_accounts_and_units(drift_cluster: Cluster) -> None:
    second = node(drift_cluster, 2)
    third = node(drift_cluster, 3)
    leader = ctl(drift_cluster)
    drift_cluster.ssh(second, "sudo systemctl mask --now slurmd")
    drift_cluster.ssh(third, "sudo rm /etc/munge/munge.key")
    drift_cluster.ssh(
        leader,
        f"sudo rm -rf /etc/slurm; echo '# mine' | sudo tee ~{drift_cluster.user}/.ssh/authorized_keys",
    )
    drift_cluster.ssh(leader, f"sudo userdel --force {drift_cluster.user}")
    drift_cluster.ssh(leader, "sudo pkill -KILL slurmdbd; sudo pkill -KILL mariadbd")
    answer = drift_cluster.json("up")
    assert (answer["probed"], answer["not_probed"]) == ([second, third], [node(drift_cluster, 1)])
    assert mended(answer) >= {
        f"{second}: slurmd was masked: started",
        f"{third}: /etc/munge/munge.key was missing: restored",
        *(
            f"{leader}: /etc/slurm/{name}.conf was missing: restored"
            for name in ("slurm", "gres", "slurmdbd")
        ),
        f"{leader}: the account {drift_cluster.user} was missing: restored",
    }
    assert not [line for line in mended(answer) if line.startswith(node(drift_cluster, 1))]
    assert (
        drift_cluster.ssh(leader, "head -n1 .ssh/authorized_keys", user=drift_cluster.user)
        == "# mine\n"
    )


def test_up_resumes_nodes_that_slurm_drained_but_not_others(drift_cluster: Cluster) -> None:
    """The next `up` has nothing else to repair."""
    second = node(drift_cluster, 2)
    third = node(drift_cluster, 3)
    drain = "sudo scontrol update nodename={} state=drain reason='{}'"
    drift_cluster.ssh(second, drain.format(second, "noisy fan"))
    drift_cluster.ssh(third, drain.format(third, SLURMS_REASON))
    answer = drift_cluster.json("up")
    assert answer["probed"] == [third]
    assert second in answer["not_probed"]
    assert any(note.endswith(f"{second}: drained by root: noisy fan") for note in answer["notes"])
    assert mended(answer) == {f"{third}: was IDLE+DRAIN: {SLURMS_REASON}: resumed"}
    drift_cluster.ssh(second, f"sudo scontrol update nodename={second} state=resume")


def ansible_hosts(answer: dict[str, Any]) -> str:
    """Return on how many hosts Ansible ran, from the note of the phase."""
    return converged(answer).partition(" on ")[2].partition(",")[0]


def test_up_recreates_a_node_that_lost_a_package(drift_cluster: Cluster) -> None:
    """The node has no route to a repository. The job on another node keeps running."""
    second = node(drift_cluster, 2)
    third = node(drift_cluster, 3)
    boot = (
        "cat /proc/sys/kernel/random/boot_id; systemctl show -p UserspaceTimestampMonotonic --value"
    )
    before = drift_cluster.ssh(third, boot)
    drift_cluster.ssh(second, "sudo dpkg --remove --force-depends munge")
    (found,) = drift_cluster("-o", "json", "up", rc=1).json["failures"]
    assert (found["host"], condition(found)) == (second, "host-unfit/package"), found
    assert found["cause"].endswith(": munge")
    assert f" node replace {second}`" in found["fix"]
    assert failure(
        drift_cluster("-o", "json", "node", "replace", f"{drift_cluster.name}-train-9", rc=2).json
    )
    answer = drift_cluster.json("node", "replace", second, "--yes")
    assert answer["probed"] == [second, third]
    assert converged(answer) == f"1 host {AS_CLASS}"
    assert drift_cluster.ssh(third, boot) == before
    assert drift_cluster.ssh(second, "dpkg-query -W -f '${Status}' munge") == "install ok installed"


def test_up_names_a_folder_of_keys_that_leads_elsewhere(drift_cluster: Cluster) -> None:
    """A job may have made it. `up` moves nothing in a home, and root is led nowhere."""
    leader = ctl(drift_cluster)
    drift_cluster.ssh(leader, "mv .ssh .away; ln -s /etc .ssh", user=drift_cluster.user)
    failed = failure(drift_cluster("-o", "json", "up", "--reconfigure", rc=1).json)
    assert (failed["host"], condition(failed)) == (leader, "configure-failed")
    assert f"/home/{drift_cluster.user}/.ssh" in failed["cause"]
    assert drift_cluster.ssh(leader, "stat -c '%U %a' /etc") == "root 755\n"
    assert "No such file" in drift_cluster.ssh(leader, "ls /etc/authorized_keys 2>&1 || true")
    home = f"/shared/home/{drift_cluster.user}"
    drift_cluster.ssh(leader, f"sudo sh -c 'cd {home} && rm .ssh && mv .away .ssh'")
    drift_cluster.json("up")


def test_up_repairs_edited_files_and_powered_off_nodes_at_once(drift_cluster: Cluster) -> None:
    """All roles run then."""
    leader = ctl(drift_cluster)
    second = node(drift_cluster, 2)
    third = node(drift_cluster, 3)
    shown = "scontrol show config | grep ^SlurmdTimeout"
    was = drift_cluster.ssh(leader, shown)
    drift_cluster.ssh(
        leader, "sudo sed -i s/^SlurmdTimeout=.*/SlurmdTimeout=77/ /etc/slurm/slurm.conf"
    )
    drift_cluster.ssh(leader, "sudo scontrol reconfigure")
    assert "77 sec" in drift_cluster.ssh(leader, shown)
    drift_cluster.ssh(
        second,
        f"sudo usermod -c drifted {drift_cluster.user}; sudo gpasswd -a {drift_cluster.user} games",
    )
    # It outlives no boot.
    drift_cluster.ssh(third, "sudo touch /var/spool/clusterctl-slurmd/cred_state.left; sync")
    drift_cluster.ssh(third, "sudo systemctl poweroff --force --force", rc=None)
    # It is still on its way down when `up` looks.
    drift_cluster.ssh(second, "sudo systemctl poweroff", rc=None)
    answer = drift_cluster.json("up", "--reconfigure")
    assert mended(answer) >= {
        f"{leader}: /etc/slurm/slurm.conf was changed: restored",
        *(f"{host}: was powered off: started" for host in (second, third)),
    }
    assert answer["probed"] == [second, third]
    assert ansible_hosts(answer) == "4 hosts"
    assert drift_cluster.ssh(leader, shown) == was
    for number in (1, 2, 3):
        cached = drift_cluster.ssh(
            node(drift_cluster, number), f"sudo grep -r ^SlurmdTimeout {SPOOL}/conf-cache"
        )
        assert "77" not in cached
    assert "cred_state.left" not in drift_cluster.ssh(third, f"sudo ls {SPOOL}")


def test_job_of_a_node_that_was_briefly_off_is_requeued(drift_cluster: Cluster) -> None:
    """Slurm does not notice that the node was off, and shows the job as running, without a
    process.
    """
    third = node(drift_cluster, 3)
    job = begin(
        drift_cluster,
        "off",
        f"#!/bin/bash\n#SBATCH --requeue --nodelist={third} --mem=100M\nsleep 600\n",
    )
    # The ages of the job and of the node are compared in whole seconds.
    eventually(lambda: int(drift_cluster.ssh(third, "ps -o etimes= -C sleep", rc=None) or 0) > 2)
    drift_cluster.ssh(third, "sudo systemctl poweroff --force --force", rc=None)
    answer = drift_cluster.json("up")
    assert any(third in repair and f"job {job}," in repair for repair in mended(answer))
    deadline = time.monotonic() + PATIENCE_S
    while len(drift_cluster.json("jobs", job)["jobs"][0]["restarts"]) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert eventually(lambda: drift_cluster.ssh(third, "pgrep -x sleep", rc=None))
    drift_cluster("cancel", job)


def test_nodes_that_do_not_reach_each_other_are_named(drift_cluster: Cluster) -> None:
    second = node(drift_cluster, 2)
    third = node(drift_cluster, 3)
    address = drift_cluster.ssh(second, f"getent hosts {third}").split()[0]
    drift_cluster.ssh(second, f"sudo ip route add blackhole {address}; sudo systemctl stop munge")
    ran = drift_cluster("-o", "json", "up", rc=1)
    drift_cluster.ssh(second, f"sudo ip route delete blackhole {address}")
    assert {f["host"] for f in ran.json["failures"]} == {second, third}
    assert failure(ran.json)["about"] == "network"
    assert second in failure(ran.json)["cause"]
    assert address in failure(ran.json)["cause"]
    # What was done is told all the same.
    started = f"{second}: munge was stopped: started"
    assert started in mended(ran.json)


def test_up_with_a_full_disk_names_it(drift_cluster: Cluster) -> None:
    second = node(drift_cluster, 2)
    drift_cluster.ssh(second, "sudo mount -t tmpfs -o size=1M full /tmp")
    drift_cluster.ssh(second, "sudo dd if=/dev/zero of=/tmp/big bs=64K", rc=None)
    found = failure(drift_cluster("-o", "json", "up", rc=1).json)
    assert (found["host"], found["code"]) == (second, "disk-full")
    assert "/tmp is full" in found["cause"]
    drift_cluster.ssh(second, "sudo umount /tmp")
    # Not sooner: Slurm takes some seconds to save a job that has just begun, and requeues what it
    # forgot.
    drift_cluster.ssh(ctl(drift_cluster), "sudo pkill -KILL slurmctld")
    assert drift_cluster.json("up")["probed"] == [second, node(drift_cluster, 3)]


def content(cluster: Cluster) -> dict[Path, bytes]:
    """Return all files that clusterctl has of a cluster on the user's machine."""
    return {path: path.read_bytes() for path in cluster.runner.home.rglob("*") if path.is_file()}


def planned(cluster: Cluster, *, rc: int) -> dict[str, Any]:
    """Return the answer of `plan --check`, which changes nothing."""
    known = content(cluster)
    plan: dict[str, Any] = cluster.json("plan", "--check", rc=rc)
    assert content(cluster) == known
    return plan


def changes(plan: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["kind"], row["name"]) for row in plan["changes"]}


def hosts(plan: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the hosts that a plan creates and removes."""
    found = {(row["name"], row["action"]) for row in plan["changes"] if row["kind"] == "host"}
    return {host for host in found if host[1] != "change"}


def daemons(cluster: Cluster, count: int) -> list[str]:
    """Return the pid and start of slurmd on each of the first nodes."""
    return on_each(
        cluster, count, "systemctl show --property=MainPID,ExecMainStartTimestampMonotonic slurmd"
    )


def on_each(cluster: Cluster, count: int, command: str) -> list[str]:
    """Return the output of a command on each of the first nodes."""
    return [cluster.ssh(node(cluster, number), command) for number in range(1, count + 1)]


def converged(answer: dict[str, Any]) -> str:
    return next(str(phase["note"]) for phase in answer["phases"] if phase["phase"] == "converge")


def test_cluster_grows_and_shrinks_beside_the_job_as_planned(drift_cluster: Cluster) -> None:
    def ask_for(*partitions: str, more: str = "") -> None:
        text = local_spec(drift_cluster.name, ", ".join(partitions))
        drift_cluster.spec.write_text(text + more)

    def up(*flags: str, rc: int = 0) -> Any:
        return drift_cluster("-o", "json", "up", *flags, rc=rc).json

    ask_for(PARTITION.format(3))
    assert planned(drift_cluster, rc=0)["changes"] == []
    slurmd = daemons(drift_cluster, 3)
    ask_for(PARTITION.format(4), OTHER)
    fourth = node(drift_cluster, 4)
    other = f"{drift_cluster.name}-other-1"
    assert hosts(planned(drift_cluster, rc=3)) == {(fourth, "make"), (other, "make")}
    answer = up()
    assert answer["probed"] == [
        node(drift_cluster, 2),
        node(drift_cluster, 3),
        node(drift_cluster, 4),
        f"{drift_cluster.name}-other-1",
    ]
    # Ansible has nothing to do, and slurmd goes on.
    assert (converged(answer), daemons(drift_cluster, 3)) == (f"6 hosts {AS_CLASS}", slurmd)
    nodes = f"sudo grep -c ^NodeName= {SPOOL}/conf-cache/slurm.conf"
    assert on_each(drift_cluster, 3, nodes) == ["5\n"] * 3
    on_second = begin(drift_cluster, "second", COUNTER.format(node=node(drift_cluster, 2)))
    script = drift_cluster.runner.cwd / "waits.sh"
    script.write_text("#!/bin/bash\n#SBATCH --hold --partition=other\nhostname\n")
    waits = drift_cluster.json("submit", script)["job_id"]

    drift_cluster.ssh(fourth, "sudo rm /etc/munge/munge.key")
    ask_for(PARTITION.format(4), more="users: [{name: bob, uid: 2002}]\n")
    plan = planned(drift_cluster, rc=3)
    assert hosts(plan) == {(other, "remove")}
    assert changes(plan) >= {("setting", "users"), ("setting", "partitions"), ("drift", fourth)}
    assert f"job {waits} (waits)" in "\n".join(plan["notes"])

    ask_for(PARTITION.format(1))
    refusal = failure(up(rc=2))["cause"]
    for words in (f"job {on_second} (second)", f"job {waits} (waits)", "partition other"):
        assert words in refusal
    assert drift_cluster.json("jobs", on_second)["jobs"][0]["state"] == "RUNNING"
    drift_cluster("cancel", on_second, waits)
    drift_cluster("wait", on_second, waits, rc=None)
    # Nobody was there to be asked.
    assert failure(up(rc=2))["code"] == "confirmation-needed"
    assert len(drift_cluster.json("status")["nodes"]) == 5

    user = drift_cluster.user
    kept = "sh -c 'echo kept | tee /var/tmp/kept.txt >/opt/lab/kept.txt'"
    drift_cluster.ssh(fourth, f"sudo install -d -o {user} /opt/lab && sudo -u {user} {kept}")
    refused = up("--yes", rc=1)["failures"]
    assert {condition(one) for one in refused} == {"would-lose/files"}
    causes = [one["cause"] for one in refused]
    for path in ("/opt/lab", "/var/tmp/kept.txt"):
        assert [cause.startswith(f"{path} on {fourth}") for cause in causes].count(True) == 1
    assert len(drift_cluster.json("status")["nodes"]) == 5
    folders = [Path(folder) for folder in drift_cluster.json("collect", "--all")["folders"]]
    (brought,) = (folder for folder in folders if folder.name == f"{fourth}-disk")
    for path in ("opt/lab", "var/tmp"):
        assert (brought / path / "kept.txt").read_text() == "kept\n"
    answer = up("--yes")
    assert [each["name"] for each in drift_cluster.json("status")["nodes"]] == [
        node(drift_cluster, 1)
    ]
    assert (converged(answer), daemons(drift_cluster, 1)) == (f"2 hosts {AS_CLASS}", slurmd[:1])
    assert planned(drift_cluster, rc=0)["changes"] == []


def test_up_refuses_to_give_a_uid_to_another_user(drift_cluster: Cluster) -> None:
    text = drift_cluster.spec.read_text()
    drift_cluster.spec.write_text(f"{text}users:\n  - {{name: other, uid: 10000}}\n")
    if drift_cluster.user == "hpc":
        assert shows(" ".join(drift_cluster.json("plan")["notes"]), "uid-taken")
        refused = failure(drift_cluster.json("up", rc=2))
        assert condition(refused) == "host-unfit/uid-taken"
        assert "hpc" in refused["cause"]
    drift_cluster.spec.write_text(text)


def test_up_installs_packages_that_the_spec_gained(drift_cluster: Cluster) -> None:
    """Although the nodes have no route to a mirror. slurmd keeps running.

    Nodes have no man pages, but their folders, in which packages such as Java's make links.
    """
    text = drift_cluster.spec.read_text()
    slurmd = daemons(drift_cluster, 1)
    ask = (
        "command -v tree; cat /etc/resolv.conf; ls /etc/apt/apt.conf.d/99bake 2>/dev/null; ls "
        "/var/lib/apt/lists"
    )
    drift_cluster.spec.write_text(f"{text}software: {{packages: [tree]}}\n")
    drift_cluster("up")
    for host in (ctl(drift_cluster), node(drift_cluster, 1)):
        assert drift_cluster.ssh(host, ask, rc=None) == "/usr/bin/tree\n"
    assert (
        drift_cluster.ssh(node(drift_cluster, 1), "ls /usr/share/man/man1 | grep tree", rc=None)
        == ""
    )
    drift_cluster.ssh(node(drift_cluster, 1), "test -d /usr/share/man/man1")
    assert daemons(drift_cluster, 1) == slurmd
    drift_cluster.spec.write_text(f"{text}software: {{packages: [no-such-package]}}\n")
    refused = failure(drift_cluster.json("up", rc=1))
    assert condition(refused) == "tool-failed/machine"
    drift_cluster.spec.write_text(text)
