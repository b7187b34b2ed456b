"""The table of sbatch's options against sbatch itself, and the reading of lines and texts with
options.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterctl.cli.main import LazyVerb
from clusterctl.errors import BadValueError, UsageError
from clusterctl.spec.job import job_of
from clusterctl.spec.job_options import flags_for, job_options
from clusterctl.spec.sbatch import (
    Directive,
    directives_in,
    directives_of,
    quoted,
    sbatch_options,
    split_words,
)
from tests.support.messages import refused

CAPTURES = Path(__file__).parent / "captures"
VERSIONS = ("22.05", "24.11", "26.05")


@pytest.mark.parametrize("version", VERSIONS)
def test_sbatch_table_has_each_option_of_the_help(version: str) -> None:
    text = (CAPTURES / f"sbatch-help-{version}.txt").read_text()
    listed = re.findall(r"^  (?:-(\w),? |   ) ?--([a-z-]+)", text, re.MULTILINE)
    assert len(listed) > 90
    letters = {name: option.letter for name, option in sbatch_options().items()}
    assert [(letter, name) for letter, name in listed if letters.get(name) != letter] == []


def test_options_that_salloc_lists_are_passed_to_it() -> None:
    text = (CAPTURES / "salloc-help-24.11.txt").read_text()
    listed = re.findall(r"^  (?:-\w,? |   ) ?--([a-z-]+)", text, re.MULTILINE)
    assert len(listed) > 80
    refused_names = {name for name, option in sbatch_options().items() if not option.salloc}
    # salloc lists this option, but does not accept it.
    assert refused_names & {*listed} == {"get-user-env"}
    assert {"export", "input", "batch"} < refused_names


def test_table_has_the_options_that_sbatch_accepts() -> None:
    _, *rows = [
        line.split() for line in (CAPTURES / "sbatch-values.txt").read_text().splitlines()[3:]
    ]
    # Slurm 26.05 allows a value of --requeue, and the table allows this value in each version.
    kinds = {name: {*values} - {"-"} for name, *values in rows}
    expected = {
        name: "optional" if "optional" in values else "".join(values)
        for name, values in kinds.items()
    }
    assert {name: option.value for name, option in sbatch_options().items()} == expected


def test_names_of_options_and_flags_in_the_table_exist() -> None:
    table = sbatch_options()
    assert {option.same for option in table.values()} <= {"", *table}
    assert {option.role for option in table.values()} == {"", "ours", "never"}
    flags = {
        name
        for param in LazyVerb("submit").load().params
        for name in (*param.opts, *param.secondary_opts)
    }
    advice = [flags_for(Directive(option, None)) for option in table.values()]
    used = {word for text in advice for word in text.split() if word[0] == "-"}
    assert {"--note", "--dry-run", "--gpus", "--no-requeue"} < used <= {*flags, "--help"}


# What the sbatch of these versions makes of the lines.
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--nodes=2 -n4 # -c 3", ["--nodes=2", "--ntasks=4"]),
        ("-HN2 -a 1,2", ["--hold", "--nodes=2", "--array=1,2"]),
        ("-N 2-4 --ntasks 8", ["--nodes=2-4", "--ntasks=8"]),
        ("--exclusive --time 5", ["--exclusive", "--time=5"]),
        ("--exclusive=user -k --nice=-3", ["--exclusive=user", "--no-kill", "--nice=-3"]),
        ("--exclusive user", ["--exclusive", "user"]),
        ("--part=x --job-n y", ["--partition=x", "--job-name=y"]),
        ("--nta=3", ["--nta=3"]),
        ("--comment=a#b --time=5", ["--comment=a"]),
        ("""--comment="it's" --mail-user='a\\b' --wckey="x y\\"z" """, None),
        ("--bogus=1 -N2", ["--bogus=1", "--nodes=2"]),
        ("nodes=2", ["nodes=2"]),
        ("--nodes", ["--nodes"]),
        ("-Z3", ["-Z3"]),
        ("", []),
    ],
)
def test_directive_is_parsed_as_sbatch_parses_it(text: str, shown: list[str] | None) -> None:
    expected = ["--comment=it's", "--mail-user=ab", '--wckey=x y"z'] if shown is None else shown
    found = [str(request) for request in directives_in((1, word) for word in split_words(text))]
    assert found == expected
    assert split_words(" ".join(map(quoted, found))) == found


