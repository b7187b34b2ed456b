"""A Slurm cluster that other people operate, used by a person who has an account and no other right there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.foreign.site import Site
from tests.support.foreign.user import User, user_of
from tests.support.messages import codes
from tests.support.verbs import Clusterctl

NAME = "grid"
RANKS = """\
from mpi4py import MPI
world = MPI.COMM_WORLD
print("rank", world.rank, "of", world.size, world.allreduce(world.rank))
"""
RATE = """\
import sys
print("argument", sys.argv[1])
"""


@dataclass(frozen=True)
class Attached:
    """The answer of `attach`, and the person's home before it."""

    site: Site
    user: User
    answer: dict[str, object]
    home_before: list[str]

    @property
    def verb(self) -> Clusterctl:
        return self.user.clusterctl


def person_at(site: Site, person: str, folder: Path) -> User:
    folder.mkdir()
    return user_of(site, person, folder)


@pytest.fixture(scope="module")
def attached(national: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    before = national.listing("stud")
    user = person_at(national, "stud", tmp_path_factory.mktemp("attach") / "stud")
    answer = user.clusterctl("attach", "national", "--name", NAME, "-o", "json").json
    (user.folder / "cluster.yaml").write_text((user.clusterctl.home / NAME / "spec.yaml").read_text())
    (user.folder / "ranks.py").write_text(RANKS)
    (user.folder / "rate.py").write_text(RATE)
    yield Attached(national, user, answer, before)
    user.clusterctl("detach", "--cluster", NAME, "--cancel", "--discard", rc=None)


def test_attach_finds_account_and_proves_mpi(attached: Attached) -> None:
    answer = attached.answer
    assert (answer["account"], answer["partitions"], answer["proven"]) == ("proj1", ["main"], True)
    facts = {fact["fact"]: fact for fact in answer["facts"]}  # type: ignore[attr-defined]
    assert all(fact["learned"] for fact in facts.values())
    assert {"c1", "c2"} <= set(answer["proof"]["nodes"]["names"])  # type: ignore[index]


def test_mpi_job_runs_over_both_nodes(attached: Attached) -> None:
    ran = attached.verb("submit", "ranks.py", "--nodes", "2", "--tasks-per-node", "2", "--follow")
    assert sorted(line for line in ran.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 6" for rank in range(4)
    ]


def test_run_of_a_training_comes_home(attached: Attached) -> None:
    words = ("submit", "train", "--nodes", "2", "--time", "5m", "--wait", "-o", "json", "--", "--epochs", "2")
    job = attached.verb(*words).json["jobs"][0]
    (run,) = attached.verb("collect", job["job_id"], "-o", "json").json["runs"]
    assert run["state"] == "COMPLETED"
    assert (Path(run["dir"]) / "metrics.jsonl").stat().st_size > 0
    assert "test accuracy" in attached.verb("logs", job["job_id"]).stdout


def test_sweep_and_cancel_work(attached: Attached) -> None:
    attached.verb("submit", "rate.py", "--sweep", "lr=0.1,0.2", "--wait")
    job = attached.verb("submit", "rate.py", "--slurm=--begin=now+1hour", "-o", "json", "--", "1").json
    job_id = job["jobs"][0]["job_id"]
    attached.verb("cancel", job_id)
    listed = {row["job_id"]: row["state"] for row in attached.verb("jobs", "-o", "json").json["jobs"]}
    assert listed[job_id] == "CANCELLED"


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("plan",),
        ("down", "--yes"),
        ("image", "bake"),
        ("bundle", "create"),
        ("node", "drain", "c1", "--reason", "test"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("choice", [("-f", "cluster.yaml"), ("--cluster", NAME)], ids=" ".join)
def test_commands_of_operators_are_refused(
    attached: Attached, words: tuple[str, ...], choice: tuple[str, ...]
) -> None:
    assert codes(attached.verb(*words, *choice, "-o", "json", rc=2)) == ["cluster-of-others"]


def test_attach_again_checks_and_changes_nothing(attached: Attached) -> None:
    before = (attached.verb.home / NAME / "hosts.json").read_text()
    again = attached.verb("attach", "national", "-o", "json").json
    assert (again["cluster"], again["folder"]) == (NAME, attached.answer["folder"])
    assert (attached.verb.home / NAME / "hosts.json").read_text() == before


def test_killed_attach_continues(national: Site, tmp_path: Path) -> None:
    user = person_at(national, "finn", tmp_path / "finn")
    # fish creates files of its own at its first login.
    national.ssh("finn", "true")
    before = national.listing("finn")
    process = user.clusterctl.start("attach", "national")
    assert process.stderr is not None
    for line in process.stderr:
        if "building the environment" in line:
            break
    else:
        pytest.fail("attach built no environment")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    answer = user.clusterctl("attach", "national", "-o", "json").json
    assert answer["proven"]
    assert not list(user.clusterctl.home.glob(".attach-*"))
    user.clusterctl("detach", "--cluster", "national")
    assert national.listing("finn") == before


def test_attach_by_csh_leaves_nothing_after_detach(national: Site, tmp_path: Path) -> None:
    user = person_at(national, "carla", tmp_path / "carla")
    before = national.listing("carla")
    user.clusterctl("attach", "national-jump")
    (user.folder / "ranks.py").write_text(RANKS)
    job = user.clusterctl("submit", "ranks.py", "--nodes", "2", "--wait", "-o", "json").json["jobs"][0]
    # The run is only there.
    assert "only-copy" in codes(user.clusterctl("detach", "--cluster", "national", "-o", "json", rc=1))
    user.clusterctl("collect", job["job_id"])
    user.clusterctl("detach", "--cluster", "national")
    assert national.listing("carla") == before
    assert not (user.clusterctl.home / "national").exists()


def test_detach_refuses_while_jobs_wait(attached: Attached) -> None:
    job = attached.verb("submit", "rate.py", "--slurm=--begin=now+1hour", "-o", "json", "--", "1").json
    refusal = attached.verb("detach", "--cluster", NAME, "--discard", "-o", "json", rc=1)
    assert "only-copy" in codes(refusal)
    listed = attached.verb("detach", "--cluster", NAME, "--dry-run", "-o", "json").json
    assert not listed["removed"]
    assert any(job["jobs"][0]["job_id"] in line for line in listed["only_there"])
    attached.verb("detach", "--cluster", NAME, "--cancel", "--discard")
    assert attached.site.listing("stud") == attached.home_before
