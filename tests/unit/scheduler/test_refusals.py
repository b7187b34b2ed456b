"""What helps if the rules of a site for accounts reject a job. The messages are those of two sites."""

from __future__ import annotations

import pytest

from clusterctl.scheduler.refusals import Asked

BY_LUA = (
    "gpuq: say your project with --account; Batch job submission failed: Invalid account or "
    "account/partition combination specified"
)
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
NO_JOBS = f"AssocGrpSubmitJobsLimit; Batch job submission failed: {POLICY}"
CORES = f"QOSMaxCpuPerUserLimit; Batch job submission failed: {POLICY}"
KEPT = "attach --account"
LIST = "sacctmgr show associations"


@pytest.mark.parametrize(
    ("said", "options", "helps", "not_said"),
    [
        (BY_LUA, ["--partition=gpuq"], ("--account", KEPT, LIST), "leave out"),
        (BY_LUA, ["--account=p"], ("another account", KEPT), "leave out"),
        (BY_LUA, ["-A p"], ("another account", KEPT), "name your"),
        (NO_JOBS, [], ("--account", "--qos", KEPT), "ask for less"),
        (CORES, ["--account=p"], ("ask for less", "--account", "--qos"), "--time"),
        ("QOSMaxWallDurationPerJobLimit", [], ("ask for less", "--qos"), "leave out"),
        (f"Batch job submission failed: {POLICY}", [], ("--account", "--qos"), "--time"),
    ],
)
def test_the_fix_names_the_account_where_it_is_the_cause(said, options, helps, not_said):
    fix = Asked(options, is_foreign=True).fix(said)
    assert [words for words in helps if words not in fix] == []
    assert not_said not in fix


def test_advice_on_accounts_depends_on_the_cluster():
    assert LIST not in Asked(is_foreign=True, lists_accounts=False).fix(BY_LUA)
    own = Asked(["--account=p"])
    assert "leave out --account" in own.fix(BY_LUA)
    assert KEPT not in own.fix(BY_LUA)
