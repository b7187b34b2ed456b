"""bundle create, verify, show: everything for a cluster in one file, for air-gapped hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.cluster.up import reject_bundles
from clusterctl.errors import NotUpError, ProvisionError, UsageError
from clusterctl.packages import bundle_create
from clusterctl.packages.bundle import Bundle, damages, open_bundle, reject_defects
from clusterctl.packages.bundle_checks import mismatches
from clusterctl.spec.distributions import Distribution, distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import find_spec
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.inventory import inventory_of
from clusterctl.transport.tree import shown_size

BundleFile = Annotated[Path, typer.Argument(metavar="FILE", help="A bundle that `bundle create` made.")]
Systems = Annotated[
    list[str] | None,
    typer.Option("--os", metavar="NAME", help="A distribution of the hosts, such as debian-12 or rocky-9."),
]


def create(
    screen: Screen,
    options: Options,
    system: Systems = None,
    archive: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="NAME=FILE",
            help="Package repositories of a distribution, in apt or dnf format. Default: its public ones.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Default: NAME.bundle.tar here.")
    ] = None,
) -> None:
    """Pack OS packages with dependencies and Python wheels into one file.

    For the distributions of the hosts if the cluster is up, else of --os.
    """
    spec = spec_of(options.chosen(screen))
    reject_bundles(spec, fix="create it without a bundle: `clusterctl up`")
    names = _names(screen, options, system)
    distributions = tuple({one.release: one for one in map(_distribution, names)}.values())
    archives = dict(_assignment(text) for text in archive or ())
    if unknown := archives.keys() - {one.release for one in distributions}:
        raise UsageError(
            f"--from names {', '.join(sorted(unknown))}, which no host has",
            code="unknown-distribution",
            fix="say it with --os",
        )
    for name in names:
        if name.startswith("rhel-") and _distribution(name).release not in archives:
            raise UsageError(
                f"--from must say where packages of {name} come from",
                code="rhel-without-repositories",
                why="RHEL's come with a subscription, and no public repository has them",
                fix=f"say --from {name}=FILE, written as in /etc/yum.repos.d",
            )
    target = out or Path(f"{spec.name}.bundle.tar")
    wanted = bundle_create.BundleRequest(spec, distributions, archives)
    made = bundle_create.create(wanted, target, report=screen.note)
    size = shown_size(target.stat().st_size)
    screen.result(
        _answer(made), *_lines(made), f"wrote {target}, {size}; take it along with clusterctl itself"
    )


def verify(screen: Screen, options: Options, path: BundleFile, system: Systems = None) -> None:
    """Verify the checksums of a bundle, and that it matches this clusterctl and the spec."""
    opened = open_bundle(path)
    releases = list({_distribution(name).release: None for name in system or ()})
    wrong = (*mismatches(opened, _spec(screen, options), releases), *damages(opened))
    reject_defects(path, wrong)
    screen.result(_answer(opened), *_lines(opened), "all checksums match")


def show(screen: Screen, options: Options, path: BundleFile) -> None:
    """Show the manifest of a bundle."""
    opened = open_bundle(path)
    screen.result(_answer(opened), *_lines(opened))


def _spec(screen: Screen, options: Options) -> ClusterSpec | None:
    """The spec that is meant; without one, a bundle may be for any."""
    found = options.file or options.cluster or find_spec(Path.cwd())
    return spec_of(options.chosen(screen)) if found else None


def _distribution(name: str) -> Distribution:
    try:
        return distribution_of(name)
    except ProvisionError as exc:
        raise UsageError(
            exc.what, code="unknown-distribution", where="--os", why=exc.why, fix=exc.fix
        ) from exc


def _names(screen: Screen, options: Options, names: list[str] | None) -> list[str]:
    """Distributions that are named, else those of the hosts as they were last looked at."""
    if names:
        return names
    try:
        hosts = inventory_of(options.chosen(screen).workspace()).hosts
    except NotUpError as exc:
        raise UsageError(
            "which distributions do the hosts have?",
            code="missing-argument",
            why="the cluster is not up, so nobody has looked yet",
            fix="say it: --os debian-12, or --os rocky-9; several if several have to be served",
        ) from exc
    return [host.distribution for host in hosts]


def _assignment(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(
            f"--from {text} is not NAME=FILE", code="bad-value", fix="say it as debian-12=mirror.list"
        )
    return _distribution(name).release, Path(path)


def _answer(opened: Bundle) -> dict[str, Any]:
    manifest = opened.manifest
    return {
        "file": str(opened.file),
        "digest": opened.digest,
        "format": manifest.format,
        "clusterctl": manifest.clusterctl,
        "cluster": manifest.cluster,
        "architecture": manifest.architecture,
        "bytes": opened.file.stat().st_size,
        "systems": {
            release: {
                "packages": system.packages,
                "python": system.python,
                "wheels": len(system.wheels + system.gpu + system.more),
            }
            for release, system in manifest.systems.items()
        },
    }


def _lines(opened: Bundle) -> list[str]:
    manifest = opened.manifest
    lines = [f"bundle for cluster {manifest.cluster!r}, created by clusterctl {manifest.clusterctl}"]
    lines += [
        f"  {release}: {system.packages} packages, {len(system.wheels + system.gpu + system.more)} wheels "
        f"for Python {system.python}"
        for release, system in manifest.systems.items()
    ]
    return [*lines, f"  digest {opened.digest}"]