def test_open_quote_is_an_error() -> None:
    for text in ("--comment='a", '--comment="a', "--comment=a\\"):
        with pytest.raises(ValueError):  # noqa: PT011 - its only error
            split_words(text)


def test_option_that_would_be_refused_is_not_suggested() -> None:
    with refused("not-an-sbatch-option", BadValueError) as found:
        directives_of(["--wat"])
    assert "did you mean" not in str(found.value)


@pytest.mark.parametrize(
    "text",
    [
        *("--gres=gpu", "--gres=gpu:a100:2,tmpfs:10G", "--gres=gres/gpu:2", "--gres=none"),
        *("--signal=10", "--signal=B:USR1@60", "--signal=SIGTERM", "--signal=R:usr2@5"),
        *("--array=[0-9:3]%2", "--array=1,3-5", "--array=7"),
    ],
)
def test_values_that_sbatch_reads_are_readable(text: str) -> None:
    (directive,) = directives_in([(1, text)])
    assert directive.is_readable


def test_option_of_salloc_is_not_a_misspelling() -> None:
    for text, is_slip in (("--no-shell", False), ("--no-kli", True)):
        with refused("not-an-sbatch-option", BadValueError) as found:
            directives_of([text])
        assert ("--no-kill" in str(found.value)) is is_slip


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        ("--nodes=2", "option-of-clusterctl", "--nodes NODES"),
        ("-n 4", "option-of-clusterctl", "--tasks-per-node"),
        ("--gres=tmpfs:1,gpu:2", "option-of-clusterctl", "--gpus "),
        ("--gpus-per-task=1", "option-of-clusterctl", "--gpus "),
        ("--time=5", "option-of-clusterctl", "--time"),
        ("--output=x", "option-of-clusterctl", "--output"),
        ("--wait", "option-of-clusterctl", "--wait"),
        ("-J x", "option-of-clusterctl", "--name NAME of `clusterctl submit`"),
        ("--exclusiv", None, ""),
        ("--exclde=a", "not-an-sbatch-option", "--exclude"),
        ("exclusive", "not-an-sbatch-option", "exclusive"),
        ("--hold=1", "not-an-sbatch-option", "--hold"),
        ("--mem=lots", "not-an-sbatch-option", "--mem=lots"),
        ("--signal=FOO", "not-an-sbatch-option", "--signal=FOO"),
        ("--gres=tmpfs:1:2:3", "not-an-sbatch-option", "--gres="),
        ("--array=a-b", "not-an-sbatch-option", "--array=a-b"),
        ("--begin", "not-an-sbatch-option", "--begin"),
        ("", "not-an-sbatch-option", ""),
        ("--comment='a", "not-an-sbatch-option", "quote"),
        ("--nice=1\nrm", "not-an-sbatch-option", ""),
    ],
)
def test_option_that_slurm_can_not_pass_is_refused(text: str, code: str | None, shown: str) -> None:
    if code is None:
        assert [str(request) for request in directives_of([text])] == ["--exclusive"]
        return
    with refused(code, UsageError, shown):
        job_options({"slurm": [text]})


@pytest.mark.parametrize(
    "text",
    [
        *(
            "--dependency=singleton",
            "--begin=now+1hour",
            "--exclusive",
            "--nice=10",
            "--reservation=maint",
        ),
        *(
            "-w a-[1-2]",
            "--exclude=a-1,a-2",
            "--constraint=fast",
            "--mem-per-cpu=2G",
            "--gres=tmpfs:10G",
        ),
        *("--time-min=10", "--mail-type=END --mail-user=a@b.c", "-Hs", "--licenses=x:2"),
    ],
)
def test_job_options_pass_any_other_sbatch_option(text: str) -> None:
    assert job_options({"slurm": [text]}).slurm == (text,)


def test_flag_and_slurm_can_not_set_the_same_quantity() -> None:
    def job(**options: object) -> None:
        job_of("train", options, folder=Path())

    for flag, value, text in (("mem", 4096, "--mem-per-cpu=1G"), ("constraint", "a", "-C b")):
        with refused("options-exclusive", UsageError, f"--{flag}"):
            job(**{flag: value}, slurm=(text,))
    with refused("options-exclusive", UsageError, "--after"):
        job(after=("3",), slurm=("--dependency=singleton",))
    job(time=3600, slurm=("--time-min=10",))
    job(mem=4096, slurm=("--exclude=a",))
