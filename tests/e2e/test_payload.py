"""The bundled training program on real nodes: its commands as jobs, their results, and resumed
jobs.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, records

ROOT = Path(__file__).resolve().parents[2]


def test_gemm_runs_on_every_node_with_right_sums(cluster: Cluster) -> None:
    flags = ("--sizes", "128,64x300x32", "--dtypes", "float32,float64", "--iterations", "3")
    done = cluster.json("submit", "gemm", "--nodes", "2", "--wait", "--", *flags)
    run = cluster.run_of(done["job_id"])
    answer_json = json.loads((run / "stdout.log").read_text().splitlines()[-1])
    assert answer_json["ok"]
    assert [rank["host"] for rank in answer_json["ranks"]] == [
        f"{cluster.name}-train-{i}" for i in (1, 2)
    ]
    assert len(records(run / "gemm.jsonl")) == len(answer_json["results"]) == 4


def test_training_leaves_the_times_of_both_ranks(cluster: Cluster) -> None:
    flags = ("--epochs", "8", "--profile", "--tensorboard")
    done = cluster.json("submit", "train", "--nodes", "2", "--wait", "--", *flags)
    run = cluster.run_of(done["job_id"])
    iterations = [
        record for record in records(run / "metrics.jsonl") if record["kind"] == "iteration"
    ]
    assert all(
        0 < one["comm_exposed_ms"] <= one["comm_total_ms"] and one["mfu"] > 0 for one in iterations
    )
    ranks = {event["pid"] for event in json.loads((run / "trace.json").read_text())["traceEvents"]}
    assert ranks == {0, 1}
    assert [file.name.split(".")[0] for file in (run / "tensorboard").iterdir()] == ["events"]
    for number in (1, 2):
        telemetry = run / "telemetry" / f"{cluster.name}-train-{number}.jsonl"
        samples = [record for record in records(telemetry) if record["kind"] == "sample"]
        assert any(0 < sample["cpu_percent"] <= 100 for sample in samples)


def test_scaling_of_two_models_on_two_sizes_has_a_table(cluster: Cluster) -> None:
    """One command: Slurm runs the jobs one after the other, and the table has their speeds and
    losses.
    """
    flags = ("--scaling", "1,2", "--sweep", "model=mlp,cnn", "--wait", "--", "--iterations", "20")
    jobs = cluster.json("submit", "train", *flags)["jobs"]
    scaling = jobs[-1]["scaling"]
    assert (scaling["missing"], scaling["shares_machine"], scaling["by"]) == ([], True, "nodes")
    assert [curve["title"] for curve in scaling["curves"]] == ["model=mlp", "model=cnn"]
    for curve in scaling["curves"]:
        one, two = (size["figures"] for size in curve["sizes"])
        assert [(size["nodes"], size["ranks"], size["runs"]) for size in curve["sizes"]] == [
            (1, 1, 1),
            (2, 2, 1),
        ]
        ratio = two["samples_per_s"]["mean"] / one["samples_per_s"]["mean"]
        assert two["speed_up"]["mean"] == pytest.approx(ratio)
        assert two["efficiency_percent"]["mean"] == pytest.approx(50 * ratio)
        assert two["eval_loss"]["mean"] == pytest.approx(one["eval_loss"]["mean"], rel=1e-3)
    first, second = (
        json.loads((cluster.run_of(job["job_id"]) / "run.json").read_text()) for job in jobs
    )
    assert first["end_time"] <= second["start_time"]
    assert cluster.json("runs", "show", jobs[0]["name"])["scaling"] == scaling
    (section,) = cluster.json("report", jobs[0]["name"])["report"]["sections"]
    assert len(section["charts"]) == len(section["tables"]) == 1


def test_gpt_learns_an_uploaded_text_with_parallel_layouts(cluster: Cluster) -> None:
    cluster("put", ROOT / "docs" / "scope.md", "corpus")
    flags = ("--model", "gpt-tiny", "--data", "text:corpus/scope.md", "--sequence-length", "32")
    more = ("--tp", "2", "--optimizer", "adamw", "--iterations", "12", "--global-batch-size", "8")
    done = cluster.json("submit", "train", "--nodes", "2", "--wait", "--", *flags, *more)
    run = cluster.run_of(done["job_id"])
    iterations = [
        record for record in records(run / "metrics.jsonl") if record["kind"] == "iteration"
    ]
    assert iterations[-1]["loss"] < 0.8 * iterations[0]["loss"]
    assert all(one["tokens_per_s"] == 32 * one["samples_per_s"] for one in iterations)
    assert "bits per byte" in (run / "stdout.log").read_text()
    exported = cluster.json("submit", "export", "--run", run, "--wait")
    whole = (cluster.run_of(exported["job_id"]) / "model.safetensors").read_bytes()
    assert whole == (run / "model" / "best.safetensors").read_bytes()


def test_requeued_training_ends_with_the_same_weights(cluster: Cluster) -> None:
    # Two iterations an epoch.
    work = (
        "--hidden",
        "256,256",
        "--global-batch-size",
        "719",
        "--epochs",
        "60",
    )
    flags = (*work, "--save-interval", "80")
    submitted = cluster.json("submit", "train", "--nodes", "2", "--", *flags)
    job = submitted["job_id"]
    log = f"{submitted['dir']}/stdout.log"
    await_line = f"until sudo grep -q 'epoch   5 ' {log}; do sleep 0.1; done"
    signal = f"sudo scancel --batch --signal=USR1 {job}"  # as Slurm does before the time limit
    cluster.ssh(f"{cluster.name}-ctl", f"{await_line}; {signal}")
    cluster.job_in("PENDING", job)
    # Slurm starts a job again some seconds later: the nodes are free for the same training in one
    # go.
    whole = cluster.json("submit", "train", "--nodes", "2", "--", *flags)["job_id"]
    cluster("logs", job, "--follow", timeout_s=120)
    run = cluster.run_of(job)
    assert json.loads((run / "run.json").read_text())["state"] == "COMPLETED"
    assert "saved after iteration" in (run / "stdout.log").read_text()
    first, again = (one for one in records(run / "metrics.jsonl") if one["kind"] == "run")
    assert (first["done"], 0 < again["done"] < 120) == (0, True)
    samples = records(run / "telemetry" / f"{cluster.name}-train-1.jsonl")
    assert sum(record["kind"] == "host" for record in samples) == 2

    judged = cluster.json("submit", "eval", "--wait", "--", "--out", f"{submitted['dir']}/files")[
        "job_id"
    ]
    evaluation = json.loads((cluster.run_of(judged) / "stdout.log").read_text().splitlines()[-1])
    assert evaluation["accuracy"] == records(run / "metrics.jsonl")[-1]["accuracy"]

    (command,) = re.findall("continue with: clusterctl (.*)", (run / "stdout.log").read_text())
    # It names the cluster.
    continued = cluster.runner("-o", "json", *shlex.split(command)).json["job_id"]
    cluster("logs", continued, "--follow", timeout_s=120)
    (start,) = records(cluster.run_of(continued) / "metrics.jsonl")[:1]
    assert (start["done"], start["world_size"]) == (120, 2)

    cluster("logs", whole, "--follow", timeout_s=120)
    undisturbed = cluster.run_of(whole)
    assert results(undisturbed) == results(run)
    for file in ("best.safetensors", "final.safetensors", "model.json"):
        assert (run / "model" / file).read_bytes() == (undisturbed / "model" / file).read_bytes(), (
            file
        )


def results(run: Path) -> tuple[list[float], list[str]]:
    """Every loss, and the hashes of the parameters at the end."""
    answer_json = records(run / "metrics.jsonl")
    losses = [record["loss"] for record in answer_json if record["kind"] == "iteration"]
    assert len(losses) == 120
    return losses, answer_json[-1]["param_hashes"]
