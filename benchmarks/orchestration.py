"""What clusterctl's verbs take, beside what the same costs without it.

Raises clusters of its own, runs both sides of each comparison in turn, checks what they did, and
prints every
round, medians and ratios. Usage: python benchmarks/orchestration.py [--rounds N] [--nodes N]
    [WHAT...]
WHAT: start, up, again, submit, attached, files, cold, fail, many, large. Default: all. `files`
needs rsync, `attached` needs root, or sudo without a password.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from support.clusters import BIN, Cluster, raised
from support.rounds import Measured, machine, measure

from clusterctl.providers.local.provider import image_keys
from clusterctl.spec.providers.local import LocalSettings
from tests.support.foreign.site import site
from tests.support.foreign.user import user_of

MIB = 1 << 20
QUEUED = 1000
LARGE = (
    "import os\n"
    "with open('large', 'wb') as f:\n"
    "    for _ in range(1000): f.write(os.urandom(10**6))\n"
)
SMALL = (
    "import os\nfor d in range({folders}):\n    os.mkdir(f'd{{d}}')\n    for i in range(100):\n"
    "        open(f'd{{d}}/f{{i}}', 'wb').write(os.urandom(1000 + 150 * i))\n"
)
MAKE = {
    "1 GB in one file": LARGE,
    "10,000 files of 1 to 16 KB": SMALL.format(folders=100),
    "100,000 files of 1 to 16 KB": SMALL.format(folders=1000),
}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def start(rounds: int, nodes: int = 2) -> None:
    """The verbs that answer at once, with little and with much in the queue."""
    measure(
        "clusterctl --help",
        rounds * 3,
        aim="at most 0.1 s",
        help=lambda: (
            subprocess.run([BIN / "clusterctl", "--help"], check=True, capture_output=True) and None
        ),
    ).show()
    with raised(nodes) as cluster:
        script = cluster.folder / "one" / "job.sh"
        script.parent.mkdir()
        script.write_text("#!/bin/bash\ntrue\n")
        job = cluster.run("submit", script, "--wait")["job_id"]
        asks = {
            "status": "sinfo -N; squeue",
            "jobs": "squeue; sacct",
            "logs": f"cat clusterctl/jobs/*/std*.log; squeue -j {job} || sacct -j {job}",
        }
        for load in ("an empty queue", "1,000 queued jobs"):
            if load != "an empty queue":
                cluster.ssh(
                    "seq 1000 | xargs -P4 -I{} sbatch --quiet --hold --time=1 --wrap=true "
                    ">/dev/null"
                )
                assert int(cluster.ssh("squeue --noheader | wc -l")) >= QUEUED
            for verb, ask in asks.items():
                words = (verb, job) if verb == "logs" else (verb,)
                measure(
                    f"clusterctl {verb}, and a bare ssh that asks Slurm the same; {load}",
                    rounds * 3,
                    times=1.3,
                    clusterctl=lambda words=words: cluster.run(*words) and None,
                    ssh=lambda ask=ask: cluster.ssh(ask) and None,
                ).show()
            measure(
                f"clusterctl submit, and an ssh that takes the file and calls sbatch; {load}",
                rounds,
                times=1.3,
                clusterctl=lambda: cluster.run("submit", script) and None,
                ssh=lambda: (
                    cluster.ssh(
                        "mkdir -p byhand && cd byhand && cat >job.sh && sbatch job.sh",
                        stdin=script.read_bytes(),
                    )
                    and None
                ),
            ).show()


@dataclass
class Raised:
    """What the rounds of a side took besides `up`: its phase `converge`, `down`, and memory of a
    node.
    """

    converge: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)


def up(rounds: int) -> None:
    """Fresh nodes each time, the image there; the last side has each node configured by plain
    Ansible.
    """
    _fresh(
        2, rounds, "at most 4 s from the cache, 7 s without; 4.5 times as fast as plain", plain=True
    )


def many(rounds: int) -> None:
    """Many nodes on this one machine; with more than 16, each configured for itself takes
    minutes.
    """
    _fresh(16, min(rounds, 2), "at most 9 s from the cache, 15 s without", plain=True)
    for nodes, aim in ((64, "40 s"), (128, "75 s; its down at most 20 s")):
        _fresh(nodes, min(rounds, 2), f"at most {aim}", plain=False)


def _fresh(nodes: int, rounds: int, aim: str, *, plain: bool) -> None:
    """Fresh nodes: what they share cached, made first, or each of them configured for itself."""
    name = f"b{secrets.token_hex(3)}"  # the class of a controller is of a name
    taken = {"class cached": Raised(), "plain linear": Raised(), "class made": Raised()}
    sides = {
        "class_cached": partial(_raise, nodes, taken["class cached"], name),
        "plain_linear": partial(_raise, nodes, taken["plain linear"], name, plain=True),
        "class_made": partial(_raise, nodes, taken["class made"]),
    }
    if not plain:
        del sides["plain_linear"], taken["plain linear"]
    _raise(2, Raised(), name)
    measured = measure(
        f"up, 1 + {nodes} nodes, image there, proof job included", rounds, aim=aim, **sides
    )
    memory = max(one for side in taken.values() for one in side.memory_mib)
    measured.notes.append(f"memory of a node, of its processes: at most {memory:.1f} MiB")
    measured.show()
    Measured(
        "of that, the phase `converge`", {side: one.converge for side, one in taken.items()}
    ).show()
    Measured(f"down of 1 + {nodes} nodes", {side: one.down for side, one in taken.items()}).show()


def _raise(nodes: int, taken: Raised, name: str = "", *, plain: bool = False) -> float:
    """The seconds of `up` of a cluster of this name; without one, no class has its name or its
    user's uid.
    """
    more = "" if name else f"users: [{{name: hpc, uid: {20_000 + secrets.randbelow(40_000)}}}]\n"
    with tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder:
        cluster = Cluster.new(folder, nodes, name=name, more=more)
        try:
            begun = time.perf_counter()
            phases = cluster.up(plain=plain)
            seconds = time.perf_counter() - begun
            taken.memory_mib.append(cluster.memory_mib())
        finally:
            ended = timed(cluster.down)
    taken.converge.append(phases["converge"])
    taken.down.append(ended)
    return seconds


def again(rounds: int) -> None:
    """Nothing to change: every check, and the proof job."""
    for nodes, aim in ((2, "1.2 s"), (16, "2 s")):
        with raised(nodes) as cluster:
            measure(
                f"up again of 1 + {nodes} nodes, nothing to change, checks and proof job included",
                rounds,
                aim=f"at most {aim}",
                up=lambda cluster=cluster: cluster.up() and None,
            ).show()


def submit(rounds: int) -> None:
    """A folder of twenty files and its script: by `submit`, and by tar, ssh and sbatch."""
    with raised(2) as cluster:

        def by_hand(project: Path) -> None:
            packed = subprocess.run(
                ["tar", "-c", "-C", project, "."], check=True, capture_output=True
            ).stdout
            cluster.ssh("mkdir -p jobs/new && tar -x -C jobs/new", stdin=packed)
            assert cluster.ssh("cd jobs/new && sbatch --parsable job.sh").strip().isdigit()

        _submits(rounds, cluster.folder, 1.3, lambda script: cluster.run("submit", script), by_hand)


def attached(rounds: int) -> None:
    """The same by an ordinary user on a Slurm cluster that other people operate."""
    with site("national") as one, tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder:
        user = user_of(one, "stud", Path(folder))
        user.clusterctl("attach", "national")

        def by_hand(project: Path) -> None:
            user.runs(
                "sh", "-c", f"tar -c -C {project} . | ssh national 'mkdir -p new && tar -x -C new'"
            )
            said = user.runs(
                "ssh", "national", "cd new && sbatch --account=proj1 --parsable job.sh"
            )
            assert said.split()[-1].isdigit()

        def ours(script: Path) -> object:
            return user.clusterctl("submit", script, "-o", "json")

        _submits(rounds, user.folder, 1.5, ours, by_hand)


def _submits(
    rounds: int,
    folder: Path,
    times: float,
    submit: Callable[[Path], object],
    submit_by_hand: Callable[[Path], object],
) -> None:
    (project := folder / "project").mkdir()
    (project / "job.sh").write_text("#!/bin/bash\ntrue\n")

    def change() -> None:  # else there would be nothing to send the second time
        for number in range(20):
            (project / f"module{number}.py").write_text(f"# {time.time_ns()}\n" * 200)

    def ours() -> float:
        change()
        return timed(lambda: submit(project / "job.sh"))

    def by_hand() -> float:
        change()
        return timed(lambda: submit_by_hand(project))

    title = "submit of a folder of 21 files"
    measure(title, rounds * 2, times=times, submit=ours, by_hand=by_hand).show()


def files(rounds: int) -> None:
    """Files both ways, and a job's, beside rsync over the same ssh_config and so the same cipher.

    Each transfer goes to a new folder, and none is removed before the last of its row: ext4 passes
    over inodes that were freed in the last minutes, which can cost the next transfer more than its
    own work.
    """
    with raised(2) as cluster:
        for number, (what, make) in enumerate(MAKE.items()):
            script = cluster.folder / "make.py"
            script.write_text(make)
            job = cluster.run("submit", script, "--wait")["job_id"]
            remote = cluster.ssh(f"scontrol show job {job} | sed -n 's/^ *WorkDir=//p'").strip()
            with tempfile.TemporaryDirectory(dir=cluster.folder) as folder:
                _files(rounds, what, _Files(cluster, Path(folder), f"row{number}", job, remote))
            cluster.ssh(f"rm -rf row{number}")
            time.sleep(5)


@dataclass
class _Files:
    """Folders of one row: of the job, where a new one goes here, and there, below the home."""

    cluster: Cluster
    folder: Path
    below: str
    job: str
    remote: str
    made: int = 0

    def here(self) -> Path:
        self.made += 1
        (new := self.folder / str(self.made)).mkdir()
        return new

    def there(self) -> str:
        self.made += 1
        self.cluster.ssh(f"mkdir -p {self.below}/{self.made}")
        return f"{self.below}/{self.made}"

    def rsync(self, origin: Path | str, target: Path | str) -> float:
        shell = f"ssh -F {self.cluster.workspace}/ssh_config -l hpc"
        ends = [
            f"{end}/" if isinstance(end, Path) else f"{self.cluster.controller}:{end}/"
            for end in (origin, target)
        ]
        return timed(lambda: subprocess.run(["rsync", "-a", "-e", shell, *ends], check=True))


def _files(rounds: int, what: str, row: _Files) -> None:
    cluster = row.cluster
    theirs = hashes_there(cluster, row.remote)
    sent = row.here()
    row.rsync(row.remote, sent)

    def checked(seconds: float, found: dict[str, str]) -> float:
        assert theirs.items() <= found.items()
        return seconds

    def collect() -> float:
        out = row.folder / "out"
        seconds = timed(lambda: cluster.run("collect", row.job, "--out", out))
        out = out.rename(row.here() / "out")  # or the next collect would find the run at home
        (run,) = out.iterdir()
        return checked(seconds, hashes_here(run))

    def get() -> float:
        new = row.here()
        seconds = timed(lambda: cluster.run("get", row.remote, new))
        return checked(seconds, hashes_here(new / Path(row.remote).name))

    def put() -> float:
        new = row.there()
        seconds = timed(lambda: cluster.run("put", sent, new))
        return checked(seconds, hashes_there(cluster, f"{new}/{sent.name}"))

    def fetched() -> float:
        new = row.here()
        return checked(row.rsync(row.remote, new), hashes_here(new))

    def pushed() -> float:
        new = row.there()
        return checked(row.rsync(sent, new), hashes_there(cluster, new))

    for verb, ours, by_rsync in (
        ("collect", collect, fetched),
        ("get", get, fetched),
        ("put", put, pushed),
    ):
        measure(
            f"{verb} of {what}, hashes checked by sha256sum there and hashlib here",
            rounds,
            aim=f"rsync / {verb} at least 1",
            **{verb: ours, "rsync": by_rsync},
        ).show()


def hashes_there(cluster: Cluster, folder: str) -> dict[str, str]:
    """Of the files that the job itself made: sha256sum's word for each."""
    said = cluster.ssh(f"cd {folder} && find large d* -type f 2>/dev/null | xargs sha256sum")
    return {name: sha for sha, name in (line.split(maxsplit=1) for line in said.splitlines())}


