"""A strict site, whose Slurm is on no PATH."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.foreign.site import HOSTS, LOGINS, Site
from tests.support.foreign.user import user_of
from tests.support.messages import codes

NAME = "strict"
BIN = "/opt/hpc/slurm/bin"
COMMANDS = "sbatch squeue scancel sinfo scontrol sacct sacctmgr srun salloc"
NAMED = ("--name", NAME, "-o", "json")


@contextmanager
def slurm_elsewhere(site: Site) -> Iterator[None]:
    """Let the login nodes have Slurm's commands in a folder that is on no PATH."""
    move = f"for name in {COMMANDS}; do mv {{}}/$name {{}}/; done"
    script = f"mkdir -p {BIN}; " + move.format("/usr/bin", BIN)
    with site.changed(LOGINS, script, move.format(BIN, "/usr/bin") + "; rm -r /opt/hpc"):
        yield


@contextmanager
def attached(site: Site, folder: Path, *options: str) -> Iterator[dict[str, object]]:
    """Attach stud, whose ~/.bashrc prints something. Detach in the end, and leave nothing."""
    before = site.listing("stud")
    user = user_of(site, "stud", folder)
    yield user.clusterctl("attach", "national", *NAMED, *options).json
    user.clusterctl("detach", "--cluster", NAME, "--cancel", "--discard")
    assert site.listing("stud") == before


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
        assert codes(refusal) == ["tool-missing/slurm"]
        assert "--module slurm/24.11" in refusal.json["failures"][0]["fix"]
        (own := tmp_path / "with").mkdir()
        with attached(national, own, "--module", "slurm/24.11") as answer:
            # The module of MPI is found too.
            assert answer["proven"]
