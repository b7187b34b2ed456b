"""The examples on a real cluster, and what their requirements come to there."""

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
from tests.support.processes import eventually
from tests.support.verbs import SCRIPT
from tests.support.wheels import a_wheel

ROOT = Path(__file__).resolve().parents[2]
SOFTWARE = "software:\n  python: {{requirements: {file}}}\n"
FOLDER = "clusterctl/environments"


@pytest.fixture(scope="module")
def own(cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster while its spec has requirements: one package, of the tests' own index."""
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
    """A program that imports modules, in a folder that tries to be more than a name."""
    folder = cluster.runner.cwd / "my project; $(x)"
    folder.mkdir(exist_ok=True)
    file = folder / f"use-{'-'.join(modules)}.py"
    file.write_text(f"import {', '.join(modules)}\nprint('found', {modules[0]}.version)\n")
    return file


def environments(cluster: Cluster) -> set[str]:
    said = cluster.ssh(f"{cluster.name}-ctl", f"ls -A {FOLDER}", user=cluster.user)
    return set(said.split()) - {".lock"}


def test_up_builds_what_the_spec_asks_for_and_keeps_it(own: Cluster) -> None:
    notes = {phase["phase"]: phase["note"] for phase in own.raised["phases"]}
    assert next(iter(notes)) == "resolve_environment"
    assert list(notes)[-2:] == ["build_environment", "verify"]
    assert (notes["resolve_environment"], notes["build_environment"]) == (
        "1 Python packages",
        "built",
    )
    before = environments(own)
    again = {phase["phase"]: phase["note"] for phase in own.json("up")["phases"]}
    assert again["build_environment"] == "unchanged"
    assert environments(own) == before
    job = own.json("submit", script(own, "basic", "mpi4py"), "--wait")
    assert "found 1.0" in own("logs", job["job_id"]).stdout
    assert environments(own) == before


def test_packages_of_a_job_are_added_to_those_of_the_cluster(own: Cluster) -> None:
    index = own.runner.cwd / "more"
    file = own.runner.cwd / "more.txt"
    index.mkdir()
    a_wheel(index, "more")
    file.write_text("--no-index\n--find-links more\nmore\n")
    job = own.json("submit", script(own, "more", "basic"), "--requirements", file, "--wait")
    run = own.run_of(job["job_id"])
    assert "found 1.0" in (run / "stdout.log").read_text()
    lock = json.loads((run / "environment.json").read_text())["client"]["requirements"]
    assert re.findall(r"^(\w+)==1.0 --hash=sha256:", lock, re.MULTILINE) == ["basic", "more"]


@pytest.mark.sweep  # test_onprem_el.py
@pytest.mark.platform("real", "pytorch")
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_torch_trains_on_two_nodes(own: Cluster, launcher: str) -> None:
    lock = train_on_nodes(own, own.raised["nodes"], launcher)
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
def test_torchrun_names_the_first_rank_that_failed(own: Cluster, line: str, code: str) -> None:
    path = own.runner.cwd / "fails.py"
    path.write_text(TORCHRUN_FAILS.format(line=line))
    file = EXAMPLES / "requirements-torch.txt"
    argv = ("--requirements", file, "--nodes", "2", "--launcher", "torchrun", "--wait")
    ran = own.quoting("-o", "json", "submit", path, *argv)
    assert ran.returncode == 4, ran
    found = json.loads(ran.stdout)["diagnosis"]
    assert (found["code"], found["rank"], found["host"]) == (code, 1, f"{own.name}-train-2"), ran
    assert ran.stderr.count("Traceback") == line.startswith("raise"), ran


@pytest.mark.sweep  # hundreds of megabytes to resolve, send and unpack
@pytest.mark.platform("real", "libraries")
@pytest.mark.parametrize(
    ("program", "name"),
    [("lightning_mlp", "lightning"), ("accelerate_mlp", "accelerate"), ("jax_dp", "jax")],
)
def test_other_libraries_train_on_two_nodes(own: Cluster, program: str, name: str) -> None:
    lock = (ROOT / "requirements" / "examples.lock").read_text()
    pins = re.findall(r"^((?:lightning|accelerate|jax|jaxlib)==.*?) *\\$", lock, re.MULTILINE)
    file = own.runner.cwd / f"{name}.txt"
    file.write_text(
        "\n".join(
            (f"-r {EXAMPLES}/requirements-{name}.txt", *(pin for pin in pins if name in pin), "")
        )
    )
    argv = ("--requirements", file, "--nodes", "2", "--wait")
    job = own.json("submit", EXAMPLES / f"{program}.py", *argv)["job_id"]
    said = own("logs", job, "--label").stdout
    for rank in (0, 1):
        assert f"{rank}: rank {rank} of 2" in said
    (accuracy,) = re.findall(r"^0: accuracy ([0-9.]+) by 2 ranks$", said, re.MULTILINE)
    assert float(accuracy) > 0.8
    own.run_of(job)
    (found,) = (row["metrics"] for row in own.json("runs")["runs"] if row["job"] == job)
    if name == "lightning":  # its CSVLogger
        assert (found["loss"]["count"], found["loss"]["nonfinite"]) == (5, 0)
    else:
        assert found == {}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "name"), [("torch_ddp", "torch"), ("lightning_mlp", "lightning")]
)
def test_signalled_example_is_requeued_and_resumes(own: Cluster, program: str, name: str) -> None:
    """SIGUSR1, as Slurm sends it before the time limit, to a training of two ranks by srun."""
    flags = ("--requirements", EXAMPLES / f"requirements-{name}.txt", "--nodes", "2", "--requeue")
    job = own.json("submit", EXAMPLES / f"{program}.py", *flags, "--", "--epochs", "150")["job_id"]
    eventually(lambda: "epoch 5:" in own("logs", job).stdout)
    own.ssh(f"{own.name}-ctl", f"sudo scancel --batch --signal=USR1 {job}")
    own.job_in("PENDING", job)
    own("logs", job, "--follow", timeout_s=300)
    run = own.run_of(job)
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
        whole = own.json(
            "submit", EXAMPLES / f"{program}.py", *flags, "--wait", "--", "--epochs", "150"
        )
        expected = own.run_of(whole["job_id"]) / "model.pt"
        assert (run / "model.pt").read_bytes() == expected.read_bytes()


