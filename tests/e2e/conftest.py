"""One two-node cluster that the modules share: it lives in a home of its own until the session ends."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, raised

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions:
  - {{name: train, nodes: 2}}
slurm:
  qos:
    - {{name: urgent, priority: 100}}
monitoring: {{interval: 1s}}
"""

LIMIT_S = 900  # of a test's setup, its call and its teardown each; clusters are raised and taken down in them

# They boot hosts or clusters whose settings of the kernel are this machine's, and so other clusters' too.
ALONE = frozenset(
    {"test_local_kernel.py", "test_machine_errors.py", "test_onprem_localhost.py", "test_systemd_host.py"}
)
# The longest first: one that began last would keep all others waiting for it. The first of all also makes
# what the others use, this machine's image and its packages.
LONGEST = (
    "test_main_job.py",
    "test_onprem_el.py",
    "test_onprem.py",
    "test_many.py",
    "test_drift.py",
    "test_jobs.py",
    "test_onprem_offline.py",
    "test_mending.py",
    "test_manual.py",
    "test_payload.py",
    "test_wheel.py",
    "test_gcp.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder raises a real cluster: a mark that a module forgets would hide that."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))
            if item.path.name in ALONE:
                item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What Slurm had to say when a test failed: its words are gone once the cluster is."""
    report = yield
    used = vars(item).get("funcargs", {}).values()
    if report.when == "call" and report.failed:
        report.sections += [(f"Slurm of {one.name}", one.told()) for one in used if isinstance(one, Cluster)]
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes in partition `train`, up and proven."""
    name = f"e{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("shared home"), tmp_path_factory.mktemp("shared cwd")
    with raised(name, SPEC.format(name=name), home, cwd) as one:
        yield one
