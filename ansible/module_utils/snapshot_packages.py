"""The packages of a host, by dpkg or rpm, and the removal of those that clusterctl installed."""

from __future__ import annotations

import abc
import hashlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

# AnsibleModule.run_command
Run = Callable[..., Any]

_NEEDED = re.compile(r"^\s+(?P<what>.+) is needed by \(installed\) (?P<by>\S+)", re.MULTILINE)
_KEY = "gpg-pubkey"
# rpm appends this suffix to the name of a settings file that it keeps.
RPM_SAVED = ".rpmsave"
# The number of characters of a program's output that are shown.
_TAIL = 1500
_NOT_INSTALLED = ("not-installed", "config-files")


class PackageError(Exception):
    """The package manager failed. The text is its output."""


class _Manager(abc.ABC):
    """The common part of both package managers. ``TEST``: command that only simulates a removal."""

    TEST: tuple[str, ...]

    def __init__(self, run: Run) -> None:
        self._run = run

    @abc.abstractmethod
    def needed(self, output: str, names: Collection[str]) -> set[str]:
        """Return the packages among ``names`` that other packages need, found in the output of
        ``TEST``.
        """

    def removable(self, names: Iterable[str]) -> list[str]:
        """Return the packages among ``names`` that can be removed, because no other package needs
        them.
        """
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
    """The package manager of Debian and Ubuntu."""

    TEST = ("dpkg", "--dry-run", "--purge")

    def __init__(self, run: Run, info: str = "/var/lib/dpkg/info") -> None:
        super().__init__(run)
        self._info = info

    def installed(self) -> dict[str, str]:
        """Return installed packages, name -> version."""
        return {
            name: version for status, name, version in self._all() if status not in _NOT_INSTALLED
        }

    def settings(self) -> list[str]:
        """Return the removed packages that left configuration files behind (dpkg's state
        config-files).
        """
        return sorted(name for status, name, _ in self._all() if status == "config-files")

    def changed_settings(self, names: Iterable[str]) -> list[str]:
        """Return the configuration files of packages that were changed. A purge would delete
        them.
        """
        out = _run_checked(self._run, ["dpkg-query", "-W", "-f", "${Conffiles}\n", *sorted(names)])
        rows = (line.split() for line in out.splitlines() if line.startswith(" "))
        return sorted(row[0] for row in rows if Path(row[0]).is_file() and _md5(row[0]) != row[1])

    def purged(self, names: Iterable[str], folders: Iterable[str]) -> list[str]:
        """Return the folders that are mentioned in the packages' postrm scripts, which may delete
        them.
        """
        scripts = [
            Path(self._info, f"{stem}.postrm")
            for name in names
            for stem in (name, name.partition(":")[0])
        ]
        text = "".join(script.read_text(errors="replace") for script in scripts if script.is_file())
        return [folder for folder in folders if folder in text]

    def automatic(self) -> list[str]:
        """Return packages that are installed only as dependencies."""
        return sorted(_run_checked(self._run, ["apt-mark", "showauto"]).split())

    def mark_automatic(self, names: Collection[str]) -> None:
        """Mark packages as dependencies, so that `apt autoremove` may remove them."""
        manual = set(_run_checked(self._run, ["apt-mark", "showmanual"]).split())
        if to_mark := sorted(manual.intersection(names)):
            _run_checked(self._run, ["apt-mark", "auto", *to_mark])

    def needed(self, output: str, names: Collection[str]) -> set[str]:
        failed = {
            line.strip().partition(":")[0]
            for line in output.rpartition("processing:")[2].splitlines()
        }
        return {name for name in names if name.partition(":")[0] in failed}

    def remove(self, names: Collection[str], keep_settings: Collection[str] = ()) -> None:
        """Purge packages. For packages in ``keep_settings``, keep the configuration files."""
        environ = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        argv = ["apt-get", "--yes", "--option=DPkg::Lock::Timeout=300", "--no-auto-remove"]
        kept = sorted(set(names).intersection(keep_settings))
        for verb, selection in (("purge", sorted(set(names).difference(kept))), ("remove", kept)):
            if selection:
                _run_checked(self._run, [*argv, verb, *selection], environ_update=environ)

    def _all(self) -> Iterator[tuple[str, str, str]]:
        out = _run_checked(
            self._run,
            ["dpkg-query", "-W", "-f", "${db:Status-Status} ${binary:Package} ${Version}\n"],
        )
        for line in out.splitlines():
            status, name, version = line.split(" ", 2)
            yield status, name, version


