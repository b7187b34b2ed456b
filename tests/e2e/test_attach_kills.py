"""`attach`, `detach` and `submit` killed at random moments on foreign clusters: the next call
converges.

SWEEP_SEED chooses other moments. The names of the tests have the seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.faults import Victim
from tests.support.foreign.site import Site
from tests.support.foreign.user import User, user_of
from tests.support.messages import codes

pytestmark = pytest.mark.sweep

SEED = int(os.environ.get("SWEEP_SEED") or 47)
# Parts of the duration of an undisturbed call.
MOMENTS = [round(random.Random(SEED + number).random(), 3) for number in range(6)]  # noqa: S311
KILLS = 30
# Each program adds a line to a file of its job's name.
JOB = """\
#!/bin/bash
echo "$SLURM_JOB_ID" >>~/"ran-$SLURM_JOB_NAME"
"""
WAYS = ((), ("--first", "main,main@proj1"), ("--first", "national,campus"))


@dataclass(frozen=True)
class Rig:
    """A person at both sites. seconds: the duration of `attach` and of `detach`."""

    sites: tuple[Site, Site]
    user: User
    before: list[str]
    seconds: dict[str, float]

    def kill(self, verb: str, moment: float) -> None:
        """Kill a verb at a moment. At every other moment, also kill everything that it has started
        here.
        """
        words = ("national",) if verb == "attach" else ("--cluster", "national")
        victim = Victim(self.user.clusterctl, verb, *words)
        victim.until(moment * self.seconds[verb])
        victim.hit("kill-all" if MOMENTS.index(moment) % 2 else "kill")

    def detach(self) -> None:
        """Detach the cluster, unless it is detached. The home is then as it was."""
        again = self.user.clusterctl("detach", "--cluster", "national", "-o", "json", rc=None)
        assert codes(again) in ([], ["not-found/cluster"])
        assert self.sites[0].listing("stud") == self.before
        assert not (self.user.clusterctl.home / "national").exists()


@pytest.fixture(scope="module")
def rig(national: Site, campus: Site, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    user = user_of(national, "stud", tmp_path_factory.mktemp("kills"), campus)
    before = national.listing("stud")
    seconds = {}
    for verb, words in (("attach", ("national",)), ("detach", ("--cluster", "national"))):
        begun = time.monotonic()
        user.clusterctl(verb, *words)
        seconds[verb] = time.monotonic() - begun
    return Rig((national, campus), user, before, seconds)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"seed-{SEED}-at-{moment}")
def test_killed_attach_and_detach_continue(rig: Rig, moment: float) -> None:
    rig.kill("attach", moment)
    assert rig.user.clusterctl("attach", "national", "-o", "json").json["proven"]
    assert not list(rig.user.clusterctl.home.glob(".attach-*"))
    rig.kill("detach", moment)
    rig.detach()


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"seed-{SEED}-at-{moment}")
def test_detach_after_a_killed_attach_leaves_nothing(rig: Rig, moment: float) -> None:
    rig.kill("attach", moment)
    rig.detach()


@pytest.fixture(scope="module")
def both(rig: Rig) -> Iterator[User]:
    """A user who has attached both sites."""
    user = rig.user
    (user.folder / "job.sh").write_text(JOB)
    befores = [one.listing("stud") for one in rig.sites]
    for one in rig.sites:
        user.clusterctl("attach", one.name)
    yield user
    for one in rig.sites:
        one.root("login1", "rm -f /home/stud/ran-*")
        user.clusterctl("detach", "--cluster", one.name, "--cancel", "--discard")
    assert [one.listing("stud") for one in rig.sites] == befores


@pytest.mark.parametrize("seed", [SEED])
def test_killed_submits_run_no_job_twice(rig: Rig, both: User, seed: int) -> None:
    moments = random.Random(seed)  # noqa: S311
    seconds = []
    for way in WAYS:
        begun = time.monotonic()
        both.clusterctl(*submit("whole", way))
        seconds.append(time.monotonic() - begun)
    for number in range(KILLS):
        kind = number % len(WAYS)
        moment = moments.random()
        name = f"kill-{number}"
        victim = Victim(both.clusterctl, *submit(name, WAYS[kind]))
        victim.until(moment * seconds[kind])
        victim.hit("kill")
        ids = [(one, job_id) for one in rig.sites for job_id in one.jobs_named(name)]
        assert len(ids) <= (2 if WAYS[kind] else 1)
        # The next commands choose a job.
        for one in rig.sites:
            both.clusterctl("jobs", "--cluster", one.name)
        for one, job_id in ids:
            one.await_end(job_id)
        ran = [line for one in rig.sites for line in jobs_that_ran(one, name)]
        assert len(ran) == min(len(ids), 1), (
            f"kill {number} after {moment:.3f} of {seconds[kind]:.2f} s"
        )


def submit(name: str, way: tuple[str, ...]) -> tuple[str | Path, ...]:
    return ("submit", "job.sh", "--cluster", "national", "--name", name, *way)


def jobs_that_ran(one: Site, name: str) -> list[str]:
    return one.root("login1", f"cat /home/stud/ran-{name}", rc=None).split()
