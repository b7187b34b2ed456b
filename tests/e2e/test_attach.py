"""A foreign Slurm cluster, used by a person with an ordinary account.

`attached` stays attached until the last test of this module. A test that detaches a cluster
attaches its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.faults import Victim
from tests.support.agents import Agent, converse
from tests.support.foreign.site import LOGINS, Site
from tests.support.foreign.user import User, user_of
from tests.support.messages import codes
from tests.support.processes import eventually
from tests.support.verbs import SCRIPT, Clusterctl
from tests.support.wheels import a_wheel

NAME = "grid"
PROGRAMS = {
    "ranks.py": """\
from mpi4py import MPI
world = MPI.COMM_WORLD
print("rank", world.rank, "of", world.size, world.allreduce(world.rank))
""",
    "rate.py": """\
import sys
print("argument", sys.argv[1])
""",
    "own.py": """\
import basic, mpi4py
print("basic", basic.version)
""",
    "secret.py": """\
import os
from mpi4py import MPI
print("rank", MPI.COMM_WORLD.rank, os.environ["TOKEN"])
""",
    "once.sh": """\
#!/bin/bash
echo "$SLURM_JOB_ID" >>ran-once
""",
}
LATER = "--slurm=--begin=now+1hour"


@dataclass(frozen=True)
class Attached:
    """The answer of `attach`, and the verbs of its user."""

    site: Site
    user: User
    answer: dict[str, object]

    @property
    def verb(self) -> Clusterctl:
        return self.user.clusterctl

    def submit(self, *words: str | Path) -> str:
        """Submit a job, or replay a run. Return the job's id."""
        return str(self.verb("-o", "json", *words).json["job_id"])

    def run_of(self, job_id: str) -> Path:
        """Wait until Slurm has ended a job, and collect its run."""
        self.site.await_end(job_id)
        (run,) = self.verb("collect", job_id, "-o", "json").json["runs"]
        assert run["state"] == "COMPLETED"
        return Path(run["dir"])


def person_at(site: Site, person: str, folder: Path, *, has_linux: bool = True) -> User:
    folder.mkdir()
    user = user_of(site, person, folder, has_linux=has_linux)
    for name, text in PROGRAMS.items():
        (user.folder / name).write_text(text)
    return user


@pytest.fixture(scope="module")
def attached(national: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    before = national.listing("stud")
    folder = tmp_path_factory.mktemp("attach") / "stud"
    # The client of a foreign cluster may run on a Mac.
    user = person_at(national, "stud", folder, has_linux=False)
    answer = user.clusterctl("attach", "national", "--name", NAME, "-o", "json").json
    (user.folder / "cluster.yaml").write_text(
        (user.clusterctl.home / NAME / "spec.yaml").read_text()
    )
    yield Attached(national, user, answer)
    user.clusterctl("detach", "--cluster", NAME, "--cancel", "--discard")
    assert national.listing("stud") == before


def test_client_needs_nothing_that_only_linux_has(attached: Attached) -> None:
    """All tests of this module run so, and more in test_attach_login.py."""
    look = "import os; print(os.listdir('/proc'), os.listdir('/sys'), hasattr(os, 'waitid'))"
    assert attached.user.runs(sys.executable, "-c", look) == "[] [] False\n"


@pytest.mark.story
def test_attach_finds_account_and_proves_mpi(attached: Attached) -> None:
    answer = attached.answer
    assert (answer["account"], answer["partitions"], answer["proven"]) == ("proj1", ["main"], True)
    facts = {fact["fact"]: fact for fact in answer["facts"]}  # type: ignore[attr-defined]
    assert all(fact["learned"] for fact in facts.values())
    assert answer["proof"]["hosts"] == ["c1", "c2"]  # type: ignore[index]
    assert facts["compute nodes"]["value"] == facts["login node"]["value"].split(", ")[1]


@pytest.mark.story
def test_mpi_job_runs_over_both_nodes(attached: Attached) -> None:
    result = attached.verb(
        "submit", "ranks.py", "--nodes", "2", "--tasks-per-node", "2", "--follow"
    )
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 6" for rank in range(4)
    ]


def test_secret_reaches_the_ranks_and_is_gone_with_its_job(
    attached: Attached, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("canary-here\n")
    words = ("submit", "secret.py", "--nodes", "2", "--secret", f"TOKEN={tmp_path}/token")
    result = attached.verb(*words, "--follow")
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} canary-here" for rank in range(2)
    ]
    left = "find ~stud/clusterctl/secrets -type f"
    assert attached.site.root("login1", left) == ""


@pytest.mark.story
def test_run_of_a_training_is_collected(attached: Attached) -> None:
    job_id = attached.submit(
        "submit", "train", "--nodes", "2", "--time", "5m", "--", "--epochs", "2"
    )
    run = attached.run_of(job_id)
    assert (run / "metrics.jsonl").stat().st_size > 0
    assert "test accuracy" in attached.verb("logs", job_id).stdout


def test_sweep_and_cancel_work(attached: Attached) -> None:
    attached.verb("submit", "rate.py", "--sweep", "lr=0.1,0.2", "--wait")
    job_id = attached.submit("submit", "rate.py", LATER, "--", "1")
    attached.verb("cancel", job_id)
    listed = {
        row["job_id"]: row["state"] for row in attached.verb("jobs", "-o", "json").json["jobs"]
    }
    assert listed[job_id] == "CANCELLED"


