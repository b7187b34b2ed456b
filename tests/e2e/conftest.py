"""One two-node cluster that the modules share: it lives in a home of its own until the session ends."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
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


# They boot hosts, whose settings of the kernel are this machine's, and so other clusters' too.
BOOT_HOSTS = frozenset({"test_machine_errors.py", "test_systemd_host.py"})


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder raises a real cluster: a mark that a module forgets would hide that."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.path.name in BOOT_HOSTS:
                item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes in partition `train`, up and proven."""
    name = f"e{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("shared home"), tmp_path_factory.mktemp("shared cwd")
    with raised(name, SPEC.format(name=name), home, cwd) as one:
        yield one
