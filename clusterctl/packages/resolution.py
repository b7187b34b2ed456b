"""Lists of packages become a lock of wheels for the nodes: uv resolves them on the user's machine, and pip
downloads the wheels, so that nodes need no internet access.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name

from clusterctl.errors import ClusterctlError, Notice, UsageError
from clusterctl.packages.accelerators import OtherBuilds, cpu_index, has_gpus, other_builds
from clusterctl.packages.index_failures import index_error
from clusterctl.packages.locked_packages import lines_of
from clusterctl.packages.named_files import reject_named_by_spec
from clusterctl.packages.node_platform import DEFAULT_PLATFORM, NodePlatform
from clusterctl.packages.project_files import PackageList
from clusterctl.packages.pure_builds import NOT_BUILT, is_of_sources, not_built, pure_wheel
from clusterctl.packages.requirement_files import hashes_in
from clusterctl.packages.uv_program import PipSettings, run_uv
from clusterctl.packages.wheelhouse import (
    CACHE,
    Pip,
    Wheel,
    WheelLock,
    cache_of_downloads,
    move_to_cache,
    not_downloaded,
    pins,
    wheel_path,
)
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.assets import digest, job_lock
from clusterctl.util.process import temporary_folder

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.inventory import Inventory

_LONGEST_REASON: Final = 2000
_NOT_BUILT: Final = re.compile(r"Failed to (?:download and )?build `([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Requirements:
    """The input for resolving ``lists``. ``base`` is the job environment's lock file.

    held: normalized name -> version to keep if possible, such as versions in the cluster's
        environment.
    gpus: whether the nodes have GPUs. None: uv chooses between CUDA and CPU builds.
    """

    lists: tuple[PackageList, ...]
    base: Path
    held: Mapping[str, str] = field(default_factory=dict)
    node: NodePlatform = DEFAULT_PLATFORM
    gpus: bool | None = None

    @classmethod
    def of_cluster(
        cls, cluster: ClusterSpec | Inventory, file: Path, node: NodePlatform
    ) -> Requirements:
        """Return the input for the file that a cluster's spec names. Whoever resolves it, stores its
        lock or looks for it has the same.

        Raises UsageError, MachineError: as ``PackageList.read``.
        """
        reject_named_by_spec(file)
        return cls((PackageList.read(file, node),), job_lock(), node=node, gpus=has_gpus(cluster))

    @property
    def where(self) -> str:
        return ", ".join(one.summary for one in self.lists)

    @property
    def is_locked(self) -> bool:
        return all(one.is_locked for one in self.lists)

    @property
    def options(self) -> list[str]:
        """The lines of a requirements file that say where packages are, for pip."""
        return [line for one in self.lists for line in one.options]

    @property
    def kept(self) -> Mapping[str, str]:
        return {} if self.is_locked else {**pins(self.base), **self.held}

    @property
    def answer(self) -> Path:
        """The path of the resulting lock in the cache. Its name is a hash of all inputs."""
        names = (key for key in sorted(os.environ) if key.startswith(("PIP_", "UV_")))
        settings = [f"{key}={os.environ[key]}" for key in names]
        if self.gpus is not None:
            settings += [f"gpus={self.gpus}", cpu_index()]
        contents = [part for one in self.lists for part in one.contents]
        kept = (f"{name}=={version}" for name, version in sorted(self.kept.items()))
        key = digest(str(self.node), digest(*kept), digest(*settings, "", *contents))
        return cache_home() / CACHE / "locks" / f"{key}.txt"


def resolve(requirements: Requirements, pip: Pip) -> WheelLock:
    """Resolve lists of packages for the nodes. The wheels are stored in the cache (see
    ``wheel_path``).

    Packages of the job environment keep their versions, unless the requirements exclude them. Then
    the lock contains another version, which jobs import instead.

    pip: for the platform of ``requirements``.

    Raises:
        UsageError: the requirements can't be met, or a package has no wheel and is not pure Python.
        MachineError: an index can't be read, or the cache can't be written.
    """
    with cache_of_downloads(CACHE) as home:
        place = requirements.answer
        if (cached := _load_lock(place, requirements)) is not None:
            return cached
        base = pins(requirements.base)
        pip.report(f"resolving {requirements.where}")
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as folder:
            if requirements.is_locked:
                lines = [line for one in requirements.lists for line in one.lines or ()]
            else:
                lines = _compiled(requirements, folder, pip)
            wheels = sorted(_wheels(lines, base, requirements, folder, pip), key=str)
        lock = WheelLock(tuple(wheels), base, requirements.node)
        write_atomic(place, lock.text)
    return lock


def cached_lock(requirements: Requirements) -> WheelLock | None:
    with cache_of_downloads(CACHE):
        return _load_lock(requirements.answer, requirements)


def _load_lock(answer: Path, requirements: Requirements) -> WheelLock | None:
    if not answer.is_file():
        return None
    lock = WheelLock.read(answer.read_text(), pins(requirements.base), requirements.node)
    return lock if all(wheel_path(wheel).is_file() for wheel in lock.wheels) else None


# Resolving


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Runs `uv pip compile`. folder: for temporary files. hashes: name -> SHA-256 of the files that
    the lists allow. Empty: they allow any. refused: name -> why no wheel can be built of its sources.
    """

    requirements: Requirements
    settings: PipSettings
    folder: Path
    hashes: Mapping[str, frozenset[str]]
    pip: Pip
    refused: dict[str, UsageError] = field(default_factory=dict)

    def compile(self, more: OtherBuilds | None = None) -> list[str]:
        """Return the lines of the chosen packages. Wheels of those that are sources are built then.

        A package whose sources can't be built is asked for again, in a version with a wheel.
        """
        while True:
            try:
                lines = self._compile(more or OtherBuilds())
                for line in lines:
                    if is_of_sources(line):
                        pure_wheel(line, self.requirements.options, self.pip.report)
            except UsageError as exc:
                if exc.about != NOT_BUILT or exc.where in self.refused:
                    raise
                self.refused[exc.where] = exc
                continue
            return lines

    def _compile(self, more: OtherBuilds) -> list[str]:
        requirements = self.requirements
        lock = self.folder / "pylock.toml"
        # uv keeps the versions of a lock that is there, if they fit.
        lock.write_text(_as_pylock(requirements.kept))
        result, traced = run_uv(
            [*self._words(more), "--output-file", str(lock)],
            cwd=self._project,
            heard=self.pip.heard,
            variables=self._variables,
        )
        if error := index_error(result, traced, requirements.where):
            raise error
        if result.rc != 0:
            raise self._unmet(result.stderr)
        content: Mapping[str, Any] = tomllib.loads(lock.read_text())
        if self.hashes:
            content = _with_hashes(content, self.hashes, requirements)
        return lines_of(content, lock, requirements.node, project=self._project)

    @property
    def _project(self) -> Path:
        return self.requirements.lists[-1].folder

    @property
    def _variables(self) -> dict[str, str]:
        by_uv = any(one.has_indexes for one in self.requirements.lists)
        # pip looks into all indexes for the best version.
        strategy = {} if by_uv else {"UV_INDEX_STRATEGY": "unsafe-best-match"}
        return {**self.settings.variables, **strategy}

    def _words(self, more: OtherBuilds) -> list[str]:
        node = self.requirements.node
        lists = self.requirements.lists
        own = self.folder / "own.txt"
        has_index = any(one.has_index_url for one in lists)
        own.write_text("\n".join((*self.settings.lines(index=not has_index), *more.lines, "")))
        left_out = self.folder / "left-out.txt"
        left_out.write_text("\n".join((*more.left_out, "")))
        words = ["pip", "compile", "--quiet", "--no-header", "--format", "pylock.toml"]
        words += ["--python-version", node.python, "--python-platform", node.of_uv]
        words += ["--python", sys.executable, "--no-python-downloads"]
        # Code whose hash is not checked must not run.
        unbuilt = [":all:"] if self.hashes else sorted(self.refused)
        words += [word for name in unbuilt for word in ("--only-binary", name)]
        words += self.settings.options
        if lists[-1].is_of_pip:
            # pip does not read the settings of uv in a project.
            words += ["--project", str(self.folder)]
        if more.lines:
            words += ["--index-strategy", "unsafe-best-match"]
        if more.left_out:
            words += ["--excludes", str(left_out)]
        return [*words, *(word for one in lists for word in one.words(self.folder)), str(own)]

    def _unmet(self, output: str) -> ClusterctlError:
        requirements = self.requirements
        if failed := _NOT_BUILT.search(output):
            return self.refused.get(failed[1]) or not_built(failed[1], output)
        if wanting := next((name for name in self.refused if name in output), None):
            return self.refused[wanting]
        hashed = "; in a list with hashes, nothing is built of sources" if self.hashes else ""
        return UsageError(
            "the requirements can't be met",
            code="packages-unmet",
            where=requirements.where,
            why=f"uv says: {output.removeprefix('error: ').strip()[:_LONGEST_REASON]}{hashed}",
            fix="require versions that fit together and have wheels for "
            f"{requirements.node}; or use an environment on the cluster with --env-path, or "
            "--container",
        )


