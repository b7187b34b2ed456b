"""Limits of a user, an account and a QOS in the spec: Slurm enforces them, and its reason is shown."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, raised
from tests.support.processes import eventually

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: train, nodes: 1}}]
users: [{{name: hpc, uid: 10000{of_user}}}]
slurm:
  accounts: [{{name: default{of_account}}}]
  qos: [{{name: brief{of_qos}}}]
"""
LIMITS = {
    "of_user": ", limits: {MaxSubmit: 2}",
    "of_account": ", limits: {MaxJobs: 1, GrpTRESMins: cpu=900}",
    "of_qos": ", limits: {MaxWall: 60}",
}
NO_LIMITS = dict.fromkeys(LIMITS, "")
OF_ASSOCIATIONS = (
    "sacctmgr -nP show assoc WOPLimits format=account,user,MaxJobs,MaxSubmit,GrpTRESMins"
)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"t{secrets.token_hex(3)}"
    home = tmp_path_factory.mktemp("home")
    cwd = tmp_path_factory.mktemp("cwd")
    with raised(name, SPEC.format(name=name, **LIMITS), home, cwd) as one:
        yield one


def refusal(cluster: Cluster, *words: object) -> str:
    """Return Slurm's words for a job that it refuses."""
    (failure,) = cluster.json("submit", "probe", *words, rc=1)["failures"]
    assert failure["code"] == "slurm-refused"
    return str(failure["cause"])


def test_job_beyond_a_limit_is_refused_or_waits_with_the_reason_of_slurm(limited: Cluster) -> None:
    limited("plan", "--check")
    assert "QOSMaxWall" in refusal(limited, "--qos", "brief", "--time", "2h")
    assert "AssocGrpCPUMinutesLimit" in refusal(limited, "--time", "2d")
    script = limited.runner.cwd / "long.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    first, second = (
        limited.json("submit", script, "--time", "10m", "--mem", "100M")["job_id"] for _ in range(2)
    )

    def reason() -> str:
        jobs = {job["job_id"]: job for job in limited.json("jobs")["jobs"]}
        return str(jobs[second]["reason"])

    eventually(lambda: reason() == "AssocMaxJobsLimit")
    assert "AssocMaxSubmitJobLimit" in refusal(limited, "--time", "10m")
    (place,) = limited.json("where", "--time", "10m")["places"]
    assert (place["accepted"], "AssocMaxSubmitJobLimit" in place["slurm"]) == (False, True)
    (failure,) = limited.json("wait", second, "--timeout", "1s", rc=6)["failures"]
    assert "AssocMaxJobsLimit" in failure["cause"]
    limited("cancel", first, second)


def test_limits_that_are_taken_out_of_the_spec_are_lifted(limited: Cluster) -> None:
    controller = f"{limited.name}-ctl"
    assert "default||1||cpu=900" in limited.ssh(controller, OF_ASSOCIATIONS).splitlines()
    (limited.runner.cwd / "cluster.yaml").write_text(SPEC.format(name=limited.name, **NO_LIMITS))
    limited("up")
    shown = limited.ssh(controller, OF_ASSOCIATIONS).splitlines()
    assert {"default||||", "default|hpc|||"} <= {*shown}
    assert limited.ssh(controller, "sacctmgr -nP show qos brief format=MaxWall").strip() == ""
    limited("plan", "--check")
