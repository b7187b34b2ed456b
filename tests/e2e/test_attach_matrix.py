"""Foreign clusters that differ in many ways: a test for each difference.

On every site, compute nodes have no sshd and no route to the internet. A test attaches the cluster,
runs a job, collects it, and detaches. The home folder is then as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign.site import NODES, PASSWORD, Kind, Site, site
from tests.support.foreign.user import User, user_of
from tests.support.messages import codes, condition
from tests.support.processes import eventually
from tests.support.standalone import real_python, standalone_list
from tests.support.terminal import terminal

pytestmark = pytest.mark.sweep

KINDS: tuple[Kind, ...] = ("campus", "national")
Change = Callable[[Site], AbstractContextManager[None]]
# The job waits for a file that root makes.
JOB = """\
#!/bin/bash
until [ -e /home/go ]; do sleep 0.1; done
srun --ntasks-per-node=1 sh -c 'echo "host $(hostname)"'
"""


# The account and the partition refuse jobs.
SBATCH = "SBATCH_ACCOUNT=nobody SBATCH_PARTITION=maint SBATCH_TIMELIMIT=1 SBATCH_EXPORT=NONE"


def unchanged(_: Site) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Cell:
    """A way in which a site differs.

    during: what changes while the job runs. way: the end of the login's name in ~/.ssh/config.
    words: more options of `attach`. submit: more options of `submit`.
    refused: the code with which `attach` refuses the site. Empty: it attaches.
    refused_job: the code with which `submit` refuses a job, and the job's options.
    has_download: whether uv can download a standalone Python.
    """

    name: str
    kind: Kind = "national"
    person: str = "stud"
    change: Change = unchanged
    during: Change = unchanged
    way: str = ""
    words: tuple[str, ...] = ()
    submit: tuple[str, ...] = ()
    refused: str = ""
    refused_job: tuple[str, tuple[str, ...]] | None = None
    has_download: bool = False


def bashrc(text: str) -> Change:
    return lambda one: one.file(["login1"], "/home/stud/.bashrc", text)


# slurmctld reads it again after a change.
LUA = """\
function slurm_job_submit(job, partitions, uid)
    if REFUSED then slurm.log_user("WORDS"); return 2045 end
    return slurm.SUCCESS