def _compiled(requirements: Requirements, folder: Path, pip: Pip) -> list[str]:
    """Return the lines of the packages that uv chooses, with builds for the nodes' hardware."""
    hashes = hashes_in(one.file for one in requirements.lists if one.is_of_pip)
    compiler = _Compiler(requirements, PipSettings.read(), folder, hashes, pip)
    lines = compiler.compile()
    if hashes:
        return lines
    versions = {wheel.name: wheel.version for wheel in _ready_wheels(lines)}
    if more := other_builds(versions, gpus=requirements.gpus, report=pip.report):
        lines = compiler.compile(more)
    refused = {canonicalize_name(name) for name in compiler.refused}
    for wheel in [one for one in _ready_wheels(lines) if one.name in refused]:
        text = (
            f"{wheel.name} is of version {wheel.version}, which has a wheel, because newer sources "
            "must be compiled"
        )
        pip.report(Notice("older-version-chosen", text))
    return lines


def _ready_wheels(lines: Sequence[str]) -> list[Wheel]:
    return [Wheel.of_line(line) for line in lines if not is_of_sources(line)]


def _as_pylock(versions: Mapping[str, str]) -> str:
    packages = ", ".join(
        f'{{name = "{name}", version = "{version}"}}' for name, version in versions.items()
    )
    return f'lock-version = "1.0"\ncreated-by = "clusterctl"\npackages = [{packages}]\n'


