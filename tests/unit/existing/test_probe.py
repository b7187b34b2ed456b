"""The probe of a login node, with answers that remote_probe.sh printed at real sites."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import MachineError, SlurmError, UsageError
from clusterctl.providers.attached import SiteFact
from clusterctl.providers.existing.attach import gpus_of
from clusterctl.providers.existing.facts import site_facts
from clusterctl.providers.existing.probe import Choices, SiteProbe, parse
from clusterctl.providers.existing.site_description import SitePartition, load_site
from clusterctl.spec.common import Gpus
from clusterctl.spec.providers.existing import ExistingSettings
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused

CAPTURES = Path(__file__).parent / "captures"


def probed(name: str, choices: Choices = Choices()) -> SiteProbe:  # noqa: B008 - it is frozen
    return parse((CAPTURES / f"{name}.txt").read_text(), choices, "login")


def with_lines(name: str, *lines: str, without: str = "") -> str:
    kept = (CAPTURES / f"{name}.txt").read_text().splitlines()
    return "\n".join(
        [*(line for line in kept if not (without and line.startswith(without))), *lines]
    )


def test_options_that_the_site_demands_are_separate_words() -> None:
    """The probe gives them to sbatch, and jobs have each in a line."""
    texts = ("--constraint cpu", "-L a -t5")
    words = ("--constraint=cpu", "--licenses=a", "--time=5")
    assert Choices.of({"slurm": texts}).slurm == words
    settings = ExistingSettings.model_validate({"type": "existing", "login": "a", "slurm": texts})
    assert settings.slurm == words


def test_site_without_accounting_is_read() -> None:
    answer = probed("slurm-22.05-no-accounting")
    site = answer.site
    assert (site.slurm_version, site.cluster_name, site.account) == ("22.05.8", "campus", "stud")
    assert site.accounting == "Slurm accounting storage is disabled"
    assert (site.max_submit, site.max_array) == (None, 1001)
    assert site.modules == ("openmpi/4.1.4",)
    assert site.pythons["/usr/bin/python3"] == "3.11.2"
    assert "pmix" in site.mpi_types
    assert (answer.account, answer.partition, answer.proof_nodes) == ("", "short", 2)


def test_site_with_associations_is_read() -> None:
    answer = probed("slurm-24.11-associations")
    site = answer.site
    assert (site.accounting, site.max_submit, site.max_array) == ("", 20, 11)
    # The user's default account may submit no job.
    assert (answer.account, answer.partition) == ("proj1", "main")


@pytest.mark.parametrize(
    ("chosen", "limits", "most"),
    [
        ("proj1", {"proj1": "20", "proj2": "500"}, 20),
        ("", {"proj1": "20", "proj2": "500"}, 500),
        ("", {"proj1": "20", "proj2": ""}, None),
        ("proj2", {"proj1": "20", "proj2": ""}, None),
    ],
)
def test_limit_of_jobs_is_that_of_the_account(
    chosen: str, limits: dict[str, str], most: int | None
) -> None:
    """Without a choice, Slurm's default account is not known, so the limit is the largest."""
    name = "slurm-24.11-associations"
    lines = [f"association\t{a}\t\t{n}\t\tnormal" for a, n in limits.items()]
    text = with_lines(name, *lines, f"chosen\t{chosen}\tmain\t5", without="association\t")
    text = text.replace("chosen\tproj1\tmain\t5\n", "", 1) if chosen != "proj1" else text
    assert parse(text, Choices(), "login").site.max_submit == most


def test_partition_with_two_node_types_is_listed_once() -> None:
    (short, gpuq) = probed("slurm-22.05-no-accounting").site.partitions
    assert (short.name, short.is_default, short.nodes, short.node_count) == (
        "short",
        True,
        "fx1-c1,fx1-c2",
        2,
    )
    assert (short.max_time_s, short.default_time_s, short.gpus) == (1800, 600, "none gpu:1")
    assert (gpuq.is_default, gpuq.default_time_s, gpuq.gpus) == (False, None, "gpu:1")


def test_default_time_of_jobs_is_shown() -> None:
    facts = {fact.fact: fact.value for fact in site_facts(probed("slurm-22.05-no-accounting"))}
    assert "10m" in facts["partition short"]


def test_partition_that_refuses_the_account_is_not_usable() -> None:
    answer = probed("slurm-22.05-no-accounting")
    assert [partition.name for partition in answer.usable] == ["short"]
    (attempt,) = answer.refused
    assert attempt.partition == "gpuq"
    assert "say your project with --account" in attempt.answer


def test_chosen_partition_is_listed_first() -> None:
    lines = [
        "chosen\tproj1\tgpuq\t5",
        "try\tproj1\tgpuq\t1\t0\tJob 1\t5",
        "try\tproj1\tshort\t1\t0\tJob 2\t5",
    ]
    answer = parse(
        with_lines("slurm-22.05-no-accounting", *lines, without="chosen"), Choices(), "login"
    )
    assert [partition.name for partition in answer.usable] == ["gpuq", "short"]


