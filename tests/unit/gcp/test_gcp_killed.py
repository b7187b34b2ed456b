"""clusterctl is killed while Terraform is at work on Google Cloud: the next run goes on from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.providers.gcp.apply import words_for
from tests.support.google.refusals import REFUSALS, Refusal
from tests.support.google.terraformed import PLACE, Terraformed
from tests.support.processes import descendants
from tests.support.terraform import addresses, program
from tests.unit.gcp.clusters import removed

INSTANCE = "google_compute_instance"
HOSTS = {"demo-ctl", "demo-train-1", "demo-train-2"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terraformed:
    """A cluster of which nothing is made yet."""
    return Terraformed(tmp_path, monkeypatch.setenv, program=program("found"))


def kill(cluster: Terraformed, verb: str, moment: str, *, all_of_it: bool) -> None:
    """Run a verb and kill it when it says that; with ``all_of_it``, Terraform and its provider as well."""
    argv = [sys.executable, "-m", "tests.unit.gcp.carry", str(cluster.folder), verb]
    environ = dict(os.environ)
    if all_of_it:  # this process does not serve the provider then: Terraform starts it
        replace(cluster.terraform, program=program("found")).init()
        environ["PATH"] = environ["PATH"].removeprefix(f"{cluster.cloud.bin}:")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if re.search(moment, line)), None)
        assert said is not None, f"it never said {moment!r}"
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
WHEN = ("asked", "told")
ASKED_FOR = {
    "google_storage_bucket": "bucket: {name: my-results, create: true}",
    "google_filestore_instance": "filestore: {tier: BASIC_SSD, capacity: 2560GiB}",
}


def moment(refusal: Refusal, when: str) -> str:
    """What clusterctl says while Google is asked for what it refuses, or once clusterctl was told so."""
    thing = "demo-train-1" if refusal.type == INSTANCE else words_for(refusal.type)
    told = "going on in" if refusal.transient else f"^{thing}.*: failed"
    return f"^{thing}.*: {DOING[refusal.on]}" if when == "asked" else told


def refused(cluster: Terraformed, names: list[str]) -> str:
    """Have node N refused for the Nth reason, or what else the only one is of; the verb that runs into it."""
    first = REFUSALS[names[0]]
    cluster.nodes(len(names), more=ASKED_FOR.get(first.type, ""))
    if first.on != "create":
        cluster.up()
    if first.on == "update":
        cluster.nodes(len(names), more="labels: {team: vision}")
    for number, name in enumerate(names, start=1):
        of = REFUSALS[name].type
        which = f"demo-train-{number}" if of == INSTANCE else "*"
        cluster.cloud.fail(name, of=of, name=which, on=first.on, seconds=1.5)
    return "down" if first.on == "delete" else "up"


QUICK = {"quota_of_filestore", "read_rate"}  # in `make test`: what stays, and what passes by itself
MATRIX = [
    pytest.param(
        names,
        f"{when}-{lost}-{then}",
        marks=[]
        if names[0] in QUICK and (when, lost, then) == ("told", "alone", "up")
        else pytest.mark.sweep,
    )
    for names in (*(NODES[i::4] for i in range(4)), *([name] for name in OTHERS))
    for when in WHEN
    for lost in ("alone", "all")  # Terraform and its provider as well
    for then in (("down",) if REFUSALS[names[0]].on == "delete" else ("up", "down"))
]


@pytest.mark.parametrize(
    ("names", "how"), MATRIX, ids=lambda value: value if isinstance(value, str) else "+".join(value[:2])
)
def test_killed_while_google_refuses_the_next_runs_converge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], how: str
) -> None:
    """Killed while Google is asked, or once it was told: `up` goes on from there, `down` leaves nothing."""
    when, lost, then = how.split("-")
    all_of_it = lost == "all"
    cluster = Terraformed(tmp_path, monkeypatch.setenv)
    verb = refused(cluster, names)
    kill(cluster, verb, moment(REFUSALS[names[0]], when), all_of_it=all_of_it)
    if then == "up" or verb == "down":
        cluster.cloud.heal()
    if then == "up":
        cluster.up()
        nodes = {f"demo-train-{n + 1}" for n in range(len(names))}
        assert set(cluster.cloud.instances) == {"demo-ctl", *nodes}
        assert not made_twice(cluster)
        assert cluster.terraform.plan().is_empty
    removed(cluster)
