"""What `outputs` brings home, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.jobs.submit import outputs_file
from clusterctl.runs.collect import _outputs
from clusterctl.runs.fetch import RunSource
from clusterctl.spec.job import JobSpec
from clusterctl.state.ledger import OUTPUTS_FILE, SOURCE_FILE
from tests.unit.runs.fetched import fetch_source

OURS = {
    "job.sbatch",
    "my [1]!.py",
    "stdout.log",
    "stderr-3.log",
    "metrics.jsonl",
    "telemetry/n1.jsonl",
}
THEIRS = {
    *(
        "results/a.csv",
        "results/deep/b.csv",
        "results/tmp/c.csv",
        "checkpoints/last.pt",
        "notes.txt",
    ),
    *(
        "task-1/metrics.jsonl",
        "task-1/results/d.csv",
        "task-1/core",
        "big/1",
        "big/2/3",
        "new\nline.pt",
    ),
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
    tree = tmp_path / "run" / "tree"
    manifest = fetch_source(RunSource(str(folder), outputs=_outputs(outputs_file(job))), tree)
    fetched_names = {
        str(p.relative_to(tree)).removesuffix(".from-job") for p in tree.rglob("*") if p.is_file()
    }
    assert fetched_names >= OURS
    return fetched_names - OURS, {one.path: one.reason for one in manifest.skipped}


def test_outputs_fetches_matching_files_and_lists_skipped_folders(job_folder, tmp_path):
    (job_folder / "results" / "link.csv").symlink_to("/etc/passwd")
    fetched_names, skipped = collected(job_folder, tmp_path, "results/**", "!results/tmp/**")
    assert fetched_names == {
        "results/a.csv",
        "results/deep/b.csv",
        "task-1/metrics.jsonl",
        "task-1/results/d.csv",
    }
    assert skipped.pop("results/link.csv") == "a symbolic link"
    (reason,) = set(skipped.values())
    assert "`clusterctl collect --all`" in reason
    left = {"big", "checkpoints", "new\\nline.pt", "notes.txt", "results/tmp", "task-1/core"}
    assert skipped.keys() == left


def test_folder_that_is_excluded_later_stays(job_folder, tmp_path):
    """The last pattern that matches counts, also if an earlier one matches the files in the
    folder.
    """
    assert collected(job_folder, tmp_path, "results/**", "!tmp/")[0] == {
        *("results/a.csv", "results/deep/b.csv", "task-1/metrics.jsonl", "task-1/results/d.csv")
    }


@pytest.mark.parametrize(
    ("pattern", "fetched_names"),
    [
        ("*.pt", {"checkpoints/last.pt", "new\nline.pt"}),
        ("/notes.txt", {"notes.txt"}),
        ("checkpoints", {"checkpoints/last.pt"}),
        ("core", {"task-1/core"}),
        ("**", THEIRS),
        ("none", set()),
        ("!stdout.log", set()),  # our own files always come
    ],
)
def test_patterns(job_folder, tmp_path, pattern, fetched_names):
    assert collected(job_folder, tmp_path, pattern)[0] == fetched_names | {"task-1/metrics.jsonl"}


def test_outputs_ignores_a_pattern_file_of_the_job(job_folder, tmp_path):
    """Those that the job was submitted with are kept here."""
    (job_folder / OUTPUTS_FILE).write_text('{"patterns": ["*.pt"]}')
    assert collected(job_folder, tmp_path) == (THEIRS | {OUTPUTS_FILE}, {})


def test_files_that_were_sent_and_are_no_outputs_are_not_named(job_folder, tmp_path):
    source = {
        "files": [{"path": "notes.txt"}, {"path": "my [1]!.py"}],
        "links": [{"path": "new\nline.pt"}],
    }
    kept = {SOURCE_FILE: json.dumps(source).encode(), OUTPUTS_FILE: b'{"patterns": ["results/"]}'}
    manifest = fetch_source(RunSource(str(job_folder), outputs=_outputs(kept)), tmp_path / "tree")
    assert {one.path for one in manifest.skipped} == {"big", "checkpoints", "task-1/core"}


def test_sent_file_that_the_job_changed_and_is_no_output_is_named(job_folder, tmp_path):
    size = (job_folder / "notes.txt").stat().st_size
    for sent_size, is_named in ((size, False), (size + 1, True)):
        files = [{"path": "notes.txt", "size": sent_size}]
        source = json.dumps({"files": files, "links": []}).encode()
        kept = {SOURCE_FILE: source, OUTPUTS_FILE: b'{"patterns": ["results/"]}'}
        source_of_job = RunSource(str(job_folder), outputs=_outputs(kept))
        manifest = fetch_source(source_of_job, tmp_path / f"tree-{sent_size}")
        assert ("notes.txt" in {one.path for one in manifest.skipped}) is is_named
