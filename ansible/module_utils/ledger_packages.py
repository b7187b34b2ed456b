"""The packages of a host, as dpkg or rpm have them, and which of ours nobody else needs by now."""

from __future__ import annotations

import abc
import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

Run = Callable[..., Any]  # AnsibleModule.run_command

_NEEDED = re.compile(r"^\s+(?P<what>.+) is needed by \(installed\) (?P<by>\S+)", re.MULTILINE)
_KEY = "gpg-pubkey"
RPM_SAVED = ".rpmsave"  # what rpm appends to a file of settings that it keeps
_INFO = "/var/lib/dpkg/info"
_TAIL = 1500  # characters of what a program said that are shown
_NOT_INSTALLED = ("not-installed", "config-files")


class PackageError(Exception):
    """The package manager did not do it; the text is what it said."""


class _Manager(abc.ABC):
    """What both managers have in common. ``TEST`` is the command that only tries to remove packages."""

    TEST: tuple[str, ...]

    def __init__(self, run: Run) -> None:
        self._run = run

    @abc.abstractmethod
    def needed(self, output: str, names: Collection[str]) -> set[str]:
        """Return the packages among ``names`` that ``TEST`` did not remove because others need them."""

    def removable(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that nothing else that is installed needs."""
        left = sorted(names)
        while left:
            rc, out, err = self._run([*self.TEST, *left])
            if rc == 0:
                break
            needed = self.needed(out + err, left)
            if not needed:
                raise PackageError((out + err).strip())
            left = [name for name in left if name not in needed]
        return left


class Dpkg(_Manager):
    """Debian, Ubuntu."""

    TEST = ("dpkg", "--dry-run", "--purge")

    def installed(self) -> dict[str, str]:
        """Name -> version."""
        return {name: version for status, name, version in self._all() if status not in _NOT_INSTALLED}

    def settings(self) -> list[str]:
        """Those that were removed, but for their settings."""
        return sorted(name for status, name, _ in self._all() if status == "config-files")

    def changed_settings(self, names: Iterable[str]) -> list[str]:
        """Their files of settings that are not as the packages brought them: removing takes them along."""
        out = _ask(self._run, ["dpkg-query", "-W", "-f", "${Conffiles}\n", *sorted(names)])
        rows = (line.split() for line in out.splitlines() if line.startswith(" "))
        return sorted(row[0] for row in rows if Path(row[0]).is_file() and _md5(row[0]) != row[1])

    def purged(self, names: Iterable[str], folders: Iterable[str]) -> list[str]:
        """Those of the folders which the packages speak of in what they do when they are purged."""
        scripts = [Path(_INFO, f"{one}.postrm") for name in names for one in (name, name.partition(":")[0])]
        text = "".join(script.read_text(errors="replace") for script in scripts if script.is_file())
        return [folder for folder in folders if folder in text]

    def automatic(self) -> list[str]:
        """Those that are there only since others need them."""
        return sorted(_ask(self._run, ["apt-mark", "showauto"]).split())

    def mark_automatic(self, names: Collection[str]) -> None:
        """Let the package manager remove them again when nobody needs them."""
        manual = set(_ask(self._run, ["apt-mark", "showmanual"]).split())
        if wanted := sorted(manual.intersection(names)):
            _ask(self._run, ["apt-mark", "auto", *wanted])

    def needed(self, output: str, names: Collection[str]) -> set[str]:
        failed = {line.strip().partition(":")[0] for line in output.rpartition("processing:")[2].splitlines()}
        return {name for name in names if name.partition(":")[0] in failed}

    def remove(self, names: Collection[str], keep_settings: Collection[str] = ()) -> None:
        """Remove them with their settings, but for those whose settings were there before."""
        environ = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        argv = ["apt-get", "--yes", "--option=DPkg::Lock::Timeout=300", "--no-auto-remove"]
        kept = sorted(set(names).intersection(keep_settings))
        for verb, some in (("purge", sorted(set(names).difference(kept))), ("remove", kept)):
            if some:
                _ask(self._run, [*argv, verb, *some], environ_update=environ)

    def _all(self) -> Iterator[tuple[str, str, str]]:
        out = _ask(
            self._run, ["dpkg-query", "-W", "-f", "${db:Status-Status} ${binary:Package} ${Version}\n"]
        )
        for line in out.splitlines():
            status, name, version = line.split(" ", 2)
            yield status, name, version


class Rpm(_Manager):
    """Rocky Linux and its kin."""

    TEST = ("rpm", "-e", "--test")

    def installed(self) -> dict[str, str]:
        """Name -> version. The keys that signatures are held against are packages, too."""
        out = _ask(self._run, ["rpm", "-qa", "--qf", "%{NAME} %{VERSION}-%{RELEASE} %{ARCH}\n"])
        rows = (line.split(" ") for line in out.splitlines())
        return {(f"{row[0]}-{row[1]}" if row[0] == _KEY else f"{row[0]}.{row[2]}"): row[1] for row in rows}

    def settings(self) -> list[str]:
        """None: rpm removes settings with their package, unless somebody changed them."""
        return []

    def changed_settings(self, names: Iterable[str]) -> list[str]:  # noqa: ARG002
        """None: rpm itself keeps a changed file, as NAME.rpmsave."""
        return []

    def purged(self, names: Iterable[str], folders: Iterable[str]) -> list[str]:  # noqa: ARG002
        """None: rpm removes nothing that it did not bring."""
        return []

    def automatic(self) -> list[str]:
        """Those that are there only since others need them."""
        query = "dnf --quiet --cacheonly repoquery --installed --qf".split()
        rc, out, _ = self._run([*query, "%{name}.%{arch} %{reason}\n"])
        rows = [line.split() for line in out.splitlines()] if rc == 0 else []
        return sorted(row[0] for row in rows if row[1:] in (["dependency"], ["weak-dependency"]))

    def mark_automatic(self, names: Collection[str]) -> None:
        """Let the package manager remove them again when nobody needs them."""
        if wanted := sorted(set(self.installed()).intersection(names).difference(self.automatic())):
            _ask(self._run, ["dnf", "--quiet", "mark", "remove", *wanted])

    def needed(self, output: str, names: Collection[str]) -> set[str]:
        missed = {found.group("what") for found in _NEEDED.finditer(output)}
        return self._providers(missed).intersection(names)

    def remove(self, names: Collection[str], keep_settings: Collection[str] = ()) -> None:  # noqa: ARG002
        """Remove them."""
        keys = sorted(name for name in names if name.startswith(_KEY))
        others = sorted(set(names) - set(keys))
        if others:
            options = (
                "--assumeyes --quiet --cacheonly --setopt=clean_requirements_on_remove=False --disablerepo=*"
            )
            _ask(self._run, ["dnf", *options.split(), "remove", *others])
        if keys:
            _ask(self._run, ["rpm", "-e", *keys])

    def _providers(self, needed: Collection[str]) -> set[str]:
        if not needed:
            return set()
        names = [re.sub(r"\s+[<=>]+\s+.*$", "", what) for what in sorted(needed)]
        _, out, _ = self._run(["rpm", "-q", "--qf", "%{NAME}.%{ARCH}\n", "--whatprovides", *names])
        return set(out.split())


def manager(run: Run) -> Dpkg | Rpm | None:
    """The package manager of this host, None where there is none that we know."""
    if shutil.which("dnf"):
        return Rpm(run)
    return Dpkg(run) if shutil.which("apt-get") else None


def _md5(path: str) -> str:
    """As dpkg notes it."""
    return hashlib.md5(Path(path).read_bytes()).hexdigest()  # noqa: S324


def _ask(run: Run, argv: list[str], **options: Any) -> str:
    rc, out, err = run(argv, **options)
    if rc != 0:
        raise PackageError(f"{' '.join(argv[:3])}: {(out + err).strip()[-_TAIL:]}")
    return str(out)
