"""clusterctl is killed while Terraform is at work on Google Cloud: the next run goes on from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from clusterctl.errors import ProvisionError, TerraformError
from clusterctl.providers.gcp.apply import words_for
from tests.support.google.refusals import REFUSALS
from tests.support.google.terraformed import CLUSTER_ID, PLACE, Terraformed
from tests.support.processes import descendants
from tests.support.terraform import addresses, program
from tests.unit.gcp.clusters import LEAN, google_of, remove, removed

INSTANCE = "google_compute_instance"
HOSTS = {"demo-ctl", "demo-train-1", "demo-train-2"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terraformed:
    """A cluster of which nothing is made yet."""
    return Terraformed(tmp_path, monkeypatch.setenv, program=program("found"))


def kill(
    cluster: Terraformed,
    verb: str,
    *moments: str,
    all_of_it: bool = False,
    until: Callable[[], object] = lambda: True,
) -> None:
    """Run a verb and kill it once it has said all of that; with ``all_of_it``, Terraform too."""
    argv = [sys.executable, "-m", "tests.unit.gcp.carry", str(cluster.folder), verb, CLUSTER_ID]
    environ = dict(os.environ)
    if all_of_it:  # this process does not serve the provider then: Terraform starts it
        replace(cluster.terraform, program=program("found")).init()
        environ["PATH"] = environ["PATH"].removeprefix(f"{cluster.cloud.bin}:")
    argv += [PLACE.project, PLACE.zone, PLACE.controller]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        awaited = set(moments)
        while awaited and (line := process.stdout.readline()):
            awaited -= {moment for moment in awaited if re.search(moment, line)}
        assert not awaited, f"it never said {awaited}"
        while not until():
            time.sleep(0.01)
        for pid in [process.pid, *(descendants(process.pid) if all_of_it else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def made_twice(cluster: Terraformed) -> list[str]:
    made = [name for _, kind, name in cluster.cloud.done("create") if kind == INSTANCE]
    return [name for name in made if made.count(name) > 1]


def in_state(cluster: Terraformed) -> set[str]:
    """The hosts whose instances Terraform knows, once it has ended."""
    instances = (each for each in addresses(cluster.terraform) if each.endswith(f"{INSTANCE}.host"))
    return {PLACE.host_of(address) or "" for address in instances}


def converges(cluster: Terraformed, up: str, down: str, *, all_of_it: bool) -> None:
    """Killed while it is raised and again while it is removed, it is raised and removed by the next runs."""
    cluster.cloud.fail("slow", name="demo-*", seconds=1.5)
    cluster.cloud.fail("slow", name="demo-*", seconds=1.5, on="delete")
    kill(cluster, "up", up, all_of_it=all_of_it)
    if not all_of_it:
        assert in_state(cluster) == set(cluster.cloud.instances)
    cluster.up()
    assert set(cluster.cloud.instances) == HOSTS
    assert not made_twice(cluster)
    assert cluster.terraform.plan().is_empty
    kill(cluster, "down", down, all_of_it=all_of_it)
    if not all_of_it:
        assert in_state(cluster) == set(cluster.cloud.instances)
    cluster.down()
    assert cluster.cloud.resources() == {}
    assert addresses(cluster.terraform) == ()


def test_killed_it_ends_terraform_first_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Terraformed(tmp_path, monkeypatch.setenv)  # its provider is not started 30 times
    cluster.nodes(2, more=LEAN)
    converges(cluster, "demo-train-1: creating", "demo-train-1: deleting", all_of_it=False)
    assert "waiting for the Terraform of a clusterctl that was killed: it writes its state" in cluster.said


@pytest.mark.sweep
@pytest.mark.parametrize("all_of_it", [False, True])
@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("planned", "planned"),
        ("a network: creating", "demo-ctl: deleted"),
        ("a network: created", "Cloud NAT: deleted"),
        ("demo-ctl: creating", "demo-ctl: deleting"),
        ("demo-train-2: creating", "a subnetwork: deleting"),
        ("demo-train-1: created", "demo-train-1: deleted"),
    ],
)
def test_killed_at_any_moment_it_converges(cluster: Terraformed, up: str, down: str, all_of_it: bool) -> None:
    converges(cluster, up, down, all_of_it=all_of_it)


DOING = {"create": "creating", "update": "changing", "delete": "deleting"}
NODES = [
    name
    for name, each in REFUSALS.items()
    if (each.type, each.on, each.transient) == (INSTANCE, "create", False)
]
OTHERS = [name for name in REFUSALS if name not in NODES]
ASKED_FOR = {
    "google_storage_bucket": "bucket: {name: my-results, create: true}",
    "google_filestore_instance": "filestore: {tier: BASIC_SSD, capacity: 2560GiB}",
}


def moments(names: list[str], when: str) -> list[str]:
    """What it says when nothing is asked yet, while Google is asked for all, or once that is refused."""
    first = REFUSALS[names[0]]
    if when == "planned" or (when == "told" and first.transient):
        return ["^planned$" if when == "planned" else "going on in"]
    nodes = [rf"demo-train-{number}\b" for number in range(1, len(names) + 1)]
    things = nodes if first.type == INSTANCE else [words_for(first.type)]
    return [f"^{thing}.*: {DOING[first.on] if when == 'asked' else 'failed'}" for thing in things]


def refuse(cluster: Terraformed, names: list[str], *, seconds: float = 1.5) -> None:
    """Have node N refused for the Nth reason, or what else the only one is of."""
    for number, name in enumerate(names, start=1):
        of = REFUSALS[name].type
        which = f"demo-train-{number}" if of == INSTANCE else "*"
        cluster.cloud.fail(name, of=of, name=which, on=REFUSALS[name].on, seconds=seconds)


def refused(cluster: Terraformed, names: list[str]) -> str:
    """Make what is there before the first refusal; the verb that runs into it."""
    first = REFUSALS[names[0]]
    cluster.nodes(len(names), more=ASKED_FOR.get(first.type, ""))
    if first.on != "create":
        cluster.up()
    if first.on == "update":
        cluster.nodes(len(names), more="labels: {team: vision}")
    refuse(cluster, names)
    return "down" if first.on == "delete" else "up"


# When it is killed, what dies with it, and the next run: `up`, `down`, or the same verb while still refused.
HOW = """
    planned-alone-up
    asked-alone-up asked-alone-down asked-alone-still asked-all-up asked-all-down
    told-alone-up told-alone-down told-all-up told-all-down told-all-still
