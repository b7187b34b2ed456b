"""The table of job options: each declaration agrees with itself, and what follows from it is
complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from clusterctl.cli.main import LazyVerb
from clusterctl.errors import UsageError, raise_together
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.slurm.refusals import RequestedOptions
from clusterctl.spec.job import JobSpec, job_spec
from clusterctl.spec.job_file import Variant, job_schema
from clusterctl.spec.job_keywords import JobKeywords, ReplayKeywords
from clusterctl.spec.job_options import (
    OPTIONS,
    InVariants,
    JobOption,
    Refusal,
    Resubmission,
    job_options,
)
from clusterctl.spec.sbatch import directives_of, sbatch_options
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import refused
from tests.support.played.batch import rendered
from tests.unit.spec.test_job_file import EVERYTHING

# A value of each option, as the user writes it.
VALUES: Mapping[str, Any] = YAML(typ="safe").load(EVERYTHING)
# What Slurm gets for some of these values. Others are passed as they are.
WORDS = {
    "mem": "--mem=4096M",
    "time": "--time=01:30:00",
    "after": "--dependency=afterok:12,afterany:13_1,singleton",
    "requeue": "--requeue",
    "signal": "--signal=B:USR1@120",
}
PASSED = [name for name, option in OPTIONS.items() if option.sbatch]
# Clusters without Slurm support these options of sbatch. `job.mpirun.j2` and its callers use them.
WITHOUT_SLURM = {"nodes", "tasks_per_node", "cpus", "time", "name", "partition"}


def contradictions(option: JobOption) -> Iterator[str]:
    """Yield what is wrong with the declaration of an option."""
    known = sbatch_options()
    own = known.get(option.sbatch.removeprefix("--"))
    if option.sbatch and (own is None or own.same or own.role):
        yield "sbatch has no such option, or another sets its quantity, or clusterctl sets it"
    if option.sbatch and [o.name for o in OPTIONS.values() if o.sbatch == option.sbatch] != [
        option.name
    ]:
        yield "another option sets the quantity"
    if option.in_shell and own is not None and not own.salloc:
        yield "salloc has no such option"
    if not option.sbatch and (option.refusal or option.writes_default or option.is_only_flag):
        yield "Slurm does not know the option"
    if option.in_replay and option.again is Resubmission.CHOSEN:
        yield "a replay leaves it out"
    is_appended = option.variants is InVariants.APPENDED
    if is_appended != (f"more_{option.name}" in Variant.model_fields):
        yield "variants have a key with + for exactly the lists that are appended"
    if option.variants is not InVariants.REPLACED and not option.is_list:
        yield "only lists and mappings are appended or merged"
    if not option.help.endswith("."):
        yield "the help is not a sentence"


@pytest.mark.parametrize("name", OPTIONS)
def test_option_agrees_with_itself(name: str) -> None:
    assert [*contradictions(OPTIONS[name])] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"sbatch": "--reservaton"},
        {"sbatch": "--mem-per-cpu"},
        {"sbatch": "--comment"},
        {"sbatch": "--mem"},
        {"sbatch": "--export", "in_shell": True},
        {"sbatch": "", "refusal": Refusal("reservation")},
        {"again": Resubmission.CHOSEN},
        {"variants": InVariants.APPENDED},
        {"variants": InVariants.MERGED},
        {"help": "Reservation"},
    ],
)
def test_declaration_that_contradicts_itself_is_found(changes: dict[str, Any]) -> None:
    assert [*contradictions(replace(OPTIONS["reservation"], **changes))]


def given(name: str) -> dict[str, Any]:
    """Return a valid value of an option by its name."""
    value = VALUES[name]
    return job_options({name: list(map(str, value)) if isinstance(value, list) else value}).given


@pytest.mark.parametrize("name", PASSED)
def test_option_reaches_sbatch_and_salloc(name: str, tmp_path: Path) -> None:
    words = WORDS.get(name, f"{OPTIONS[name].sbatch}={VALUES[name]}")
    job = JobSpec(name="j", bundled="train").model_copy(update=given(name))
    assert f"#SBATCH {words}\n" in rendered(job).replace('"', "")
    script = tmp_path / "own.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {words.replace('B:', '')}\n#SBATCH --hold\ntrue\n")
    own = JobSpec(name="j", script=script).model_copy(update=given(name))
    assert rendered(own).replace('"', "").count(f"#SBATCH {words.partition('=')[0]}") == 1
    if OPTIONS[name].in_shell:
        assert words in [*map(str, Request.read(job).options)]


def test_options_that_are_not_given_are_not_passed() -> None:
    def passed(**options: Any) -> list[str]:
        job = JobSpec(name="j", bundled="probe").model_copy(update=job_options(options).given)
        return [*map(str, Request.read(job).options)]

    defaults = ["--nodes=1", "--ntasks-per-node=1"]
    assert passed() == passed(gpus=0) == defaults
    assert passed(requeue=False) == [*defaults, "--no-requeue"]


@pytest.mark.parametrize("name", PASSED)
def test_option_of_slurm_is_refused_without_slurm(name: str) -> None:
    site = site_of(inventory_with(PartitionFacts("train", ("n1", "n2")), scheduler="none"))
    job = JobSpec(name="j", bundled="train").model_copy(update=given(name))
    if name in WITHOUT_SLURM:
        assert not OPTIONS[name].needs_slurm
        return
    with refused("unsupported/slurm", UsageError, OPTIONS[name].flag):
        raise_together(site.faults(Request.read(job)))


@pytest.mark.parametrize(
    "name", [name for name in PASSED if not OPTIONS[name].is_only_flag and OPTIONS[name].refusal]
)
def test_refusal_names_the_option_as_the_user_wrote_it(name: str) -> None:
    option = OPTIONS[name]
    assert option.refusal is not None
    stderr = f"Batch job submission failed: {option.refusal.pattern} is invalid"
    assert option.flag in RequestedOptions().fix(stderr)
    text = "--mem-per-cpu=1G" if name == "mem" else f"{option.sbatch}=x"
    assert f"--slurm {text}" in RequestedOptions(directives_of([text])).fix(stderr)


@pytest.mark.parametrize("name", PASSED)
def test_flag_and_slurm_can_not_set_the_same_quantity(name: str) -> None:
    option = OPTIONS[name]
    text = option.sbatch if option.kind is bool else f"{option.sbatch}=1"
    flags = {**given(name), "slurm": [text]}
    code = "option-of-clusterctl" if option.is_only_flag else "options-exclusive"
    with refused(code, UsageError):
        job_spec("train", flags)


def test_job_option_has_a_flag_a_key_and_a_keyword() -> None:
    flags = {
        verb: [name for param in LazyVerb(verb).load().params for name in param.opts]
        for verb in ("submit", "rehearse", "shell", "replay")
    }
    own = [option for option in OPTIONS.values() if not option.is_argument]
    with_flag = [option for option in own if option.in_submit]
    for verb, trait in (
        ("rehearse", "in_rehearse"),
        ("shell", "in_shell"),
        ("replay", "in_replay"),
    ):
        expected = {option.flag for option in with_flag if getattr(option, trait)}
        assert {option.flag for option in own} & {*flags[verb]} == expected
    # The others are keys of job files, which --set sets.
    assert {option.flag for option in own} & {*flags["submit"]} == {
        option.flag for option in with_flag
    }
    assert "--set" in flags["submit"]
    for verb, names in flags.items():
        assert len(names) == len({*names}), f"{verb} has two flags with the same name"
    assert {*OPTIONS} < job_schema()["properties"].keys()
    assert {option.name for option in own} == JobKeywords.__annotations__.keys()
    in_replay = {option.name for option in own if option.in_replay}
    assert in_replay == ReplayKeywords.__annotations__.keys()


def test_placement_options_apply_to_shell_and_replay() -> None:
    """They are neither compared, unless they can be the cause of other results."""
    for name in ("partition", "account", "qos", "constraint", "reservation", "licenses"):
        option = OPTIONS[name]
        assert (option.in_shell, option.in_replay, option.again) == (
            True,
            True,
            Resubmission.REPEATED,
        )
        assert option.compared is (name in {"partition", "constraint"})


@pytest.mark.parametrize("command", ["", " \n"])
def test_build_without_a_command_is_refused(command: str) -> None:
    with refused("bad-value", UsageError):
        job_options({"build": command})
