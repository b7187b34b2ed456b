"""Ending jobs, and listing them."""

from __future__ import annotations

import pytest

from clusterctl.errors import SlurmError, UsageError
from clusterctl.jobs.watch import cancel, known_jobs, list_jobs
from tests.support.played.cluster import submitted


def test_cancel(session, cluster, tmp_path):
    job_id = submitted(session, tmp_path, "sleep 60")
    (job,) = cancel(session, [job_id])
    assert (job.id, job.ended) == (job_id, False)
    assert cluster.job(job_id)["state"] == "CANCELLED"


def test_cancel_says_what_had_ended(session, cluster, tmp_path):
    over, running = submitted(session, tmp_path, "true"), submitted(session, tmp_path, "sleep 60")
    cluster.wait_until_ended(over)
    done = cancel(session, [over, running])
    assert {job.id: job.ended for job in done} == {over: True, running: False}
    assert cluster.job(over)["state"] == "COMPLETED"


def test_cancel_of_an_unknown_job_cancels_nothing(session, cluster, tmp_path):
    job_id = submitted(session, tmp_path, "sleep 60")
    with pytest.raises(SlurmError, match="does not know job 77"):
        cancel(session, [job_id, "77"])
    assert cluster.job(job_id)["state"] == "RUNNING"
    with pytest.raises(UsageError):
        cancel(session, ["all"])


def test_list_has_the_queue_and_what_it_has_forgotten(session, cluster, tmp_path):
    first, second = submitted(session, tmp_path, "true"), submitted(session, tmp_path, "true")
    cluster.wait_until_ended(first)
    cluster.wait_until_ended(second)
    cluster.change(first, forgotten=True)
    assert [job.id for job in list_jobs(session)] == [first, second]


def test_as_dict_is_plain_json(session, cluster, tmp_path):
    job_id = submitted(session, tmp_path, "true")
    cluster.wait_until_ended(job_id)
    (job,) = known_jobs(session, [job_id])
    told = job.as_dict()
    assert (told["job_id"], told["state"], told["nodes"]) == (job_id, "COMPLETED", ["n1"])
    assert type(told["state"]) is str
