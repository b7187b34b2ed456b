"""Ctrl-C, `kill` and SIGKILL while a cluster comes up: nothing runs on, and `up` goes on from there.

Its storage is kept: it outlives a `down` that was killed, too.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import at_work, at_work_on_nodes, eventually_none
from tests.support.sweeps import in_sweep
from tests.support.verbs import Clusterctl
from tests.support.victim import Ended, Victim

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
storage: {{keep: true}}
partitions:
  - {{name: train, nodes: 2}}
users:
  - {{name: ada, uid: 12001}}
  - {{name: bob, uid: 12002}}
"""
OWNERS = "cd /shared/home; sudo stat -c '%n %u' ada/datasets/set.txt ada/out/weights bob bob/notes"


@pytest.fixture(scope="module")
def spec(clusterctl: Clusterctl, cluster_name: str) -> Iterator[Path]:
    """A spec whose cluster is down in the end."""
    path = clusterctl.cwd / "cluster.yaml"
    path.write_text(SPEC.format(name=cluster_name))
    yield path
    clusterctl("-f", path, "down", "--yes", "--discard", "--storage", rc=None)


def interrupted(clusterctl: Clusterctl, phase: str, how: str) -> Ended:
    """Start `up` and end it once it has said that phase: wherever in it, the outcome is the same.

    It runs Ansible on the hosts, too, which those of classes do without.
    """
    victim = Victim(clusterctl, "up", "--reconfigure")
    victim.until_phase(phase)
    assert at_work(clusterctl.home)
    return victim.hit(how)


@pytest.mark.parametrize(
    "phase",
    ["prepare_class", "converge", *in_sweep("provision", "probe", "verify")],
)
def test_ctrl_c_ends_up_cleanly(clusterctl: Clusterctl, spec: Path, phase: str) -> None:
    ended = interrupted(clusterctl, phase, "int")
    assert ended.code == 130, ended
    assert "interrupted" in ended.stderr
    assert "`clusterctl up` goes on from here" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "error" not in ended.stderr
    assert at_work(clusterctl.home) == []


def test_kill_ends_it_as_cleanly(clusterctl: Clusterctl, spec: Path) -> None:
    ended = interrupted(clusterctl, "converge", "term")
    assert ended.code == 128 + signal.SIGTERM, ended
    assert "Traceback" not in ended.stderr
    assert at_work(clusterctl.home) == []


def test_even_a_sudden_death_leaves_nothing_at_work(clusterctl: Clusterctl, spec: Path) -> None:
    assert interrupted(clusterctl, "converge", "kill").code == -signal.SIGKILL
    assert eventually_none(clusterctl.home) == []
    (identity,) = clusterctl.home.glob("*/id")
    on_nodes = functools.partial(at_work_on_nodes, identity.read_text().strip())
    assert eventually_none(clusterctl.home, on_nodes) == []


def test_up_goes_on_from_there(clusterctl: Clusterctl, spec: Path) -> None:
    """No lock is held by the dead, and the half-made cluster becomes whole."""
    assert clusterctl("-o", "json", "up").json["ready"]
    assert clusterctl("-o", "json", "status").json["ready"]


def test_a_down_that_was_killed_is_finished_by_the_next(clusterctl: Clusterctl, spec: Path) -> None:
    (clusterctl.cwd / "set.txt").write_text("rows\n")
    clusterctl("put", "set.txt", "datasets/")
    (clusterctl.cwd / "train.sh").write_text("#!/bin/sh\nmkdir ~/out && echo 0.5 > ~/out/weights\n")
    clusterctl("submit", "train.sh", "--wait")
    clusterctl("ssh", "--user", "bob", "--", "touch", "notes")
    victim = Victim(clusterctl, "down", "--yes")
    victim.until_phase("destroy")
    ended = victim.hit("kill")
    assert ended.code == -signal.SIGKILL, ended
    assert "Traceback" not in ended.stderr
    ran = clusterctl("down", "--yes", rc=None)
    assert ran.rc == 0 or "there is no cluster" in ran.stderr, ran
    assert eventually_none(clusterctl.home) == []


def test_the_next_up_takes_up_the_storage_that_was_kept(clusterctl: Clusterctl, spec: Path) -> None:
    """With the owners of all that is there; another uid is refused before anything is made."""
    (kept,) = clusterctl("-o", "json", "list").json["storage"]
    assert (kept["size_mib"], kept["usd_per_month"]) == (1, 0.0)
    other = clusterctl.cwd / "other.yaml"
    other.write_text(spec.read_text().replace("12001", "12003"))
    refused = clusterctl("-f", other, "up", rc=2)
    assert "ada has uid 12003 in the spec, and files there belong to uid 12001" in refused.stderr
    assert not any(clusterctl.home.glob("*/id"))

    raised = clusterctl("-o", "json", "up").json
    assert any(kept["what"] in note for note in raised["notes"])
    assert clusterctl("-o", "json", "list").json["storage"] == []
    found = clusterctl("ssh", "--admin", f"{raised['cluster']}-ctl", OWNERS).stdout.splitlines()
    of_ada, of_bob = ["ada/datasets/set.txt 12001", "ada/out/weights 12001"], ["bob 12002", "bob/notes 12002"]
    assert found == of_ada + of_bob


def test_down_storage_removes_it(clusterctl: Clusterctl, spec: Path) -> None:
    """It stops at what is nowhere else, and not at what was sent to or collected from an earlier cluster."""
    refused = clusterctl("-o", "json", "down", "--storage", "--yes", rc=1)
    (only,) = refused.json["failures"]
    assert only["cause"].startswith("/shared/home/ada/out: 4 B in 1 file of ada")
    assert "leave out --storage" in only["fix"]
    (clusterctl.cwd / "set.txt").unlink()
    causes = [
        one["cause"] for one in clusterctl("-o", "json", "down", "--storage", "--yes", rc=1).json["failures"]
    ]
    assert any(cause.startswith("/shared/home/ada/datasets: ") for cause in causes)
    clusterctl("down", "--yes")
    refused = clusterctl("down", "--storage", "--yes", rc=1)
    assert "/shared/home/ada/out" in refused.stderr, "it exists only there"
    assert len(clusterctl("-o", "json", "list").json["storage"]) == 1
    assert "remove it" in clusterctl("down", "--storage", "--discard", rc=2).stderr, "it asks still"
    assert "discarded: /shared/home/ada/out" in clusterctl("down", "--storage", "--discard", "--yes").stderr
    assert clusterctl("-o", "json", "list").json["storage"] == []
    assert "there is no kept storage" in clusterctl("down", "--storage", "--yes").stdout
