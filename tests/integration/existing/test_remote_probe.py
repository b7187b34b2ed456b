"""The probe of a login node, with commands that answer as on a cluster with Slurm 22.05."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import MachineError, SlurmAwayError, SlurmError
from clusterctl.providers.existing.facts import site_facts
from clusterctl.providers.existing.probe import Choices, probe
from tests.integration.existing.conftest import Commands
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused


def test_chosen_folder_of_slurm_is_used(commands: Commands, tmp_path: Path) -> None:
    commands("short")
    other = tmp_path / "opt/slurm"
    other.mkdir(parents=True)
    (other / "sbatch").symlink_to(tmp_path / "slurm+bin/sbatch")
    assert probe(LocalTransport(), Choices()).site.slurm_path == str(tmp_path / "slurm+bin")
    assert probe(LocalTransport(), Choices(slurm_path=str(other))).site.slurm_path == str(other)


def test_named_python_is_found_first(commands: Commands, tmp_path: Path) -> None:
    commands("short")
    python = tmp_path / "own python"
    python.symlink_to(sys.executable)
    pythons = probe(LocalTransport(), Choices(python=str(python))).site.pythons
    assert next(iter(pythons.items())) == (str(python), ".".join(map(str, sys.version_info[:3])))


def test_python_of_a_named_module_is_found_first(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands("short")
    (tmp_path / "python/3.12").mkdir(parents=True)
    (tmp_path / "python/3.12/python3").symlink_to(sys.executable)
    # bash reads this file as a site's shells read the definition of the command `module`.
    (tmp_path / "modules").write_text(
        f'module() {{ PATH={tmp_path}/$3:$PATH; echo "loading $*"; }}\n'
    )
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "modules"))
    found = probe(LocalTransport(), Choices(modules=("gcc/12", "python/3.12"))).site.pythons
    assert next(iter(found)) == f"{tmp_path}/python/3.12/python3"


def test_partition_is_chosen_among_others_if_the_default_refuses(commands: Commands) -> None:
    commands("short", "gpuq", accepted="*--partition=gpuq*")
    assert probe(LocalTransport(), Choices()).partition == "gpuq"
    with refused("slurm-refused/all-partitions", SlurmError, "--account"):
        probe(LocalTransport(), Choices(partition="short"))


def test_sbatch_is_called_a_limited_number_of_times(commands: Commands) -> None:
    calls = commands(
        *(f"p{number}" for number in range(30)), default=False, accepted="nothing", accounts=12
    )
    with refused("slurm-refused/all-partitions", SlurmError, "--partition"):
        probe(LocalTransport(), Choices())
    assert len(calls.read_text().splitlines()) == 76


Profile = Callable[[str], None]


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Let bash run these lines first, as it runs ~/.bashrc and /etc/profile of a site."""

    def write(lines: str) -> None:
        # bash reads this file as it reads ~/.bashrc under sshd.
        (tmp_path / "bashrc").write_text(lines)
        monkeypatch.setenv("BASH_ENV", str(tmp_path / "bashrc"))

    return write


