"""What jobs can use at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clusterctl.jobs.plan import at_most, listed, most_of_jobs
from clusterctl.jobs.prepare import read_jobs
from clusterctl.jobs.source import source_of
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.script import fitted_to
from clusterctl.scheduler.sites.site import Site
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.load import dump_spec
from clusterctl.state.inventory import PartitionFacts
from clusterctl.state.workspace import Workspace
from tests.support.inventories import inventory_with
from tests.unit.cluster.specs import spec_of

PARTITIONS = (
    PartitionFacts("train", ("c-1", "c-2", "c-3"), max_time=4 * 3600),
    PartitionFacts("long", ("c-4",)),
)
SITE = site_of(inventory_with(*PARTITIONS))
FOREIGN = site_of(inventory_with(*PARTITIONS, is_foreign=True))
PRICES = {"train": 2.0}
UNKNOWN = (None, None)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """`script("--nodes=2")`: the path of a script with these #SBATCH lines."""

    def write(*options: str) -> Path:
        path = tmp_path / "job.sh"
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "hostname"]
        path.write_text("\n".join(lines))
        return path

    return write


def uses(target: Path | str, site: Site = SITE, **options: Any) -> tuple[Any, ...]:
    """Return (tasks, node hours, USD) of a job."""
    jobs = [fitted_to(site, Request.read(job)) for job in read_jobs(str(target), options)]
    found = asdict(at_most(site, jobs, PRICES.get))
    assert found["jobs"] == len(jobs)
    return found["tasks"], found["node_hours"], found["usd"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"time": "30m"}, (1, 0.5, 1.0)),
        ({"time": "90s", "nodes": 3}, (1, 0.1, 0.2)),
        ({}, (1, 4.0, 8.0)),
        ({"partition": "long"}, (1, None, None)),
        ({"partition": "long", "time": "1h"}, (1, 1.0, None)),
        ({"time": "1h", "array": "0-9%2"}, (10, 10.0, 20.0)),
        ({"time": "1h", "array": "1-16:4,20"}, (5, 5.0, 10.0)),
        ({"time": "1h", "array": "0-9", "pack": True}, (1, 1.0, 2.0)),
        ({"time": "1h", "sweep": ["lr=1,2,3", "seed=0..3"]}, (12, 12.0, 24.0)),
        ({"time": "1h", "scaling": {"nodes": [1, 2], "repeats": 2}}, (4, 6.0, 12.0)),
        ({"time": "1h", "chain": "7h", "nodes": 2}, (1, 16.0, 32.0)),
        ({"time": "1h", "requeue": True}, (1, *UNKNOWN)),
        ({"time": "1h", "nodes": 2, "slurm": ["--nodelist=c-[1-3]"]}, (1, *UNKNOWN)),
        ({"time": "1h", "slurm": ["--clusters=other"]}, (1, *UNKNOWN)),
        ({"time": "1h", "nodes": 2, "slurm": ["--exclude=c-3"]}, (1, 2.0, 4.0)),
    ],
)  # fmt: skip
def test_at_most_counts_all_tasks_and_attempts(
    script: Callable[..., Path], options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert uses(script(), **options) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["--time=60", "--nodes=2"], (1, 2.0, 4.0)),
        (["--time=60", "--array=[1-16:4]%2"], (4, 4.0, 8.0)),
        (["--time=60"], (1, 1.0, 2.0)),
        (["--time=60", "--ntasks=1", "--mem=1G"], (1, 1.0, 2.0)),
        (["--nodes=2"], (1, 8.0, 16.0)),
        (["--time=0", "--nodes=2"], (1, 8.0, 16.0)),
        (["--time=UNLIMITED"], (1, 4.0, 8.0)),
        (["--time=0", "--partition=long"], (1, *UNKNOWN)),
        (["--time=60", "--nodes=2-8"], (1, *UNKNOWN)),
        (["--time=60", "--nodes=8,2"], (1, *UNKNOWN)),
        (["--time=60", "--nodes=1-16:4"], (1, *UNKNOWN)),
        (["--time=60", "--nodes=1k"], (1, *UNKNOWN)),
        (["--time=60", "\f--nodes=2"], (1, 2.0, 4.0)),
        (["--time=60", "-N4"], (1, 4.0, 8.0)),
        (["--time=60", "--ntasks=8"], (1, *UNKNOWN)),
        (["--time=60", "--gpus=8"], (1, *UNKNOWN)),
        (["--time=60", "--array=0xf"], (None, *UNKNOWN)),
        (["--time=60", "--requeue"], (1, *UNKNOWN)),
        (["--time=60", "--partition=train,long"], (1, 1.0, None)),
        (["--partition=train,long"], (1, *UNKNOWN)),
        (["--time=60", "--partition=elsewhere"], (1, 1.0, None)),
    ],
)  # fmt: skip
def test_at_most_reads_the_lines_of_the_script(
    script: Callable[..., Path], lines: list[str], expected: tuple[Any, ...]
) -> None:
    assert uses(script(*lines)) == expected