def _with_hashes(
    content: Mapping[str, Any], hashes: Mapping[str, frozenset[str]], requirements: Requirements
) -> Mapping[str, Any]:
    """Return a lock with only the wheels that have one of these hashes."""
    packages = list[Mapping[str, Any]]()
    for package in content.get("packages", ()):
        allowed = hashes.get(package["name"], frozenset())
        wheels = [
            one for one in package.get("wheels", ()) if one["hashes"].get("sha256") in allowed
        ]
        if "wheels" in package and not wheels:
            raise _without_hash(package, requirements, is_listed=bool(allowed))
        packages.append({**package, "wheels": wheels} if wheels else package)
    return {**content, "packages": packages}


def _without_hash(
    package: Mapping[str, Any], requirements: Requirements, *, is_listed: bool
) -> UsageError:
    """Return the error that no wheel of a package has a hash that the lists have.

    is_listed: whether they have a hash of the package.
    """
    bare = [
        one.summary
        for one in requirements.lists
        if not (is_listed or one.is_locked or (one.is_of_pip and hashes_in([one.file])))
    ]
    return UsageError(
        "the requirements can't be met",
        code="packages-unmet",
        where=", ".join(bare) or requirements.where,
        why=f"no wheel of {package['name']} {package['version']} has a hash that the lists have"
        + ("; if one list has hashes, all need them" if bare else ""),
        fix="write the list with hashes, too, such as with `uv pip compile --generate-hashes` or `uv "
        "export`"
        if bare
        else "write the list of packages again with the tool that wrote it",
    )


# Downloading


def _wheels(
    lines: Sequence[str],
    base: Mapping[str, str],
    requirements: Requirements,
    folder: Path,
    pip: Pip,
) -> Iterator[Wheel]:
    """Yield the wheels of lines that the nodes lack, and put them into the cache."""
    missing = dict[str, Wheel]()
    for line in lines:
        if is_of_sources(line):
            built = pure_wheel(line, requirements.options, pip.report)
            wheel = move_to_cache(Path(shutil.copy(built, folder)))
        else:
            wheel = Wheel.of_line(line)
        if base.get(wheel.name) == wheel.version:
            continue
        if wheel_path(wheel).is_file():
            yield wheel
        else:
            missing[line] = wheel
    if missing:
        wanted = folder / "wanted.txt"
        wanted.write_text("\n".join((*requirements.options, *_wanted(missing, requirements), "")))
        target = folder / "wheels"
        result = pip.download(["--no-deps", "--requirement", str(wanted), "--dest", str(target)])
        if result.rc != 0:
            raise not_downloaded(requirements.where, result.stdout)
        yield from (move_to_cache(path) for path in sorted(target.glob("*.whl")))


def _wanted(missing: Mapping[str, Wheel], requirements: Requirements) -> list[str]:
    """Return the lines for pip. Without an index, those of a lock don't name the index's URLs, so that
    pip looks for wheels with these hashes where its setting `find-links` says.
    """
    if not (requirements.is_locked and PipSettings.read().has_no_index):
        return [*missing]
    return [
        str(wheel) if wheel.sha256 and urlsplit(line.partition(" @ ")[2]).scheme != "file" else line
        for line, wheel in missing.items()
    ]