class Rpm(_Manager):
    """The package manager of Rocky Linux and similar distributions."""

    TEST = ("rpm", "-e", "--test")

    def installed(self) -> dict[str, str]:
        """Return installed packages, name -> version. rpm lists the keys of signatures like
        packages.
        """
        out = _run_checked(
            self._run, ["rpm", "-qa", "--qf", "%{NAME} %{VERSION}-%{RELEASE} %{ARCH}\n"]
        )
        rows = (line.split(" ") for line in out.splitlines())
        return {
            (f"{row[0]}-{row[1]}" if row[0] == _KEY else f"{row[0]}.{row[2]}"): row[1]
            for row in rows
        }

    def settings(self) -> list[str]:
        """Return nothing: rpm removes unchanged configuration files with their package."""
        return []

    def changed_settings(self, names: Iterable[str]) -> list[str]:  # noqa: ARG002
        """Return nothing: rpm itself keeps a changed configuration file, as NAME.rpmsave."""
        return []

    def purged(self, names: Iterable[str], folders: Iterable[str]) -> list[str]:  # noqa: ARG002
        """Return nothing: a removal by rpm deletes only files of its packages."""
        return []

    def automatic(self) -> list[str]:
        """Return packages that are installed only as dependencies."""
        query = "dnf --quiet --cacheonly repoquery --installed --qf".split()
        rc, out, _ = self._run([*query, "%{name}.%{arch} %{reason}\n"])
        rows = [line.split() for line in out.splitlines()] if rc == 0 else []
        return sorted(row[0] for row in rows if row[1:] in (["dependency"], ["weak-dependency"]))

    def mark_automatic(self, names: Collection[str]) -> None:
        """Mark packages as dependencies, so that `dnf autoremove` may remove them."""
        if to_mark := sorted(
            set(self.installed()).intersection(names).difference(self.automatic())
        ):
            _run_checked(self._run, ["dnf", "--quiet", "mark", "remove", *to_mark])

    def needed(self, output: str, names: Collection[str]) -> set[str]:
        requirements = {match.group("what") for match in _NEEDED.finditer(output)}
        return self._providers(requirements).intersection(names)

    def remove(self, names: Collection[str], keep_settings: Collection[str] = ()) -> None:  # noqa: ARG002
        """Remove packages. ``keep_settings`` has no effect: rpm keeps changed configuration
        files.
        """
        keys = sorted(name for name in names if name.startswith(_KEY))
        packages = sorted(set(names) - set(keys))
        if packages:
            options = (
                "--assumeyes --quiet --cacheonly --setopt=clean_requirements_on_remove=False "
                "--disablerepo=*"
            )
            _run_checked(self._run, ["dnf", *options.split(), "remove", *packages])
        if keys:
            _run_checked(self._run, ["rpm", "-e", *keys])

    def _providers(self, needed: Collection[str]) -> set[str]:
        if not needed:
            return set()
        names = [re.sub(r"\s+[<=>]+\s+.*$", "", requirement) for requirement in sorted(needed)]
        _, out, _ = self._run(["rpm", "-q", "--qf", "%{NAME}.%{ARCH}\n", "--whatprovides", *names])
        return set(out.split())


def manager(run: Run) -> Dpkg | Rpm | None:
    """Return the package manager of this host; None if it has neither dnf nor apt-get."""
    if shutil.which("dnf"):
        return Rpm(run)
    return Dpkg(run) if shutil.which("apt-get") else None


def _md5(path: str) -> str:
    return hashlib.md5(Path(path).read_bytes()).hexdigest()  # noqa: S324


def _run_checked(run: Run, argv: list[str], **options: Any) -> str:
    rc, out, err = run(argv, **options)
    if rc != 0:
        raise PackageError(f"{' '.join(argv[:3])}: {(out + err).strip()[-_TAIL:]}")
    return str(out)
