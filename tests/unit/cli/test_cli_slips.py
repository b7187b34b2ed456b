"""Typical slips in the words of `submit`: one line each, with the right command to type."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.verbs import Clusterctl

SCRIPT = 'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--epochs", type=int)\n'

# What is typed after `clusterctl submit` -> why not, and what to type after it instead.
SLIPS = {
    "train --epochs 3": ("train's own options go after --", "train -- --epochs 3"),
    "--epochs 3 train --wait": ("train's own options go after --", "train --wait -- --epochs 3"),
    "train --lr=0.1 --wait": ("train's own options go after --", "train --wait -- --lr=0.1"),
    "train --find --nodes 2 -- --seed 1": (
        "train's own options go after --", "train --nodes 2 -- --find --seed 1",
    ),
    "train --epoch 3": (
        "there is no option --epoch; did you mean train's --epochs, which goes after --",
        "train -- --epochs 3",
    ),
    "x.py --epochs 3": ("x.py's own options go after --", "x.py -- --epochs 3"),
    "x.py --foo 3 4": ("submit has no option --foo; x.py's own go after --", "x.py -- --foo 3 4"),
    "x.py --epochs 3 --node 2": ("x.py's own options go after --", "x.py --nodes 2 -- --epochs 3"),
    "x.py input.txt": ("arguments of x.py go after --", "x.py -- input.txt"),
    "x.py 'two words' -- b": ("arguments of x.py go after --", "x.py -- 'two words' b"),
    "x.py --time 5 min": ("'5 min' is two words", "x.py --time 5m"),
    "x.py --mem 4 GB": ("'4 GB' is two words", "x.py --mem 4G"),
    "predict --run x a.png": ("arguments of predict go after --", "predict --run x -- a.png"),
    "sweep.yaml steep": ("variants are named by --variant", "sweep.yaml --variant steep"),
    "trian": ("there is no job 'trian'; did you mean train", "train"),
    "./train": ("there is no job './train'; did you mean train", "train"),
    "./xx.py --wait": ("there is no job './xx.py'; did you mean x.py", "x.py --wait"),
    "train.yaml": ("there is no job file train.yaml; the bundled job is called without .yaml", "train"),
    "./dir": ("./dir is a folder; name a script in it", "dir/main.py"),
    "python -u x.py --lr 1": ("python is started by the job itself", "x.py -- --lr 1"),
    "torchrun --standalone x.py --lr 1": (
        "torchrun is started by the job itself", "x.py --launcher torchrun -- --lr 1",
    ),
    "'x.py --lr 1' --nodes 2": (
        "JOB and the program's arguments are words of their own", "x.py --nodes 2 -- --lr 1",
    ),
    "--nodes 2": ("no JOB is named, such as", "train --nodes 2"),
    "--epochs 3": ("no JOB is named, such as", "train -- --epochs 3"),
    "": ("no JOB is named, such as", "train"),
    "train 4": ("4 is no argument of train; a number of nodes is told by --nodes", "train --nodes 4"),
    "train lr=0.1": ("train's own options go after --, and begin with --", "train -- --lr=0.1"),
    "train --node 2": ("there is no option --node; did you mean --nodes", "train --nodes 2"),
    "train --nnodes=2": ("--nnodes is --nodes here", "train --nodes 2"),
    "train -n 4": ("-n counts all tasks; here it is the tasks of a node", "train --tasks-per-node 4"),
    "train -n4 -N 2": (
        "-n counts all tasks; here it is the tasks of a node", "train --tasks-per-node 2 -N 2",
    ),
    "train --ntasks 4": (
        "--ntasks counts all tasks; here it is the tasks of a node", "train --tasks-per-node 4",
    ),
    "train --mem-per-cpu 2G -c 4": (
        "--mem-per-cpu is the memory of a core; here it is the memory of a node", "train --mem 8G -c 4",
    ),
    "train --gres gpu:2": ("--gres is --gpus here", "train --gpus 2"),
}  # fmt: skip


@pytest.fixture
def folder(cli: Clusterctl) -> Path:
    (cli.cwd / "x.py").write_text(SCRIPT)
    (cli.cwd / "dir").mkdir()
    (cli.cwd / "dir" / "main.py").touch()
    (cli.cwd / "sweep.yaml").write_text("job: train\nvariants: {steep: {nodes: 1}}\n")
    (cli.cwd / "my.sh").write_text("#!/bin/sh\n")
    return cli.cwd


@pytest.mark.parametrize("typed", SLIPS)
def test_a_slip_is_answered_with_the_right_command(cli: Clusterctl, folder: Path, typed: str) -> None:
    what, right = SLIPS[typed]
    ran = cli("--no-color", "submit", *shlex.split(typed), rc=2)
    assert ran.stderr.splitlines() == [f"error: {what}: clusterctl --no-color submit {right}"]
    assert ran.stdout == ""


@pytest.mark.parametrize("typed", ["train --epochs 3", "x.py input.txt", "trian", "--nodes 2"])
def test_a_slip_is_told_to_programs(cli: Clusterctl, folder: Path, typed: str) -> None:
    what, right = SLIPS[typed]
    (failure,) = cli("-ojson", "submit", *shlex.split(typed), rc=2).json["failures"]
    assert (failure["cause"], failure["fix"]) == (what, f"`clusterctl -ojson submit {right}`")


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ("train --zorg 1", "neither submit nor train has an option --zorg"),
        (
            "train --batch-size 8",
            "no option --batch-size; train has --global-batch-size and --micro-batch-size, which go after --",
        ),
        ("train foo", "train takes no word 'foo'"),
        ("my.sh --dependency 5", "a line `#SBATCH --dependency ...` in my.sh works"),
        ("zorg", "there is no job 'zorg'"),
        ("other.yaml", "there is no job file other.yaml"),
        ("train --nodes two", "Invalid value for '--nodes'"),
        ("--tag x.py", "--tag takes a value, and x.py stands in its place"),
        ("x.py --note", "Option '--note' requires an argument\n  fix: `clusterctl submit --help`"),
        ("x.py --tag ok --tag a,b", "the first a letter or digit, not 'a,b'"),
    ],
)
def test_what_nobody_knows(cli: Clusterctl, folder: Path, typed: str, what: str) -> None:
    ran = cli("submit", *shlex.split(typed), rc=2)
    assert what in ran.stderr
    assert "\n  fix: " in ran.stderr or typed.endswith("a,b")


def test_slurms_own_names_of_flags(cli: Clusterctl) -> None:
    flags = "--ntasks-per-node 2 -c 3 --gpus-per-node 0 -t 30 -J slow"
    script = cli("submit", "train", *flags.split(), "--dry-run").stdout
    for line in ("--ntasks-per-node=2", "--cpus-per-task=3", "--time=00:30:00", "--job-name=slow"):
        assert f"#SBATCH {line}" in script, script
    assert "--job-name" not in cli("submit", "--help").stdout


def test_words_after_the_dashes_are_the_programs(cli: Clusterctl, folder: Path) -> None:
    script = cli("submit", "x.py", "--dry-run", "--", "min", "--nodes", "3", "--help").stdout
    assert "x.py min --nodes 3 --help" in script
    assert "-m payload gemm --sizes 64" in cli("submit", "--dry-run", "--", "gemm", "--sizes", "64").stdout


WRONG = {
    "--lrr 0.1": "train: unrecognized arguments: --lrr 0.1; did you mean --lr?",
    "--lr abc": "train: argument --lr: 'abc' is not a finite number",
    "--beta1 0.5": "train: --beta1: it has an effect only with --optimizer adamw or lamb",
}


@pytest.mark.parametrize("words", WRONG)
def test_arguments_of_bundled_jobs_are_checked_here(cli: Clusterctl, words: str) -> None:
    for flags in ((), ("--dry-run",), ("--array", "0-3")):
        ran = cli("submit", "train", *flags, "--", *words.split(), rc=2)
        assert WRONG[words] in ran.stderr.splitlines()[0], "before a cluster is looked for"
        assert "fix: `clusterctl submit train -- --help`" in ran.stderr


def test_arguments_in_a_job_file_are_checked_here(cli: Clusterctl) -> None:
    (cli.cwd / "job.yaml").write_text(
        "job: train\nvariants: {a: {args: [--lr, 1e-2]}, b: {args: [--lrr, 1e-2]}}\n"
    )
    said = cli("submit", "job.yaml", rc=2).stderr
    assert "train: unrecognized arguments: --lrr 1e-2; did you mean --lr? (train-b)" in said


def test_words_after_the_dashes_replace_the_args_of_a_job_file_and_that_is_said(cli: Clusterctl) -> None:
    (cli.cwd / "job.yaml").write_text(
        "job: train\nargs: [--epochs, 2]\nvariants: {a: {}, b: {args+: [--lr, 1]}}\n"
    )
    ran = cli("submit", "job.yaml", "--dry-run", "--", "--seed", "3")
    assert "note: train-a: the file's args are replaced: --epochs 2\n" in ran.stderr
    assert "note: train-b: the file's args are replaced: --epochs 2 --lr 1\n" in ran.stderr
    assert ran.stdout.count("-m payload train --seed 3") == 2


def test_a_config_file_of_the_cluster_is_left_to_the_job(cli: Clusterctl) -> None:
    script = cli("submit", "train", "--dry-run", "--", "--config", "/shared/x.toml", "--lr", "0.1").stdout
    assert "--config /shared/x.toml" in script
    wrong = ("train", "--dry-run", "--", "--config", "/shared/x.toml", "--lr", "x")
    assert "argument --lr" in cli("submit", *wrong, rc=2).stderr


def test_the_help_of_a_bundled_job(cli: Clusterctl) -> None:
    said = cli("submit", "train", "--nodes", "2", "--", "--help")
    assert said.stdout.startswith("usage: clusterctl submit train --")
    assert "--global-batch-size N" in said.stdout
    assert said.stderr == ""
    assert "--run RUN" in cli("-o", "json", "submit", "predict", "--", "-h").json["help"]


@pytest.mark.parametrize("job", ["eval", "sample", "predict", "export"])
def test_a_job_without_its_model_is_refused(cli: Clusterctl, job: str) -> None:
    said = cli("submit", job, rc=2).stderr
    assert f"error: {job} needs a trained model: clusterctl submit {job} --run RUN\n" in said
    assert ("or a checkpoint" in said) == (job in {"eval", "export"})