def test_agent_submits_and_waits_within_limits(attached: Attached, tmp_path: Path) -> None:
    config = tmp_path / "clusterctl" / "config.yaml"
    config.parent.mkdir()
    config.write_text("agent: {nodes: 0}\n")
    given = {"target": "rate.py", "args": ["7"], "nodes": 1, "time": "5m"}

    async def story(agent: Agent) -> None:
        assert (await agent.call("status"))["ok"]
        refusal = await agent.call("submit", **given)
        assert refusal["limit"]["name"] == "nodes"
        config.unlink()
        (job,) = (await agent.done("submit", **given))["jobs"]
        assert (await agent.call("wait", ids=[job["job_id"]], timeout="5m"))["ok"]
        assert "argument 7" in str(await agent.call("logs", job_id=job["job_id"]))

    server: list[str | Path] = [attached.user.enter, "env"]
    server += [f"XDG_CONFIG_HOME={tmp_path}", SCRIPT, "mcp"]
    environ = {**os.environ, "CLUSTERCTL_HOME": str(attached.verb.home)}
    converse(server, attached.user.folder, environ, story)


def test_attach_again_checks_and_changes_nothing(attached: Attached) -> None:
    before = (attached.verb.home / NAME / "hosts.json").read_text()
    again = attached.verb("attach", "national", "-o", "json").json
    assert (again["cluster"], again["folder"]) == (NAME, attached.answer["folder"])
    assert (attached.verb.home / NAME / "hosts.json").read_text() == before


def test_replay_has_the_packages_of_the_run(attached: Attached) -> None:
    """The site reaches no package index. The wheel comes from the user's machine."""
    (index := attached.user.folder / "index").mkdir()
    a_wheel(index, "basic")
    (attached.user.folder / "own.txt").write_text("--no-index\n--find-links index\nbasic\n")
    run = attached.run_of(attached.submit("submit", "own.py", "--requirements", "own.txt"))
    again = attached.run_of(attached.submit("replay", str(run)))
    assert again != run
    for folder in (run, again):
        assert (folder / "stdout.log").read_text() == "basic 1.0\n"


def test_submit_killed_during_sbatch_makes_one_job(attached: Attached) -> None:
    site = attached.site
    with site.silent_slurmctld():
        victim = Victim(attached.verb, "submit", "once.sh", "--name", "killed")
        eventually(lambda: site.root("login1", "pgrep -x sbatch", rc=None))
        victim.hit("kill")
    killed_jobs = site.jobs_named("killed")
    assert len(killed_jobs) <= 1
    jobs = attached.verb("jobs", "-o", "json").json["jobs"]
    assert [job["job_id"] for job in jobs if job["name"] == "killed"] == killed_jobs


def test_first_submit_killed_runs_one_job(attached: Attached) -> None:
    """Without clusterctl, the jobs decide which of them runs."""
    site = attached.site
    victim = Victim(
        attached.verb, "submit", "once.sh", "--name", "race", "--first", "main,main@proj1"
    )
    eventually(lambda: len(site.jobs_named("race")) == 2)
    victim.hit("kill")
    for job_id in site.jobs_named("race"):
        site.await_end(job_id)
    assert (
        len(site.root("login1", "cat /home/stud/clusterctl/jobs/race-*/files/ran-once").split())
        == 1
    )
    jobs = attached.verb("jobs", "-o", "json").json["jobs"]
    assert [job["state"] for job in jobs if job["name"] == "race"] == ["COMPLETED"]


def test_detach_refuses_while_jobs_wait(attached: Attached) -> None:
    job_id = attached.submit("submit", "rate.py", LATER, "--", "1")
    refusal = attached.verb("detach", "--cluster", NAME, "--discard", "-o", "json", rc=1)
    assert "would-lose/files" in codes(refusal)
    listed = attached.verb("detach", "--cluster", NAME, "--dry-run", "-o", "json").json
    assert not listed["removed"]
    assert any(job_id in line for line in listed["only_there"])


def test_login_that_the_site_refuses_is_tried_once(attached: Attached) -> None:
    """By PAM, as during a maintenance."""
    site = attached.site
    words = "national is down for maintenance until 6 pm"
    refusals = "journalctl --boot --output=cat | grep -c 'Access denied for user stud' || true"
    with site.file(LOGINS, "/etc/nologin", f"{words}\n"):
        site.root("login1", "pkill -KILL -u stud -f sshd")
        eventually(lambda: not site.root("login1", "pgrep -u stud -f sshd", rc=None))
        before = int(site.root("login1", refusals))
        refusal = attached.verb("jobs", "-o", "json", "--cluster", NAME, rc=1)
        assert codes(refusal) == ["login-refused"]
        assert words in refusal.json["failures"][0]["cause"]
        assert int(site.root("login1", refusals)) == before + 1


def test_killed_attach_and_detach_continue(national: Site, tmp_path: Path) -> None:
    user = person_at(national, "finn", tmp_path / "finn")
    # fish creates files of its own at its first login.
    national.ssh("finn", "true")
    before = national.listing("finn")
    attach = Victim(user.clusterctl, "attach", "national")
    attach.until_said("building the environment")
    attach.hit("kill")
    assert user.clusterctl("attach", "national", "-o", "json").json["proven"]
    assert not list(user.clusterctl.home.glob(".attach-*"))
    detach = Victim(user.clusterctl, "detach", "--cluster", "national")
    detach.until_phase("remove")
    detach.hit("kill")
    again = user.clusterctl("detach", "--cluster", "national", "-o", "json", rc=None)
    assert codes(again) in ([], ["not-found/cluster"])
    assert national.listing("finn") == before
