from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from payload.__main__ import main
from payload.cli.arguments import check, parse
from payload.cli.config import ProbeConfig, TelemetryConfig, TrainConfig
from payload.cli.settings import to_record, to_toml
from payload.data.datasets import synthetic_tokens
from payload.errors import UsageError
from payload.training.build import model_sizes
from payload.training.schedule import LearningRate, scaled
from tests.support.messages import refused
from tests.support.payload import train_config


def test_train_arguments() -> None:
    config = train_config("--hidden", "8,4", "--lr", "1e-2", "--iterations", "5", "--out", "runs/a")
    assert (config.model.hidden, config.optimizer.lr) == ((8, 4), 0.01)
    assert (config.batch.iterations, config.run.out) == (5, Path("runs/a"))
    assert (config.precision.precision, config.batch.global_batch_size, config.batch.seed) == (
        "fp32",
        64,
        0,
    )


def test_parse_reads_arguments_of_probe_and_telemetry() -> None:
    assert parse(["probe", "--expect-hosts", "a, b,a"]) == ProbeConfig(expect_hosts=("a", "b"))
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
        "gemm --sizes 2x3",
        "gemm --sizes 1x2x",
        "gemm --dtypes int8",
        "allreduce --min 4KB",
        "allreduce --max 0",
        "allreduce --comm mpi,fast",
    ],
)
def test_wrong_arguments_are_refused_in_one_line(line: str) -> None:
    command, *rest = line.split() or [""]
    flags = [word for word in rest if word.startswith("--") and command != "probe"][-1:]
    with refused("bad-flag", UsageError, *flags) as caught:
        parse(line.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "code", "named"),
    [
        ("train --data text:a", "data-unfit-for-model", "--data text:a: the model takes images;"),
        ("train --schedule step", "bad-settings", "--schedule step: "),
        ("allreduce --cuda-aware --comm ring,naive", "setting-without-effect", "--cuda-aware has "),
        ("allreduce --comm mpi,nccl --device cpu", "no-gpu", "--comm nccl needs GPUs"),
        ("gemm --comm nccl --device cpu", "no-gpu", "--comm nccl needs GPUs"),
        ("train --comm nccl --device cpu", "no-gpu", "--comm nccl needs GPUs"),
        ("train --cuda-aware --device cpu", "no-gpu", "--cuda-aware needs GPUs"),
        (
            "train --kernels fused --precision bf16 --device cpu",
            "no-gpu",
            "--kernels fused needs GPUs",
        ),
        (
            "train --precision bf16 --kernels fused --capture --tp 2",
            "bad-settings",
            "--capture: ranks with --tp",
        ),
        (
            "train --precision bf16 --kernels fused --capture --pp 2",
            "bad-settings",
            "--capture: ranks with --tp",
        ),
        (
            "train --precision bf16 --kernels fused --capture --zero 2",
            "bad-settings",
            "--capture: ranks with --tp",
        ),
        (
            "train --precision bf16 --kernels fused --capture --profile",
            "bad-settings",
            "--capture: a CUDA graph has no times",
        ),
        ("train --compress topk --zero 1", "bad-settings", "--compress topk and --zero 1 cannot "),
        (
            "train --compress topk --precision fp16",
            "bad-settings",
            "--compress topk and --precision fp16 need ",
        ),
        ("bench --schedule cosine", "setting-without-effect", "--schedule has "),
        ("export --checkpoint a --weights final", "setting-without-effect", "--weights has "),
    ],
)
def test_contradicting_settings_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], line: str, code: str, named: str
) -> None:
    with refused(code, UsageError, named):
        check(parse(line.split()))
    assert main(line.split()) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"payload: error: {named}")


def test_compatible_settings_and_zero_values_are_accepted() -> None:
    for line in (
        "--zero 0",
        "--optimizer adamw --no-nesterov --momentum 0",
        "--compress none --min-lr 0",
    ):
        check(train_config(*line.split()), several=False)
    check(train_config(*"--compress topk --precision fp16 --loss-scale 128".split()))


