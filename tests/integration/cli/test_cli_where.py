"""The command `where`, and `submit --first best`, on a cluster whose Slurm is a double."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import submit
from clusterctl.cli.output import Screen
from clusterctl.cli.where import where
from clusterctl.errors import SlurmAwayError, UsageError
from clusterctl.jobs import where as places_of_jobs
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites.kinds import ForeignSlurm
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.manual import ROOT, assert_shown
from tests.support.messages import refused, shows
from tests.support.played.cluster import SPEC, PlayedCluster, node_record

TEXT = Screen(json=False, color=False)
BUSY = "allocation failure: Requested node configuration is not available"
LIMIT = "allocation failure: Requested time limit is invalid (missing or exceeds some limit)"
Where = Callable[..., list[dict[str, Any]]]


def partition(name: str, state: str = "up") -> dict[str, str]:
    return {"Partition": name, "Available": state, "Time": "infinite", "NodeAIOT": "0/2/0/2"}


@pytest.fixture
def asked(
    played_session: Session, cluster: PlayedCluster, capsys: pytest.CaptureFixture[str]
) -> Where:
    """Return a function that runs `where` and returns the places. Slurm has train and short."""
    with cluster.state() as state:
        state["nodes"] = [
            node_record("n1", "train"),
            node_record("n2", "train"),
            node_record("n3", "short"),
        ]
        state["partitions"] = [partition("train"), partition("short")]

    def asked(target: str = "probe", **options: Any) -> list[dict[str, Any]]:
        where(Screen(json=True, color=False), target, **options)
        return list(json.loads(capsys.readouterr().out)["places"])

    return asked


def trials(cluster: PlayedCluster, **answers: str | float) -> None:
    with cluster.state() as state:
        state["trials"] = answers


def names(places: list[dict[str, Any]]) -> list[str]:
    return [each["partition"] for each in places]


def test_where_ranks_accepted_places_by_their_expected_start(asked, cluster) -> None:
    trials(cluster, train=time.time() + 7200)
    first, second = asked()
    assert (first["partition"], first["accepted"]) == ("short", True)
    assert (second["partition"], second["nodes"], second["free_nodes"]) == ("train", 2, 2)
    assert second["expected_start"] > time.time() + 7000
    trials(cluster, short=LIMIT)
    first, second = asked(time="10m")
    assert (names([first, second]), second["accepted"]) == (["train", "short"], False)
    assert second["slurm"] == LIMIT.partition(": ")[2]
    assert (second["account"], second["cluster"], second["usd_per_hour"]) == (
        "default",
        "demo",
        None,
    )


def test_where_sends_the_options_that_shape_the_job(asked, cluster, tmp_path) -> None:
    (script := tmp_path / "a.sh").write_text(
        "#!/bin/bash\n#SBATCH --partition=x\n#SBATCH --mem=1G\n"
    )
    (found,) = asked(str(script), partition="train", account="mine", nodes=3)
    assert (found["account"], found["fitting"]) == ("mine", 0)
    with cluster.state() as state:
        (tried,) = state["tried"]
        assert not state["jobs"]
    assert [tried[name] for name in ("nodes", "mem", "partition", "account")] == [
        "3",
        "1G",
        "train",
        "mine",
    ]
    with refused("not-found/partition", UsageError):
        asked(partition="x")


def test_where_names_what_contradicts_slurms_answer(asked, cluster) -> None:
    """Free nodes with a late start, and a start now without free nodes, are both shown."""
    trials(cluster, train=time.time() + 7200)
    (train,) = asked(partition="train")
    assert shows(train["finding"], "where-room-but-later")
    trials(cluster)
    with cluster.state() as state:
        for number in (0, 1):
            state["nodes"][number] |= {"StateComplete": "mixed", "CPUsState": "n/a"}
    (train,) = asked(partition="train")
    assert (train["unknown_nodes"], train["free_cpus"], train["fitting"]) == (2, 0, 0)
    assert shows(train["finding"], "where-no-room-but-now")
    (short,) = asked(partition="short")
    assert shows(short["finding"], "where-not-submittable")


def test_where_refusal_while_nodes_are_out_of_service_is_unknown(asked, cluster) -> None:
    trials(cluster, train=BUSY, short=BUSY)
    with cluster.state() as state:
        state["nodes"][1] = node_record("n2", "train", "down")
    found = {each["partition"]: each["accepted"] for each in asked()}
    assert found == {"train": None, "short": False}


def test_where_in_a_partition_that_is_down_expects_no_start(asked, cluster) -> None:
    """With --test-only, Slurm 24.11 expects a start now, and the job that is submitted waits."""
    with cluster.state() as state:
        state["partitions"] = [partition("train", "down"), partition("short")]
    short, train = asked()
    assert (train["accepted"], train["expected_start"], train["submittable"]) == (True, None, False)
    assert shows(train["finding"], "where-partition-down")
    assert short["expected_start"] is not None
    # Slurm refuses the job in a test, and when it is submitted lets it wait.
    trials(cluster, train=BUSY)
    (train,) = asked(partition="train")
    assert (train["accepted"], train["submittable"]) == (None, False)
    assert shows(train["finding"], "where-partition-down")
    # Of a job that Slurm refuses, nothing tells that it would wait.
    trials(cluster, train=LIMIT)
    (train,) = asked(partition="train")
    assert (train["accepted"], train["finding"]) == (False, "")


def test_where_behind_jobs_without_a_time_limit_expects_no_start(asked, cluster) -> None:
    """Slurm expects such jobs to last for a year."""
    trials(cluster, train=time.time() + 365 * 86400 - 60)
    short, train = asked()
    assert (short["partition"], train["accepted"], train["expected_start"]) == ("short", True, None)
    assert train["submittable"]
    assert shows(train["finding"], "where-endless-jobs")


def test_where_of_a_held_job_expects_no_start(asked, cluster, tmp_path) -> None:
    """With --test-only, Slurm expects a start of it."""
    (script := tmp_path / "a.sh").write_text("#!/bin/bash\n#SBATCH --hold\n")
    for found in [*asked(slurm=["--hold"]), *asked(slurm=["-H"]), *asked(str(script))]:
        assert (found["accepted"], found["expected_start"]) == (True, None)
        assert not found["submittable"]
        assert shows(found["finding"], "where-held")


def test_where_beyond_a_time_limit_expects_no_start(asked, cluster, tmp_path) -> None:
    """Without EnforcePartLimits, Slurm accepts the job, expects a start, and never starts it."""
    with cluster.state() as state:
        state["partitions"] = [partition("train") | {"Time": "1:00:00"}, partition("short")]
    short, train = asked(time="2h")
    assert (train["accepted"], train["expected_start"], train["submittable"]) == (True, None, False)
    assert shows(train["finding"], "where-beyond-limit")
    assert short["expected_start"] is not None
    assert asked(time="1h", partition="train")[0]["expected_start"] is not None
    (script := tmp_path / "a.sh").write_text("#!/bin/bash\n#SBATCH --time=0-02\n")
    assert asked(str(script), partition="train")[0]["expected_start"] is None


def test_where_on_a_site_that_hides_its_nodes_knows_no_room(asked, cluster, capsys) -> None:
    """With PrivateData=nodes, sinfo is refused, and scontrol shows the partitions."""
    with cluster.state() as state:
        state["hides_nodes"] = True
    found = {each["partition"]: each for each in asked()}
    assert {*found} == {"train", "short"}
    assert (found["train"]["accepted"], found["train"]["fitting"]) == (True, None)
    assert found["train"]["expected_start"] is not None
    where(TEXT, partition="train")
    assert capsys.readouterr().out.splitlines()[1].split()[3:6] == ["unknown"] * 3


def test_where_on_a_site_that_chooses_the_partition_names_none(asked, cluster) -> None:
    inventory = Workspace.of("demo").inventory
    inventory.write_text(json.dumps({**json.loads(inventory.read_text()), "is_routed": True}))
    (place,) = asked()
    assert (place["partition"], place["nodes"], place["submittable"]) == (None, 3, True)
    with cluster.state() as state:
        assert ["partition" in tried for tried in state["tried"]] == [False]


def test_where_refusal_of_a_site_that_hides_its_nodes_is_unknown(asked, cluster) -> None:
    """Some may be out of service."""
    trials(cluster, train=BUSY)
    with cluster.state() as state:
        state["hides_nodes"] = True
    (train,) = asked(partition="train")
    assert train["accepted"] is None
    assert shows(train["finding"], "where-nodes-out")


def test_where_keeps_the_pace_of_a_site_and_shows_the_age(
    asked, cluster, monkeypatch, capsys, set_clock
) -> None:
    """It waits for a place without an answer. If all have one, these are shown with their age."""
    inventory = Workspace.of("demo").inventory
    inventory.write_text(json.dumps({**json.loads(inventory.read_text()), "is_foreign": True}))
    monkeypatch.setattr(places_of_jobs, "MOST_ASKED", 1)
    now = time.time()
    pauses = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(time, "time", lambda: now)
    set_clock(Clock(sleep=sleep))
    where(TEXT)
    assert shows(capsys.readouterr().out, "where-unasked")
    assert (cluster.calls("sbatch"), pauses) == (1, [])
    now += 10
    pace_s = ForeignSlurm.pace.pending_s
    assert sorted(each["asked_s"] for each in asked()) == [0, pace_s]
    assert (cluster.calls("sbatch"), pauses) == (2, [pace_s - 10])
    now += pace_s - 1
    assert sorted(each["asked_s"] for each in asked()) == [pace_s - 1, 2 * pace_s - 1]
    assert (cluster.calls("sbatch"), len(pauses)) == (2, 1)
    now += 1
    assert sorted(each["asked_s"] for each in asked()) == [0, pace_s]
    # An answer that is days old tells no start.
    now += 3 * 86400
    starts = {each["asked_s"] == 0: each["expected_start"] for each in asked()}
    assert starts[True] is not None
    assert starts[False] is None


def test_where_multiplies_the_price_of_a_node(asked) -> None:
    spec = Workspace.of("demo").spec
    spec.write_text(SPEC.replace("nodes: 2}", "nodes: 2, price_per_hour: 0.5}"))
    (train,) = asked(partition="train", nodes=2)
    assert train["usd_per_hour"] == 1.0


@pytest.mark.parametrize("content", ["{", "[]", '{"trials": {"a": 1}}'])
def test_where_ignores_a_damaged_memory(asked, content: str) -> None:
    Workspace.of("demo").where.write_text(content)
    assert names(asked()) == ["train", "short"]


def test_where_names_clusters_that_do_not_answer(asked, capsys) -> None:
    far = Workspace.of("far")
    far.create()
    far.inventory.write_text("{")
    where(Screen(json=True, color=False))
    answer = json.loads(capsys.readouterr().out)
    assert [each["cluster"] for each in answer["unanswered"]] == ["far"]
    assert names(answer["places"]) == ["train", "short"]
    where(Screen(json=True, color=False, cluster="demo"))
    assert json.loads(capsys.readouterr().out)["unanswered"] == []


def test_where_in_text_has_a_row_for_each_place_and_the_reasons(asked, cluster, capsys) -> None:
    trials(cluster, short=LIMIT)
    where(TEXT)
    head, train, short, _, reason = capsys.readouterr().out.splitlines()
    assert head.split() == "PLACE ACCEPTED START ROOM NODES CPUS GPUS USD/H ASKED".split()
    assert train.split()[:4] == ["demo/train@default", "yes", "now", "2"]
    assert short.split()[:2] == ["demo/short@default", "no"]
    assert reason.startswith("demo/short@default: Requested time limit is invalid")


def test_where_is_shown_as_in_the_manual(asked, cluster, tmp_path, monkeypatch, capsys) -> None:
    trials(
        cluster,
        train=time.time() + 140,
        short="allocation failure: More processors requested than permitted",
        vip="allocation failure: Invalid qos specification",
    )
    with cluster.state() as state:
        state["partitions"] = [
            *(partition("train"), partition("closed", "down"), partition("short"), partition("vip"))
        ]
        for node in state["nodes"][:2]:
            node |= {"StateComplete": "allocated", "CPUsState": "1/0/0/1"}
        state["nodes"] += [node_record("n4", "closed"), node_record("n5", "vip")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    where(TEXT, "train.py", nodes=2, mem="100MiB", time="10m")
    command = "clusterctl where train.py --nodes 2 --mem 100MiB --time 10m"
    assert_shown(ROOT / "docs/howto/where.md", command, capsys.readouterr().out, {})


def test_trial_without_an_answer_of_slurm_is_no_refusal(session, cluster) -> None:
    trials(cluster, train="sbatch: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmAwayError):
        session.scheduler.trial("#!/bin/bash\n")


def test_first_best_submits_to_the_best_places(asked, cluster, tmp_path: Path, capsys) -> None:
    """It leaves out the partitions that `submit` does not know."""
    (script := tmp_path / "a.sh").write_text("#!/bin/bash\ntrue\n")
    with refused("option-invalid/first-places", UsageError):
        submit.submit(TEXT, str(script), first="best:3")
    inventory = Workspace.of("demo").inventory
    facts = json.loads(inventory.read_text())
    facts["partitions"] += [{"name": "short", "nodes": ["n3"]}]
    inventory.write_text(json.dumps(facts))
    capsys.readouterr()
    submit.submit(Screen(json=True, color=False), str(script), first="best:3")
    answer = json.loads(capsys.readouterr().out)
    places = {answer["partition"], *(each["partition"] for each in answer["cancelled"])}
    assert (places, answer["account"]) == ({"train", "short"}, "default")