end
function slurm_job_modify() return slurm.SUCCESS end
return slurm.SUCCESS
"""


def refusing(condition: str, words: str) -> Change:
    """Let campus refuse the jobs of which the condition holds, in Lua."""
    text = LUA.replace("REFUSED", condition).replace("WORDS", words)
    return lambda one: one.file(["login1"], "/etc/slurm/job_submit.lua", text)


def without_homes(one: Site) -> AbstractContextManager[None]:
    """Let the compute nodes have an empty home of their own."""
    own = "mount -t tmpfs -o uid=3001,gid=3000,mode=700 none /home/stud"
    return one.changed(NODES, own, "umount --lazy /home/stud")


def without_module(one: Site) -> AbstractContextManager[None]:
    """Let the module of MPI be on the login nodes only."""
    folder = "/opt/site/modulefiles/openmpi"
    return one.changed(NODES, f"mv {folder} {folder}.away", f"mv {folder}.away {folder}")


SETTINGS = """\
cd /tmp
set -u
trap 'echo bye' EXIT
export SINFO_FORMAT=%all SQUEUE_FORMAT=%i SLURM_TIME_FORMAT=relative SACCT_FORMAT=User
"""
CELLS = (
    Cell("slurm-22.05-without-accounting", "campus"),
    Cell("slurm-24.11-with-associations"),
    Cell("tcsh-and-slurm-22.05", "campus", "carla"),
    Cell("tcsh", person="carla"),
    Cell("fish-and-slurm-22.05", "campus", "finn"),
    Cell("fish", person="finn"),
    Cell("proxy-jump", way="-jump", change=Site.behind_jump),
    Cell("two-logins-under-a-name", way="-any"),
    Cell("second-factor", change=lambda one: one.second_factor("stud")),
    Cell("few-bytes-left", change=lambda one: one.full_homes(5), refused="file-unwritable/here"),
    Cell(
        "few-files-left",
        change=lambda one: one.few_files(50),
        refused="packages-unmet/installation",
    ),
    Cell("sacct-refused", change=lambda one: one.sacct("refused")),
    Cell("sacct-truncated", change=lambda one: one.sacct("truncated")),
    Cell("sacct-gone-during-a-job", during=Site.without_slurmdbd),
    Cell(
        "four-jobs-at-once",
        change=lambda one: one.limits("stud", MaxSubmitJobs="4"),
        refused_job=("job-unfit/tasks", ("--array", "0-4")),
    ),
    Cell(
        "account-and-qos-compulsory",
        change=lambda one: one.limits("stud", QOS="long,brief"),
        words=("--account", "proj1", "--qos", "long"),
    ),
    Cell("job-requeue-0", change=lambda one: one.slurm("JobRequeue=0"), submit=("--requeue",)),
    Cell("sbatch-export-none", change=bashrc("export SBATCH_EXPORT=NONE\necho hello\n")),
    Cell("variables-of-sbatch", change=bashrc(f"export {SBATCH}\necho hello\n")),
    Cell("bashrc-with-settings", change=bashrc(SETTINGS)),
    Cell(
        "ten-minutes-or-more",
        "campus",
        change=refusing("job.time_limit < 10", "10 minutes or more"),
        submit=("--time", "10m"),
    ),
    Cell(
        "partitions-refused", "campus", change=refusing("job.partition ~= nil", "name no partition")
    ),
    Cell("homes-not-on-nodes", change=without_homes, refused="not-ready/proof"),
    Cell("module-not-on-nodes", change=without_module, refused="not-ready/proof"),
    Cell("python-3.6", change=lambda one: one.only_python("3.6"), has_download=True),
    Cell("python-3.9", change=lambda one: one.only_python("3.9"), has_download=True),
    Cell(
        "python-3.9-without-a-download",
        change=lambda one: one.only_python("3.9"),
        refused="transfer-failed/python-download",
    ),
)


@pytest.fixture(scope="module")
def sites() -> Iterator[Mapping[str, Site]]:
    """Both sites, raised at the same time."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield dict(
            zip(KINDS, pool.map(lambda kind: stack.enter_context(site(kind)), KINDS), strict=True)
        )


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_attached_cluster_runs_a_job(
    cell: Cell, sites: Mapping[str, Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = "file:///nowhere/downloads.json"
    if cell.has_download:
        downloads = standalone_list(tmp_path, real_python())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", downloads)
    one = sites[cell.kind]
    user = user_of(sites[cell.kind], cell.person, tmp_path)
    one.reset_homes()
    before = one.listing(cell.person)
    with cell.change(one):
        answer = attach(user, cell)
        assert [condition(failure) for failure in answer["failures"]] == (
            [cell.refused] if cell.refused else []
        )
        if not cell.refused:
            use_and_detach(one, user, cell)
    if cell.refused:
        assert attach(user, cell)["proven"], "the site is as usual again"
        use_and_detach(one, user, cell)
    assert one.listing(cell.person) == before


def attach(user: User, cell: Cell) -> Any:
    """Return the answer of `attach`. On a terminal, its user types the second factor, once."""
    login = f"{cell.kind}{cell.way}"
    words = ("-o", "json", "attach", login, "--name", cell.kind, "--folder", "~/mine", *cell.words)
    if cell.name != "second-factor":
        return user.clusterctl(*words, rc=None).json
    with terminal(user.clusterctl, *words) as window:
        window.read_until("assword:")
        window.type(f"{PASSWORD}\n")
        window.end()
        assert window.shown.count("assword:") == 1
        return json.loads(next(line for line in window.shown.splitlines() if line.startswith("{")))


def use_and_detach(one: Site, user: User, cell: Cell) -> None:
    """Submit a job, see it run and end, collect its run, and detach the cluster."""
    user.rotate_logins()

    def ask(*words: str) -> Any:
        return user.clusterctl("-o", "json", "--cluster", cell.kind, *words).json

    (user.folder / "job.sh").write_text(JOB)
    if cell.refused_job:
        code, words = cell.refused_job
        submitted = user.clusterctl(
            "-o", "json", "--cluster", cell.kind, "submit", "job.sh", *words, rc=None
        )
        assert codes(submitted) == [code]
    job_id = ask("submit", "job.sh", "--nodes", "2", *cell.submit)["job_id"]
    eventually(lambda: ask("jobs", job_id)["jobs"][0]["state"] == "RUNNING", pause_s=0.5)
    with cell.during(one), one.file(["login1"], "/home/go", ""):
        user.clusterctl("--cluster", cell.kind, "logs", job_id, "--follow")
        assert ask("jobs", job_id)["jobs"][0]["state"] == "COMPLETED"
        (run,) = ask("collect", job_id)["runs"]
    assert run["state"] == "COMPLETED"
    assert sorted((Path(run["dir"]) / "stdout.log").read_text().split()) == [
        "c1",
        "c2",
        "host",
        "host",
    ]
    if cell.during is not unchanged:
        # The run lacks its accounting, which is there again.
        assert [run["job_id"] for run in ask("collect")["runs"]] == [job_id]
    user.clusterctl("--cluster", cell.kind, "detach")


SWEPT = """\
import os, sys
print(os.getenv("SLURM_ARRAY_TASK_ID"), os.getenv("SLURM_ARRAY_TASK_COUNT"), *sys.argv[1:])
"""


@pytest.mark.parametrize("kind", KINDS)
def test_sweep_above_the_array_limit_runs_packed(
    kind: Kind, sites: Mapping[str, Site], tmp_path: Path
) -> None:
    """Slurm's MaxArraySize is 11."""
    one = sites[kind]
    user = user_of(sites[kind], "stud", tmp_path)
    one.reset_homes()

    def ask(*words: str) -> Any:
        return user.clusterctl("-o", "json", "--cluster", kind, *words).json

    (user.folder / "swept.py").write_text(SWEPT)
    sweep = f"lr={','.join(map(str, range(100, 125)))}"
    with nullcontext() if kind == "national" else one.slurm("MaxArraySize=11"):
        user.clusterctl("attach", kind, "--name", kind)
        alone = ("-o", "json", "--cluster", kind, "submit", "swept.py", "--sweep", sweep)
        assert codes(user.clusterctl(*alone, rc=2)) == ["job-unfit/array-index"]
        job_id = ask("submit", "swept.py", "--sweep", sweep, "--pack", "--wait")["job_id"]
        (run,) = ask("collect", job_id)["runs"]
        assert len(ask("runs", "show", run["dir"])["run"]["tasks"]) == 25
        assert user.clusterctl("logs", f"{job_id}_14").stdout.endswith("14 25 --lr 114\n")
        user.clusterctl("--cluster", kind, "detach", "--cancel", "--discard")
