"""Groups of end-to-end modules that share clusters and a worker of pytest-xdist, and their order."""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

# Any other module is a group of its own.
GROUPS = {
    "local": (
        "test_main_job.py",
        "test_payload.py",
        "test_data.py",
        "test_own_folder.py",
        "test_jobs.py",
        "test_job_words.py",
        "test_containers.py",
        "test_submit_survival.py",
        "test_nodes.py",
        "test_examples.py",
        "test_rehearse.py",
        "test_shell.py",
        "test_failures.py",
        "test_hangs.py",
    ),
    "life": ("test_convergence.py", "test_storage.py"),
    "person": ("test_ordinary_user.py", "test_manual.py"),
    "attach": (
        "test_attach.py",
        "test_attach_place.py",
        "test_attach_login.py",
        "test_attach_strict.py",
    ),
}
_GROUP_OF = {module: group for group, modules in GROUPS.items() for module in modules}
# The longest groups first: one that began last would keep all others waiting for it. The first of
# all also makes what the others use, this machine's image and its packages.
LONGEST = (
    "local",
    "test_onprem_el.py",
    "life",
    "attach",
    "test_drift.py",
    "test_needs.py",
    "person",
    "test_onprem.py",
    "test_gcp.py",
    "test_gpus.py",
    "test_no_scheduler.py",
    "test_systemd_host.py",
    "test_onprem_faults.py",
)


def group_of(module: str) -> str:
    return _GROUP_OF.get(module, module)


def turn_of(module: str) -> tuple[int, str, int]:
    """What modules are sorted by: groups begin as in ``LONGEST``, their modules follow as in
    ``GROUPS``.
    """
    group = group_of(module)
    turn = LONGEST.index(group) if group in LONGEST else len(LONGEST)
    return turn, group, GROUPS.get(group, (module,)).index(module)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Sends all tests of a group to one worker, one after the other.

    pytest-xdist's own `--dist=loadgroup` spreads them over all workers under pytest 9.2, without a
    word.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(PurePath(nodeid.partition("::")[0]).name)