def hashes_here(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
    return found


def cold(rounds: int) -> None:
    """No image, no wheels: everything is fetched from Debian's mirror and the package index."""
    mirror = "http://deb.debian.org/debian/"  # one slash more than the default: an image of its own

    def side() -> float:
        for kind, key in zip(
            ("base", "image"), image_keys(LocalSettings(mirror=mirror)), strict=True
        ):
            shutil.rmtree(Path(f"/var/cache/clusterctl/{kind}-{key}"), ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder:
            cluster = Cluster.new(
                folder, 2, provider=f", mirror: '{mirror}'", XDG_CACHE_HOME=f"{folder}/cache"
            )
            try:
                return timed(cluster.up)
            finally:
                cluster.down()

    measure("cold up, 1 + 2 nodes, no image", min(rounds, 2), aim="at most 120 s", up=side).show()


FAILS = """\
import ctypes, os, signal, time
{begin}
barrier()
if rank == 1:
    open("failed-at", "w").write(f"{{time.time()}}\\n")
    {line}
barrier()
"""
MPI = "from mpi4py import MPI\nrank, barrier = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.Barrier"
TORCH = """\
import torch.distributed as dist
dist.init_process_group("gloo")
rank, barrier = dist.get_rank(), dist.barrier
"""
FAILURES = {
    "error": "raise KeyError('a bug')",
    "exit": "os._exit(3)",
    "segmentation fault": "ctypes.string_at(0)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


def fail(rounds: int) -> None:
    """Rank 1 of 2 fails while the other waits for it: how long until the job has ended."""
    for scheduler, launchers in (
        ("slurm", ("srun", "mpirun", "torchrun")),
        ("none", ("mpirun", "torchrun")),
    ):
        with raised(2, f"scheduler: {scheduler}\n") as cluster:
            (cluster.folder / "torch.txt").write_text("torch\n")

            def side(launcher: str, line: str, cluster: Cluster = cluster) -> float:
                by_torch = launcher == "torchrun"
                text = FAILS.format(begin=TORCH if by_torch else MPI, line=line)
                (cluster.folder / "fails.py").write_text(text)
                more = ("--requirements", cluster.folder / "torch.txt") if by_torch else ()
                words = (
                    "submit",
                    cluster.folder / "fails.py",
                    "--nodes",
                    "2",
                    "--launcher",
                    launcher,
                    *more,
                )
                job = cluster.run(*words)["job_id"]
                while (found := cluster.run("jobs", job)["jobs"][0])["exit"] == "":  # it goes on
                    time.sleep(0.5)
                at = f"cat {found['work_dir']}/failed-at || true"  # of a folder on each node, without Slurm
                said = [cluster.ssh(at, host=f"{cluster.name}-train-{number}") for number in (1, 2)]
                return float(found["end_time"] - float("".join(dict.fromkeys(said))))

            for launcher in launchers:
                measure(
                    f"{launcher}, scheduler {scheduler}: from a rank's failure to the job's end",
                    rounds,
                    aim="at most 15 s",
                    **{
                        name: lambda line=line, by=launcher: side(by, line)
                        for name, line in FAILURES.items()
                    },
                ).show()


def large(rounds: int) -> None:
    """A cluster of 10,000 nodes on paper."""
    steps: dict[str, list[float]] = {}
    peaks = []

    def side() -> float:
        with tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder:
            argv = [BIN / "python", Path(__file__).parent / "support" / "large.py", folder, "10000"]
            said = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
        for step, seconds in said["taken"].items():
            steps.setdefault(step, []).append(seconds)
        peaks.append(said["peak_mib"])
        return sum(said["taken"].values())

    measured = measure(
        "10,000 nodes: spec, inventory, Slurm's files, plan", rounds, aim="at most 5 s", all=side
    )
    measured.notes.append(f"peak memory {max(peaks):.0f} MiB")
    measured.show()
    Measured("of that", steps).show()


ALL: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (start, up, again, submit, attached, files, cold, fail, many, large)
}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[[], *ALL], metavar="WHAT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2, help="of the cluster that `start` asks")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # not without taking clusters down
    print(machine())
    for name in given.what or ALL:
        ALL[name](given.rounds, **({"nodes": given.nodes} if name == "start" else {}))


if __name__ == "__main__":
    main()