def test_at_most_does_not_trust_the_limits_of_other_peoples_partitions(
    script: Callable[..., Path],
) -> None:
    assert uses(script(), FOREIGN) == (1, *UNKNOWN)
    assert uses(script(), FOREIGN, time="1h") == (1, 1.0, 2.0)


def test_at_most_rounds_up(script: Callable[..., Path]) -> None:
    (_, hours, _) = uses(script(), time="1m", array="0-6")
    assert 7 / 60 <= hours < 7 / 60 + 1e-4


def test_at_most_counts_a_started_minute_as_a_minute(script: Callable[..., Path]) -> None:
    (_, hours, _) = uses(script(), time="0:01")
    assert hours >= 1 / 60


def test_at_most_has_the_nodes_and_the_time_of_the_largest_job(script: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"scaling": {"nodes": [1, 3]}, "time": "1h", "chain": "7h"}
    jobs = [fitted_to(SITE, Request.read(job)) for job in read_jobs(str(script()), options)]
    most = at_most(SITE, jobs, PRICES.get)
    assert (most.nodes, most.time_s) == (3, 8 * 3600)
    unknown = [
        fitted_to(SITE, Request.read(job)) for job in read_jobs(str(script("--ntasks=8")), {})
    ]
    most = at_most(SITE, [*jobs, *unknown], PRICES.get)
    assert (most.nodes, most.node_hours) == (None, None)


def test_jobs_are_measured_on_the_cluster_that_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on that which the changed spec describes."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    spec = spec_of({"name": "train", "nodes": 3})
    request = Request.read(job_spec("train", {"nodes": 2}))
    planned = most_of_jobs(spec, [request])
    assert (planned.node_hours, planned.usd) == (None, 0.0)
    workspace = Workspace.of(spec.name)
    workspace.create()
    workspace.spec.write_text(dump_spec(spec))
    partition = PartitionFacts("train", ("d-train-1", "d-train-2"), max_time=3600)
    workspace.inventory.write_text(inventory_with(partition).text)
    most = most_of_jobs(spec, [request])
    assert most.node_hours == 2.0


def test_first_files_are_listed_and_the_others_by_folder(script: Callable[..., Path]) -> None:
    folder = script().parent
    (folder / "data").mkdir()
    for number in range(30):
        (folder / "data" / f"{number:02}.csv").write_text("1")
    (folder / "z.txt").write_text("zz")
    source = source_of(Request.read(JobSpec(name="j", script=folder / "job.sh")))
    assert source is not None
    rows = listed(source)
    assert [row.path for row in rows[:3]] == ["data/00.csv", "data/01.csv", "data/02.csv"]
    assert [(row.path, row.files) for row in rows[20:]] == [("data/", 10), ("./", 2)]
    assert sum(row.files for row in rows) == len(source.files)
    assert sum(row.bytes for row in rows) == source.bytes
