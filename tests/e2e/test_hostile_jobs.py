"""Hostile jobs: each damages its own folder and name, and affects no other job and no verb."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clusterctl.transport.base import BOOT
from tests.support.cluster import Cluster, raised
from tests.support.terminal import terminal

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions:
  - {{name: train, nodes: 2}}
"""

# What a job does to its program's folder, and to its own folder above, in bash. Its name here is
# the one that it is submitted under.
FOLDERS = {
    "fifo-source": "cd .. && rm -f source.json && mkfifo source.json",
    "zero-outputs": "cd .. && rm -f outputs.json && ln -s /dev/zero outputs.json",
    "link-logs": "cd .. && rm -f stderr.log && ln -s /dev/zero stderr.log",
    "sparse": "truncate -s 1T sparse.bin && echo here >beside.txt && mkdir empty",
    "names": (
        "touch $'a\\nb' $'\\e]52;c;aGk=\\a' $'\\xff\\xfe' -- -rf '$(id)' \"$(printf 'x%.0s' "
        '{1..255})"'
    ),
    "forged": "cd ..; for f in run.json spec.yaml job.sbatch SHA256SUMS sacct.json environment.json; do"
    ' rm -rf "$f"; echo \'{"token": "forged", "state": "COMPLETED"}\' >"$f"; done',
    "special": "mkfifo pipe; ln -s . loop; ln -s /etc/shadow shadow; ln -s missing dangling;"
    " python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
    "gone": 'cd .. && cd .. && rm -rf -- "$OLDPWD"',
    "swapped-files": 'here=$PWD; cd .. && mv -- "$here" away && ln -s / "$here"',
    "swapped": 'cd ..; here=$PWD; cd .. && mv -- "$here" "$here.away" && ln -s / "$here"',
    "terminal": "printf 'red \\e[31mred\\n\\e]52;c;aGFja2Vk\\a\\e]0;title\\a\\e[2J\\e[H'"
    "'\\x9b2J\\xe2\\x80\\xaeabc\\n\\ePq\\e\\\\' | tee /dev/stderr",
}

# Names that a job gives itself, as bash reads them.
NAMES = (
    r"a\nb|y",
    r"\n999|evil|root|train|x|x|COMPLETED|None|0:0|",
    r"\x1f\x1e\x1f",
    r"\e]52;c;aGFja2Vk\a",
    r"\e[2J\e[H\e[31m",
    r"\xe2\x80\xaetxt.exe",
    r"\r12345 root COMPLETED",
    r"$(touch pwned)`id`;id",
    r'"}],"ok":false,"x":[{"',
    r"\xe2\x80\xa8line\xc2\x85next\x0bvt\x0cff",
)
SCRIPT = """\
#!/bin/bash
scontrol update jobid="$SLURM_JOB_ID" jobname=$'{name}' || true
{body}
exit 0
"""
HEALTHY = 'echo "healthy" >result.txt; echo done\n'
ALL_ENDED = 'for i in $(seq 200); do [ -z "$(squeue --noheader)" ] && exit; sleep 0.5; done; exit 1'
LIMIT_MIB = 200
SGR = re.compile(r"\x1b\[[0-9;:]*m")
ACTED_UPON = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ID = re.compile(r"\bjob (\d+)")
OUTSIDE = {"gone", "swapped"}  # of these no folder is left that could be collected


@dataclass
class Peak:
    """The maximum memory of a process, in MiB: of the verb here, or of its processes on a node."""

    spec: Path
    mib: float = 0.0
    argv: str = ""
    _done: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if os.fsencode(self.spec) not in words and not words[2].startswith(
                    BOOT.encode()[:40]
                ):
                    continue
                text = (process / "status").read_text(errors="replace")
                kib = int(text.partition("VmHWM:")[2].split()[0])
                if kib / 1024 > self.mib:
                    self.mib = kib / 1024
                    self.argv = repr(words[:2] + words[-3:])[:300]

    def watch(self) -> None:
        while not self._done.wait(0.05):
            self.look()


