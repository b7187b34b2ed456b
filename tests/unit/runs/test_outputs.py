"""What `outputs` brings home, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.jobs.submit import OUTPUTS_FILE, outputs_file
from clusterctl.spec.job import JobSpec
from tests.support.sweeps import in_sweep
from tests.unit.runs.fetched import fetch

OURS = {"job.sbatch", "my [1]!.py", "stdout.log", "stderr-3.log", "metrics.jsonl", "telemetry/n1.jsonl"}
THEIRS = {
    *("results/a.csv", "results/deep/b.csv", "results/tmp/c.csv", "checkpoints/last.pt", "notes.txt"),
    *("task-1/metrics.jsonl", "task-1/results/d.csv", "task-1/core", "big/1", "big/2/3", "new\nline.pt"),
}


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    for name in OURS | THEIRS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "empty").mkdir()
    return folder


def collected(folder: Path, tmp_path: Path, *patterns: str) -> tuple[set[str], dict[str, str]]:
    """What of THEIRS comes home, and what is said of what does not."""
    job = JobSpec(name="j", script=folder / "my [1]!.py", outputs=patterns)
    for name, content in outputs_file(job).items():
        (folder / name).write_bytes(content)
    tree = tmp_path / "run" / "tree"
    manifest = fetch(folder, tree)
    here = {str(p.relative_to(tree)).removesuffix(".from-job") for p in tree.rglob("*") if p.is_file()}
    assert here >= OURS
    return here - OURS - {OUTPUTS_FILE}, {one.path: one.reason for one in manifest.skipped}


def test_what_is_named_comes_and_the_rest_is_told_by_folder(job_folder, tmp_path):
    (job_folder / "results" / "link.csv").symlink_to("/etc/passwd")
    here, skipped = collected(job_folder, tmp_path, "results/**", "!results/tmp/**")
    assert here == {"results/a.csv", "results/deep/b.csv", "task-1/metrics.jsonl", "task-1/results/d.csv"}
    assert skipped.pop("results/link.csv") == "a symbolic link"
    (reason,) = set(skipped.values())
    assert "`clusterctl collect --all`" in reason
    left = {"big", "checkpoints", "new\\nline.pt", "notes.txt", "results/tmp", "task-1/core"}
    assert skipped.keys() == left


@pytest.mark.parametrize(
    ("pattern", "here"),
    [
        ("*.pt", {"checkpoints/last.pt", "new\nline.pt"}),
        ("/notes.txt", {"notes.txt"}),
        *in_sweep(
            ("checkpoints", {"checkpoints/last.pt"}),
            ("core", {"task-1/core"}),
            ("**", THEIRS),
            ("none", set()),
        ),
        ("!stdout.log", set()),  # our own files always come
    ],
)
def test_patterns(job_folder, tmp_path, pattern, here):
    assert collected(job_folder, tmp_path, pattern)[0] == here | {"task-1/metrics.jsonl"}


@pytest.mark.parametrize(
    "content", [None, '{"patterns": 5}', "[" * 100_000, *in_sweep("", "{}", '{"rules": [[true, "("]]}')]
)
def test_by_default_all_comes(job_folder, tmp_path, content):
    """Also if the job has damaged the file of patterns."""
    if content is not None:
        (job_folder / OUTPUTS_FILE).write_text(content)
    assert collected(job_folder, tmp_path) == (THEIRS, {})
