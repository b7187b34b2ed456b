"""Ansible as the rest of clusterctl sees it: write the inventory, install on an image, configure hosts.

ansible-runner is imported when a playbook is run: most calls of `up` run none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from clusterctl.configure.events import Recap, TaskPreview, TaskProgress
from clusterctl.configure.inventory_file import (
    connection_variables,
    distribution_variables,
    install_mark,
    literal,
    to_yaml,
)
from clusterctl.errors import ConfigureError, Failure
from clusterctl.spec.distributions import distribution_of
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Inventory, ssh_options
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.process import temporary_folder


class Image(Protocol):
    """An image under construction that answers SSH. ``known_hosts`` has its key under `[address]:port`."""

    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def user(self) -> str: ...
    @property
    def key(self) -> Path: ...
    @property
    def known_hosts(self) -> Path: ...
    @property
    def distribution(self) -> str: ...


def configure(
    inventory: Inventory,
    workspace: Workspace,
    *,
    limit: Collection[str] = (),
    progress: Callable[[TaskProgress], None],
) -> Recap:
    """Configure every host of the cluster, or those that ``limit`` names; doing it again changes nothing.

    The Ansible inventory must be written, and Slurm's files lie in ``workspace.rendered``. A limit is sound
    only where nothing but these hosts has changed since all were configured: they may need what others hold.

    Raises:
        ConfigureError: tasks failed; one failure a host. The whole output is in ``workspace.logs``.
    """
    playbook = "configure.yml" if inventory.baked else "site.yml"
    return _run_noted(playbook, inventory, workspace, limit, progress)


def restore(
    inventory: Inventory,
    workspace: Workspace,
    *,
    limit: Collection[str] = (),
    progress: Callable[[TaskProgress], None],
) -> Mapping[str, tuple[str, ...]]:
    """Give hosts back as they were before their first ``configure``; what was left on each, and why.

    One that was given back already, or never configured, is left alone.

    Raises:
        ConfigureError: tasks failed; one failure a host. The others are given back.
    """
    return _run("restore.yml", inventory, workspace, limit, progress).notes


def preview(
    inventory: Inventory, workspace: Workspace, *, limit: Collection[str]
) -> tuple[tuple[TaskPreview, ...], tuple[Failure, ...]]:
    """What ``configure`` would change on these hosts, by Ansible's check mode; and where that can't be told.

    Raises:
        ConfigureError: Ansible itself could not run.
    """
    from clusterctl.configure.playbook import PlaybookRun, new_log, run_check_mode  # noqa: PLC0415

    playbook = "configure.yml" if inventory.baked else "site.yml"
    log = new_log(workspace.logs)
    return run_check_mode(PlaybookRun(playbook, workspace.inventory, len(limit), log, tuple(limit)))


def introduce(inventory: Inventory, workspace: Workspace, *, limit: Collection[str]) -> Recap:
    """Tell these hosts who belongs to the cluster: names, addresses, the firewall; nothing is restarted.

    Raises:
        ConfigureError: tasks failed; one failure a host. The whole output is in ``workspace.logs``.
    """
    return _run("introduce.yml", inventory, workspace, limit, lambda _: None)


def install_on_hosts(
    inventory: Inventory,
    workspace: Workspace,
    *,
    limit: Collection[str] = (),
    progress: Callable[[TaskProgress], None],
) -> Recap:
    """Run the install half of every role on the hosts, as ``configure`` does first where nothing is baked.

    Raises:
        ConfigureError: tasks failed; one failure a host. The whole output is in ``workspace.logs``.
    """
    return _run_noted("install_first.yml", inventory, workspace, limit, progress)


def _run_noted(
    playbook: str,
    inventory: Inventory,
    workspace: Workspace,
    limit: Collection[str],
    progress: Callable[[TaskProgress], None],
) -> Recap:
    """Run it; where it fails on somebody's own hosts, note what it did: what comes next may be their work."""
    try:
        return _run(playbook, inventory, workspace, limit, progress)
    except ConfigureError:
        if inventory.traits.user_owned:
            with suppress(ConfigureError):
                _run("seal.yml", inventory, workspace, limit, lambda _: None)
        raise


def _run(
    playbook: str,
    inventory: Inventory,
    workspace: Workspace,
    limit: Collection[str],
    progress: Callable[[TaskProgress], None],
) -> Recap:
    from clusterctl.configure.playbook import PlaybookRun, new_log, run_playbook  # noqa: PLC0415

    hosts = len(limit or inventory.hosts)
    run = PlaybookRun(playbook, workspace.inventory, hosts, new_log(workspace.logs), tuple(limit))
    return run_playbook(run, progress)


def install(
    image: Image, *, wheels: Path, lock: Path, workspace: Workspace, progress: Callable[[TaskProgress], None]
) -> Recap:
    """Run the install half of every role on an image that has a route to its mirror. No service is started.

    ``wheels`` is a folder with every wheel that ``lock``, a requirements file with hashes, names.

    Raises:
        ConfigureError: a task failed. The whole output is in ``workspace.logs``.
    """
    from clusterctl.configure.playbook import PlaybookRun, new_log, run_playbook  # noqa: PLC0415

    with temporary_folder() as folder:
        ssh_config = folder / "ssh_config"
        write_atomic(ssh_config, _ssh_config(image))
        document = {
            "all": {
                "vars": {
                    **connection_variables(ssh_config),
                    "clusterctl_install_mark": install_mark(),
                    "clusterctl_image": True,
                    **distribution_variables(distribution_of(image.distribution)),
                    "job_env_wheelhouse": literal(str(wheels)),
                    "job_env_requirements": literal(str(lock)),
                },
                "children": {CONTROLLER: {"hosts": {"image": {}}}, COMPUTE: {"hosts": {"image": {}}}},
            }
        }
        inventory = folder / "inventory.yml"
        write_atomic(inventory, to_yaml(document))
        run = PlaybookRun("install.yml", inventory, 1, new_log(workspace.logs))
        return run_playbook(run, progress)


def _ssh_config(image: Image) -> str:
    return (
        "Host image\n"
        f"    HostName {image.address}\n"
        f"    Port {image.port}\n"
        f"    User {image.user}\n" + ssh_options(key=image.key, known_hosts=image.known_hosts)
    )
