"""The commands bundle create, verify and show. A bundle has all software for air-gapped hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from clusterctl.cli.options import Words, argument, option
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import for_operators
from clusterctl.cluster.up import reject_bundles
from clusterctl.errors import NotUpError, ProvisionError, UsageError
from clusterctl.packages import bundle_create
from clusterctl.packages.bundle import Bundle, damages, mismatches, open_bundle, reject_defects
from clusterctl.spec.distributions import Distribution, distribution_of
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.inventory import inventory_of
from clusterctl.transport.tree import format_size
from clusterctl.util.numbers import counted

BundleFile = Annotated[Path, argument("A bundle from `bundle create`.", metavar="FILE")]
Systems = Annotated[
    Words,
    option(
        "A distribution of the hosts, such as debian-12 or rocky-9. Repeatable.",
        "--os",
        metavar="NAME",
    ),
]


@for_operators
def create(
    screen: Screen,
    system: Systems = None,
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
        Path | None, option("Output file. Default: ./NAME.bundle.tar.", metavar="FILE")
    ] = None,
) -> None:
    """Pack OS packages with dependencies and Python wheels into a file.

    Covers the hosts' distributions if the cluster is up, otherwise those given by --os.
    """
    spec = spec_of(screen.chosen())
    reject_bundles(spec, fix="create it without a bundle: `clusterctl up`")
    names = _names(screen, system)
    by_release = {distribution.release: distribution for distribution in map(_distribution, names)}
    archives = dict(_assignment(text) for text in archive or ())
    if unknown := archives.keys() - by_release.keys():
        raise UsageError(
            "--from names a distribution that the bundle does not cover: "
            f"{', '.join(sorted(unknown))}",
            code="unknown-distribution",
            fix="add the distribution with --os",
        )
    for name in names:
        if name.startswith("rhel-") and _distribution(name).release not in archives:
            raise UsageError(
                f"the package repositories of {name} are missing",
                code="rhel-without-repositories",
                why="packages of RHEL need a subscription; no public repository has them",
                fix=f"pass --from {name}=FILE, with a file as in /etc/yum.repos.d",
            )
    target = out or Path(f"{spec.name}.bundle.tar")
    request = bundle_create.BundleRequest(spec, tuple(by_release.values()), archives, screen.note)
    made = bundle_create.create(request, target)
    size = format_size(target.stat().st_size)
    _show(screen, made, f"wrote {target}, {size}; copy it together with clusterctl")


def verify(screen: Screen, path: BundleFile, system: Systems = None) -> None:
    """Verify that a bundle is intact and matches clusterctl and the spec."""
    opened = open_bundle(path)
    releases = list({_distribution(name).release: None for name in system or ()})
    has_spec = screen.cluster is not None or screen.chosen().spec_file is not None
    # Without a spec, only the checksums and the distributions are verified.
    spec = spec_of(screen.chosen()) if has_spec else None
    defects = (*mismatches(opened, spec, releases), *damages(opened))
    reject_defects(path, defects)
    _show(screen, opened, "all checksums match")


def show(screen: Screen, path: BundleFile) -> None:
    """Show the manifest of a bundle."""
    _show(screen, open_bundle(path))


def _distribution(name: str) -> Distribution:
    try:
        return distribution_of(name)
    except ProvisionError as exc:
        code = "unknown-distribution"
        raise UsageError(exc.what, code=code, where="--os", why=exc.why, fix=exc.fix) from exc


def _names(screen: Screen, names: list[str] | None) -> list[str]:
    """Return ``names`` (from --os); if empty, the names of the hosts' Linux distributions."""
    if names:
        return names
    try:
        hosts = inventory_of(screen.chosen().workspace()).hosts
    except NotUpError as exc:
        raise UsageError(
            "the distributions of the hosts are unknown",
            code="missing-argument",
            why="the cluster is not up, so its hosts have not been probed",
            fix="pass --os for each distribution, such as --os debian-12 or --os rocky-9",
        ) from exc
    return [host.distribution for host in hosts]


def _assignment(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(
            f"--from {text} is not of the form NAME=FILE",
            code="bad-value",
            fix="write it as --from debian-12=mirror.list",
        )
    return _distribution(name).release, Path(path)


def _show(screen: Screen, opened: Bundle, *last: str) -> None:
    manifest = opened.manifest
    systems: dict[str, dict[str, Any]] = {}
    lines = [
        f"bundle for cluster {manifest.cluster!r}, created by clusterctl {manifest.clusterctl}"
    ]
    for release, system in manifest.systems.items():
        count = system.packages
        wheels = len(system.wheels + system.gpu + system.more)
        systems[release] = {"packages": count, "python": system.python, "wheels": wheels}
        lines.append(
            f"  {release}: {counted(count, 'package')}, {counted(wheels, 'wheel')} for Python {system.python}"
        )
    answer = {
        "file": str(opened.file),
        "digest": opened.digest,
        "format": manifest.format,
        "clusterctl": manifest.clusterctl,
        "cluster": manifest.cluster,
        "architecture": manifest.architecture,
        "bytes": opened.file.stat().st_size,
        "systems": systems,
    }
    screen.result(answer, *lines, f"  digest {opened.digest}", *last)
