"""Bring the repository of a bundle to the hosts that have something to install, once each, over our SSH."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from clusterctl.bundle.archive import Bundle, header
from clusterctl.bundle.checks import misfits, refuse
from clusterctl.bundle.parts import system_folder
from clusterctl.configure.inventory_file import BUNDLE_FOLDER
from clusterctl.distributions import Distribution, distribution_of
from clusterctl.errors import ClusterctlError, CommandError, Failure, TransportError
from clusterctl.inventory import Host, Inventory
from clusterctl.telling import HostStep, Say
from clusterctl.transport.base import Transport

_AT_ONCE: Final = 8
_REPOSITORY: Final = f"{BUNDLE_FOLDER}/repository"

# What apt and dnf are told in place of the host's own settings of repositories. The indexes were made of
# signed ones when the bundle was packed; packages of rpm bear signatures of their own.
_FILES: Final[Mapping[str, Mapping[str, str]]] = {
    "Debian": {
        "apt.conf": f"""\
Dir::Etc::SourceList "{BUNDLE_FOLDER}/bundle.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "{BUNDLE_FOLDER}/lists";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Sandbox::User "root";
APT::Default-Release "";
""",
        "bundle.list": f"deb [trusted=yes] file:{_REPOSITORY} ./\n",
        "prepare": f"mkdir -p lists/partial\nAPT_CONFIG={BUNDLE_FOLDER}/apt.conf apt-get --quiet=2 update\n",
    },
    "RedHat": {
        "dnf.conf": f"""\
[main]
reposdir={BUNDLE_FOLDER}/repos
cachedir={BUNDLE_FOLDER}/cache
gpgcheck=1
""",
        "repos/bundle.repo": f"""\
[clusterctl-bundle]
name=clusterctl bundle
baseurl=file://{_REPOSITORY}
gpgcheck=1
gpgkey={{keys}}
module_hotfixes=1
""",
        "prepare": "",
    },
}

# Answers `there`, `send` and then takes a tar, or nothing where all is installed.
_RECEIVE: Final = """\
set -eu
umask 077
folder=$1 digest=$2
shift 2
for mark; do [ ! -e "$mark" ] || exit 0; done
if [ -e "$folder/$digest" ]; then echo there; exit; fi
rm -rf -- "$folder" "$folder".??????
new=$(mktemp -d -- "$folder.XXXXXX")
trap 'rm -rf -- "$new"' EXIT
echo send
tar -xf - -C "$new" --no-same-owner --no-same-permissions
mv -- "$new" "$folder"
cd -- "$folder"
sh -eu prepare >&2
touch -- "$digest"
"""


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What every host gets that lacks something."""

    bundle: Bundle
    mark: str
    to: Callable[[str], Transport]

    def bring(self, host: Host) -> bool:
        """Whether the repository had to be sent."""
        distribution = distribution_of(host.distribution)
        argv = ["sudo", "-n", "sh", "-c", _RECEIVE, "sh", BUNDLE_FOLDER, self.bundle.digest]
        argv += _marks(host, self.mark)
        with self.to(host.name).converse(argv, bulk=True) as talk:
            answer = _line(talk.receive)
            if answer == "send":
                for chunk in _tar(self.bundle, distribution):
                    talk.send(chunk)
            talk.finish()
        return answer == "send"


def ship(
    bundle: Bundle, inventory: Inventory, mark: str, to: Callable[[str], Transport], *, say: Say
) -> tuple[str, ...]:
    """Have the repository on each host that is not installed yet; the names of those that it went to.

    ``mark`` names what is to be installed. Installing removes the repository again.

    Raises:
        BundleError: the bundle has no packages for some host's distribution; nothing was sent.
        TransportError: it could not be sent to some hosts; one failure a host.
    """
    releases = {distribution_of(host.distribution).release for host in inventory.hosts}
    refuse(bundle.file, misfits(bundle, None, sorted(releases)))
    delivery = _Delivery(bundle, mark, to)
    failed: dict[str, ClusterctlError] = {}
    sent: list[str] = []

    def bring(host: Host) -> None:
        try:
            if delivery.bring(host):
                sent.append(host.name)
        except ClusterctlError as exc:
            failed[host.name] = exc
        say(HostStep(host.name, "has the packages", len(inventory.hosts), failed=host.name in failed))

    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(inventory.hosts))) as pool:
        list(pool.map(bring, inventory.hosts))
    if failed:
        raise _unsent(failed)
    return tuple(sorted(sent))


def _marks(host: Host, mark: str) -> tuple[str, str]:
    """The files by which a host tells that all is installed, or what its roles need: see install.yml."""
    whole = f"/opt/clusterctl/installed-{mark}"
    own = "" if host.leads and host.computes else "-controller" if host.leads else "-compute"
    return whole, f"{whole}{own if host.leads or host.computes else '-login'}"


def _line(receive: Callable[[], bytes]) -> str:
    said = b""
    while not said.endswith(b"\n") and (chunk := receive()):
        said += chunk
    return said.decode(errors="replace").strip()


def _tar(bundle: Bundle, distribution: Distribution) -> Iterator[bytes]:
    """The repository as it lies in the bundle, and before it what points apt or dnf at it."""
    folder = system_folder(distribution.release)
    keys = sorted(path for path in bundle.places if path.startswith(f"{folder}/keys/"))
    urls = " ".join(f"file://{_REPOSITORY}/keys/{key.rpartition('/')[2]}" for key in keys)
    for name, text in _FILES[distribution.family].items():
        raw = text.format(keys=urls).encode() if name.endswith(".repo") else text.encode()
        yield header(name, len(raw)) + raw + bytes(-len(raw) % tarfile.BLOCKSIZE)
    yield from bundle.stream(folder, as_folder="repository")


def _unsent(failed: Mapping[str, ClusterctlError]) -> TransportError:
    failures = tuple(
        Failure(exc.code, exc.why or exc.what, name, "bundle", exc.fix, exc.retryable)
        for name, exc in failed.items()
    )
    full = any(isinstance(exc, CommandError) and "No space" in exc.why for exc in failed.values())
    return TransportError(
        f"the packages could not be brought to {', '.join(failed)}",
        why="; ".join(f"{failure.host}: {failure.cause}" for failure in failures),
        fix="make room in /var/lib there, then run `clusterctl up` again"
        if full
        else "see what `clusterctl ssh HOST` says, then run `clusterctl up` again",
        failures=failures,
    )
