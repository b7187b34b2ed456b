"""The groups that modules form, and the two-node cluster that some of them share until the session ends."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, raised
from tests.support.install import Installed, build_wheel, install

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

# They change settings of the kernel, which are this machine's and so all clusters' and hosts'.
ALONE = frozenset({"test_local_kernel.py", "test_many.py", "test_sweep.py"})
# Modules that share clusters, and so a worker of pytest-xdist; any other module is a group of its own.
GROUPS = {
    "jobs": (
        "test_jobs.py",
        "test_job_words.py",
        "test_shell.py",
        "test_submit_survival.py",
        "test_nodes.py",
    ),
    "training": ("test_main_job.py", "test_payload.py", "test_data.py", "test_own_folder.py"),
    "manual": ("test_manual.py", "test_wheel.py"),
    "ends": ("test_interrupt.py", "test_survival_sweep.py"),
}
GROUP_OF = {module: group for group, modules in GROUPS.items() for module in modules}
# The longest groups first: one that began last would keep all others waiting for it. The first of all also
# makes what the others use, this machine's image and its packages.
LONGEST = (
    "training",
    "test_onprem.py",
    "jobs",
    "test_onprem_el.py",
    "manual",
    "test_onprem_localhost.py",
    "test_drift.py",
    "test_convergence.py",
    "test_gpus.py",
    "test_gcp.py",
    "test_no_scheduler.py",
    "test_examples.py",
    "ends",
    "test_systemd_host.py",
    "test_machine_errors.py",
)


def group_of(item: pytest.Item) -> str:
    return GROUP_OF.get(item.path.name, item.path.name)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder raises a real cluster: a mark that a module forgets would hide that."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))
            if item.path.name in ALONE:
                item.add_marker(pytest.mark.alone)

    def turn(item: pytest.Item) -> tuple[int, str]:
        group = group_of(item)
        return (LONGEST.index(group), "") if group in LONGEST else (len(LONGEST), group)

    items.sort(key=turn)


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


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of this checkout, in an environment whose path has a space."""
    return install(build_wheel(tmp_path_factory.mktemp("dist")), tmp_path_factory.mktemp("an env") / "venv")
