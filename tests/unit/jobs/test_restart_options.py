"""The options of jobs that Slurm requeues: the defaults of the training, and the total time of a
chain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs.prepare import restart_notice, with_restarts
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import condition
from tests.support.played.batch import rendered, user_script

PARTITIONS = (
    PartitionFacts("train", ("c-1", "c-2")),
    PartitionFacts("short", ("c-3",), max_time=3600),
)
SITE = site_of(inventory_with(*PARTITIONS))
SAVES = ("--save-interval", "50")
RESUMES = (*SAVES, "--resume", "auto")


def train(*args: str, **options: Any) -> JobSpec:
    return JobSpec(name="t", bundled="train", args=args, **options)


@pytest.mark.parametrize(
    ("job", "requeue", "args", "code"),
    [
        (train(), False, (), ""),
        (train(*SAVES), True, SAVES, "requeued-by-default"),
        (train("--save-interval=50"), True, ("--save-interval=50",), "requeued-by-default"),
        (train(*SAVES, requeue=True), True, SAVES, ""),
        (train(*RESUMES), True, RESUMES, "requeued-by-default"),
        (
            train(*SAVES, "--resume", "never"),
            True,
            (*SAVES, "--resume", "never"),
            "requeued-by-default",
        ),
        (train(*RESUMES, requeue=True), True, RESUMES, ""),
        (train(*SAVES, requeue=False), False, SAVES, ""),
        (train(requeue=True), True, (), "requeue-without-checkpoints"),
        (train("--config", "a.toml", requeue=True), True, ("--config", "a.toml"), ""),
        (train(*SAVES, chain="7d", time="4h"), True, SAVES, ""),
        (train(*RESUMES, chain="7d", time="4h"), True, RESUMES, ""),
        (train(chain="7d", time="4h"), True, (), "requeue-without-checkpoints"),
        (JobSpec(name="e", bundled="eval", args=SAVES), False, SAVES, ""),
    ],
)
def test_training_is_requeued(
    job: JobSpec, requeue: bool, args: tuple[str, ...], code: str
) -> None:
    """By default if it saves checkpoints. Whatever the user has not written is said.

    Its arguments stay: after a restart it continues from its checkpoints by itself.
    """
    found = with_restarts(SITE, job)
    assert (found.requeue, found.args) == (requeue, args)
    notice = restart_notice(job, found)
    assert (condition(notice) if notice else "") == code


def test_training_without_slurm_is_not_requeued() -> None:
    job = train(*SAVES)
    site = site_of(inventory_with(*PARTITIONS, scheduler="none"))
    assert with_restarts(site, job) == job
    continued = with_restarts(site, train(from_run="12"))
    assert (continued.requeue, continued.args) == (False, ("--resume", "auto"))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "option-invalid/chain-limit"),
        ({"time": "1h1m"}, "option-invalid/chain"),
        ({"partition": "short", "chain": "59m"}, "option-invalid/chain"),
        ({"time": "1h", "requeue": False}, "options-exclusive"),
    ],
)
def test_chain_without_use_is_rejected(options: dict[str, Any], code: str) -> None:
    job = with_restarts(SITE, train(**{"chain": "1h", **options}))
    assert [condition(fault) for fault in SITE.faults(Request.read(job))] == [code]


def test_chain_takes_the_limit_of_partition_or_script(tmp_path: Path) -> None:
    assert with_restarts(SITE, train(chain="2h", partition="short")).requeue
    script = user_script(tmp_path, "own.sh", "#!/bin/bash\n#SBATCH -t 60\ntrue\n")
    job = with_restarts(SITE, JobSpec(name="own", script=script, chain="2h"))
    assert {"--requeue", "--chain=7200"} <= {*rendered(job).split()}
    for partition in ("short", "train,short"):
        script = user_script(tmp_path, "own.sh", f"#!/bin/bash\n#SBATCH -p {partition}\ntrue\n")
        job = with_restarts(SITE, JobSpec(name="own", script=script, chain="2h"))
        assert job.requeue
        assert [*SITE.faults(Request.read(job))] == []


def test_refused_requeue_is_refused_to_slurm() -> None:
    """Slurm itself requeues jobs that lose a node, unless it is told otherwise."""
    assert "#SBATCH --no-requeue\n" in rendered(train(requeue=False))
    assert "requeue" not in rendered(train())
