"""Bundled programs use the GPUs of their nodes, one rank each, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec

_ON_THE_CPU = "probe"  # it proves the way between ranks, and is to start at once


def with_gpus(spec: ClusterSpec, job: JobSpec) -> JobSpec:
    """The job with what it did not say of GPUs and ranks, from its partition's ``gpus``.

    All GPUs of a node and one rank on each; as many ranks as GPUs where one of both was given. Scripts of the
    user's, jobs with ``--device cpu`` and partitions without GPUs stay as they are.
    """
    chosen = {one.name: one for one in spec.partitions}.get(job.partition or spec.partitions[0].name)
    if chosen is None or chosen.gpus is None or job.bundled in (None, _ON_THE_CPU) or _on_cpu(job.args):
        return job
    said: dict[str, Any] = {}
    if "gpus" not in job.model_fields_set and spec.has_slurm:  # without it, a job has all there are
        ranks = job.tasks_per_node if "tasks_per_node" in job.model_fields_set else chosen.gpus.count
        said["gpus"] = min(ranks, chosen.gpus.count)
    if "tasks_per_node" not in job.model_fields_set:
        said["tasks_per_node"] = max(said.get("gpus", job.gpus if spec.has_slurm else chosen.gpus.count), 1)
    return job.model_copy(update=said)


def _on_cpu(args: Sequence[str]) -> bool:
    return "--device=cpu" in args or ("--device", "cpu") in pairwise(args)
