from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from payload.__main__ import main
from payload.config import ProbeConfig, TelemetryConfig, TrainConfig, parse
from payload.crosschecks import check
from payload.errors import UsageError
from payload.schedule import LearningRate, scaled
from payload.settings import to_toml

Runner = Callable[..., subprocess.CompletedProcess[str]]


def test_train_arguments() -> None:
    config = parse(["train", "--hidden", "8,4", "--lr", "1e-2", "--iterations", "5", "--out", "runs/a"])
    assert isinstance(config, TrainConfig)
    assert (config.model.hidden, config.optimizer.lr) == ((8, 4), 0.01)
    assert (config.batch.iterations, config.run.out) == (5, Path("runs/a"))
    assert (config.precision.precision, config.batch.global_batch_size, config.batch.seed) == ("fp32", 64, 0)


def test_other_arguments() -> None:
    assert parse(["probe", "--expect-hosts", "a, b,a"]) == ProbeConfig(expect_hosts=("a", "b"), device="auto")
    assert parse(["telemetry", "--out", "t", "--interval", ".5"]) == TelemetryConfig(Path("t"), 0.5)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "tarin",
        "train --epochs 0",
        "train --epochs 1.5",
        "train --iterations 0",
        "train --global-batch-size 0",
        "train --lr 0",
        "train --lr nan",
        "train --lr inf",
        "train --momentum 1",
        "train --momentum -0.1",
        "train --hidden 8,,4",
        "train --hidden 0",
        "train --seed -1",
        "train --zero 4",
        "train --compress-ratio 1.5",
        "train --augment flop",
        "train --data idx",
        "train --tokenizer bpe:256",
        "train --weight-decay -1",
        "train --schedule step --decay-factor 1e308",
        "train --precision float16",
        "train --device tpu",
        "train --epoch 3",
        "train stray",
        "probe --device",
        "telemetry",
        "telemetry --out t --interval 0",
        "train --layers 99999999999999999999",
    ],
)
def test_bad_arguments_are_one_line(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("train --nesterov --momentum 0", "--nesterov"),
        ("train --nesterov --optimizer adamw", "--nesterov"),
        ("train --schedule step", "--schedule step"),
        ("train --schedule cosine --decay-iterations 5", "--decay-iterations"),
        ("train --no-overlap --zero 2", "--no-overlap"),
        ("train --cuda-aware --comm ring", "--cuda-aware"),
        ("allreduce --cuda-aware --comm ring,naive", "--cuda-aware"),
        ("bench --schedule cosine", "--schedule"),
        ("bench --warmup-iterations 5", "--warmup-iterations"),
        ("train --compress topk --zero 1", "--compress topk and --zero 1"),
        ("train --compress topk --precision fp16", "--compress topk and --precision fp16"),
        ("train --model gpt-tiny --data text:a --augment crop", "--augment"),
        ("train --data synthetic --augment crop", "--augment"),
        ("train --data synthetic --clean", "--clean"),
        ("train --tokenizer bpe:300", "--tokenizer bpe:300"),
        ("bench --find", "--find"),
        ("bench --resume auto", "--resume"),
        ("bench --save-interval 5", "--save-interval"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], line: str, named: str
) -> None:
    assert main(line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"payload: error: {named}: ")


@pytest.mark.parametrize(
    "line",
    [
        "train --nesterov",
        "train --compress topk",
        "train --compress topk --precision fp16 --loss-scale 128",
        "train --zero 1",
        "train --zero 1 --no-overlap",
        "train --zero 2",
        "train --cuda-aware",
        "train --schedule step --decay-iterations 5,9",
        "train --data idx:a --augment crop --clean",
        "train --model gpt-tiny --data text:a --tokenizer bpe:300",
        "train --find",
        "bench --zero 1",
    ],
)
def test_what_goes_together_is_not_refused(line: str) -> None:
    config = parse(line.split())
    assert isinstance(config, TrainConfig)
    check(config)


def test_learning_rates_that_are_none_are_refused() -> None:
    for workers in (1, 4, 100):
        with pytest.raises(UsageError, match=r"--lr: a learning rate of"):
            LearningRate(scaled(1e308, "linear", workers), "constant", 10)
    with pytest.raises(UsageError, match=r"--min-lr 0\.1 is above the learning rate, which is 0\.05"):
        LearningRate(0.05, "cosine", 10, least=0.1)


def test_the_message_names_flag_and_value() -> None:
    with pytest.raises(UsageError, match=r"payload train: argument --lr: 'fast' is not a finite number"):
        parse(["train", "--lr", "fast"])


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[batch]\nseed = 3\nepochs = 2\n[optimizer]\nlr = 1\n[model]\nhidden = [8, 4]\n")
    config = parse(["train", "--epochs", "5", "--config", str(file)])
    assert isinstance(config, TrainConfig)
    assert (config.batch.seed, config.batch.epochs, config.batch.global_batch_size) == (3, 5, 64)
    assert (config.optimizer.lr, config.model.hidden) == (1.0, (8, 4))


def test_what_is_written_gives_the_same_again(tmp_path: Path) -> None:
    odd = 'a "b"\\ \u00e9\n\x7f'
    config = parse(["train", "--hidden", "8,4", "--lr", "1e-5", "--iterations", "5", "--out", odd])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert parse(["train", "--config", str(file)]) == config
    assert to_toml(parse(["train"])).startswith('[model]\nmodel = "mlp"\n\n[data]\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[batch]\nsed = 1", "there is no [batch] sed; did you mean [batch] seed?"),
        ("seed = 1", "there is no seed; did you mean [batch] seed?"),
        ("[optimizer]\nseed = 1", "there is no [optimizer] seed; did you mean [batch] seed?"),
        ("zzz = 1", "there is no zzz"),
        ("[optimizer]\nlr = 'fast'", "[optimizer] lr: 'fast' is not a finite number"),
        ("[batch]\nseed = true", "[batch] seed: 'true' is not a whole number of 0 or more"),
        ("[batch]\nseed = {a = 1}", "[batch] seed: \"{'a': 1}\" is not a whole number of 0 or more"),
        ("[batch", "is not TOML: Expected ']' at the end of a table declaration"),
        ("x = '\ud800'", "is not TOML: 'utf-8' codec can't decode"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UsageError) as caught:
        parse(["train", "--config", str(file)])
    assert str(caught.value).startswith(f"--config: {file}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_on_one_rank_stops_all(program: Runner, tmp_path: Path) -> None:
    answer = program(2, "lacking.py", str(tmp_path / "config.toml"))
    assert answer.returncode == 2
    assert answer.stderr.count("payload: error:") == 1
    assert "config.toml cannot be read: No such file or directory" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_needs_neither_numpy_nor_mpi(arguments: list[str]) -> None:
    blocked = "import sys; sys.modules.update(numpy=None, mpi4py=None)"
    code = f"{blocked}; from payload.__main__ import main; main({arguments!r})"
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "usage: python -m payload" in answer.stdout


def test_all_ranks_refuse_and_one_speaks(mpirun: Runner) -> None:
    answer = mpirun(3, "train", "--lr", "fast")
    assert answer.returncode == 2
    assert answer.stderr.count("payload: error:") == 1


def test_the_others_wait_for_the_one_that_speaks(program: Runner) -> None:
    answer = program(2, "late.py")
    assert answer.returncode == 2
    assert answer.stderr.count("payload: error:") == 1


def test_alone_it_refuses_without_mpi(alone: Runner, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('must not be imported')")
    answer = alone("train", "--lr", "fast", PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[3]}")
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
