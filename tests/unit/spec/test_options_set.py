"""`submit --set KEY=VALUE` sets any key of a job file, as the file itself would."""

from __future__ import annotations

import pytest

from clusterctl.errors import UsageError
from clusterctl.spec.job_options import OPTIONS, JobOptions, job_options, options_set
from tests.support.messages import condition, refused


def options_of(*entries: str, **flags: object) -> JobOptions:
    return job_options(options_set(entries, flags))


@pytest.mark.parametrize(
    ("entry", "name", "value"),
    [
        ("chain=7d", "chain", 7 * 86400),
        ("ranks=1", "ranks", 1),
        ("pack=true", "pack", True),
        ("requeue=false", "requeue", False),
        ("note=a=b", "note", "a=b"),
        ("stage=/a:/b", "stage", ("/a:/b",)),
        ("env=A=1", "env", {"A": "1"}),
        ("folder=none", "folder", False),
        ("requirements=none", "requirements", False),
    ],
)
def test_options_set_reads_a_value_as_the_job_file_does(
    entry: str, name: str, value: object
) -> None:
    assert getattr(options_of(entry), name) == value


def test_options_set_adds_to_the_list_of_a_flag() -> None:
    assert options_of("tag=b", "tag=c", tag=["a"]).tag == ("a", "b", "c")


def test_options_set_joins_the_keys_of_a_scaling_with_its_flag() -> None:
    scaling = options_of("scaling.repeats=3", "scaling.weak=true", scaling="tasks=1,2").scaling
    assert scaling is not None
    assert (scaling.tasks, scaling.repeats, scaling.weak) == ((1, 2), 3, True)
    assert options_of(scaling="1,2").scaling == options_of("scaling.nodes=1,2").scaling


def test_options_set_joins_the_keys_of_a_sweep_with_its_flag() -> None:
    sweep = options_of("sweep.metric=widgets", "sweep.goal=max", sweep=["lr=1,2"]).sweep
    assert sweep is not None
    assert (sweep.metric, sweep.record["goal"], [*sweep.keys]) == ("widgets", "max", ["lr"])


def test_options_set_suggests_only_a_key_with_the_same_first_letter() -> None:
    with refused("option-invalid/job-key", UsageError) as found:
        options_set(["variants=a"], {})
    assert "did you mean" not in found.value.fix


@pytest.mark.parametrize("entry", ["chian=7d", "chain", "chain.x=1", "args=x", "=1", "job=x"])
def test_options_set_of_no_key_is_refused(entry: str) -> None:
    with refused("option-invalid/job-key", UsageError, exit_code=2):
        options_set([entry], {})


@pytest.mark.parametrize(
    ("entries", "flags"),
    [
        (["nodes=3"], {"nodes": 2}),
        (["chain=1h", "chain=2h"], {}),
        (["scaling.weak=true", "scaling.weak=true"], {"scaling": "1,2"}),
    ],
)
def test_options_set_twice_is_refused(entries: list[str], flags: dict[str, object]) -> None:
    with refused("options-exclusive", UsageError):
        options_set(entries, flags)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("ranks=x", "--set ranks "),
        ("pack=yes", "--pack "),
        ("chain=soon", "--set chain:"),
        ("scaling.repeats=x", "--set scaling.repeats "),
        ("ranks=-1", "--set ranks "),
    ],
)
def test_wrong_value_set_names_its_key(entry: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        options_of(entry)
    assert caught.value.what.startswith(name)


def test_all_wrong_keys_are_told_at_once() -> None:
    with refused("option-invalid/several", UsageError) as caught:
        options_set(["chian=7d", "nodes=3", "chain=1h", "wat=1"], {"nodes": 2})
    assert [condition(failure) for failure in caught.value.failures] == [
        "option-invalid/job-key",
        "options-exclusive",
        "option-invalid/job-key",
    ]


def test_options_without_a_flag_are_keys_of_job_files() -> None:
    without = {name for name, option in OPTIONS.items() if not option.in_submit}
    assert without == {"ranks", "chain", "alarm", "outputs", "stage"}