@dataclass(frozen=True)
class Row:
    given: str
    line: str = ""
    idle: tuple[str, ...] = ()  # lines with which it has none, or what the run has not
    does: str = "train find bench"


_VIT = "--model vit-tiny"
_GPT = "--model gpt-tiny --data text:a"
_TEXT = ("", f"{_VIT} --data synthetic", _GPT.replace("text:a", "synthetic"))
_STEP = "--schedule step --decay-iterations 9"
TRAIN = {
    "model": Row("--model cnn"),
    "hidden": Row("--hidden 8", "", ("--model cnn", _VIT, _GPT)),
    "layers": Row("--layers 2", _VIT, ("", "--model cnn", "--model resnet18")),
    "heads": Row("--heads 2", _VIT, ("", "--model lstm-rows")),
    "width": Row("--width 16", "--model resnet18", ("", "--model cnn")),
    "patch": Row("--patch 2", _VIT, ("", _GPT)),
    "dropout": Row("--dropout 0.1", _GPT, ("", "--model resnet50")),
    "norm_eps": Row("--norm-eps 1e-3", _VIT, ("", "--model resnet50")),
    "data": Row("--data synthetic"),
    "augment": Row("--augment crop", "", ("--data synthetic", _GPT)),
    "clean": Row("--clean", "--data idx:a", ("--data synthetic", _GPT)),
    "tokenizer": Row("--tokenizer bpe:300", _GPT, _TEXT),
    "sequence_length": Row("--sequence-length 8", _GPT, _TEXT[:2]),
    "prefetch": Row("--prefetch 3", does="train find"),
    "global_batch_size": Row("--global-batch-size 8"),
    "micro_batch_size": Row("--micro-batch-size 8"),
    "epochs": Row("--epochs 3", does="train"),
    "iterations": Row("--iterations 3", does="train"),
    "eval_interval": Row("--eval-interval 3", does="train"),
    "eval_samples": Row("--eval-samples 3", does="train"),
    "seed": Row("--seed 3"),
    "find": Row("--find", does="train"),
    "tp": Row("--tp 2", _GPT),
    "pp": Row("--pp 2"),
    "zero": Row("--zero 1", "", ("one rank",)),
    "offload_optimizer": Row("--offload-optimizer", "", ("a CPU",)),
    "recompute": Row("--recompute"),
    "bucket_mib": Row("--bucket-mib 3", "", ("one rank",)),
    "overlap": Row("--no-overlap", "", ("--zero 2", "one rank")),
    "comm": Row("--comm ring"),
    "cuda_aware": Row("--cuda-aware", "", ("--comm ring",)),
    "compress": Row("--compress topk", "", ("one rank",), "train bench"),
    "compress_ratio": Row(
        "--compress-ratio 0.1", "--compress topk", ("", "--compress int8"), "train bench"
    ),
    "compress_rank": Row(
        "--compress-rank 2", "--compress powersgd", ("", "--compress topk"), "train bench"
    ),
    "optimizer": Row("--optimizer lamb"),
    "lr": Row("--lr 0.1", does="train"),
    "momentum": Row("--momentum 0.8", "", ("--optimizer adamw", "--optimizer lamb")),
    "nesterov": Row("--nesterov", "", ("--optimizer adamw", "--momentum 0")),
    "beta1": Row("--beta1 0.8", "--optimizer adamw", ("", "--optimizer sgd")),
    "beta2": Row("--beta2 0.8", "--optimizer lamb", ("",)),
    "eps": Row("--eps 0.1", "--optimizer lamb", ("",)),
    "weight_decay": Row("--weight-decay 0.1"),
    "clip_grad": Row("--clip-grad 1"),
    "schedule": Row("--schedule cosine", does="train"),
    "warmup_iterations": Row("--warmup-iterations 3", does="train"),
    "min_lr": Row("--min-lr 0.01", "--schedule cosine", ("", "--warmup-iterations 3"), "train"),
    "decay_iterations": Row(
        "--decay-iterations 3", "--schedule step", ("", "--schedule cosine"), "train"
    ),
    "decay_factor": Row("--decay-factor 0.5", _STEP, ("", "--schedule cosine"), "train"),
    "scale_lr": Row("--scale-lr sqrt", "", ("one rank",), "train"),
    "precision": Row("--precision bf16"),
    "loss_scale": Row("--loss-scale 8"),
    "kernels": Row("--kernels fused", "--precision bf16", ("", "--precision fp64")),
    "deterministic": Row("--deterministic", "--precision fp16 --kernels fused", ("",)),
    "capture": Row("--capture", "--precision fp16 --kernels fused", ("",), "train bench"),
    "save_interval": Row("--save-interval 3", does="train"),
    "save": Row("--save sync", "--save-interval 3", ("", "--resume auto"), "train"),
    "keep": Row("--keep 3", "--save-interval 3", ("", "--resume auto"), "train"),
    "checkpoints": Row("--checkpoints a", "--resume auto", ("", "--resume a"), "train find"),
    "resume": Row("--resume auto", does="train find"),
    "save_model": Row("--no-save-model", does="train"),
    "profile": Row("--profile", does="train"),
    "profile_iterations": Row("--profile-iterations 3", "--profile", ("",), "train"),
    "tensorboard": Row("--tensorboard", does="train"),
    "peak_tflops": Row("--peak-tflops 3", does="train bench"),
    "device": Row("--device cpu"),
    "out": Row("--out a"),
}