""".split()
GROUPS = NODES[0::2], NODES[1::2]
MATRIX = [
    pytest.param(names, how)
    for names in (*GROUPS, *([name] for name in OTHERS))
    for how in HOW
    if not (REFUSALS[names[0]].on == "delete" and how.endswith("up"))
]


# That a kill is gone on from: the test above; what each refusal says, and that `down` leaves nothing then:
# test_gcp_refusals.py.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("names", "how"), MATRIX, ids=lambda value: value if isinstance(value, str) else "+".join(value[:2])
)
def test_killed_while_google_refuses_the_next_runs_converge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], how: str
) -> None:
    """Killed before, while or after Google is asked: `up` goes on from there, `down` leaves nothing."""
    when, lost, then = how.split("-")
    cluster = Terraformed(tmp_path, monkeypatch.setenv)
    verb = refused(cluster, names)
    kill(cluster, verb, *moments(names, when), all_of_it=lost == "all")
    if then == "still":
        cluster.cloud.heal()
        refuse(cluster, names, seconds=0)
        with pytest.raises(TerraformError):
            cluster.down() if verb == "down" else cluster.up()
    if then != "down" or verb == "down":
        cluster.cloud.heal()
    if then != "down" and verb == "up":
        cluster.up()
        nodes = {f"demo-train-{n + 1}" for n in range(len(names))}
        assert set(cluster.cloud.instances) == {"demo-ctl", *nodes}
        assert not made_twice(cluster)
        assert cluster.terraform.plan().is_empty
    removed(cluster)


@pytest.mark.sweep  # a deletion of ours that is refused: test_gcp_orphans.py
@pytest.mark.parametrize("name", ["unavailable", "permission", "protected", "internal_error_of_operation"])
def test_killed_while_google_refuses_our_own_deletions_the_next_down_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cluster = Terraformed(tmp_path, monkeypatch.setenv)
    cluster.nodes(1)
    cluster.up()
    cluster.forget("demo-train-1")
    with google_of(cluster) as google:
        google.refuse("compute.instances.delete", name)
        called = partial(google.called, "compute.instances.delete")
        kill(cluster, "remove", "deleting 1 x instance", until=called)
        with pytest.raises(ProvisionError, match="could not be deleted"):
            remove(cluster)
    assert cluster.cloud.instances
    removed(cluster)
