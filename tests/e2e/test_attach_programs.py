"""Trainings that take minutes, by an ordinary user on foreign clusters without internet access."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import records
from tests.support.foreign.site import Site
from tests.support.foreign.user import User, user_of

pytestmark = pytest.mark.sweep

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# PyTorch alone unpacks to 700 MB. The index of scripts/bootstrap may have its wheel for this
# machine's Python only, which is that of campus.
ROOM = "4g"


@pytest.fixture(params=["stud", "carla"])
def user(request: pytest.FixtureRequest, campus: Site, tmp_path: Path) -> Iterator[User]:
    """A person who uses bash, and one who uses tcsh."""
    before = campus.listing(request.param)
    one = user_of(campus, request.param, tmp_path)
    with campus.large_homes(ROOM):
        one.clusterctl("attach", "campus")
        yield one
        one.clusterctl("detach", "--cluster", "campus", "--cancel", "--discard")
        assert campus.listing(request.param) == before


def run_of(user: User, *words: str | Path) -> Path:
    """Submit a job, wait until it has ended, and collect its run."""
    job_id = user.clusterctl("-o", "json", "submit", "--wait", *words, timeout_s=800).json["job_id"]
    (run,) = user.clusterctl("-o", "json", "collect", job_id).json["runs"]
    return Path(run["dir"])


def test_torchrun_and_lightning_train_on_two_nodes(user: User) -> None:
    options = ("--nodes", "2", "--requirements")
    torch = run_of(
        *(user, EXAMPLES / "torch_ddp.py", "--launcher", "torchrun", *options),
        *(EXAMPLES / "requirements-torch.txt", "--", "--epochs", "15"),
    )
    log = (torch / "stdout.log").read_text()
    assert {f"rank {rank} of 2 on c{rank + 1}: cpu, gloo" for rank in (0, 1)} <= {*log.splitlines()}
    assert (torch / "model.pt").stat().st_size > 1000
    lightning = run_of(
        user, EXAMPLES / "lightning_mlp.py", *options, EXAMPLES / "requirements-lightning.txt"
    )
    *_, last = (lightning / "stdout.log").read_text().splitlines()
    assert last.endswith("by 2 ranks")
    assert float(last.split()[1]) > 0.8


@pytest.mark.parametrize("person", ["stud", "carla"])
def test_chain_continues_after_the_time_limit(national: Site, tmp_path: Path, person: str) -> None:
    """Slurm starts a requeued job only after two minutes."""
    user = user_of(national, person, tmp_path)
    before = national.listing(person)
    user.clusterctl("attach", "national")
    limits = ("--nodes", "2", "--time", "1m", "--set", "chain=1m")
    job_id = user.clusterctl(
        *("-o", "json", "submit", "train", *limits, "--wait", "--"),
        *("--model", "mlp", "--epochs", "100000", "--save-interval", "50"),
        rc=None,
    ).json["job_id"]
    (run,) = user.clusterctl("-o", "json", "collect", job_id).json["runs"]
    events = records(Path(run["dir"]) / "job.events")
    *earlier, last = [event for event in events if event["event"] in ("requeue", "stop")]
    assert {event["reason"] for event in earlier} == {"saved"}
    assert last["reason"] == "chain-over"
    # Each attempt continues from the checkpoint of the one before.
    iterations = [event["progress"][0] for event in (*earlier, last)]
    assert iterations == sorted({*iterations})
    user.clusterctl("detach", "--cluster", "national", "--discard")
    assert national.listing(person) == before
