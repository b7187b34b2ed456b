"""The order of the modules, and the cluster of two nodes that some of them share."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.person import Person, allowed, new_person
from tests.support.cluster import Cluster, local_spec, raised
from tests.support.foreign.site import Site, site
from tests.support.groups import turn_of

LIMIT_S = 900  # of a test's setup, its call and its teardown each; clusters are raised and taken down in them


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Require that every test of this folder has the mark e2e, also in a module that forgets it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))
    items.sort(key=lambda item: turn_of(item.path.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of Slurm to the report of a failed test, because the cluster is removed later."""
    report = yield
    used = vars(item).get("funcargs", {}).values()
    if report.when == "call" and report.failed:
        report.sections += [
            (f"Slurm of {one.name}", one.slurm_status()) for one in used if isinstance(one, Cluster)
        ]
    return report


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes in partition `train`, created and verified by `up`."""
    name = f"e{secrets.token_hex(3)}"
    home = tmp_path_factory.mktemp("shared home")
    cwd = tmp_path_factory.mktemp("shared cwd")
    with raised(name, local_spec(name), home, cwd) as one:
        yield one


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster. A module restores its spec, leaves no job, and all nodes in service."""
    spec = shared_cluster.spec.read_text()
    yield shared_cluster
    assert shared_cluster.spec.read_text() == spec
    look = (
        "squeue --noheader; sinfo --noheader --Node --states=all --format='%N %T %E' | grep -v "
        "' idle none$'"
    )
    wait = (
        f'for i in $(seq 60); do left=$({look}); [ -n "$left" ] || break; sleep 0.5; done; echo '
        f'"$left"'
    )
    assert shared_cluster.ssh(f"{shared_cluster.name}-ctl", wait).strip() == ""


@pytest.fixture(scope="session")
def person() -> Iterator[Person]:
    """An ordinary user who installed the wheel of this checkout."""
    with new_person() as one:
        yield one


@pytest.fixture(scope="session")
def rights(person: Person) -> Iterator[None]:
    with allowed(person):
        yield


@pytest.fixture(scope="session")
def national() -> Iterator[Site]:
    """A foreign Slurm cluster with accounting that demands an account:
    tests/support/foreign/site.py.
    """
    with site("national") as one:
        yield one


@pytest.fixture(scope="session")
def campus() -> Iterator[Site]:
    """A foreign Slurm cluster without accounting."""
    with site("campus") as one:
        yield one
