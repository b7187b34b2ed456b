"""Foreign Slurm sites are as tests/support/foreign claims, and each change to one is undone."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreign.site import HOSTS, PASSWORD, Site, site
from tests.support.foreign.user import user_of
from tests.support.lab import ROUTE_OUT
from tests.support.terminal import on_terminal

ACCOUNT = {"campus": "", "national": "--account=proj1"}
BATCH = "sbatch --account=proj1 --hold --output=/dev/null --wrap true"
RUNTIME_FOLDER = "/run/user/3001"
# Each rank prints the size of its MPI world.
WORLD = """\
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
size, world = ctypes.c_int(), ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")
mpi.MPI_Init(None, None)
mpi.MPI_Comm_size(ctypes.byref(world), ctypes.byref(size))
print("world", size.value)
mpi.MPI_Finalize()
"""


@pytest.fixture(scope="module")
def campus() -> Iterator[Site]:
    with site("campus") as one:
        yield one


@pytest.fixture(scope="module")
def national() -> Iterator[Site]:
    with site("national") as one:
        yield one


@pytest.fixture(scope="module", params=["campus", "national"])
def each(request: pytest.FixtureRequest) -> Site:
    return request.getfixturevalue(request.param)


def in_job(one: Site, script: str) -> str:
    """What a script prints that has an allocation of two tasks on two nodes."""
    words = f"salloc --quiet --nodes=2 --ntasks=2 {ACCOUNT[one.name]} bash -c {shlex.quote(script)}"
    return one.ssh("stud", words).stdout.replace("hello\n", "")


def worlds(
    one: Site, launcher: str, *, module: str = "module load openmpi"
) -> tuple[str, list[str]]:
    """The exit status of a launcher of two ranks, and the sizes of the worlds that they saw."""
    rank = f"python3 -c {shlex.quote(WORLD)} 2>/dev/null"
    said = in_job(
        one, f". /etc/profile; {module}; {launcher} sh -c {shlex.quote(rank)}; echo status $?"
    )
    return re.findall(r"status (\d+)", said)[0], re.findall(r"world (\d+)", said)


@pytest.mark.parametrize(
    ("person", "variable", "noise"),
    [
        ("stud", "BASH_VERSION", "hello"),
        ("carla", "tcsh", "hello from cshrc"),
        ("finn", "FISH_VERSION", "hello from fish"),
    ],
)
def test_login_shells_are_noisy(each: Site, person: str, variable: str, noise: str) -> None:
    """Only the shell itself knows this variable. It prints its greeting before the command's
    output.
    """
    first, *rest = each.ssh(person, f"echo ${variable}; umask").stdout.splitlines()
    assert first == noise
    assert re.match(r"\d+\.\d", rest[0])
    assert int(rest[1], 8) == 0o77


def test_campus_has_no_accounting(campus: Site) -> None:
    sacct = campus.ssh("stud", "sacct", rc=1)
    assert "disabled" in sacct.stderr
    assert campus.ssh("stud", "sinfo --version").stdout.split()[-1].startswith("22.05")


def test_campus_wants_an_account_for_its_gpu(campus: Site) -> None:
    gpu = "sbatch --hold --partition=gpuq --gres=gpu:1 --output=/dev/null --wrap true"
    assert "gpuq" in campus.ssh("stud", gpu, rc=1).stderr
    campus.ssh("stud", f"{gpu} --account=any")
    campus.ssh("stud", "scancel --me")


def test_national_demands_an_account_and_hides_jobs(national: Site) -> None:
    refused = national.ssh("stud", BATCH.replace("--account=proj1 ", ""), rc=1)
    assert "AssocGrpSubmitJobsLimit" in refused.stderr
    national.ssh("stud", BATCH)
    assert "stud" in national.ssh("stud", "squeue --noheader --format=%u").stdout
    assert "stud" not in national.ssh("carla", "squeue --noheader --format=%u").stdout
    assert "maint" not in national.ssh("stud", "sinfo").stdout
    national.ssh("stud", "scancel --me")
    assert national.ssh("stud", "sinfo --version").stdout.split()[-1].startswith("24.11")


def test_srun_without_pmix_makes_worlds_of_one(each: Site) -> None:
    """With the newer Open MPI it even succeeds, so that its exit status proves nothing."""
    expected = ("1", []) if each.name == "campus" else ("0", ["1", "1"])
    assert worlds(each, "srun --mpi=none") == expected
    assert worlds(each, "srun --mpi=pmix") == ("0", ["2", "2"])
    assert worlds(each, "mpirun") == ("0", ["2", "2"])


def test_only_the_module_finds_mpi(each: Site) -> None:
    assert worlds(each, "srun --mpi=pmix", module="true") == ("1", [])


def test_compute_nodes_have_no_sshd_and_no_route_out(each: Site) -> None:
    look = (
        f"echo $XDG_RUNTIME_DIR; pgrep -x sshd; {ROUTE_OUT}; ls -d $XDG_RUNTIME_DIR 2>/dev/null; "
        "true"
    )
    command = f"srun sh -c {shlex.quote(look)}"
    assert in_job(each, command).split() == [RUNTIME_FOLDER] * 2


def test_homes_are_small_and_on_all_hosts(each: Site) -> None:
    each.ssh("stud", "echo seen >shared")
    assert {each.root(host, "cat /home/stud/shared") for host in HOSTS} == {"seen\n"}
    full = "head -c 600M /dev/zero >big"
    assert "space" in each.ssh("stud", full, rc=1).stderr
    each.ssh("stud", "rm big")
    with each.full_homes(5):
        each.ssh("stud", "head -c 6M /dev/zero >big", rc=1)
        each.ssh("stud", "head -c 4M /dev/zero >big")
    before = each.listing("carla")
    each.reset_homes()
    assert not [line for line in each.listing("stud") if "shared" in line or "big" in line]
    assert each.listing("carla") == before


def test_login_is_reached_by_several_names(each: Site, tmp_path: Path) -> None:
    user = user_of(each, "stud", tmp_path)

    ssh = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1")

    def host_behind(alias: str) -> str:
        return user.runs(*ssh, f"{each.name}{alias}", "hostname").split()[-1]

    assert [host_behind(alias) for alias in ("", "-jump", "-any")] == ["login1", "login1", "login1"]
    with each.behind_jump():
        assert host_behind("-jump") == "login1"
        assert host_behind("-any") == "login2", "ssh tries the name's next address"
        assert user.runs(*ssh, each.name, "true", rc=255) == ""
    user.rotate_logins()
    assert [host_behind(alias) for alias in ("", "-any")] == ["login1", "login2"]


def test_second_factor_is_asked_for_after_the_key(national: Site, tmp_path: Path) -> None:
    user = user_of(national, "stud", tmp_path)
    with national.second_factor("stud"):
        assert national.ssh("stud", "true", rc=255).stdout == ""
        with on_terminal(
            [user.enter, "ssh", "national", "hostname"], os.environ, tmp_path
        ) as window:
            window.read_until("assword:")
            window.type(f"{PASSWORD}\n")
            window.read_until("login1")
            assert window.end() == 0
    assert national.ssh("stud", "true").rc == 0


def test_site_has_python_39_alone(each: Site) -> None:
    look = "python3 -c 'import ssl, venv, sys; print(sys.version[:4])'; ls /usr/bin/python3.[0-9]*"
    command = f"srun sh -c {shlex.quote(look)} | sort"
    before = in_job(each, command)
    with each.only_python39():
        found = in_job(each, command)
        assert found.split() == ["/usr/bin/python3.9", "/usr/bin/python3.9", "3.9.", "3.9."]
        assert each.ssh("stud", "python3 --version").stdout.split()[-1].startswith("3.9.")
    assert in_job(each, command) == before != found


def test_slurm_conf_takes_other_values(each: Site) -> None:
    ask = "scontrol show config | grep -E '^(JobRequeue|MaxArraySize) '"
    before = each.ssh("stud", ask).stdout
    with each.slurm("JobRequeue=0", "MaxArraySize=7"):
        assert re.findall(r"= (\d+)", each.ssh("stud", ask).stdout) == ["0", "7"]
        each.ssh("stud", f"sbatch {ACCOUNT[each.name]} --array=7 --wrap true", rc=1)
    assert each.ssh("stud", ask).stdout == before


def test_few_more_files_fit_into_homes(each: Site) -> None:
    each.ssh("stud", "mkdir files")
    fill = "for i in $(seq 50); do : >files/$i || break; done 2>/dev/null; ls files | wc -l"
    with each.few_files(20):
        assert int(each.ssh("stud", fill).stdout.split()[-1]) == 20
    assert int(each.ssh("stud", fill).stdout.split()[-1]) == 50
    each.ssh("stud", "rm -r files")


def test_sacct_fails_in_three_ways(national: Site) -> None:
    national.ssh("stud", "sacct")
    with national.sacct("refused"):
        national.ssh("stud", "sacct", rc=126)
    with national.sacct("truncated"):
        cut = national.ssh("stud", "sacct").stdout.removeprefix("hello\n")
        assert len(cut) == 40
        assert not cut.endswith("\n")
    with national.without_slurmdbd():
        national.ssh("stud", "timeout 30 sacct", rc=1)
    assert len(national.ssh("stud", "sacct").stdout) > 80
    with national.limits("stud", MaxSubmitJobs="0"):
        assert "MaxSubmit" in national.ssh("stud", BATCH, rc=1).stderr


def test_associations_limit_jobs_and_demand_a_qos(national: Site) -> None:
    with national.limits("stud", MaxSubmitJobs="4"):
        assert [national.ssh("stud", BATCH, rc=None).rc for _ in range(5)] == [0, 0, 0, 0, 1]
        national.ssh("stud", "scancel --me")
    with national.limits("stud", QOS="long,brief"):
        assert "qos" in national.ssh("stud", BATCH, rc=1).stderr
        national.ssh("stud", f"{BATCH} --qos=long")
        national.ssh("stud", "scancel --me")
    national.ssh("stud", BATCH)
    national.ssh("stud", "scancel --me")


def test_file_is_changed_and_restored(national: Site) -> None:
    with national.file(["login1"], "/home/stud/.bashrc", "export SBATCH_EXPORT=NONE\n"):
        assert national.ssh("stud", "echo $SBATCH_EXPORT").stdout == "NONE\n"
    with national.file(["login1"], "/home/stud/new", "text"):
        assert national.ssh("stud", "cat new").stdout == "hello\ntext"
    assert national.ssh("stud", "ls; echo $SBATCH_EXPORT").stdout == "hello\n\n"
