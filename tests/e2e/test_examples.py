"""The examples on a real cluster, and the packages that they require."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.torch_job import EXAMPLES
from tests.support.cluster import Cluster
from tests.support.verbs import SCRIPT
from tests.support.wheels import a_wheel

ROOT = Path(__file__).resolve().parents[2]
SOFTWARE = "software:\n  python: {{requirements: {file}}}\n"
FOLDER = "clusterctl/environments"


@pytest.fixture(scope="module")
def example_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster while its spec requires one package of the tests' own index."""
    cwd = cluster.runner.cwd
    spec = cluster.spec.read_text()
    (cwd / "index").mkdir()
    a_wheel(cwd / "index", "basic")
    file = cwd / "requirements of the cluster.txt"
    file.write_text("--find-links index\nbasic\n")
    cluster.spec.write_text(spec + SOFTWARE.format(file=json.dumps(str(file))))
    with pytest.MonkeyPatch.context() as patch:
        # PyTorch's index may be out of reach; pip would try it again and again for each package.
        patch.setenv("PIP_RETRIES", "1")
        yield replace(cluster, raised=cluster.json("up"))
    cluster.spec.write_text(spec)
    cluster("up")


def script(cluster: Cluster, *modules: str) -> Path:
    """A program that imports modules, in a folder whose name has special characters."""
    folder = cluster.runner.cwd / "my project; $(x)"
    folder.mkdir(exist_ok=True)
    file = folder / f"use-{'-'.join(modules)}.py"
    file.write_text(f"import {', '.join(modules)}\nprint('found', {modules[0]}.version)\n")
    return file


def environments(cluster: Cluster) -> set[str]:
    output = cluster.ssh(f"{cluster.name}-ctl", f"ls -A {FOLDER}", user=cluster.user)
    return set(output.split()) - {".lock"}


def test_up_builds_what_the_spec_asks_for_and_keeps_it(example_cluster: Cluster) -> None:
    notes = {phase["phase"]: phase["note"] for phase in example_cluster.raised["phases"]}
    assert next(iter(notes)) == "resolve_environment"
    assert list(notes)[-2:] == ["build_environment", "verify"]
    assert (notes["resolve_environment"], notes["build_environment"]) == (
        "1 Python packages",
        "built",
    )
    before = environments(example_cluster)
    again = {phase["phase"]: phase["note"] for phase in example_cluster.json("up")["phases"]}
    assert again["build_environment"] == "unchanged"
    assert environments(example_cluster) == before
    job = example_cluster.json("submit", script(example_cluster, "basic", "mpi4py"), "--wait")
    assert "found 1.0" in example_cluster("logs", job["job_id"]).stdout
    assert environments(example_cluster) == before


def test_packages_of_a_job_are_added_to_those_of_the_cluster(example_cluster: Cluster) -> None:
    index = example_cluster.runner.cwd / "more"
    file = example_cluster.runner.cwd / "more.txt"
    index.mkdir()
    a_wheel(index, "more")
    file.write_text("--no-index\n--find-links more\nmore\n")
    job = example_cluster.json(
        "submit", script(example_cluster, "more", "basic"), "--requirements", file, "--wait"
    )
    run = example_cluster.run_of(job["job_id"])
    assert "found 1.0" in (run / "stdout.log").read_text()
    lock = json.loads((run / "environment.json").read_text())["client"]["requirements"]
    assert re.findall(r"^(\w+)==1.0 --hash=sha256:", lock, re.MULTILINE) == ["basic", "more"]


def lines_of(run: Path) -> list[str]:
    return (run / "stdout.log").read_text().splitlines()


@pytest.mark.platform("real", "libraries")
def test_example_of_lightning_trains_on_two_nodes(example_cluster: Cluster) -> None:
    lock = (ROOT / "requirements" / "examples.lock").read_text()
    (pin,) = re.findall(r"^(lightning==.*?) *\\$", lock, re.MULTILINE)
    file = example_cluster.runner.cwd / "lightning.txt"
    file.write_text(f"-r {EXAMPLES}/requirements-lightning.txt\n{pin}\n")
    argv = ("--requirements", file, "--nodes", "2", "--wait")
    job = example_cluster.json("submit", EXAMPLES / "lightning_mlp.py", *argv)["job_id"]
    output = example_cluster("logs", job, "--label").stdout
    for rank in (0, 1):
        assert f"{rank}: rank {rank} of 2" in output
    (accuracy,) = re.findall(r"^0: accuracy ([0-9.]+) by 2 ranks$", output, re.MULTILINE)
    assert float(accuracy) > 0.8
    example_cluster.run_of(job)
    (found,) = (row["metrics"] for row in example_cluster.json("runs")["runs"] if row["job"] == job)
    # Of its CSVLogger.
    assert (found["loss"]["count"], found["loss"]["nonfinite"]) == (5, 0)


@pytest.fixture(scope="module")
def typed(example_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cluster.yaml and the examples, as a user has it."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "cluster.yaml").symlink_to(example_cluster.spec)
    (folder / "examples").symlink_to(EXAMPLES)
    return folder


def example(cluster: Cluster, folder: Path, name: str) -> str:
    """Return the output of a script of the examples."""
    path = f"{SCRIPT.parent}:{os.environ['PATH']}"
    environ = {**os.environ, "CLUSTERCTL_HOME": str(cluster.runner.home), "PATH": path}
    argv = ["bash", f"examples/{name}"]
    done = subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done
    return done.stdout


def test_example_learns_a_text_and_samples_it(example_cluster: Cluster, typed: Path) -> None:
    there, collected, here = example(example_cluster, typed, "text.sh").partition(": runs/")
    assert collected
    assert "\nYou may" in there
    assert "\nYou may" in here
    assert len(here) > 200


def test_example_trains_evaluates_and_predicts_digits(
    example_cluster: Cluster, typed: Path
) -> None:
    judged, _, predictions = example(example_cluster, typed, "digits.sh").partition(": runs/")
    assert json.loads(judged.splitlines()[-2])["accuracy"] > 0.9
    lines = predictions.splitlines()[1:]
    assert [line.split(": ")[0] for line in lines] == [
        f"examples/digits.csv:{row}" for row in range(1, 11)
    ]
    classes = [int(line.split(": ")[1].split()[0]) for line in lines]
    assert sum(digit == found for digit, found in enumerate(classes)) >= 9
