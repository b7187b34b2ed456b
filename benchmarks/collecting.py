"""What `collect` takes of time and memory where there is much to bring home, beside rsync by hand.

Raises a cluster of its own, runs both sides in turn, checks what arrived, and prints every round,
medians, ratios, and peak memory here and on the node. Then it kills a collect in the middle, and
says what travels again.

Usage: python benchmarks/collecting.py [--rounds N] [--jobs N] [--log GB] [--files N] [--steps N]
    [WHAT...]
WHAT: jobs (many small runs), large (one run: a log, and many small files), metrics (the figures and
the report of a run of many steps, without a cluster). Default: all. The first two need rsync.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
from support.clusters import BIN, Cluster, raised
from support.rounds import machine, measure

from clusterctl.jobs.source import source_of
from clusterctl.jobs.submit import PreparedJob, Submitter
from clusterctl.runs.find import Row
from clusterctl.runs.page import REPORT_FILE, write_report
from clusterctl.runs.report import report_of
from clusterctl.runs.series import summarize
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import connect_session
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import job_inventory
from clusterctl.state.ledger import ADDED_FILES, METRICS_FILE, SENT_FILES
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import BOOT

SMALL = "echo hello\nmkdir telemetry out\nfor i in $(seq 10); do echo $i >out/$i; done\n"
# The record of a run without telemetry.
RECORD = {
    "token": "0",
    "cluster": "none",
    "job_id": "1",
    "name": "steps",
    "user": "",
    "partition": "",
    "account": "",
    "state": "COMPLETED",
    "final": True,
    "tasks": [{"id": "1", "state": "COMPLETED"}],
    "nodes": [],
    "submit_time": None,
    "start_time": None,
    "end_time": None,
    "elapsed_s": None,
    "collected_at": 0,
    "remote_dir": "",
    "files": 1,
    "bytes": 0,
}
LARGE = """import os
with open('train.log', 'wb') as log:
    for _ in range({log_mb}):
        log.write(os.urandom(500_000).hex().encode())
for number in range({files}):
    if number % 1000 == 0:
        folder = f'out/{{number // 1000}}'
        os.makedirs(folder)
    with open(f'{{folder}}/{{number}}.json', 'w') as file:
        file.write(str(number) * 200)
