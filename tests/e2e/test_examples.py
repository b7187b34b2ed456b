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

from tests.e2e.torch_job import EXAMPLES, train_on_nodes
from tests.support.cluster import Cluster, records
from tests.support.manual import blocks
from tests.support.processes import eventually
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


@pytest.mark.sweep  # test_onprem_el.py
@pytest.mark.platform("real", "pytorch")
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_torch_trains_on_two_nodes(example_cluster: Cluster, launcher: str) -> None:
    lock = train_on_nodes(example_cluster, example_cluster.raised["nodes"], launcher)
    assert "\nbasic==1.0 --hash=sha256:" in lock


TORCHRUN_FAILS = """\
import ctypes, os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    {line}
dist.barrier()
"""


@pytest.mark.sweep  # as test_failures.py has it with the other launchers
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("raise KeyError('a bug')", "python-exception"),
        ("os._exit(3)", "exit-code"),
        ("ctypes.string_at(0)", "segmentation-fault"),
    ],
)
def test_torchrun_names_the_first_rank_that_failed(
    example_cluster: Cluster, line: str, code: str
) -> None:
    path = example_cluster.runner.cwd / "fails.py"
    path.write_text(TORCHRUN_FAILS.format(line=line))
    file = EXAMPLES / "requirements-torch.txt"
    argv = ("--requirements", file, "--nodes", "2", "--launcher", "torchrun", "--wait")
    ran = example_cluster.quoting("-o", "json", "submit", path, *argv)
    assert ran.returncode == 4, ran
    found = json.loads(ran.stdout)["diagnosis"]
    assert code in {found["code"], *(hint["name"] for hint in found["hints"])}, ran
    assert (found["rank"], found["host"]) == (1, f"{example_cluster.name}-train-2"), ran
    assert ran.stderr.count("Traceback") == line.startswith("raise"), ran


@pytest.mark.sweep  # hundreds of megabytes to resolve, send and unpack
@pytest.mark.platform("real", "libraries")
@pytest.mark.parametrize(
    ("program", "name"),
    [("lightning_mlp", "lightning"), ("accelerate_mlp", "accelerate"), ("jax_dp", "jax")],
)
def test_example_of_another_library_trains_on_two_nodes(
    example_cluster: Cluster, program: str, name: str
) -> None:
    lock = (ROOT / "requirements" / "examples.lock").read_text()
    pins = re.findall(r"^((?:lightning|accelerate|jax|jaxlib)==.*?) *\\$", lock, re.MULTILINE)
    file = example_cluster.runner.cwd / f"{name}.txt"
    file.write_text(
        "\n".join(
            (f"-r {EXAMPLES}/requirements-{name}.txt", *(pin for pin in pins if name in pin), "")
        )
    )
    argv = ("--requirements", file, "--nodes", "2", "--wait")
    job = example_cluster.json("submit", EXAMPLES / f"{program}.py", *argv)["job_id"]
    output = example_cluster("logs", job, "--label").stdout
    for rank in (0, 1):
        assert f"{rank}: rank {rank} of 2" in output
    (accuracy,) = re.findall(r"^0: accuracy ([0-9.]+) by 2 ranks$", output, re.MULTILINE)
    assert float(accuracy) > 0.8
    example_cluster.run_of(job)
    (found,) = (row["metrics"] for row in example_cluster.json("runs")["runs"] if row["job"] == job)
    if name == "lightning":  # its CSVLogger
        assert (found["loss"]["count"], found["loss"]["nonfinite"]) == (5, 0)
    else:
        assert found == {}


@pytest.mark.sweep  # dozens of packages to resolve, send and unpack
@pytest.mark.parametrize(
    ("engine", "result"),
    [("snakemake", "total.txt"), ("parsl", "stdout.log")],
)
def test_workflow_engine_of_the_manual_uses_all_nodes_of_its_job(
    example_cluster: Cluster, engine: str, result: str
) -> None:
    folder = example_cluster.runner.cwd / engine
    folder.mkdir()
    (folder / f"{engine}.txt").write_text(f"{engine}\n")
    for block in blocks(ROOT / "docs" / "howto" / "workflow-engines.md"):
        if block.file:
            (folder / block.file).write_text(block.text)
    flags = ("--nodes", "2", "--slurm=--exclusive", "--requirements", folder / f"{engine}.txt")
    job = example_cluster.json("submit", folder / f"{engine}.sh", *flags, "--wait")["job_id"]
    lines = (example_cluster.run_of(job) / result).read_text().splitlines()
    nodes = [f"{example_cluster.name}-train-{number}" for number in (1, 2)]
    if engine == "parsl":
        assert lines == ["332833500 by 2 nodes"]
    else:
        assert [line.split()[0] for line in lines] == [str(number) for number in range(8)]
        assert {line.split()[1] for line in lines} == {*nodes}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "name"), [("torch_ddp", "torch"), ("lightning_mlp", "lightning")]
)
def test_signalled_example_is_requeued_and_resumes(
    example_cluster: Cluster, program: str, name: str
) -> None:
    """SIGUSR1, as Slurm sends it before the time limit, to a training of two ranks by srun."""
    flags = ("--requirements", EXAMPLES / f"requirements-{name}.txt", "--nodes", "2", "--requeue")
    job = example_cluster.json(
        "submit", EXAMPLES / f"{program}.py", *flags, "--", "--epochs", "150"
    )["job_id"]
    eventually(lambda: "epoch 5:" in example_cluster("logs", job).stdout)
    example_cluster.ssh(f"{example_cluster.name}-ctl", f"sudo scancel --batch --signal=USR1 {job}")
    example_cluster.job_in("PENDING", job)
    example_cluster("logs", job, "--follow", timeout_s=300)
    run = example_cluster.run_of(job)
    events = [event["event"] for event in records(run / "job.events")]
    assert [event for event in events if event in ("start", "requeue")] == [
        "start",
        "requeue",
        "start",
    ]
    epochs = [int(line.split()[1][:-1]) for line in lines_of(run) if line.startswith("epoch ")]
    assert sorted({*epochs}) == list(range(150))
    # Only the epoch that was interrupted may be reported twice.
    assert len(epochs) <= 151
    assert next(run.glob("checkpoints/step-*.pt"))
    if name == "torch":
        whole = example_cluster.json(
            "submit", EXAMPLES / f"{program}.py", *flags, "--wait", "--", "--epochs", "150"
        )
        expected = example_cluster.run_of(whole["job_id"]) / "model.pt"
        assert (run / "model.pt").read_bytes() == expected.read_bytes()


def lines_of(run: Path) -> list[str]:
    return (run / "stdout.log").read_text().splitlines()


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