def checked(line: str, *, several: bool = True, gpu: bool = True) -> None:
    config = parse(line.split())
    check(config, several=several, gpu=gpu)
    if isinstance(config, TrainConfig):
        model_sizes(config.model, synthetic_tokens(64, 8))


@pytest.mark.parametrize("name", TRAIN)
def test_setting_has_an_effect_or_is_refused(name: str) -> None:
    row = TRAIN[name]
    flag = row.given.split()[0]
    for does, start in (("train", "train"), ("find", "train --find"), ("bench", "bench")):
        line = f"{start} {row.line}"
        if does in row.does.split():
            checked(f"{line} {row.given}")
            ours, plain = (to_record(parse(one.split())) for one in (f"{line} {row.given}", line))
            assert ours.pop(name) != plain.pop(name)
        elif name != "find" or does == "bench":
            # With a line, its own settings may have no effect either.
            with refused("setting-without-effect", UsageError, "" if row.line else f"{flag} has "):
                checked(f"{line} {row.given}")
    for idle in row.idle:
        known = {"several": idle != "one rank", "gpu": idle != "a CPU"}
        line = "" if idle in ("one rank", "a CPU") else idle
        with pytest.raises(UsageError) as caught:
            checked(f"train {line} {row.given}", **known)
        assert str(caught.value).startswith((f"{flag} has ", f"{flag}: ", "--schedule step: "))
        assert caught.value.code in ("setting-without-effect", "model-without-size", "bad-settings")


