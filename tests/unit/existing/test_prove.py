"""The proof of an attached cluster: its job's output, recorded on two Slurm clusters."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.packages.node_platform import NodePlatform
from clusterctl.providers.existing.place import Placed
from clusterctl.providers.existing.prove import (
    Proof,
    ProofOptions,
    Unproven,
    mpi_modules,
    proof_script,
    read_facts,
)
from clusterctl.providers.existing.site_description import SiteDescription
from clusterctl.spec.names import ENGINES, Launcher

CAPTURES = Path(__file__).parent / "captures"
SITE = SiteDescription("24.11.5", "campus", "ada", "/bin/bash", "/home/ada", "/opt/slurm/bin")
PLACED = Placed(
    "/home/ada/ours",
    "a1b2",
    "/usr/bin/python3",
    "3.11.2",
    NodePlatform("3.11", 36),
    1.0,
    built=True,
)


def captured(name: str) -> list[str]:
    return (CAPTURES / f"proof-{name}.txt").read_text().splitlines()


def test_proof_by_pmix() -> None:
    proof = read_facts(captured("22.05-pmix"))
    assert isinstance(proof, Proof)
    assert (proof.launcher, proof.modules) == ("pmix", ("openmpi/4.1.4",))
    assert proof.judged["hosts"] == list(proof.nodes.names) == ["fx1-c1", "fx1-c2"]
    nodes = proof.nodes
    assert (nodes.version, nodes.glibc, nodes.arch, nodes.internet) == (
        "3.11.2",
        "2.36",
        "x86_64",
        False,
    )
    assert nodes.pythons == {"/usr/bin/python3": "3.11.2", "/usr/bin/python3.11": "3.11.2"}
    assert [(trial.modules, trial.launcher) for trial in proof.trials] == [
        ("", ""),
        ("openmpi/4.1.4", "pmix"),
    ]


def test_launchers_are_tried_until_one_works() -> None:
    """Slurm's PMIx plugin is missing on the nodes, and in the second job also mpirun."""
    proof = read_facts(captured("24.11-mpirun"))
    assert isinstance(proof, Proof)
    assert (proof.launcher, proof.modules) == ("mpirun", ("openmpi/5.0",))
    tried = [(trial.modules, trial.launcher) for trial in proof.trials]
    assert tried == [("", ""), ("openmpi/5.0", "pmix"), ("openmpi/5.0", "mpirun")]
    assert [bool(trial.failure) for trial in proof.trials] == [True, True, False]
    unproven = read_facts(captured("24.11-no-mpi"))
    assert isinstance(unproven, Unproven)
    assert (unproven.code, unproven.why) == ("mpi", unproven.trials[-1].failure)
    assert [(trial.modules, trial.launcher) for trial in unproven.trials] == tried
    assert unproven.nodes.names == ("c1", "c2")


def test_refused_and_pending_jobs_have_slurms_words() -> None:
    refused, pending = (read_facts(captured(name)) for name in ("24.11-refused", "22.05-pending"))
    assert isinstance(refused, Unproven)
    assert isinstance(pending, Unproven)
    assert refused.code == "refused"
    assert "AssocGrpSubmitJobsLimit" in refused.why
    assert (pending.code, pending.why, pending.expected_start) == (
        "pending",
        "PartitionNodeLimit",
        "N/A",
    )


def changed(old: str, new: str) -> list[str]:
    return [
        line.replace(old, new)
        for line in captured("22.05-pmix")
        if not line.startswith(("works", "fails"))
    ]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (
            [*changed("fx1-c2\tseen\tyes", "fx1-c2\tother\t"), "lost\tfx1-c2\tno such file"],
            "not-shared",
        ),
        (changed("version\t3.11.2", "version\tbad interpreter"), "python"),
        (changed("fx1-c2\tversion\t3.11.2", "fx1-c2\tversion\t3.11.9"), "python"),
        ([], "ended"),
        (["output\tslurmstepd: error: no space"], "ended"),
        (changed("", ""), "ended"),
    ],
    ids=["not-shared", "no-python", "two-pythons", "nothing", "output", "no-trial"],
)
def test_read_facts_of_a_failed_proof_has_a_code(lines: list[str], code: str) -> None:
    unproven = read_facts(lines)
    assert isinstance(unproven, Unproven)
    assert unproven.code == code


def test_proof_asks_for_all_engines() -> None:
    script = proof_script(SITE, PLACED, ProofOptions("short"))
    assert f"engines='{' '.join(ENGINES)}'\n".encode() in script


def test_engines_are_those_that_all_nodes_have() -> None:
    rows = [
        ("fx1-c1", "apptainer apptainer version 1.4.5"),
        ("fx1-c2", "apptainer apptainer version 1.4.5"),
        ("fx1-c1", "enroot 4.1.2"),
        ("fx1-c2", "enroot 3.5.0"),
        ("fx1-c2", "ch-run 0.38"),
    ]
    lines = [f"node\t{name}\tengine\t{text}" for name, text in rows]
    proof = read_facts([*captured("22.05-pmix"), *lines])
    assert isinstance(proof, Proof)
    assert proof.nodes.engines == {"apptainer": "apptainer version 1.4.5"}


