"""Search of this machine for a file or a module that a failed job did not find."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.errors import UsageError
from clusterctl.packages.package_files import find_package_file
from clusterctl.packages.project_files import choices_of, unsupported_packages
from clusterctl.scheduler.ends.facts import LocalMatch, Packages
from clusterctl.spec.program import holds_package, import_roots, repository_of
from clusterctl.state.ledger import PROGRAM_FOLDER
from clusterctl.transport.tree import literal_pattern

_MOST_FOLDERS = 5_000
_MOST_SCRIPT = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The folder of this machine that was sent with a job.

    script: path of the job's script; None for a bundled job. start: folder in which the program
        started.
    sent: paths of the sent files below ``folder``. remote: the folder of the job's program on the
        cluster.
    requirements: the job's requirements file. Empty: the job has no such file.
    image: of --container. environment: of --env-path.
    is_alone: whether only the script was sent, because of --folder none.
    """

    folder: Path
    script: Path | None
    start: str
    sent: Collection[str]
    remote: str
    requirements: str
    image: str
    environment: str
    is_alone: bool

    @classmethod
    def of(cls, facts: Mapping[str, Any], source: Mapping[str, Any], remote: str) -> LocalFiles:
        """Read the facts of a submission (environment.client.json), and its list of files
        (source.json).
        """
        request = facts.get("job") or {}
        script = Path(request["script"]) if request.get("script") else None
        sent = [str(file.get("path")) for file in source.get("files", ())]
        folder = Path(facts.get("folder") or (script.parent if script else ""))
        start = str((request.get("project") or {}).get("start") or ".")
        requirements = str(request.get("requirements") or "")
        image, environment = (str(request.get(name) or "") for name in ("container", "env_path"))
        is_alone = request.get("folder") is False
        return cls(folder, script, start, sent, remote, requirements, image, environment, is_alone)

    def script_text(self, source: Mapping[str, Any]) -> str:
        """Return the text of the script as it was sent; "" if it has changed since then, or is not
        text.

        source: the job's list of files (source.json).
        """
        if self.script is None:
            return ""
        hashes = {
            file.get("sha256") for file in source.get("files", ()) if isinstance(file, Mapping)
        }
        with suppress(OSError, ValueError):
            content = (
                self.script.read_bytes() if self.script.stat().st_size <= _MOST_SCRIPT else b""
            )
            if hashlib.sha256(content).hexdigest() in hashes:
                return content.decode()
        return ""

    def find(self, name: str, *, is_module: bool) -> LocalMatch:
        """Return what this machine has of a file that the job did not find, or of a module.

        name: of a module: with slashes in place of dots.
        """
        if self.script is None:
            return LocalMatch()
        # The folder with the folders of all jobs.
        # Unlike Path, this takes any name.
        jobs = os.path.dirname(self.remote.removesuffix(f"/{PROGRAM_FOLDER}"))
        is_of_job = bool(jobs) and name.startswith(f"{jobs}/")
        job_folder = self.remote.removesuffix(PROGRAM_FOLDER)
        if (
            job_folder != self.remote
            and os.path.normpath(name).removeprefix(job_folder) in self.sent
        ):
            below = os.path.normpath(name).removeprefix(job_folder)
            return LocalMatch(inside=f"{PROGRAM_FOLDER}/{below}")
        # An absolute path replaces the start.
        path = os.path.normpath(
            os.path.relpath(name, self.remote) if is_of_job else Path(self.start) / name
        )
        if venv := self._virtual_environment(path):
            return LocalMatch(venv=venv)
        # Unlike Path, this takes any name.
        if os.path.isabs(path):
            return LocalMatch()
        is_outside = path.partition("/")[0] == ".."
        if not is_outside and (home := self._unsent(path, is_module)):
            return (
                LocalMatch(above=shlex.quote(str(self.folder)))
                if self.is_alone
                else LocalMatch(home=home)
            )
        if is_module:
            return self._module(name)
        # A name alone may also be that of another folder.
        places = self._above() if "/" in name else ()
        with_name = (folder for folder in places if os.path.lexists(folder / name))
        above = self._above_of(path) if is_outside else next(with_name, None)
        return LocalMatch(above=shlex.quote(str(above)) if above is not None else "")

    def _above_of(self, path: str) -> Path | None:
        """Return the folder that contains a file outside of the sent folder, such as
        ``../a.json``.
        """
        file = Path(os.path.normpath(self.folder / path))
        folders = (folder for folder in self._above() if file.is_relative_to(folder))
        return next(folders, None) if os.path.lexists(file) else None

    def _virtual_environment(self, path: str) -> str:
        parents = (str(parent) for parent in Path(path).parents)
        return next(
            (name for name in parents if os.path.isfile(self.folder / name / "pyvenv.cfg")),
            "",
        )

    def _unsent(self, path: str, is_module: bool) -> str:
        bases = dict.fromkeys((path, os.path.relpath(path, self.start)))
        for candidate in (
            f"{base}{ending}" for base in bases for ending in ("", ".py")[: 1 + is_module]
        ):
            is_sent = any(
                other == candidate or other.startswith(f"{candidate}/") for other in self.sent
            )
            is_here = os.path.lexists(self.folder / candidate)
            if is_module and is_here:
                # A folder of data may have the name of a package.
                is_here = holds_package((self.folder / candidate).parent, Path(candidate).stem)
            if not is_sent and is_here:
                # A pattern without a slash at its start would select files of that name in all
                # folders.
                return shlex.quote(literal_pattern(candidate))
        return ""

    def _module(self, path: str) -> LocalMatch:
        """Search for a module. path: its name, with slashes in place of dots."""
        top = path.partition("/")[0]
        pattern = re.compile(
            rf"(?:(?P<root>.+)/)?{re.escape(top)}(?:\.py|/[^/]*\.py|/[^/]*/__init__\.py)"
        )
        roots = [match["root"] or "." for sent in self.sent if (match := pattern.fullmatch(sent))]
        if roots and "/" in path:
            return LocalMatch(own=top)
        if roots:
            return LocalMatch(beside=shlex.quote(os.path.relpath(min(roots, key=len), self.start)))
        for folder in self._above():
            if any(holds_package(root, top) for root in import_roots(folder)):
                return LocalMatch(above=shlex.quote(str(folder)))
        for root in self._elsewhere():
            if holds_package(root, top):
                return LocalMatch(
                    elsewhere=shlex.quote(str(root / top)), root=shlex.quote(str(root))
                )
        return LocalMatch()

    def _above(self) -> Iterator[Path]:
        """Yield the folders above the sent folder, up to the repository's root or below the home
        folder.
        """
        top = repository_of(self.folder)
        for folder in self.folder.parents:
            # Unlike Path.expanduser, this never raises.
            if folder in (Path(os.path.expanduser("~")), folder.parent):
                return
            yield folder
            if folder == top:
                return

    def _elsewhere(self) -> Iterator[Path]:
        """Yield the folders of the repository that contains the sent folder."""
        root = repository_of(self.folder)
        for count, (folder, names, files) in enumerate(os.walk(root or self.folder)):
            if count > _MOST_FOLDERS:
                return
            names[:] = (
                []
                if "pyvenv.cfg" in files
                else [name for name in names if not name.startswith(".")]
            )
            yield Path(folder)

    def packages(self) -> Packages:
        """Return where the job has its packages of Python from, and from where it could have them."""
        if self.image:
            return Packages(image=shlex.quote(self.image))
        if self.environment:
            return Packages(environment=shlex.quote(self.environment))
        with suppress(UsageError, OSError):
            file = Path(self.requirements)
            if not self.requirements:
                found = self.script and find_package_file(self.script, self.folder)
                if not found:
                    return Packages()
                if error := unsupported_packages(found):
                    return Packages(way=error.fix)
                file = found
            listed = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
            choices = {name: shlex.quote(one) for name, one in choices_of(Path(listed)).items()}
            return Packages(listed=shlex.quote(listed), choices=choices)
        return Packages()
