"""The command bundle: a folder with all software for air-gapped hosts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from clusterctl.cli.options import Words, option
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import for_operators
from clusterctl.errors import NotUpError, ProvisionError, UsageError
from clusterctl.packages.bundle import BundleRequest, create
from clusterctl.spec.distributions import Distribution, distribution_of
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.inventory import inventory_of
from clusterctl.util.numbers import counted


@for_operators
def bundle(
    screen: Screen,
    system: Annotated[
        Words,
        option(
            "A distribution of the hosts, such as debian-12 or rocky-9. Repeatable.",
            "--os",
            metavar="NAME",
        ),
    ] = None,
    archive: Annotated[
        Words,
        option(
            "A file with package repositories of a distribution, in apt or dnf format. Default: "
            "its public repositories.",
            "--from",
            metavar="NAME=FILE",
        ),
    ] = None,
    out: Annotated[
        Path | None, option("Output folder. Default: ./NAME.bundle.", metavar="FOLDER")
    ] = None,
) -> None:
    """Download OS packages with dependencies and Python wheels to a folder.

    Covers the hosts' distributions if the cluster is up, otherwise those given by --os.
    """
    spec = spec_of(screen.chosen())
    names = _names(screen, system)
    by_release = {distribution.release: distribution for distribution in map(_distribution, names)}
    archives = dict(_assignment(text) for text in archive or ())
    if unknown := archives.keys() - by_release.keys():
        raise UsageError(
            "--from names a distribution that the bundle does not cover: "
            f"{', '.join(sorted(unknown))}",
            code="not-found",
            about="distribution",
            fix="add the distribution with --os",
        )
    for name in names:
        if name.startswith("rhel-") and _distribution(name).release not in archives:
            raise UsageError(
                f"the package repositories of {name} are missing",
                about="repositories",
                why="packages of RHEL need a subscription; no public repository has them",
                fix=f"pass --from {name}=FILE, with a file as in /etc/yum.repos.d",
            )
    folder = out or Path(f"{spec.name}.bundle")
    request = BundleRequest(spec, tuple(by_release.values()), archives, screen.note)
    systems = create(request, folder)
    lines = [
        f"{release}: {counted(system.packages, 'package')}, {counted(system.wheels, 'wheel')} for "
        f"Python {system.python}"
        for release, system in systems.items()
    ]
    answer = {
        "folder": str(folder.absolute()),
        "systems": {release: asdict(system) for release, system in systems.items()},
    }
    screen.result(answer, *lines, f"wrote {folder}; copy it together with clusterctl")


def _distribution(name: str) -> Distribution:
    try:
        return distribution_of(name)
    except ProvisionError as exc:
        raise UsageError(
            exc.what,
            code="not-found",
            about="distribution",
            where="--os",
            why=exc.why,
            fix=exc.fix,
        ) from exc


def _names(screen: Screen, names: list[str] | None) -> list[str]:
    """Return ``names`` (from --os); if empty, the names of the hosts' Linux distributions."""
    if names:
        return names
    try:
        hosts = inventory_of(screen.chosen().workspace()).hosts
    except NotUpError as exc:
        raise UsageError(
            "the distributions of the hosts are unknown",
            about="argument-missing",
            why="the cluster is not up, so its hosts have not been probed",
            fix="pass --os for each distribution, such as --os debian-12 or --os rocky-9",
        ) from exc
    return [host.distribution for host in hosts]


def _assignment(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(
            f"--from {text} is not of the form NAME=FILE",
            about="value",
            fix="write it as --from debian-12=mirror.list",
        )
    return _distribution(name).release, Path(path).absolute()