def test_local_folders_are_those_that_all_nodes_have_for_themselves() -> None:
    rows = [
        ("fx1-c1", "$TMPDIR xfs 900"),
        ("fx1-c2", "$TMPDIR xfs 700"),
        ("fx1-c1", "/local ext4 900"),
        ("fx1-c2", "/scratch ext4 900"),
        *((name, "/lscratch lustre 900") for name in ("fx1-c1", "fx1-c2")),
        ("fx1-c1", "/tmp tmpfs 30"),
        ("fx1-c2", "/tmp xfs 30"),
        ("fx1-c1", "/broken xfs"),
    ]
    lines = [f"node\t{name}\tscratch\t{text}" for name, text in rows]
    proof = read_facts([*captured("22.05-pmix"), *lines])
    assert isinstance(proof, Proof)
    assert proof.nodes.scratch == {"$TMPDIR": ("xfs", 700)}


def test_pythons_of_nodes_are_those_that_all_have() -> None:
    lines = changed(
        "fx1-c2\tpython\t/usr/bin/python3 3.11.2", "fx1-c2\tpython\t/usr/bin/python3 3.9.1"
    )
    assert dict(read_facts(lines).nodes.pythons) == {"/usr/bin/python3.11": "3.11.2"}


@pytest.mark.parametrize(
    "line",
    [
        "works\tm\tpmix\tsoon\t{}",
        "works\tm\tpmix\t1\t[]",
        'works\tm\trsh\t1\t{"ok": true}',
        'works\tm\tpmi2\t1\t{"ok": true}',
        "works",
        "node\tx",
        "\t",
        "hosts",
    ],
)
def test_read_facts_skips_malformed_lines(line: str) -> None:
    good = captured("22.05-pmix")
    assert read_facts([*good[:-2], line, *good[-2:]]) == read_facts(good)


@pytest.mark.parametrize(
    ("types", "modules", "chosen_modules", "launchers", "variants"),
    [
        ((), (), (), "pmix mpirun", "'' openmpi/4.1 mpi/mpich-x86_64"),
        (("none", "pmi2", "cray_shasta"), (), (), "mpirun", "'' openmpi/4.1 mpi/mpich-x86_64"),
        (("pmix", "pmix_v4"), (), ("gcc/12", "impi/2021"), "pmix mpirun", "'gcc/12 impi/2021'"),
    ],
)
def test_trials_are_those_that_the_site_has(
    types, modules, chosen_modules, launchers, variants
) -> None:
    names = ("openmpi/4.1", "python/3.11", "mpi/mpich-x86_64", "libopenmpi/1")
    site = SiteDescription("", "", "", "", "", "", mpi_types=types, modules=names)
    options = ProofOptions("short", modules=chosen_modules, others=not chosen_modules)
    lines = proof_script(site, PLACED, options).decode().splitlines()
    assert f"launchers=({launchers})" in lines
    assert f"variants=({variants})" in lines


@pytest.mark.parametrize(
    ("launcher", "others", "launchers"),
    [
        (Launcher.MPIRUN, True, "mpirun pmix"),
        (Launcher.SRUN, True, "pmix mpirun"),
        (Launcher.MPIRUN, False, "mpirun"),
        (Launcher.SRUN, False, "pmix"),
    ],
)
def test_known_launcher_is_tried_first_and_a_chosen_one_alone(
    launcher: Launcher, others: bool, launchers: str
) -> None:
    options = ProofOptions("short", launcher=launcher, other_launchers=others)
    assert f"launchers=({launchers})" in proof_script(SITE, PLACED, options).decode().splitlines()


def variants(modules: tuple[str, ...], chosen: tuple[str, ...], *, others: bool) -> list[str]:
    options = ProofOptions("short", modules=chosen, others=others)
    script = proof_script(replace(SITE, modules=modules), PLACED, options).decode()
    (line,) = re.findall(r"^variants=\((.*)\)$", script, re.MULTILINE)
    return shlex.split(line)


MODULES = ("mpi/openmpi-x86_64", "openmpi/5.0", "python/3.13")


def test_chosen_python_module_does_not_end_the_search_for_mpi() -> None:
    with_mpi = ["python/3.13", "python/3.13 openmpi/5.0", "python/3.13 mpi/openmpi-x86_64"]
    assert variants(MODULES, ("python/3.13",), others=False) == with_mpi
    assert variants(MODULES, ("slurm/24", "python/3.13"), others=False)[0] == "slurm/24 python/3.13"
    # A chosen module of MPI, wherever the site keeps it, is the only one.
    for chosen in ("openmpi/4.1", "mpi/openmpi/5.0", "impi"):
        assert variants(MODULES, (chosen, "python/3.13"), others=False) == [f"{chosen} python/3.13"]
    assert variants(MODULES, (), others=True) == ["", "openmpi/5.0", "mpi/openmpi-x86_64"]


def test_newest_version_of_each_library_is_tried_first() -> None:
    versions = [
        f"openmpi/{version}" for version in ("1.8", "2.1.6", "3.1.4", "4.0.7", "4.1.10", "4.1.9")
    ]
    names = ["impi/2019.9", "impi/2021.3", "mpich2/1", "gcc/12", *versions, "python/3.13"]
    assert mpi_modules(names) == [
        *("impi/2021.3", "openmpi/4.1.10"),
        *("impi/2019.9", "openmpi/4.1.9"),
        *("openmpi/4.0.7", "openmpi/3.1.4"),
    ]


def test_proof_job_without_output_has_a_reason() -> None:
    outcome = read_facts([])
    assert isinstance(outcome, Unproven)
    assert outcome.why
