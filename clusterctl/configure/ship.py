"""Bring the repository of a bundle to the hosts that have something to install, once each, over our SSH."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from clusterctl.configure.inventory_file import BUNDLE_FOLDER, install_mark
from clusterctl.errors import CommandError, TransportError
from clusterctl.hosts.probe import HostReport
from clusterctl.packages.bundle import Bundle
from clusterctl.packages.bundle_checks import mismatches, raise_faults, system_folder
from clusterctl.spec.common import Software
from clusterctl.spec.distributions import Distribution, distribution_of
from clusterctl.state.inventory import Host, Inventory
from clusterctl.transport.base import Transport
from clusterctl.util.assets import asset, render, tree_files
from clusterctl.util.process import on_each, parallel_map
from clusterctl.util.progress import HostStep, Reporter

_MAX_PARALLEL: Final = 8
_UNPACK_S: Final = 1800.0  # a host says nothing while it unpacks and prepares
# Below it, by family, what apt and dnf are told in place of the host's own settings of repositories. The
# indexes were made of signed ones when the bundle was packed; packages of rpm bear signatures of their own.
_TEMPLATES: Final = "bundle"

# Which of the files that tell of a finished install are there.
_LOOK: Final = 'for mark; do [ ! -e "$mark" ] || echo there; done'


def lacking(
    inventory: Inventory,
    software: Software,
    reports: Mapping[str, HostReport],
    to: Callable[[str], Transport],
) -> tuple[Host, ...]:
    """The hosts that are not installed to the end. On those with cards something is installed for these, too.

    Raises:
        TransportError: a host can't be asked.
    """
    mark = install_mark(inventory, software)
    counted = inventory.compute if software.nvidia.installs else ()
    with_cards = {host.name for host in counted if reports[host.name].cards}

    def lacks(host: Host) -> bool:
        argv = ["sh", "-c", _LOOK, "sh", *_marks(host, mark, with_cards=host.name in with_cards)]
        return not to(host.name).run(argv).stdout

    found = parallel_map(inventory.hosts, lacks)
    return tuple(host for host, does in zip(inventory.hosts, found, strict=True) if does)


def ship(
    bundle: Bundle, hosts: Sequence[Host], to: Callable[[str], Transport], *, report: Reporter
) -> tuple[str, ...]:
    """Have the repository on these hosts; the names of those that it had to be sent to.

    Installing removes it again.

    Raises:
        BundleError: the bundle has no packages for some host's distribution; nothing was sent.
        TransportError: it could not be sent to some hosts; one failure a host.
    """
    releases = {distribution_of(host.distribution).release for host in hosts}
    raise_faults(bundle.file, mismatches(bundle, None, sorted(releases)))
    by_name = {host.name: host for host in hosts}

    def bring(name: str) -> bool:
        failed = True
        try:
            was_sent = _bring(bundle, by_name[name], to(name))
            failed = False
        finally:
            report(HostStep(name, "has the packages", len(hosts), failed=failed))
        return was_sent

    sent, failed = on_each(by_name, bring, most=_MAX_PARALLEL)
    if failed:
        full = any(isinstance(exc, CommandError) and "No space" in exc.why for exc in failed.values())
        first = "make room in /var/lib there" if full else "see what `clusterctl ssh HOST` says"
        raise TransportError.of_hosts(
            "the packages could not be brought to {hosts}",
            [exc.on(host, "bundle") for host, exc in failed.items()],
            fix=f"{first}, then run `clusterctl up` again",
        )
    return tuple(sorted(name for name, was_sent in sent.items() if was_sent))


def _bring(bundle: Bundle, host: Host, transport: Transport) -> bool:
    """Whether it had to be sent."""
    argv = ["sudo", "-n", "sh", "-c", render(f"{_TEMPLATES}/receive.sh"), "sh", BUNDLE_FOLDER, bundle.digest]
    with transport.converse(argv, bulk=True, silence_s=_UNPACK_S) as talk:
        answer = _line(talk.receive)
        if answer == "send":
            for chunk in _tar(bundle, distribution_of(host.distribution)):
                talk.send(chunk)
        talk.finish()
    return answer == "send"


def _marks(host: Host, mark: str, *, with_cards: bool) -> tuple[str, ...]:
    """The files by which a host tells that all is installed, or what its roles need: see install.yml."""
    whole = f"/opt/clusterctl/installed-{mark}"
    role = (
        "" if host.is_controller and host.is_compute else "-controller" if host.is_controller else "-compute"
    )
    own = f"{whole}{role if host.is_controller or host.is_compute else '-login'}"
    return (f"{own}-cards",) if with_cards else (whole, own)


def _line(receive: Callable[[], bytes]) -> str:
    said = b""
    while not said.endswith(b"\n") and (chunk := receive()):
        said += chunk
    return said.decode(errors="replace").strip()


def _tar(bundle: Bundle, distribution: Distribution) -> Iterator[bytes]:
    """The repository as it lies in the bundle, and before it what points apt or dnf at it."""
    folder = system_folder(distribution.release)
    paths = sorted(path for path in bundle.places if path.startswith(f"{folder}/keys/"))
    keys = " ".join(f"file://{BUNDLE_FOLDER}/repository/keys/{path.rpartition('/')[2]}" for path in paths)
    root = asset("templates") / _TEMPLATES / distribution.family
    names = [path.relative_to(root.parents[1]).as_posix() for path in tree_files(root)]
    files = {
        name.split("/", 2)[2].removesuffix(".j2"): render(name, folder=BUNDLE_FOLDER, keys=keys).encode()
        for name in names
    }
    return bundle.stream(folder, as_folder="repository", after=files)