@pytest.mark.parametrize(("limit_s", "minutes"), [(None, "5"), (1800, "5"), (180, "3"), (30, "1")])
def test_time_limit_of_the_test_is_at_most_that_of_the_partition(
    limit_s: int | None, minutes: str
) -> None:
    answer = probed("slurm-22.05-no-accounting")
    partitions = tuple(replace(one, max_time_s=limit_s) for one in answer.site.partitions)
    answer = replace(answer, site=replace(answer.site, partitions=partitions))
    assert answer.test_minutes == minutes


def test_refused_accounts_are_shown_with_what_was_asked() -> None:
    with refused("slurm-refused/all-partitions", SlurmError) as caught:
        probed("slurm-24.11-refused", Choices(account="nobody"))
    assert "--account=nobody --partition=main" in caught.value.why
    assert "AssocGrpSubmitJobsLimit" in caught.value.why


def test_unknown_partition_error_lists_the_partitions() -> None:
    with refused("not-found/partition", UsageError) as caught:
        probed("slurm-24.11-associations", Choices(partition="gpu"))
    assert "main" in caught.value.fix


def test_machine_without_slurm_is_refused() -> None:
    with refused("tool-missing/slurm", MachineError):
        parse("slurm_path\t\n", Choices(), "login")


@pytest.mark.parametrize(
    "key", ["partition", "named", "try", "association", "config", "python", "chosen", ""]
)
def test_row_without_its_values_is_skipped(key: str) -> None:
    good = probed("slurm-24.11-associations")
    lines = (CAPTURES / "slurm-24.11-associations.txt").read_text().splitlines()
    assert parse("\n".join([f"{key}\tx", *lines]), Choices(), "login") == good


def test_partition_with_a_name_unfit_for_a_spec_is_not_usable() -> None:
    lines = [
        "chosen\tproj1\ta/b\t5",
        "try\tproj1\ta/b\t1\t0\tJob 1\t5",
        "try\tproj1\tshort\t1\t0\tJob 2\t5",
    ]
    text = with_lines("slurm-22.05-no-accounting", *lines, without="chosen")
    answer = parse(text, Choices(), "login")
    assert answer.partition == "short"
    assert {attempt.partition for attempt in answer.refused} == {"a/b", "gpuq"}


def test_site_without_a_partition_of_its_answers_is_refused() -> None:
    with refused("slurm-refused/all-partitions", SlurmError):
        parse(with_lines("slurm-24.11-associations", without="partition"), Choices(), "login")


def test_site_survives_its_file(tmp_path: Path) -> None:
    facts = (SiteFact("MPI", "srun with PMIx", "a job on c1, c2"),)
    site = replace(probed("slurm-24.11-associations").site, facts=facts)
    workspace = Workspace(tmp_path)
    site.save(workspace)
    assert load_site(workspace) == site


def test_site_file_of_another_version_is_read(tmp_path: Path) -> None:
    site = probed("slurm-24.11-associations").site
    workspace = Workspace(tmp_path)
    site.save(workspace)
    record = json.loads((tmp_path / "site.json").read_text())
    record |= {"removed": 1, "partitions": [row | {"removed": 1} for row in record["partitions"]]}
    (tmp_path / "site.json").write_text(json.dumps(record))
    assert load_site(workspace) == site


def test_damaged_site_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text("{}")
    with refused("record-damaged/site", UsageError):
        load_site(Workspace(tmp_path))


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", None),
        ("gpu:1", Gpus(type="gpu", count=1)),
        ("gpu:a100:4(S:0-1)", Gpus(type="a100", count=4)),
        ("gpu:A100_SXM4:8,nvme:1", Gpus(type="a100-sxm4", count=8)),
        ("gpu:a100:4,gpu:v100:2", None),
        ("none gpu:1", None),
        ("gpu:72", None),
        ("craynetwork:4", None),
        ("gpu:1g.5gb:7", Gpus(type="gpu-1g-5gb", count=7)),
        (
            "gpu:nvidia_h100_80gb_hbm3_2g.20gb:3",
            Gpus(type="nvidia-h100-80gb-hbm3-2g-20gb", count=3),
        ),
        (
            "gpu:nvidia_h100_80gb_hbm3_1g.10gb_me:1",
            Gpus(type="gpu-nvidia-h100-80gb-hbm3-1g-10", count=1),
        ),
        ("gpu:a+b:1", Gpus(type="a-b", count=1)),
    ],
)
def test_gpus_of_a_partition(text: str, gpus: Gpus | None) -> None:
    partition = SitePartition(
        "p", is_default=True, max_time_s=None, nodes="n1", node_count=1, gpus=text
    )
    assert gpus_of(partition) == gpus
