"""The tasks of a sweep, and how their values reach a program."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clusterctl.errors import BadValueError, UsageError
from clusterctl.jobs.prepare import read_jobs
from clusterctl.spec.job import job_spec
from clusterctl.spec.job_options import job_options
from clusterctl.spec.sweep import ArgumentForm, Sweep, as_sweep, sweep_arguments
from tests.support.messages import refused


def tasks(**keys: Any) -> list[dict[str, str]]:
    return [dict(one) for one in Sweep.model_validate(keys).tasks]


def test_grid_has_every_combination_the_last_key_varies_first() -> None:
    assert tasks(grid={"lr": ["1e-4", "1e-3"], "seed": "0..2"}) == [
        {"lr": lr, "seed": seed} for lr in ("1e-4", "1e-3") for seed in "012"
    ]


def test_list_times_grid_omits_excluded_combinations() -> None:
    found = tasks(
        list=[{"opt": "sgd", "lr": "1"}, {"opt": "adam", "lr": "2"}],
        grid={"seed": ["0", "1"]},
        exclude=[{"opt": "sgd", "seed": "1"}],
    )
    assert found == [
        {"opt": "sgd", "lr": "1", "seed": "0"},
        {"opt": "adam", "lr": "2", "seed": "0"},
        {"opt": "adam", "lr": "2", "seed": "1"},
    ]


def test_conditional_key_makes_no_duplicate_tasks() -> None:
    found = tasks(
        grid={"opt": ["sgd", "adam"], "momentum": ["0", "0.9"]}, when={"momentum": {"opt": "sgd"}}
    )
    assert found == [
        {"opt": "sgd", "momentum": "0"},
        {"opt": "sgd", "momentum": "0.9"},
        {"opt": "adam"},
    ]


def test_random_values_in_range_and_reproducible_by_seed() -> None:
    keys = {
        "random": {
            "lr": "log 1e-5..1e-2",
            "layers": "1..3",
            "dropout": "0.0..0.5",
            "opt": ["sgd", "adam"],
        },
        "trials": 200,
    }
    found = tasks(**keys, seed=1)
    assert found == tasks(**keys, seed=1)
    assert found != tasks(**keys, seed=2)
    assert {one["layers"] for one in found} == {"1", "2", "3"}
    assert {one["opt"] for one in found} == {"sgd", "adam"}
    assert all(0 <= float(one["dropout"]) <= 0.5 for one in found)
    logs = sorted(math.log10(float(one["lr"])) for one in found)
    assert logs[0] >= -5.0001
    assert logs[-1] <= -1.9999
    assert abs(logs[100] - -3.5) < 0.5  # the median of a range that is uniform in the logarithm


@pytest.mark.parametrize(
    "keys",
    [
        {"grid": {"0lr": ["1"]}},
        {"grid": {"seed": "2..1"}},
        {"grid": {"a": ["x\0y"]}},
        {"list": [{"a": "x\0y"}]},
        {"grid": {"seed": "0..1000000"}},
        {"grid": {"a": "0..199", "b": "0..199"}},
        {"grid": {f"k{n}": "0..9" for n in range(12)}},
        {"grid": {"a": ["1"]}, "list": [{"a": "2"}]},
        {"grid": {"a": ["1"]}, "exclude": [{"a": "1"}]},
        {"grid": {"a": ["1"]}, "exclude": [{"b": "1"}]},
        {"grid": {"a": ["1"]}, "when": {"b": {"a": "1"}}},
        {"random": {"a": "1..2"}},
        {"grid": {"a": ["1"]}, "trials": 2},
        {"random": {"a": "log 0..1"}, "trials": 1},
        {"random": {"a": "1..1"}, "trials": 1},
        {"random": {"a": "1..nan"}, "trials": 1},
        {"random": {"a": "many"}, "trials": 1},
        {"grid": {"a": ["1"]}, "goal": "high"},
        {"grid": {"a": ["1"]}, "parallel": 0},
        {"grid": {"a": ["1", "2", "1"]}},
    ],
)
def test_wrong_sweep_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sweep.model_validate(keys)


def test_flags_are_a_grid() -> None:
    assert as_sweep(["lr=1e-4,3e-4", "name=a=b"]) == {
        "grid": {"lr": ["1e-4", "3e-4"], "name": ["a=b"]}
    }
    for wrong, code in {
        "lr": "sweep-entry",
        "lr=": "sweep-entry",
        "lr=1 lr=2": "option-twice",
    }.items():
        with refused(code, BadValueError, "'lr"):
            as_sweep(wrong.split())


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[64,64],[128]", ["[64,64]", "[128]"]),
        ("[[1,2],[3]],[[4]]", ["[[1,2],[3]]", "[[4]]"]),
        ("(0.9,0.999),(0.8,0.99)", ["(0.9,0.999)", "(0.8,0.99)"]),
        ("{a: 1, b: [2,3]},{}", ["{a: 1, b: [2,3]}", "{}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('["a,]","b"],"x\\",y"', ['["a,]","b"]', '"x\\",y"']),
        ("choice(1,2),3", ["choice(1,2)", "3"]),
        ("it's,that's", ["it's", "that's"]),
        ("a=b,c=[d,e]", ["a=b", "c=[d,e]"]),
        ("-x,--y,-1e-3", ["-x", "--y", "-1e-3"]),
        ("[", ["["]),
        (",a b,", ["", "a b", ""]),
    ],
)
def test_flags_are_split_at_commas_outside_brackets_and_quotes(
    text: str, values: list[str]
) -> None:
    assert as_sweep([f"x={text}"]) == {"grid": {"x": values}}


@pytest.mark.parametrize(
    "text", ["[0,1),[1,2)", "a(,b", "a,b)", "'a,b", '["a,b]', "{a,(b},c)", ":),;)"]
)
def test_flag_with_a_bracket_that_is_not_closed_is_refused(text: str) -> None:
    with refused("sweep-brackets", BadValueError, "grid: {x:"):
        as_sweep([f"x={text}"])
    assert tasks(grid={"x": [text]}) == [{"x": text}]


@pytest.mark.parametrize(
    "text",
    [
        *("0.1..0.5", "1e-5..1e-2", "log 1..8", "0..10:2", "0..9..3", "-1.5..1.5"),
        *("1..", "..5", "1...", "1e-5..", "log 1..", "{1..3}", "[1..]"),
    ],
)
def test_range_of_other_than_whole_numbers_is_refused_in_a_grid(text: str) -> None:
    with refused("sweep-range", UsageError):
        job_options({"sweep": [f"x={text}"]})
    assert tasks(list=[{"x": text}]) == [{"x": text}]


@pytest.mark.parametrize("text", ["1,2,...,8", "1,..,8", "0.1,…"])
def test_dots_in_a_list_of_numbers_are_refused(text: str) -> None:
    with refused("sweep-range", UsageError):
        job_options({"sweep": [f"x={text}"]})


@pytest.mark.parametrize("text", ["v1..v2", "main..dev", "../a..b", "..", "1..x", "a..3"])
def test_text_with_two_dots_is_a_value(text: str) -> None:
    assert tasks(grid={"x": text}) == [{"x": text}]


def test_sweep_with_two_tables_is_refused() -> None:
    with refused("tables-twice", BadValueError):
        as_sweep(["a.csv", "b.csv"])


def test_values_are_options_and_switches() -> None:
    assert sweep_arguments({"lr": "1e-4", "fast": "true", "slow": "false", "name": ""}) == [
        *("--lr", "1e-4"),
        "--fast",
        *("--name", ""),
    ]


# Values that a program could take for an option.
DASHED = [
    "-1e-3",
    "-inf",
    "-x",
    "--c",
    "-0.5,2",
    "-a b",
    "-1_0",
    "-.5e2",
    "-1.",
    "-0x1f",
    "-ä",
    "--tag=x",
]


@pytest.mark.parametrize("value", DASHED)
def test_value_that_begins_with_a_dash_is_an_argument_with_its_key(value: str) -> None:
    assert sweep_arguments({"x": value}) == [f"--x={value}"]
    assert sweep_arguments({"x": value}, ArgumentForm.OPTION) == ["--x", value]
    parser = argparse.ArgumentParser()
    parser.add_argument("--x")
    parser.add_argument("--tag", action="store_true")
    assert parser.parse_args(sweep_arguments({"x": value, "tag": "true"})).x == value


@pytest.mark.parametrize(
    "value", ["-3", "-0.5", "-.5", "-", "1e-3", "", "a,b", "[1, 2]", "'a'", "k=v", "$x\n"]
)
def test_value_without_a_dash_is_an_argument_of_its_own(value: str) -> None:
    """Shell scripts often read only this form."""
    assert sweep_arguments({"x": value}) == ["--x", value]
    assert sweep_arguments({"x": value}, ArgumentForm.JOINED) == [f"--x={value}"]


def test_joined_form_passes_true_and_false_verbatim() -> None:
    assert sweep_arguments({"a": "true", "b": "false"}, ArgumentForm.JOINED) == [
        "--a=true",
        "--b=false",
    ]


@pytest.mark.parametrize(
    ("keys", "args", "form"),
    [
        ("lr", "model=resnet ++x.y=1 ~z=", "key=value"),
        ("+optimizer.lr", "", "key=value"),
        ("db/type@main", "--help", "key=value"),
        ("optimizer.lr", "", None),
        ("lr", "model=resnet --fast", None),
        ("lr", "data/x.csv model=resnet", None),
        ("lr", "=1", None),
    ],
)
def test_form_of_values_follows_the_other_arguments(keys: str, args: str, form: str | None) -> None:
    sweep = Sweep.model_validate({"grid": {key: ["1"] for key in keys.split()}})
    assert sweep.for_arguments(args.split()).record["form"] == form
    for chosen in ArgumentForm:
        assert sweep.model_copy(update={"form": chosen}).for_arguments(args.split()).form == chosen


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("a.sh", "while (($#)); do case $1 in --x) X=$2; shift 2;; esac; done", "--key value"),
        ("a.sh", 'python train.py "$@"', None),
        ("a.sh", "D=$1; shift; python train.py ${@:1}", None),
        ("a.sh", 'eval set -- $(getopt -l x: -- "$@"); shift', None),
        ("a.sh", "echo $SWEEP_X", None),
        ("a.py", "shift = 1", None),
        ("a.R", "shift", None),
    ],
)
def test_shell_script_that_reads_its_own_arguments_gets_words(
    tmp_path: Path, name: str, text: str, form: str | None
) -> None:
    (tmp_path / name).write_text(f"{text}\n")
    job = job_spec(str(tmp_path / name), {"sweep": ["x=-1e-3"]})
    assert job.sweep is not None
    assert job.sweep.form == form


def test_values_are_pairs_for_hydra() -> None:
    values = {"lr": "1e-4", "++fast": "true", "slow": "false", "name": ""}
    assert sweep_arguments(values, ArgumentForm.PAIR) == [
        "lr=1e-4",
        "++fast=true",
        "slow=false",
        "name=",
    ]
    with pytest.raises(ValidationError):
        Sweep.model_validate({"grid": {"a": ["1"]}, "form": "=value"})


def test_sweep_by_metric_of_unknown_direction_needs_a_goal() -> None:
    sweep = {"grid": ["a=1,2"], "metric": "widgets"}
    with refused("goal-unknown", UsageError, exit_code=2):
        read_jobs("train", {"sweep": sweep})
    (job,) = read_jobs("train", {"sweep": {**sweep, "goal": "max"}})
    (known,) = read_jobs("train", {"sweep": {**sweep, "metric": "gflops"}})
    assert job.sweep is not None
    assert known.sweep is not None
    assert (job.sweep.record["goal"], known.sweep.record["goal"]) == ("max", "max")


def test_sweep_record_has_all_keys_and_the_goal() -> None:
    sweep = Sweep.model_validate({"list": [{"a": "1"}, {"++b-c": "2"}], "metric": "accuracy"})
    assert sweep.record == {
        "version": 1,
        "metric": "accuracy",
        "goal": "max",
        "keys": ["a", "b_c"],
        "form": None,
        "tasks": ({"a": "1"}, {"++b-c": "2"}),
        "arguments": [["--a", "1"], ["--++b-c", "2"]],
    }
    assert Sweep.model_validate({"grid": {"a": ["1", "2"]}, "parallel": 1}).array == "0-1%1"