@pytest.mark.parametrize(
    "line",
    [
        *("train --data idx:{}", "train --resume {}", "eval --resume {}"),
        "export --to a --checkpoint {}",
    ],
)
def test_tilde_in_a_path_is_the_home_folder(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert parse(line.format("~/b").split()) == parse(line.format("/home/ada/b").split())
    assert parse(["train", "--resume", "auto"]).checkpoints.resume == "auto"


def test_table_has_every_setting_of_train() -> None:
    assert set(to_record(parse(["train"]))) == set(TRAIN)


def test_setting_in_a_file_is_refused_unless_it_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    line = f"train --config {file}"
    file.write_text(
        "[optimizer]\nmomentum = 0.9\nbeta1 = 0.9\nlr = 0.1\n[checkpoints]\nsave-interval = 5\n"
    )
    for more in ("", " --optimizer adamw", " --find"):
        checked(line + more)
    with refused("setting-without-effect", UsageError, "--momentum "):
        checked(f"{line} --optimizer adamw --momentum 0.9")
    file.write_text("[optimizer]\nmomentum = 0.8\n")
    checked(line)
    place = f"--config: {file}: [optimizer] momentum "
    with refused("setting-without-effect", UsageError, place, "--optimizer sgd;"):
        checked(f"{line} --optimizer adamw")
    for row in TRAIN.values():
        file.write_text(to_toml(parse(f"train {row.line} {row.given}".split())))
        checked(line)
        # The run may go on elsewhere.
        checked(line, several=False, gpu=False)


def test_config_file_is_searched_in_the_current_then_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job starts in a folder of its own, and `clusterctl put` copies to the home folder."""
    home = tmp_path / "home"
    (home / "auto").mkdir(parents=True)
    (home / "set").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    line = "train --data idx:set --resume auto --save-interval 1"
    config = parse(line.split())
    assert (config.data.data, config.checkpoints.resume) == (f"idx:{home}/set", "auto")
    assert parse(["train", "--resume", "set"]).checkpoints.resume == str(home / "set")
    assert parse(["export", "--checkpoint", "set"]).checkpoint == home / "set"
    (tmp_path / "set").mkdir()
    assert parse(line.split()).data.data == "idx:set"
    too_long = "x" * 300
    assert parse(["train", "--data", f"idx:{too_long}"]).data.data == f"idx:{too_long}"


def test_invalid_learning_rates_are_refused() -> None:
    for workers in (1, 4, 100):
        with refused("lr-too-high", UsageError, "--lr"):
            LearningRate(scaled(1e308, "linear", workers), "constant", 10)
    LearningRate(0.05, "step", 10, warmup=10, milestones=(9, 20))
    lates: list[dict[str, Any]] = [{"warmup": 11}, {"milestones": (10, 20)}]
    for late in lates:
        with refused("run-too-short", UsageError, "10 iterations"):
            LearningRate(0.05, "step", 10, **late)
    with refused("min-above-max", UsageError, "--min-lr 0.1", "0.05"):
        LearningRate(0.05, "cosine", 10, minimum=0.1)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        "[batch]\nseed = 3\nepochs = 2\n[optimizer]\nlr = 1\n[model]\nhidden = [8, 4]\n"
    )
    config = train_config("--epochs", "5", "--config", str(file))
    assert (config.batch.seed, config.batch.epochs, config.batch.global_batch_size) == (3, 5, 64)
    assert (config.optimizer.lr, config.model.hidden) == (1.0, (8, 4))


def test_config_written_as_toml_is_read_back_equal(tmp_path: Path) -> None:
    odd = 'a "b"\\ \u00e9\n\x7f'
    config = parse(["train", "--hidden", "8,4", "--lr", "1e-5", "--iterations", "5", "--out", odd])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert parse(["train", "--config", str(file)]) == config
    assert to_toml(parse(["train"])).startswith('[model]\nmodel = "mlp"\n\n[data]\n')


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("[batch]\nsed = 1", "unknown-key", ("setting [batch] sed;", "[batch] seed?")),
        ("seed = 1", "unknown-key", ("setting seed;", "[batch] seed?")),
        ("[optimizer]\nseed = 1", "unknown-key", ("setting [optimizer] seed;", "[batch] seed?")),
        ("zzz = 1", "unknown-key", ("setting zzz",)),
        ("[optimizer]\nlr = 'fast'", "bad-value", ("[optimizer] lr: 'fast'",)),
        ("[batch]\nseed = true", "bad-value", ("[batch] seed: 'true'",)),
        ("[batch]\nseed = {a = 1}", "bad-value", ("[batch] seed: \"{'a': 1}\"",)),
        ("[batch", "not-toml", ("']'",)),
        ("x = '\ud800'", "not-toml", ("'utf-8'",)),
    ],
)
def test_wrong_config_file_is_refused_in_one_line(
    tmp_path: Path, text: str, code: str, values: tuple[str, ...]
) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with refused(code, UsageError, f"--config: {file}", *values) as caught:
        parse(["train", "--config", str(file)])
    assert "\n" not in str(caught.value)