"""


@dataclass
class Peak:
    """MB of memory that processes had at most."""

    here: float = 0
    there: float = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the programs of ours on the nodes, whose processes this machine sees."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(0.05):
                for status in Path("/proc").glob("[0-9]*/status"):
                    try:
                        if BOOT[:40].encode() in (status.parent / "cmdline").read_bytes():
                            self.there = max(self.there, _peak_mb(status.read_text()))
                    except (OSError, StopIteration):  # it has ended
                        pass

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _peak_mb(status: str) -> float:
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def collect(cluster: Cluster, out: Path, ids: list[str], peak: Peak) -> float:
    """Seconds that `clusterctl collect` takes."""
    argv = [
        BIN / "clusterctl",
        "-f",
        cluster.folder / "cluster.yaml",
        "collect",
        *ids,
        "--out",
        out,
    ]
    begun = time.perf_counter()
    with (cluster.folder / "collect.log").open("wb") as log, peak.watching():
        process = subprocess.Popen(argv, env=dict(cluster.environ), stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    assert status == 0, (cluster.folder / "collect.log").read_text()
    peak.here = max(peak.here, used.ru_maxrss / 1000)
    return time.perf_counter() - begun


def rsync(cluster: Cluster, remote: str, mirror: Path) -> float:
    """Seconds that rsync takes, by the same ssh_config."""
    shutil.rmtree(mirror, ignore_errors=True)
    shell = f"ssh -F {cluster.workspace}/ssh_config -l hpc"
    begun = time.perf_counter()
    subprocess.run(
        ["rsync", "-a", "-e", shell, f"{cluster.controller}:{remote}/", f"{mirror}/"], check=True
    )
    return time.perf_counter() - begun


def wait_for_all(cluster: Cluster) -> None:
    while cluster.ssh("squeue -h"):
        time.sleep(1)


def jobs(rounds: int, given: argparse.Namespace) -> None:
    """Many jobs with a dozen small files each."""
    with raised(2) as cluster:
        script = cluster.folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{SMALL}")
        os.environ.update(cluster.environ)
        workspace = Workspace.of(cluster.name)
        with connect_session(job_inventory(workspace), workspace) as opened:
            job = JobSpec(name="small", script=script)
            prepared = PreparedJob(
                Request.read(job), opened.site.render(Request.read(job)), source_of(job)
            )
            ids = [Submitter(opened).submit(prepared).job_id for _ in range(given.jobs)]
        wait_for_all(cluster)
        out = cluster.folder / "out"
        mirror = cluster.folder / "mirror"
        peak = Peak()

        def ours() -> float:
            shutil.rmtree(out, ignore_errors=True)
            seconds = collect(cluster, out, ids, peak)
            assert len(list(out.glob("*/out/10"))) == given.jobs
            return seconds

        def by_rsync() -> float:
            seconds = rsync(cluster, "clusterctl/jobs", mirror)
            assert len(list(mirror.glob("*/out/10"))) == given.jobs
            return seconds

        measured = measure(
            f"{given.jobs} jobs; rsync takes their folder as one, without accounting or sums",
            rounds,
            collect=ours,
            rsync=by_rsync,
        )
        measured.notes.append(_shown(peak))
        measured.show()


def large(rounds: int, given: argparse.Namespace) -> None:
    """One run with a large log and many small files; then one that is killed in the middle."""
    with raised(2) as cluster:
        script = cluster.folder / "make.py"
        script.write_text(LARGE.format(log_mb=int(given.log * 1000), files=given.files))
        job = cluster.run("submit", script, "--wait")["job_id"]
        remote = cluster.ssh(f"scontrol show job {job} | sed -n 's/^ *WorkDir=//p'").strip()
        out = cluster.folder / "out"
        mirror = cluster.folder / "mirror"
        peak = Peak()

        def ours() -> float:
            shutil.rmtree(out, ignore_errors=True)
            return collect(cluster, out, [job], peak)

        measured = measure(
            f"a run with a log of {given.log:g} GB and {given.files:,} files",
            rounds,
            collect=ours,
            rsync=lambda: rsync(cluster, remote, mirror),
        )
        (run,) = out.iterdir()
        ours_only = sorted({*SENT_FILES, *ADDED_FILES, REPORT_FILE})
        compared = ["diff", "-rq", *(f"--exclude={name}*" for name in ours_only), run, mirror]
        subprocess.run(compared, check=True)
        measured.notes.append(_shown(peak))
        measured.show()
        shutil.rmtree(mirror)
        resumed(cluster, job, out, given)


def metrics(rounds: int, given: argparse.Namespace) -> None:
    """The figures and the report of a run that wrote its loss at each step, beside JSON and
    NumPy.
    """
    losses = numpy.random.default_rng(0).random(given.steps)
    with tempfile.TemporaryDirectory() as folder:
        run = RunRecord.model_validate({**RECORD, "directory": Path(folder)})
        with (run.directory / METRICS_FILE).open("w") as file:
            lines = enumerate(losses.tolist())
            file.writelines(f'{{"step": {step}, "loss": {loss!r}}}\n' for step, loss in lines)

        def figures() -> None:
            loss = summarize(run.directory).metrics["loss"]
            assert (loss.count, loss.min, loss.max) == (len(losses), losses.min(), losses.max())

        def by_numpy() -> None:
            with (run.directory / METRICS_FILE).open() as file:
                values = numpy.array([json.loads(line)["loss"] for line in file])
            assert (values.min(), values.max()) == (losses.min(), losses.max())

        measure(
            f"{given.steps:,} steps",
            rounds,
            aim="a report within 3 s",
            report=lambda: write_report(report_of([Row(run)]), run.directory / REPORT_FILE),
            json_and_NumPy=by_numpy,
            figures_in_run_json=figures,
        ).show()


def resumed(cluster: Cluster, job: str, out: Path, given: argparse.Namespace) -> None:
    """Kill a collect when it has half of the log, and see that only the rest travels."""
    shutil.rmtree(out)
    argv = [BIN / "clusterctl", "-f", cluster.folder / "cluster.yaml", "collect", job, "--out", out]
    process = subprocess.Popen(argv, env=dict(cluster.environ), stderr=subprocess.DEVNULL)
    begun = time.perf_counter()
    half = 5e8 * given.log
    while _size(out) < half and process.poll() is None:
        time.sleep(0.2)
    process.kill()
    process.wait()
    there = _size(out)
    before = time.perf_counter() - begun
    read = _received(cluster)
    begun = time.perf_counter()
    cluster.run("collect", job, "--out", out)
    took = time.perf_counter() - begun
    (run,) = out.iterdir()
    whole = json.loads((run / "run.json").read_text())["bytes"]
    print(
        f"  killed after {before:.1f} s with {there / 1e9:.2f} of {whole / 1e9:.2f} GB here; "
        f"again: {took:.1f} s, {(_received(cluster) - read) / 1e9:.2f} GB came over the network"
    )


def _size(folder: Path) -> int:
    if not folder.exists():
        return 0
    done = subprocess.run(["du", "-sb", folder], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0])


def _received(cluster: Cluster) -> int:
    """Bytes that this machine has received from the cluster."""
    lines = (cluster.workspace / "ssh_config").read_text().splitlines()
    address = next(line.split()[1] for line in lines if line.split()[:1] == ["HostName"])
    route = subprocess.run(
        ["ip", "-j", "route", "get", address], check=True, capture_output=True
    ).stdout
    return int(
        Path("/sys/class/net", json.loads(route)[0]["dev"], "statistics/rx_bytes").read_text()
    )


def _shown(peak: Peak) -> str:
    return f"peak memory of collect: {peak.here:.0f} MB here, {peak.there:.0f} MB on the controller"


ALL = {one.__name__: one for one in (jobs, large, metrics)}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[[], *ALL], metavar="WHAT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--log", type=float, default=5, metavar="GB")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    given = parser.parse_args()
    if shutil.which("rsync") is None and {*given.what} != {metrics.__name__}:
        # Before a cluster is raised.
        sys.exit(
            "rsync is missing, which this compares with: install it, such as `apt install rsync`"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # not without taking clusters down
    print(machine())
    for name in given.what or ALL:
        ALL[name](given.rounds, given)


if __name__ == "__main__":
    main()