@contextmanager
def memory_bounded(cluster: Cluster) -> Iterator[None]:
    """Assert that during the context no verb, here or on a node, uses more than LIMIT_MIB of
    memory.
    """
    peak = Peak(cluster.spec)
    thread = threading.Thread(target=peak.watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        peak._done.set()
        thread.join()
    logging.getLogger(__name__).info("at most %.0f MiB: %s", peak.mib, peak.argv)
    assert peak.mib < LIMIT_MIB, f"{peak.mib:.0f} MiB: {peak.argv}"


@dataclass(frozen=True)
class Attack:
    """A cluster on which hostile and healthy jobs have run, and their IDs by what they did."""

    cluster: Cluster
    hostile: dict[str, str]
    healthy: tuple[str, ...]

    @property
    def all(self) -> set[str]:
        return {*self.hostile.values(), *self.healthy}

    def on_terminal(self, *argv: str, rc: int | None = 0) -> str:
        """Return the output of a verb on a terminal, which must have no effect on the terminal."""
        one = self.cluster
        with terminal(one.runner, "-f", str(one.spec), *argv, size=(50, 200)) as window:
            ended = window.end()
        assert rc is None or ended == rc, window.shown
        plain = SGR.sub("", window.shown.replace("\r\n", "\n"))
        # Progress is drawn by rich itself: erasing a line and moving up, nothing else.
        plain = re.sub(r"\x1b\[(?:2K|1A|0?K|\?25[lh]|\d*[ABCDG])", "", plain).replace("\r", "")
        found = ACTED_UPON.findall(plain)
        assert not found, (argv, found, window.shown)
        return window.shown


@pytest.fixture(scope="module")
def attack(
    cluster_name: str, clusterctl_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attack]:
    """Jobs, each with a hostile folder and a hostile name, and healthy jobs among them."""
    cwd = tmp_path_factory.mktemp("hostile")
    with raised(cluster_name, SPEC.format(name=cluster_name), clusterctl_home, cwd) as cluster:
        hostile = {}
        healthy = []
        for index, (case, body) in enumerate(FOLDERS.items()):
            script = cwd / case / f"{case}.sh"
            script.parent.mkdir()
            script.write_text(
                SCRIPT.format(name=NAMES[index % len(NAMES)].replace("'", "\\'"), body=body)
            )
            hostile[case] = cluster.json("submit", script)["job_id"]
            if index % 6 == 0:
                good = cwd / f"good-{index}" / "good.sh"
                good.parent.mkdir()
                good.write_text(HEALTHY)
                healthy.append(cluster.json("submit", good)["job_id"])
        cluster.ssh(f"{cluster.name}-ctl", ALL_ENDED)
        yield Attack(cluster, hostile, tuple(healthy))


def test_reading_verbs_show_all_hostile_jobs(attack: Attack) -> None:
    cluster = attack.cluster
    with memory_bounded(attack.cluster):
        jobs = cluster.json("jobs", "--all")["jobs"]
        assert {job["job_id"] for job in jobs} >= attack.all
        assert {job["state"] for job in jobs if job["job_id"] in attack.all} == {"COMPLETED"}
        shown = attack.on_terminal("jobs", "--all")
        assert all(re.search(rf"^{job} ", SGR.sub("", shown), re.MULTILINE) for job in attack.all)
        attack.on_terminal("status")
        assert cluster.json("status")["ready"]


def test_logs_of_each_hostile_job_end(attack: Attack) -> None:
    with memory_bounded(attack.cluster):
        for job in attack.all:
            attack.cluster("-o", "json", "logs", job, rc=None, timeout_s=90)
            attack.on_terminal("logs", job, rc=None)


def test_collect_fetches_all_it_can_and_names_the_rest(attack: Attack) -> None:
    with memory_bounded(attack.cluster):
        ran = attack.cluster("-o", "json", "collect", rc=None, timeout_s=600)
    answer = ran.json
    home = {run["job_id"]: Path(run["dir"]) for run in answer["runs"]}
    outside = {attack.hostile[case] for case in OUTSIDE}
    assert home.keys() >= attack.all - outside, ran
    output = json.dumps(answer["failures"]) + ran.stderr
    assert all(job in home or f"job {job}" in output for job in attack.all), ran
    for job in attack.healthy:
        assert (home[job] / "result.txt").read_text() == "healthy\n"
        assert json.loads((home[job] / "run.json").read_text())["skipped"] == []

    def skipped(case: str) -> dict[str, str]:
        record = json.loads((home[attack.hostile[case]] / "run.json").read_text())
        return {one["path"]: one["reason"] for one in record["skipped"]}

    assert "source.json" in skipped("fifo-source")
    assert "outputs.json" in skipped("zero-outputs")
    assert "files/sparse.bin" in skipped("sparse")
    assert skipped("swapped-files").keys() == {"files"}
    sparse = home[attack.hostile["sparse"]]
    assert (sparse / "beside.txt").read_text() == "here\n"
    forged = home[attack.hostile["forged"]]
    assert json.loads((forged / "run.json").read_text())["name"] == "forged"
    assert "forged" not in (forged / "spec.yaml").read_text()
    special = ("pipe", "loop", "shadow", "dangling", "sock")
    assert {f"files/{name}" for name in special} <= skipped("special").keys()
    for run in home.values():
        assert not any(path.is_symlink() for path in run.rglob("*"))


def test_collect_prints_no_control_sequences_of_hostile_names(attack: Attack) -> None:
    shutil.rmtree(attack.cluster.runner.cwd / "runs")
    with memory_bounded(attack.cluster):
        attack.on_terminal("collect", *sorted(attack.all), rc=None)


def test_down_refuses_uncollectable_files_until_discard(attack: Attack) -> None:
    """A job whose folder was removed has no files. A folder that a job replaced is named as the
    file that it is.
    """
    moved = attack.hostile["swapped"]
    sparse = attack.hostile["sparse"]
    left = f"files of job {sparse}"
    with memory_bounded(attack.cluster):
        shown = attack.on_terminal("down", "--yes", rc=1)
        assert left in shown
        assert re.search(r"swapped-\S+\.away", shown), shown
        assert attack.hostile["gone"] not in ID.findall(shown), shown
        ids = [word for job in (moved, sparse) for word in ("--discard-run", job)]
        shown = attack.on_terminal("down", "--yes", *ids, rc=1)
        assert left not in shown
        # It is in no job's folder.
        assert re.search(r"swapped-\S+\.away", shown), shown
        attack.on_terminal("down", "--yes", "--discard")
    assert not (attack.cluster.workspace / "hosts.json").exists()
