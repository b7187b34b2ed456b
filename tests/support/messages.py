"""Errors and notes by their codes. Tests assert these; only ``SHOWN`` has parts of texts.

with refused("in-use/subnet", where="provider.subnet"): ...      # an error of ours, with its fields
assert codes(result) == ["not-found/job"]                           # `-o json`
assert shows(result.stderr, "not-up")                               # as a person reads it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.errors import BadValueError, ClusterctlError
from payload.errors import PayloadError, RankError

if TYPE_CHECKING:
    from tests.support.verbs import CommandResult


@contextmanager
def refused(
    code: str,
    kind: type[ClusterctlError | BadValueError | PayloadError | RankError] = ClusterctlError,
    *values: str,
    **fields: object,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error of a condition, such as "in-use/subnet". The body gets pytest's `caught`.

    kind: the class of the error.
    values: names, numbers and commands that its text shows.
    fields: attributes that it has.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    assert code in codes_of(error), f"{codes_of(error)}: {error}"
    assert [value for value in values if value not in str(error)] == []
    assert {name: getattr(error, name) for name in fields} == fields


def condition(failure: object) -> str:
    """Return the code of an error or of a failure, and the thing that it is about, such as
    "not-found/run". For a mistake in a spec: its kind, such as "bad-format".

    failure: an error, a failure, or a failure of `-o json`.
    """
    values = failure if isinstance(failure, Mapping) else None
    code = values.get("code", "") if values else getattr(failure, "code", "")
    about = values.get("about", "") if values else getattr(failure, "about", "")
    return about if code == "spec-invalid" and about else "/".join(filter(None, (code, about)))


def codes_of(error: ClusterctlError | BadValueError | PayloadError | RankError) -> list[str]:
    """Return the conditions of an error and of the failures behind it, and the mistakes in values
    by their own names, such as "bad-format".
    """
    failures = error.failures if isinstance(error, ClusterctlError) else ()
    mistakes = [failure.about for failure in failures if failure.about]
    return list(dict.fromkeys([condition(error), *map(condition, failures), *mistakes]))


def codes(result: CommandResult) -> list[str]:
    """Return the conditions of the failures in an answer of `-o json`."""
    return [condition(failure) for failure in result.json["failures"]]


def shows(text: str, code: str) -> bool:
    """Return whether a text for a person has a message of a code in it."""
    line = " ".join(text.split())
    return any(part in line for part in SHOWN[code])


# Code -> parts of its messages, as a person reads them.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "answer-garbled": (
        "the host's answer contains no facts",
        "the program that reads jobs' folders on the cluster gave a",
        "the log reader on the cluster gave a malformed answer",
        "did not return valid JSON",
        "sent a malformed list of files",
        "the host's answer is not a valid list of jobs",
        "nothing was downloaded: the cluster listed files that were",
        "nothing was downloaded: the list of files is malformed or",
        "clusterctl does not understand the cluster's answer",
    ),
    "api-off": (
        "is not enabled in project",
        ".googleapis.com is not enabled",
    ),
    "bad-flag": ("see --help",),
    "batch-above-samples": ("is too large: there are",),
    "built-from-source": ("of its sources on this machine",),
    "built-in-spec": ("no cluster.yaml here: using the built-in local cluster",),
    "busy": ("is already running",),
    "cache-empty": ("the image cache is empty",),
    "checkpoint-damaged": (
        "is broken",
        "is damaged",
        "--checkpoint",
    ),
    "checkpoint-other-settings": ("but this run has",),
    "checkpoint-unwritable": ("a checkpoint cannot be written",),
    "checkpoints-not-shared": ("is not the same folder on all nodes: use a shared folder",),
    "cluster-missing": ("is not listed",),
    "code-changed-since": ("changed after the submission; the replay uses the files",),
    "code-of-bundled-job": ("--code current changes nothing: a bundled job always runs",),
    "data-not-named": ("is not in a run's folder, so no config.toml names the data",),
    "data-unfit-for-model": (
        "use digits, idx:DIR or synthetic",
        "use text:FILE or synthetic",
    ),
    "detached": ("is not cancelled; follow it with `clusterctl logs",),
    "exit-code": (
        "usually a shell returns 128 plus the number of the signal",
        "exit code",
    ),
    "figure-form-unknown": ("is not the name of a figure",),
    "file-exists": (
        "already exists",
        "exists; choose another name, or overwrite it with --force",
    ),
    "file-unreadable": (
        "can't be read",
        "the requirements file",
        "can't be submitted",
        "is not a file",
        "cannot be read",
    ),
    "file-unwritable": (
        "can't be written",
        "cannot be written",
    ),
    "gpu-lost": (
        "a GPU does not answer",
        "usually a GPU failed",
    ),
    "iam-propagation": ("Google's IAM does not know the new service account",),
    "image-distribution": ("hosts with these images can't form a cluster",),
    "image-of-the-cluster": ("is missing or changed on this machine; the cluster's copy",),
    "job-folder-empty": ("the job's folder is empty or was deleted",),
    "job-hangs": ("hangs",),
    "job-not-ended": ("was still running when it was collected",),
    "lock-not-used": ("is not used, because only its own tool reads it; to install",),
    "log-ends-with-error": (
        "the program has handled it, or ignores it",
        "a shell script goes on after a failed command, unless it",
    ),
    "means-of-runs": ("mean ± sample standard deviation of n runs, over",),
    "message-not-sent": (
        "note: the message",
        "note: a message to",
    ),
    "messages-while-running": ("while this command runs, from this machine",),
    "metrics-nonfinite": ("became NaN or infinite",),
    "model-unfit-for-command": ("but this command needs",),
    "needs-confirmation": ("the command needs a confirmation",),
    "needs-terminal": (
        "no command is given",
        "a shell needs a terminal",
    ),
    "no-accounting": ("Slurm's accounting (slurmdbd) does not answer, but jobs run",),
    "no-cgroups": ("Slurm runs without control groups",),
    "no-checkpoint": ("contains no checkpoint",),
    "no-gpu": (
        "usually the program found no GPU",
        "needs GPUs: leave out --device cpu, or",
        "--cuda-aware: this rank uses no GPU; omit --cuda-aware",
        "--comm nccl: this rank has no GPU",
        "--kernels fused: this rank has no GPU; use --kernels plain",
        "check that nvidia-smi lists a GPU on the node, and that the",
    ),
    "no-run-matches": ("no run matches the conditions",),
    "no-runs": ("no runs yet; `clusterctl collect` copies them here",),
    "no-such-folder": ("does not exist; create it first",),
    "not-a-model-folder": ("pass the folder model/ of a training run",),
    "not-replayable": ("can't be replayed",),
    "not-up": (
        "no cluster is up",
        "is not up",
    ),
    "older-jobs": (
        "not shown: `clusterctl jobs --all` shows all",
        "not shown: `clusterctl jobs --all --cluster all` shows all",
    ),
    "older-version-chosen": ("which has a wheel, because newer sources must be compiled",),
    "only-cluster-up": ("the only cluster that is up",),
    "options-exclusive": (
        "--cluster all shows all jobs, and job IDs were given",
        "usage shows one cluster, and --cluster all was given",
        "--failed runs tasks again unchanged, and can't be combined",
        "can't be combined with",
        "--out, --resume, --tp and --pp are for checkpoints, not for",
        "export: pass either --model-folder or --checkpoint",
    ),
    "orphans-not-deleted": ("resources of the cluster could not be deleted",),
    "packages-for-another-python": ("the original job used packages for",),
    "packages-not-installed": ("are not installed",),
    "parameters-differ": ("ranks' parameters differ",),
    "part-ended-by-exception": ("is COMPLETED, but an exception ended a part of its program",),
    "path-not-permitted": ("your account may not use",),
    "port-unusable": ("of this machine can't be forwarded",),
    "price-unknown": ("the cost does not include",),
    "project-images-unlisted": ("the images of the cloud project can't be listed",),
    "ranks-not-divisible": (
        "ranks; start a multiple of",
        "is not a multiple of --tp x --pp, which is",
    ),
    "reboot-needed": ("a reboot is needed",),
    "run-not-averaged": ("not in a mean",),
    "run-stays": ("was collected before, and its run stays in",),
    "run-too-short": ("-iterations, or make the run longer with --epochs or",),
    "runs-elsewhere": ("./runs does not exist; showing the runs in",),
    "setting-without-effect": ("has an effect only",),
    "several-tasks": (
        "tasks of job",
        "is not running",
    ),
    "slurm-away": (
        "slurmctld does not answer",
        "slurmctld did not answer sbatch",
        "slurmctld has not answered",
    ),
    "slurm-vulnerable": ("}` has a maintained release: see docs/distributions.md",),
    "sweep-incomplete": ("tasks did not complete; to repeat them",),
    "sweep-of-two-programs": ("ran different code: `clusterctl runs diff",),
    "target-other-kind": ("--to must be",),
    "task-without-number": ("can't be run again: its record has no valid task number",),
    "terraform-interrupted": (
        "Terraform was interrupted. Google keeps billing what is not",
        "Terraform was interrupted. What it was creating is not in",
    ),
    "tp-not-divisible": (
        "attention heads: use one of",
        "does not divide the",
    ),
    "tp-without-layers": ("this model has no tensor-parallel layers; omit --tp",),
    "training-diverged": ("training diverged at iteration",),
    "uid-maybe-taken": ("may be in use on the hosts: Google's images assign uids",),
    "uid-taken": (
        "these users have uids of other accounts",
        "needs, belongs to",
    ),
    "unknown-cluster": ("there is no cluster",),
    "unknown-partition": (
        "the cluster has no partition",
        "does not exist",
        "there is no partition",
    ),
    "unknown-run-key": ("no run has a value for",),
    "weights-other-model": ("the weights do not fit this model",),
    "where-beyond-limit": ("longer than the partition's time limit",),
    "where-endless-jobs": ("the job waits for jobs without a time limit, so Slurm can't",),
    "where-held": ("the job is held (--hold): it starts after `scontrol release",),
    "where-no-room-but-now": ("nodes are known to have room, yet Slurm expects a start",),
    "where-nodes-out": (
        "nodes of the partition are out of service; a job that needs",
        "nodes, which Slurm does not show, may be out of service, so",
    ),
    "where-not-submittable": ("submit` can't use this partition yet",),
    "where-partition-down": ("the partition is down; jobs wait until it is up",),
    "where-room-but-later": ("nodes have room, yet Slurm expects a later start: they may",),
    "where-unasked": ("yet, to keep the pace of the site; run the command again in",),
    "works-on-a-copy": ("down` works on a copy of it",),
}
