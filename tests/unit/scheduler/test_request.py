"""What a job asks for is read once, with the place of each value, and all that is wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError, raise_together
from clusterctl.scheduler.request.request import IN_TURN, Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.script import fitted_to
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_file import jobs_of_file
from clusterctl.spec.names import Launcher
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import condition, refused

SITE = site_of(
    inventory_with(
        PartitionFacts("train", ("c-1", "c-2"), max_time=3600, gpus=2),
        PartitionFacts("long", ("c-3",), gpus=0),
        account="proj",
    )
)


def request_of(folder: Path, lines: str, **options: Any) -> Request:
    """Return the request of a script whose first #SBATCH line is line 2 of job.sh."""
    script = folder / "job.sh"
    marked = "".join(f"#SBATCH {line}\n" for line in lines.splitlines())
    script.write_text(f"#!/bin/bash\n{marked}hostname\n")
    return Request.read(JobSpec(name="j", script=script, **options))


def test_script_is_read_once(tmp_path: Path) -> None:
    request = request_of(tmp_path, "--nodes=2")
    before = SITE.render(fitted_to(SITE, request))
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=1\n")
    assert SITE.render(fitted_to(SITE, request)) == before
    assert request.of(request.job.model_copy(update={"cpus": 2})).value("--nodes") == "2"


def test_each_value_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH -N2 --mem=1G --qos=q\n")
    (tmp_path / "j.yaml").write_text("job: job.sh\nmem: 2G\ncpus: 2\nslurm: [--nice=5]\n")
    (job,) = jobs_of_file(tmp_path / "j.yaml", {"cpus": 3, "time": "5m"})
    request = fitted_to(SITE, Request.read(job))
    assert {one.own_name: (one.value, one.place) for one in request.options} == {
        "--nodes": ("2", "`#SBATCH --nodes=2` in line 2 of job.sh"),
        "--qos": ("q", "`#SBATCH --qos=q` in line 2 of job.sh"),
        "--mem": ("2048M", "`mem` of j.yaml"),
        "--cpus-per-task": ("3", "--cpus"),
        "--time": ("00:05:00", "--time"),
        "--account": ("proj", "the default of cluster d"),
        "--nice": ("5", "`--slurm --nice=5`"),
    }


# Lines of old scripts that are wrong on SITE, and the code and the line of each error.
OLD = [
    (
        "--partition=regular\n--nodes=5\n--time=2-0\n--wrap=hostname",
        [
            ("option-invalid/directive", 5),
            ("not-found/partition", 2),
            ("job-unfit/nodes", 3),
        ],
    ),
    (
        "--partition=train\n--nodes=3\n--time=2:00:00\n--gres=gpu:4",
        [("job-unfit/nodes", 3), ("job-unfit/node-size", 5), ("job-unfit/time", 4)],
    ),
    (
        "hetjob\n--nodes=3\n--comment='open\n--array=0-99999999",
        [
            ("unsupported/heterogeneous", 2),
            ("option-invalid/directive", 4),
            ("job-unfit/nodes", 3),
            ("job-unfit/array-index", 5),
        ],
    ),
    ("--partition=long,train\n--nodes=2-4\n--time=UNLIMITED", []),
    (
        "--nodes=two\n--time=30m\n-n x\n--mem-per-cpu=lots\n--partition=gone",
        [("option-invalid/directive", line) for line in (2, 3, 4, 5)]
        + [("not-found/partition", 6)],
    ),
    ("--nodes=1-2\n--time=0-0:30\n--mem=1g\n-n 2", []),
    ("--partition=gone,train,old", [("not-found/partition", 2), ("not-found/partition", 2)]),
]


@pytest.mark.parametrize(("lines", "expected"), OLD)
def test_all_wrong_lines_are_told_at_once(
    tmp_path: Path, lines: str, expected: list[tuple[str, int]]
) -> None:
    faults = [*SITE.faults(request_of(tmp_path, lines))]
    assert [condition(fault) for fault in faults] == [code for code, _ in expected]
    for fault, (_, line) in zip(faults, expected, strict=True):
        assert f"line {line} of job.sh" in str(fault)


def test_wrong_flags_and_lines_are_one_error(tmp_path: Path) -> None:
    request = request_of(tmp_path, "--nodes=9", partition="gone", mount=("/a",))
    with refused(
        "option-invalid/several", UsageError, "--partition", "line 2", "--mount"
    ) as caught:
        raise_together(SITE.faults(request))
    codes = [condition(failure) for failure in caught.value.failures]
    assert codes == ["not-found/partition", "job-unfit/nodes", "option-invalid/option-missing"]


@pytest.mark.parametrize(
    ("lines", "options", "faults"),
    [
        ("--array=1-2\n--dependency=singleton", {}, 2),
        ("", {"after": ("12",)}, 1),
        ("", {"array": "0-3"}, 1),
        ("", {"slurm": ("--dependency=afterok:3",)}, 1),
        ("", {"launcher": Launcher.MPIRUN, "ranks": 1}, 1),
        ("", {"slurm": (IN_TURN,)}, 0),
    ],
)
def test_scaling_with_what_it_sets_is_refused(
    tmp_path: Path, lines: str, options: dict[str, Any], faults: int
) -> None:
    request = request_of(tmp_path, lines, scaling={"nodes": "1,2"}, **options)
    codes = [condition(fault) for fault in SITE.faults(request)]
    assert codes.count("options-exclusive") == faults