@pytest.fixture
def hidden(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remove Slurm's commands from PATH. Return their folder."""
    commands("short")
    folder = tmp_path / "slurm+bin"
    monkeypatch.setenv("PATH", os.environ["PATH"].removeprefix(f"{folder}:"))
    return folder


NOISE = {
    "line": "echo hello",
    "no-line-feed": "printf hello",
    "colours": r"printf '\033[32mwelcome\033[0m: '",
    "stderr": "echo hello >&2",
    "many-lines": "seq 5000",
    "a-path": "echo /usr/bin:/bin",
    "at-exit": "trap 'echo bye' EXIT",
    "like-a-row": r"printf 'slurm_path\t/nowhere\n'",
    "fails": "false; nonsense-command",
    "no-glob": "set -f; echo hello",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_output_of_startup_files_is_no_part_of_the_path(
    hidden: Path, profile: Profile, noise: str
) -> None:
    """/etc/profile puts Slurm's folder first, and ~/.bashrc prints something."""
    profile(f"{noise}\nfunction . {{ echo more noise; PATH={shlex.quote(str(hidden))}:$PATH; }}\n")
    assert probe(LocalTransport(), Choices()).site.slurm_path == str(hidden)


def test_slurm_of_a_named_module_is_found(hidden: Path, profile: Profile) -> None:
    profile(
        f"echo hello\n"
        f'module() {{ echo loading; [ "$2" != slurm/24.11 ] || PATH=$PATH:{hidden}; }}\n'
    )
    site = probe(LocalTransport(), Choices(modules=("slurm/24.11",))).site
    assert (site.slurm_path, site.cluster_name) == (str(hidden), "campus")


AVAILABLE = (
    "module() { printf '%s\\n' /opt/modules: gcc/ gcc/12 slurm/ 'slurm/24.11(default)' "
    "slurmtools/1 >&2; }\n"
)


@pytest.mark.usefixtures("hidden")
def test_module_of_slurm_is_named_if_slurm_is_not_found(profile: Profile) -> None:
    profile(AVAILABLE)
    with refused("tool-missing/slurm", MachineError, "--module slurm/24.11") as caught:
        probe(LocalTransport(), Choices())
    assert "provider.slurm_path" in caught.value.fix
    profile("module() { echo \"Unable to locate a modulefile for '$2'\" >&2; }\n")
    with refused("tool-missing/slurm", MachineError, "provider.slurm_path") as caught:
        probe(LocalTransport(), Choices(modules=("slurm/9",)))
    assert "Unable to locate a modulefile for 'slurm/9'" in caught.value.why


def test_mpi_modules_below_a_folder_are_listed(commands: Commands, profile: Profile) -> None:
    names = (
        "mpi/openmpi-x86_64 mpi/openmpi/5.0 Apps/MPI/OpenMPI/4.1.4-GCC-12 openmpi4/4.1.6 "
        "hpcx-mt-ompi/2.17"
    )
    names += " openmpi-4.1.4-gcc-11.3.0"
    others = "hdf5-openmpi/1.12 R-mpi/3 python/3.13 gcc/12 mpich-docs2/"
    commands("short")
    profile(f"module() {{ echo noise; printf '%s(D)\\n' {names} {others} >&2; }}\n")
    assert {*probe(LocalTransport(), Choices()).site.modules} == {*names.split()}


CONNECT_FAILURE = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize("partition", ["", "short"])
def test_slurmctld_that_is_down_is_asked_once(
    commands: Commands, tmp_path: Path, partition: str
) -> None:
    calls = commands("short")
    asked = tmp_path / "asked"
    (tmp_path / "slurm+bin/sinfo").write_text(
        f"#!/bin/sh\necho x >>{asked}\necho '{CONNECT_FAILURE}' >&2\nexit 1\n"
    )
    with refused("slurm-away", SlurmAwayError) as caught:
        probe(LocalTransport(), Choices(partition=partition))
    assert (caught.value.why, caught.value.retryable) == (CONNECT_FAILURE, True)
    assert (asked.read_text(), calls.exists()) == ("x\n", False)


def test_sinfo_that_is_refused_is_quoted(commands: Commands, tmp_path: Path) -> None:
    commands("short")
    words = "slurm_load_node: Access/permission denied"
    (tmp_path / "slurm+bin/sinfo").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    with refused("slurm-refused/partitions", SlurmError, "sinfo") as caught:
        probe(LocalTransport(), Choices(partition="short"))
    assert (caught.value.why, caught.value.retryable) == (words, False)


def test_slurmctld_down_during_the_probe_is_slurm_away(commands: Commands, tmp_path: Path) -> None:
    commands("short")
    words = "allocation failure: Unable to contact slurm controller (connect failure)"
    (tmp_path / "slurm+bin/sbatch").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    with refused("slurm-away", SlurmAwayError):
        probe(LocalTransport(), Choices())


def test_sacct_message_is_quoted_without_the_shells_name(
    commands: Commands, tmp_path: Path
) -> None:
    commands("short")
    (tmp_path / "slurm+bin/sacct").chmod(0o644)
    assert probe(LocalTransport(), Choices()).site.accounting == "sacct: Permission denied"


def test_time_limit_that_the_site_demands_is_noticed(commands: Commands) -> None:
    commands("short")
    assert not probe(LocalTransport(), Choices()).site.needs_time
    commands("short", accepted="*--time=*")
    answer = probe(LocalTransport(), Choices())
    assert (answer.site.needs_time, answer.partition, answer.refused) == (True, "short", ())


DRAINED = "allocation failure: Requested node configuration is not available"
PARTITION = "{}|30:00|10:00|2|c[1-2]|(null)|{}|{}|"


def of_partitions(tmp_path: Path, *rows: str, sbatch: str = "exit 0") -> None:
    lines = "\n".join(f"echo '{row}'" for row in rows)
    (tmp_path / "slurm+bin/sinfo").write_text(f"#!/bin/sh\ncase $* in *-O*)\n{lines}\nesac\n")
    (tmp_path / "slurm+bin/sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")


def test_job_whose_nodes_are_all_drained_waits(commands: Commands, tmp_path: Path) -> None:
    commands("main", accounts=2)
    refusal = (
        f"case $* in *--account=proj1*) echo '{DRAINED}';; *) echo 'Invalid account';; esac >&2; "
        "exit 1"
    )
    of_partitions(tmp_path, PARTITION.format("main*", "up", "0/0/2/2"), sbatch=refusal)
    answer = probe(LocalTransport(), Choices())
    assert (answer.account, answer.partition, answer.proof_nodes) == ("proj1", "main", 2)
    facts = {fact.fact: fact.value for fact in site_facts(answer)}
    assert facts["partition main"].startswith("2 nodes, none in service")


def test_larger_job_than_the_site_has_is_refused(commands: Commands, tmp_path: Path) -> None:
    """The nodes are in service, so Slurm's message is about the request."""
    commands("main")
    of_partitions(
        tmp_path, PARTITION.format("main*", "up", "1/1/0/2"), sbatch=f"echo '{DRAINED}' >&2; exit 1"
    )
    with refused("slurm-refused/all-partitions", SlurmError, "--account"):
        probe(LocalTransport(), Choices())


def test_proof_uses_two_nodes_if_one_is_drained(commands: Commands, tmp_path: Path) -> None:
    """A proof on a single node would show nothing."""
    commands("main")
    refusal = f"case $* in *--nodes=2*) echo '{DRAINED}' >&2; exit 1;; esac"
    of_partitions(tmp_path, PARTITION.format("main*", "up", "0/1/1/2"), sbatch=refusal)
    assert probe(LocalTransport(), Choices()).proof_nodes == 2
    of_partitions(tmp_path, PARTITION.format("main*", "up", "0/2/0/2"), sbatch=refusal)
    assert probe(LocalTransport(), Choices()).proof_nodes == 1


def test_partition_that_is_down_is_listed_last(commands: Commands, tmp_path: Path) -> None:
    commands("main")
    of_partitions(
        tmp_path,
        PARTITION.format("broken*", "down", "0/2/0/2"),
        PARTITION.format("main", "up", "0/2/0/2"),
    )
    answer = probe(LocalTransport(), Choices())
    assert [partition.name for partition in answer.usable] == ["main", "broken"]
    facts = {fact.fact: fact.value for fact in site_facts(answer)}
    assert "the partition is down" in facts["partition broken"]
    assert "down" not in facts["partition main"]
    assert probe(LocalTransport(), Choices(partition="broken")).partition == "broken"


def test_messages_that_a_site_always_prints_are_no_reason(
    commands: Commands, tmp_path: Path
) -> None:
    commands("main")
    wrapper = (
        "echo 'BUDGET: 1000 h left'; case $* in *closed*) echo 'Invalid account' >&2; exit 1;; esac"
    )
    rows = [PARTITION.format(name, "up", "0/2/0/2") for name in ("main*", "closed")]
    of_partitions(tmp_path, *rows, sbatch=wrapper)
    (attempt,) = probe(LocalTransport(), Choices()).refused
    assert (attempt.partition, attempt.answer) == ("closed", "Invalid account")
    of_partitions(tmp_path, *rows[1:], sbatch=wrapper)
    with refused("slurm-refused/all-partitions", SlurmError) as caught:
        probe(LocalTransport(), Choices(partition="closed"))
    assert "Invalid account" in caught.value.why


def test_partitions_are_read_by_scontrol_if_sinfo_is_refused(
    commands: Commands, tmp_path: Path
) -> None:
    """PrivateData=nodes refuses sinfo."""
    commands("std")
    folder = tmp_path / "slurm+bin"
    (folder / "sinfo").write_text("#!/bin/sh\necho 'Access/permission denied' >&2\nexit 1\n")
    row = (
        "PartitionName={} AllowGroups=ALL Default={} QoS=N/A MaxTime={} DefaultTime=NONE State=UP "
    )
    rows = [row.format("std", "NO", "UNLIMITED"), row.format("short", "YES", "00:30:00")]
    shown = "\n".join(f"echo '{one}TotalNodes=2 Nodes=c[1-2]'" for one in rows)
    (folder / "scontrol").write_text(f"#!/bin/sh\ncase $* in *oneliner*)\n{shown}\nesac\n")
    answer = probe(LocalTransport(), Choices())
    found = [(part.name, part.node_count, part.max_time_s) for part in answer.usable]
    assert found == [("short", 2, 1800), ("std", 2, None)]
    assert answer.usable[0].in_service is None


def test_variables_of_a_named_module_reach_slurms_commands(
    commands: Commands, tmp_path: Path, profile: Profile
) -> None:
    """The module has the path of slurm.conf, without which sinfo finds no cluster."""
    commands("short")
    sinfo = tmp_path / "slurm+bin/sinfo"
    words = "sinfo: error: Could not establish a configuration source"
    lacks = (
        f'#!/bin/sh\n[ "$SLURM_CONF" = /apps/slurm.conf ] || {{ echo "{words}" >&2; exit 1; }}\n'
    )
    sinfo.write_text(lacks + sinfo.read_text())
    profile(
        "trap 'echo SLURM_A=bye' EXIT\necho hello\n"
        "module() { case $* in *avail*) echo slurm/24 >&2;;\n"
        "*) export SLURM_CONF=/apps/slurm.conf LOADEDMODULES=$2 NL=$'a\\nb';; esac; }\n"
    )
    site = probe(LocalTransport(), Choices(modules=("slurm/24",))).site
    assert site.variables == {"SLURM_CONF": "/apps/slurm.conf"}
    with refused("slurm-refused/partitions", SlurmError, "--module slurm/24"):
        probe(LocalTransport(), Choices())


def test_variables_of_an_allocation_and_tokens_are_not_kept(
    commands: Commands, profile: Profile
) -> None:
    """A login shell may be in an allocation. They would be recorded, and set for later commands."""
    commands("short")
    profile(
        "export SLURM_CONF=/etc/slurm.conf SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_JWT=secret\n"
        "module() { case $* in *load*) export SLURM_JWT=new SLURM_JOB_NAME=x SLURM_PMIX=1;; esac; }\n"
    )
    kept = {"SLURM_CONF": "/etc/slurm.conf"}
    assert probe(LocalTransport(), Choices()).site.variables == kept
    loaded = probe(LocalTransport(), Choices(modules=("slurm/24",))).site.variables
    assert loaded == {**kept, "SLURM_PMIX": "1"}


def test_job_of_a_routed_site_names_no_partition(commands: Commands) -> None:
    """Also where a job that names one passes the test."""
    calls = commands("short", "gpuq")
    answer = probe(LocalTransport(), Choices(routed=True))
    assert (answer.is_routed, len(answer.usable)) == (True, 2)
    assert "--partition=" not in calls.read_text().splitlines()[0]
    commands("short", accepted="*--partition=*")
    with refused("slurm-refused/all-partitions", SlurmError, "--partition ''"):
        probe(LocalTransport(), Choices(routed=True))


@pytest.mark.parametrize(
    ("accepted", "choices", "minutes", "is_routed"),
    [
        ("*--time=5*--partition=*", Choices(), "5", False),
        # The shortest time limit of the site is longer, or the longest is shorter.
        ("*--time=60*", Choices(), "60", False),
        ("*--time=1" + " *", Choices(), "1", False),
        ("*--time=7*", Choices(time="7m"), "7", False),
        ("*--constraint=cpu*", Choices(slurm=("--constraint=cpu",)), "5", False),
        # The site chooses the partition itself, and refuses jobs that name one.
        ("[!p]*=1 --ntasks-per-node=1 --time=5 --wrap*", Choices(), "5", True),
    ],
)
def test_test_job_fits_the_rules_of_the_site(
    commands: Commands, accepted: str, choices: Choices, minutes: str, *, is_routed: bool
) -> None:
    commands("short", accepted=accepted.replace(" ", '" "'))
    answer = probe(LocalTransport(), choices)
    assert (answer.minutes, answer.is_routed) == (minutes, is_routed)
    assert [part.name for part in answer.usable] == ["short"]


def test_refused_test_job_is_shown_as_it_was_run(commands: Commands) -> None:
    commands("short", accepted="nothing")
    with refused("slurm-refused/all-partitions", SlurmError, "--time") as caught:
        probe(LocalTransport(), Choices(slurm=("--constraint=cpu",)))
    assert "--nodes=1 --ntasks-per-node=1" in caught.value.why
    assert "--constraint=cpu --wrap=true" in caught.value.why


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("proj|||normal|normal", "normal|4", "N/A"), 4),
        (("proj||20|normal|normal", "normal|4", "N/A"), 4),
        (("proj||20|normal|normal", "normal|", "N/A"), 20),
        (("proj||20||normal", "normal|4", "N/A"), 4),
        (("proj||20||long,normal", "normal|4", "N/A"), 20),
        (("proj||20|normal|normal", "normal|4\npart|2", "part"), 2),
        (("proj||20|normal|normal", "normal|4\npart|", "part"), 4),
        (("proj|||normal|normal", "other|4", "N/A"), None),
    ],
)
def test_max_submit_is_read_from_the_qos(
    commands: Commands, tmp_path: Path, words: tuple[str, str, str], most: int | None
) -> None:
    """words: the association, the QOS with their limits, and the partition's QOS."""
    commands("short")
    association, qos, partition_qos = words
    answers = f"case $* in *assoc*) echo '{association}';; *qos*) echo '{qos}';; esac"
    (tmp_path / "slurm+bin/sacctmgr").write_text(f"#!/bin/sh\n{answers}\n")
    shown = (
        "case $* in *partition*) printf '   AllocNodes=ALL Default=YES "
        f"QoS={partition_qos}\\n';; esac"
    )
    (tmp_path / "slurm+bin/scontrol").write_text(f"#!/bin/sh\n{shown}\n")
    assert probe(LocalTransport(), Choices(account="proj")).site.max_submit == most
