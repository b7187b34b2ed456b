"""A strict site: Slurm on no PATH, or in maintenance; drained nodes; a program of the site as
sbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.foreign.site import HOSTS, LOGINS, Site
from tests.support.foreign.user import User, user_of
from tests.support.messages import codes
from tests.support.processes import eventually

NAME = "strict"
BIN = "/opt/hpc/slurm/bin"
COMMANDS = "sbatch squeue scancel sinfo scontrol sacct sacctmgr srun salloc"
WORDS = "national is down for maintenance until 6 pm"
NAMED = ("--name", NAME, "-o", "json")


@contextmanager
def slurm_elsewhere(site: Site) -> Iterator[None]:
    """Let the login nodes have Slurm's commands in a folder that is on no PATH."""
    move = f"for name in {COMMANDS}; do mv {{}}/$name {{}}/; done"
    script = f"mkdir -p {BIN}; " + move.format("/usr/bin", BIN)
    with site.changed(LOGINS, script, move.format(BIN, "/usr/bin") + "; rm -r /opt/hpc"):
        yield


@contextmanager
def attached(site: Site, folder: Path, *options: str) -> Iterator[tuple[User, dict[str, object]]]:
    """Attach stud, whose ~/.bashrc prints something. Detach in the end, and leave nothing."""
    before = site.listing("stud")
    user = user_of(site, "stud", folder)
    yield user, user.clusterctl("attach", "national", *NAMED, *options).json
    user.clusterctl("detach", "--cluster", NAME, "--cancel", "--discard")
    assert site.listing("stud") == before


def queue_of(site: Site, person: str) -> list[str]:
    """The ids of a person's jobs in the queue that have not ended."""
    return site.root("login1", f"squeue --noheader --user={person} --format=%A").split()


def test_slurm_that_only_login_shells_find_is_used(national: Site, tmp_path: Path) -> None:
    profile = ("/etc/profile.d/zz-slurm.sh", f"echo welcome\nPATH={BIN}:$PATH\n")
    with (
        slurm_elsewhere(national),
        national.file(LOGINS, *profile),
        attached(national, tmp_path) as (user, answer),
    ):
        assert (answer["proven"], answer["partitions"]) == (True, ["main"])
        user.clusterctl(
            "submit", "train", "--nodes", "2", "--time", "5m", "--wait", "--", "--epochs", "1"
        )


def test_slurm_of_a_module_is_used(national: Site, tmp_path: Path) -> None:
    module = ("/opt/site/modulefiles/slurm/24.11.lua", f'prepend_path("PATH", "{BIN}")\n')
    folder = "mkdir -p /opt/site/modulefiles/slurm"
    with (
        slurm_elsewhere(national),
        national.changed(HOSTS, folder, "rm -r /opt/site/modulefiles/slurm"),
        national.file(HOSTS, *module),
    ):
        (other := tmp_path / "without").mkdir()
        refusal = user_of(national, "stud", other).clusterctl("attach", "national", *NAMED, rc=1)
        assert codes(refusal) == ["no-slurm-here"]
        assert "--module slurm/24.11" in refusal.json["failures"][0]["fix"]
        (own := tmp_path / "with").mkdir()
        with attached(national, own, "--module", "slurm/24.11") as (_, answer):
            # The module of MPI is found too.
            assert answer["proven"]


def test_drained_site_is_attached(national: Site, tmp_path: Path) -> None:
    state = "scontrol update nodename=c[1-2] state={}"
    drain = state.format("drain") + " reason=power"
    with (
        national.changed(("login1",), drain, state.format("resume")),
        attached(national, tmp_path) as (user, answer),
    ):
        assert (answer["failures"], answer["proven"]) == ([], False)
        facts = {fact["fact"]: fact["value"] for fact in answer["facts"]}  # type: ignore[attr-defined]
        assert "none in service" in facts["partition main"]
        assert queue_of(national, "stud") == []
        job = user.clusterctl("submit", "train", "--nodes", "2", "-o", "json").json["job_id"]
        assert queue_of(national, "stud") == [job]
    national.await_idle()


def test_slurmctld_that_is_down_is_named(national: Site, tmp_path: Path) -> None:
    before = national.listing("stud")
    user = user_of(national, "stud", tmp_path)
    with national.changed(("login1",), "systemctl stop slurmctld", "systemctl start slurmctld"):
        refusal = user.clusterctl("attach", "national", *NAMED, rc=1)
    (failure,) = refusal.json["failures"]
    assert (failure["code"], failure["retryable"]) == ("slurm-away", True)
    assert "Unable to contact slurm controller" in failure["cause"]
    assert national.listing("stud") == before
    national.await_idle()


def test_wrapper_that_prints_leaves_no_proof_in_a_full_queue(
    national: Site, tmp_path: Path
) -> None:
    wrapper = (
        "#!/bin/sh\n"
        'echo "BUDGET: 1000 h left"\n'
        '/usr/bin/sbatch.real "$@"\n'
        "rc=$?\n"
        "echo 7\n"
        "exit $rc\n"
    )
    keep = "cp -a /usr/bin/sbatch /usr/bin/sbatch.real"
    busy = national.ssh(
        "carla", "sbatch --parsable -A proj1 -N2 --exclusive -t 30 --wrap 'sleep 1500'"
    )
    job = busy.stdout.split()[-1]
    try:
        with (
            national.changed(LOGINS, keep, "mv /usr/bin/sbatch.real /usr/bin/sbatch"),
            national.file(LOGINS, "/usr/bin/sbatch", wrapper),
            attached(national, tmp_path) as (_, answer),
        ):
            assert (answer["failures"], answer["proven"]) == ([], False)
            assert queue_of(national, "stud") == []
            facts = [fact["value"] for fact in answer["facts"]]  # type: ignore[attr-defined]
            assert not [value for value in facts if "BUDGET" in value]
    finally:
        national.root("login1", f"scancel {job}")
    national.await_idle()


def test_login_that_the_site_refuses_is_tried_once(national: Site, tmp_path: Path) -> None:
    refusals = "journalctl --boot --output=cat | grep -c 'Access denied for user stud' || true"
    with (
        attached(national, tmp_path) as (user, _),
        national.file(LOGINS, "/etc/nologin", f"{WORDS}\n"),
    ):
        national.root("login1", "pkill -KILL -u stud -f sshd")
        eventually(lambda: not national.root("login1", "pgrep -u stud -f sshd", rc=None))
        before = int(national.root("login1", refusals))
        refusal = user.clusterctl("jobs", "-o", "json", "--cluster", NAME, rc=1)
        assert codes(refusal) == ["login-refused"]
        assert WORDS in refusal.json["failures"][0]["cause"]
        assert int(national.root("login1", refusals)) == before + 1
