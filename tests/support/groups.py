"""Which end-to-end modules share clusters, and so a worker of pytest-xdist; which groups begin first."""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

# They change settings of the kernel, which are this machine's and so all clusters' and hosts'.
ALONE = frozenset({"test_local_kernel.py", "test_many.py", "test_sweep.py"})
# Any other module is a group of its own.
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
_GROUP_OF = {module: group for group, modules in GROUPS.items() for module in modules}
# The longest groups first: one that began last would keep all others waiting for it. The first of all also
# makes what the others use, this machine's image and its packages.
LONGEST = (
    "training",
    "test_onprem.py",
    "jobs",
    "test_onprem_el.py",
    "test_drift.py",
    "test_onprem_localhost.py",
    "test_gcp.py",
    "test_debian_12.py",
    "test_gpus.py",
    "test_convergence.py",
    "test_no_scheduler.py",
    "manual",
    "test_examples.py",
    "ends",
    "test_ordinary_user.py",
    "test_systemd_host.py",
    "test_machine_errors.py",
)


def group_of(module: str) -> str:
    """The group of a module, by its file's name."""
    return _GROUP_OF.get(module, module)


def turn_of(module: str) -> tuple[int, str]:
    """What modules are sorted by, so that the groups begin in the order of ``LONGEST``."""
    group = group_of(module)
    return (LONGEST.index(group), "") if group in LONGEST else (len(LONGEST), group)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Sends all tests of a group to one worker, one after the other.

    pytest-xdist's own `--dist=loadgroup` spreads them over all workers under pytest 9.2, without a word.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(PurePath(nodeid.partition("::")[0]).name)