def lines_of(run: Path) -> list[str]:
    return (run / "stdout.log").read_text().splitlines()


@pytest.fixture(scope="module")
def typed(own: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as that of somebody who types what the examples say."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "cluster.yaml").symlink_to(own.spec)
    (folder / "examples").symlink_to(EXAMPLES)
    return folder


def example(cluster: Cluster, folder: Path, name: str) -> str:
    """What a script of the examples prints."""
    path = f"{SCRIPT.parent}:{os.environ['PATH']}"
    environ = {**os.environ, "CLUSTERCTL_HOME": str(cluster.runner.home), "PATH": path}
    argv = ["bash", f"examples/{name}"]
    done = subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done
    return done.stdout


def test_text_is_learned_and_written(own: Cluster, typed: Path) -> None:
    there, collected, here = example(own, typed, "text.sh").partition("COMPLETED: runs/")
    assert collected
    assert "\nYou may" in there
    assert "\nYou may" in here
    assert len(here) > 200


def test_trained_model_goes_on_with_another_text(own: Cluster, typed: Path) -> None:
    said = example(own, typed, "fine_tune.sh")
    (accuracy,) = re.findall(r"^test accuracy ([0-9.]+)$", said, re.MULTILINE)
    assert float(accuracy) > 0.15  # 0.06 from first weights
    assert "\nclusterctl" in said.partition("test accuracy")[2]


def test_digits_are_learned_judged_and_told(own: Cluster, typed: Path) -> None:
    judged, _, told = example(own, typed, "digits.sh").partition("COMPLETED: runs/")
    assert json.loads(judged.splitlines()[-2])["accuracy"] > 0.9
    lines = told.splitlines()[1:]
    assert [line.split(": ")[0] for line in lines] == [
        f"examples/digits.csv:{row}" for row in range(1, 11)
    ]
    classes = [int(line.split(": ")[1].split()[0]) for line in lines]
    assert sum(digit == found for digit, found in enumerate(classes)) >= 9
