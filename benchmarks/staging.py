"""How long `submit --set stage=...` takes to copy files to the disks of two nodes, beside `cp -a`.

Raises a cluster of its own with two nodes, and makes many small files and a few large ones on the
shared folder. Prints for both, with every round: the first job, `cp -a` on both nodes in a job, and
a second job with the same files. Then two jobs at once, and a job whose nodes' disk (a tmpfs) is full,
with what their logs say.

Usage: python benchmarks/staging.py [--rounds N] [--files N] [--gb N]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence

from support.clusters import Cluster, raised
from support.rounds import machine, measure

NODES = 2
DISK = "/var/tmp/bench"  # noqa: S108 - on the nodes
SMALL_DISK = "/mnt/small"
MAKE = """\
mkdir -p ~/many ~/large && cd ~/many && python3 -c '
import os, random
for n in range({files}):
    os.makedirs(f"{{n // 500}}", exist_ok=True)
    open(f"{{n // 500}}/{{n}}", "wb").write(os.urandom(random.Random(n).randrange(1000, 16000)))
' && for n in 0 1 2 3; do head -c {quarter} /dev/urandom >~/large/$n; done
"""
# Prints the seconds of the slower node.
COPY = """#!/bin/bash
srun --ntasks-per-node=1 bash -c '
    mkdir -p {disk}
    begin=$EPOCHREALTIME; cp -a ~/{what} {disk}/; echo "took $begin $EPOCHREALTIME"'
"""
ENDINGS = ("copied in", "copied by an earlier job", "itself")


class Bench:
    """The cluster, and the jobs that stage its files."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = [f"{cluster.name}-train-{number}" for number in range(1, NODES + 1)]
        scripts = cluster.folder / "scripts"
        scripts.mkdir()
        self.reads = scripts / "reads.sh"
        self.reads.write_text("#!/bin/bash\nsrun --ntasks-per-node=1 find -L $1 -type f | wc -l\n")
        for what in ("many", "large"):
            (scripts / f"copy-{what}.sh").write_text(COPY.format(disk=DISK, what=what))
        self.scripts = scripts

    def clear(self) -> None:
        """Remove all copies, and write what is left to the disks."""
        for node in self.nodes:
            self.cluster.ssh(f"chmod -R u+w {DISK} || true; rm -rf {DISK}; sync", host=node)

    def submit(self, what: str, disk: str, *flags: str) -> str:
        words = ("--nodes", str(NODES), "--set", f"stage=~/{what}:{disk}/x", *flags)
        answer = self.cluster.run("submit", self.reads, *words, "--", f"{disk}/x")
        return str(answer["job_id"])

    def folder_of(self, job_id: str) -> str:
        (job,) = self.cluster.run("jobs", job_id)["jobs"]
        return str(job["work_dir"])

    def staged_s(self, job_id: str) -> float:
        """The seconds until all nodes had staged their files, by the job's events."""
        lines = self.cluster.ssh(f"cat {self.folder_of(job_id)}/job.events").splitlines()
        (staged,) = (event for event in map(json.loads, lines) if event["event"] == "staged")
        return float(staged["time"] - staged["since"])

    def log(self, job_id: str) -> str:
        return self.cluster.ssh(f"cat {self.folder_of(job_id)}/stdout.log")

    def endings(self, jobs: Sequence[str]) -> str:
        """How often the jobs' logs have each ending of a stage."""
        text = "".join(map(self.log, jobs))
        counts = Counter({ending: text.count(ending) for ending in ENDINGS})
        return ", ".join(f"{count} x {ending!r}" for ending, count in counts.items() if count)

    def first(self, what: str) -> float:
        self.clear()
        return self.staged_s(self.submit(what, DISK, "--wait"))

    def again(self, what: str) -> float:
        job_id = self.submit(what, DISK, "--wait")
        assert self.endings([job_id]) == f"{NODES} x 'copied by an earlier job'"
        return self.staged_s(job_id)

    def by_hand(self, what: str) -> float:
        self.clear()
        words = (self.scripts / f"copy-{what}.sh", "--nodes", str(NODES), "--wait")
        job_id = self.cluster.run("submit", *words)["job_id"]
        lines = [line.split() for line in self.log(job_id).splitlines() if line[:4] == "took"]
        assert len(lines) == NODES
        return max(float(end) - float(begin) for _, begin, end in lines)

    def at_once(self, what: str) -> None:
        self.clear()
        jobs = [self.submit(what, DISK) for _ in range(2)]
        self.cluster.run("jobs", *jobs)
        for job_id in jobs:
            self.cluster.run("logs", job_id, "--follow")
        times = ", ".join(f"{self.staged_s(job_id):.2f} s" for job_id in jobs)
        print(f"\ntwo jobs at once, {what}: {times}; logs: {self.endings(jobs)}")

    def on_full_disk(self, what: str) -> None:
        for node in self.nodes:
            mount = (
                f"mkdir -p {SMALL_DISK} && mount -t tmpfs -o size=64m,mode=1777 none {SMALL_DISK}"
            )
            self.cluster.ssh(f"sudo sh -c '{mount}'", user="clusterctl", host=node)
        job_id = self.submit(what, SMALL_DISK, "--wait")
        print(f"\ndisk of 64 MiB, {what}: {self.staged_s(job_id):.2f} s; {self.endings([job_id])}")
        print("\n".join(f"  {line}" for line in self.log(job_id).splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--gb", type=float, default=2.0)
    given = parser.parse_args()
    # Two jobs on a node at the same time.
    with raised(NODES, partition=", cpus: 2") as cluster:
        cluster.ssh(MAKE.format(files=given.files, quarter=int(given.gb * 1e9) // 4))
        bench = Bench(cluster)
        titles = {"many": f"{given.files:,} files", "large": f"{given.gb:g} GB in 4 files"}
        for what, title in titles.items():
            sides = {
                "first_job": lambda what=what: bench.first(what),
                "second_job": lambda what=what: bench.again(what),
                "cp": lambda what=what: bench.by_hand(what),
            }
            measure(f"{title} to {NODES} nodes", given.rounds, **sides).show()
        bench.at_once("large")
        bench.on_full_disk("large")
    print(machine())


if __name__ == "__main__":
    main()
