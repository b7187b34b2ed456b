"""Fixes for jobs that the account rules of a site reject, with messages of two sites."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.scheduler.sites.advice import FOREIGN, OWN
from clusterctl.scheduler.slurm.refusals import RequestedOptions
from clusterctl.spec.sbatch import Directive, directives_of

BY_LUA = (
    "gpuq: say your project with --account; Batch job submission failed: Invalid account or "
    "account/partition combination specified"
)
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
NO_JOBS = f"AssocGrpSubmitJobsLimit; Batch job submission failed: {POLICY}"
CORES = f"QOSMaxCpuPerUserLimit; Batch job submission failed: {POLICY}"
KEPT = "attach --account"
LIST = "sacctmgr show associations"


def flags(*words: str) -> list[Directive]:
    """Return options of sbatch as the flags of `submit` set them."""
    return [replace(one, place=one.own_name) for one in directives_of(words)]


@pytest.mark.parametrize(
    ("message", "options", "helps", "absent"),
    [
        pytest.param(
            BY_LUA, ["--partition=gpuq"], ("--account", KEPT, LIST), "leave out", id="no-account"
        ),
        pytest.param(BY_LUA, ["--account=p"], ("another account", KEPT), "leave out", id="account"),
        pytest.param(BY_LUA, ["-A p"], ("another account", KEPT), "name your", id="short-option"),
        pytest.param(NO_JOBS, [], ("--account", "--qos", KEPT), "ask for less", id="no-jobs"),
        pytest.param(
            CORES, ["--account=p"], ("ask for less", "--account", "--qos"), "--time", id="cores"
        ),
        pytest.param(
            "QOSMaxWallDurationPerJobLimit", [], ("ask for less", "--qos"), "leave out", id="time"
        ),
        pytest.param(
            f"Batch job submission failed: {POLICY}",
            [],
            ("--account", "--qos"),
            "--time",
            id="policy",
        ),
    ],
)
def test_fix_names_the_options_on_which_a_refusal_depends(message, options, helps, absent):
    fix = RequestedOptions(flags(*options), advice=FOREIGN).fix(message)
    assert [words for words in helps if words not in fix] == []
    assert absent not in fix


def test_refusal_of_which_nothing_is_known_has_no_fix() -> None:
    asked = RequestedOptions(flags("--nodes=2"), advice=OWN)
    assert asked.fix("Batch job submission failed: I/O error writing script/environment") == ""


def test_advice_on_accounts_depends_on_the_cluster():
    assert LIST not in RequestedOptions(advice=FOREIGN, lists_accounts=False).fix(BY_LUA)
    own = RequestedOptions(flags("--account=p"))
    assert "leave out --account" in own.fix(BY_LUA)
    assert KEPT not in own.fix(BY_LUA)


# sbatch of Slurm 24.11 with an unknown key in slurm.conf, and without munged.
UNREADABLE = (
    "_parse_next_key: Parsing error at unrecognized key: Nonsense; fatal: Unable to process "
    "configuration file"
)
NO_MUNGE = (
    "If munged is up, restart with --num-threads=10; Munge encode failed: Failed to access "
    '"/run/munge/munge.socket.2": No such file or directory (Did you start munged?)'
)


@pytest.mark.parametrize("advice", [OWN, FOREIGN])
@pytest.mark.parametrize("said", [UNREADABLE, NO_MUNGE])
def test_fix_for_a_broken_cluster_is_its_repair(advice, said):
    assert RequestedOptions(flags("--time=5"), advice=advice).fix(said) == advice.repair


# Words of Slurm and of job_submit plugins for a request without a time limit.
NO_TIME = (
    "Requested time limit is invalid (missing or exceeds some limit)",
    "Time limit specification required, but not provided",
    "please specify a time limit",
    "You must set a walltime",
    "jobs without --time are not allowed here",
)


@pytest.mark.parametrize("message", NO_TIME)
def test_fix_for_a_missing_time_limit_is_time(message):
    fix = RequestedOptions(flags("--nodes=2", "--time-min=5"), advice=FOREIGN).fix(message)
    assert fix.startswith("pass ")
    assert "--time" in fix
    for option in ("--time=100", "-t 100", "--time 1:00"):
        assert (
            RequestedOptions(flags(option), advice=FOREIGN)
            .fix(message)
            .startswith("leave out --time")
        )


@pytest.mark.parametrize(("options", "is_array"), [(["--array=0-7"], True), (["--nodes=2"], False)])
def test_fix_for_an_array_above_a_job_limit_is_fewer_tasks(options, is_array):
    """It is refused also if the queue has no other job of the user."""
    fix = RequestedOptions(flags(*options), advice=FOREIGN).fix(
        f"QOSMaxSubmitJobPerUserLimit; {POLICY}"
    )
    assert ("fewer tasks" in fix) is ("--pack" in fix) is is_array
    assert "--qos" in fix
