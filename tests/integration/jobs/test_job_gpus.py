"""How many ranks a training gets on GPUs, by what `submit` prepares."""

from __future__ import annotations

from clusterctl.errors import UsageError
from clusterctl.jobs.prepare import Preparer, Submission
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.util.progress import SILENT
from tests.support.messages import refused


def test_default_number_of_ranks_suits_the_arguments() -> None:
    gpus = {"type": "h100", "count": 8}
    provider = {"type": "gcp", "project": "p-123456", "zone": "europe-west4-a"}
    partitions = [{"name": "train", "nodes": 1, "gpus": gpus}]
    spec = ClusterSpec.model_validate(
        {"version": 1, "name": "demo", "provider": provider, "partitions": partitions}
    )
    fit, unfit = (JobSpec(name="t", bundled="train", args=("--pp", stages)) for stages in "23")
    preparer = Preparer(SILENT.note)
    (prepared,) = preparer.plan(Submission.of((fit,)), spec).jobs
    assert prepared.job.tasks_per_node == 8
    with refused("option-invalid/program", UsageError, "--pp 3", "the 8 ranks"):
        preparer.plan(Submission.of((unfit,)), spec)
