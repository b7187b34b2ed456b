"""The packages that a project's files declare: uv.lock, pylock.toml, pyproject.toml, a comment of a
script (PEP 723), or the section `pip` of an environment.yml.

Each file is read as lines of a requirements file of pip. Lines of a lock are wheels with their
hashes, chosen for the nodes; a package without a wheel is resolved by its locked version.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from packaging.dependency_groups import resolve_dependency_groups
from packaging.pylock import (
    Package,
    PackageArchive,
    PackageSdist,
    PackageVcs,
    PackageWheel,
    Pylock,
    PylockSelectError,
    PylockValidationError,
    is_valid_pylock_path,
)
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from clusterctl.errors import Notice, UsageError
from clusterctl.packages.index_failures import uv_index_error
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.requirement_files import (
    OF_TOOLS,
    as_elsewhere,
    contents_of,
    decoded,
    include,
    read_requirements,
    reject_source,
)
from clusterctl.packages.sources import SourceLine
from clusterctl.spec.names import first_few
from clusterctl.spec.program import head_of, script_block
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.assets import digest
from clusterctl.util.numbers import counted
from clusterctl.util.process import run

# The files in a project's folder that are looked for, the first of which counts.
_LOOKED_FOR: Final = (
    "uv.lock",
    "pylock.toml",
    "requirements.txt",
    "pyproject.toml",
    "environment.yml",
    "environment.yaml",
    "Pipfile",
    "setup.cfg",
    "setup.py",
)
# Those of them that only another tool reads -> the tool.
_OF_OTHERS: Final = {"Pipfile": "Pipenv", "setup.cfg": "setuptools", "setup.py": "setuptools"}
_LOCKS_OF_OTHERS: Final = ("poetry.lock", "pdm.lock")
_CONDA: Final = frozenset({"environment.yml", "environment.yaml"})
# FILE[NAME,...] chooses extras and dependency groups.
_CHOICE: Final = re.compile(r"(?P<file>.+)\[(?P<names>[\w.,\s-]+)\]")
_CONDA_SPEC: Final = re.compile(r"(?:[\w./-]+::)?(?P<name>[\w.-]+)\s*(?P<version>.*)")


@dataclass(frozen=True, slots=True)
class PackageList:
    """The packages that a file lists.

    file: what pip reads: the file itself, or the same packages in pip's format.
    summary: the file and its packages for the user, such as "pyproject.toml: 4 packages".
    where: the file as the user knows it.
    is_locked: the file has the versions of all packages, so that pip has nothing to choose.
    sources: packages of which the file names repositories of git or archives; not in ``file``.
    """

    file: Path
    summary: str
    where: str
    is_locked: bool = False
    sources: tuple[SourceLine, ...] = ()

    @classmethod
    def read(cls, choice: Path, node: NodePlatform) -> PackageList:
        """Read a file that the user chose: ``FILE`` or, with extras and groups, ``FILE[NAME,...]``.

        Raises:
            UsageError: the file can't be read, declares no packages, or names what nodes can't
                have.
        """
        file, names = _split(choice)
        if _is_of_uv(file):
            return _of_uv(file, names, node)
        if is_valid_pylock_path(file):
            return _of_pylock(file, _toml(file), names, node)
        if file.name == "pyproject.toml":
            return _of_pyproject(file, names, node)
        if names:
            raise UsageError(
                f"{file.name} has no extras or groups to choose",
                code="no-extras-here",
                where=str(file),
                why="pyproject.toml, uv.lock and pylock.toml may have them",
                fix=f"use --requirements {file}",
            )
        if file.suffix == ".py":
            return _of_script(file, node)
        if file.name in _CONDA:
            return _of_conda(file, node)
        return _of_pip(file)


def content_hash(choices: Sequence[Path]) -> str:
    """Return a hash of files that list packages, and of the files that these include.

    Raise a UsageError if a file can't be read.
    """
    parts = list[bytes]()
    for file, names in map(_split, choices):
        parts += (name.encode() for name in names)
        if is_of_pip(file):
            parts += (content for _, content in contents_of(file))
        else:
            parts.append(_text(file).encode())
    return digest(*parts)


def is_of_pip(file: Path) -> bool:
    """Return whether a file has pip's own format, by its name."""
    others = {"pyproject.toml", *_CONDA}
    is_lock = _is_of_uv(file) or is_valid_pylock_path(file)
    return not is_lock and file.name not in others and file.suffix != ".py"


def _is_of_uv(file: Path) -> bool:
    """Return whether a file is a lock of uv, for a project or for a script."""
    return file.name == "uv.lock" or file.name.endswith(".py.lock")


def find_package_file(script: Path, top: Path) -> Path | None:
    """Return the file that lists the packages of a Python program. None: there is no such file.

    It is the program itself if it has a comment `# /// script`; otherwise the first of
    ``_LOOKED_FOR`` in the nearest folder that has one, from the program's folder up to ``top``.
    The path has no symbolic links to folders, so that ``top`` is found on the way up.
    """
    top = top.resolve()
    script = script.parent.resolve() / script.name
    lock = script.with_name(f"{script.name}.lock")
    if script_block(script, head_of(script)) is not None:
        return lock if lock.is_file() else script
    for folder in (script.parent, *script.parent.parents):
        if not folder.is_relative_to(top):
            break
        for name in _LOOKED_FOR:
            if (folder / name).is_file() and _lists_packages(folder / name):
                return folder / name
    return None


def note_of_unread_lock(file: Path) -> Notice | None:
    """Return a note on a lock of another tool beside a pyproject.toml that is read in its place.

    file: as the user chose it, with extras and groups.
    """
    file, _ = _split(file)
    for name in _LOCKS_OF_OTHERS:
        if file.name == "pyproject.toml" and file.with_name(name).is_file():
            return Notice(
                "lock-not-used",
                f"{name} is not used, because only its own tool reads it; to install its versions, "
                f"write requirements.txt with `{OF_TOOLS[name]}`",
            )
    return None


def unsupported_packages(file: Path) -> UsageError | None:
    """Return why pip can't install what a file lists, and the fix. None: it can."""
    if file.name in _CONDA:
        return _conda_error(file, _conda_entries(file)[2])
    if file.name in _OF_OTHERS:
        return UsageError(
            f"{file} is not a requirements file",
            code="not-requirements",
            where=str(file),
            why=f"only {_OF_OTHERS[file.name]} reads {file.name}",
            fix=f"write requirements.txt with `{OF_TOOLS[file.name]}`, and use --requirements "
            "requirements.txt",
        )
    if file.name == "pyproject.toml":
        content = _toml(file)
        if not _table(content, "project") and not _table(content, "dependency-groups"):
            return _without_project(file, content)
    return None


def choices_of(choice: Path) -> Mapping[str, str]:
    """Return the packages of extras and groups of a project that the user has not chosen: normalized
    name -> ``FILE[NAME,...]``, the value of --requirements that chooses its extra or group, too.

    choice: as the user chose it, with extras and groups. Empty: the file has no such packages.
    """
    file, names = _split(choice)
    project = file.with_name("pyproject.toml")
    if file.name not in ("uv.lock", "pyproject.toml") or not project.is_file():
        return {}
    content = _toml(project)
    tables = {
        **_table(content, "project", "optional-dependencies"),
        **_table(content, "dependency-groups"),
    }
    return {
        _name(line, project): f"{str(choice)[:-1]},{name}]" if names else f"{choice}[{name}]"
        for name, lines in tables.items()
        if name not in names and isinstance(lines, list)
        for line in lines
        if isinstance(line, str)
    }


def member_roots(file: Path) -> Iterator[Path]:
    """Yield the folders of the packages of a workspace that a uv.lock names.

    file: as the user chose it, with extras and groups.
    """
    file, _ = _split(file)
    if file.name != "uv.lock":
        return
    for package in _locked_by_uv(file):
        source = _table(package, "source")
        folder = source.get("editable") or source.get("directory")
        if isinstance(folder, str):
            place = Path(os.path.normpath(file.parent / folder))
            yield place / "src" if (place / "src").is_dir() else place


def file_of(choice: Path) -> Path:
    """Return the file of a choice FILE[NAME,...]."""
    return _split(choice)[0]


def _split(choice: Path) -> tuple[Path, tuple[str, ...]]:
    match = None if os.path.exists(choice) else _CHOICE.fullmatch(str(choice))
    if match is None:
        return choice.absolute(), ()
    names = tuple(name.strip() for name in match["names"].split(",") if name.strip())
    return Path(match["file"]).absolute(), names


def _lists_packages(file: Path) -> bool:
    """Return whether a file that was found lists packages, as its only purpose may be another."""
    try:
        if file.name == "pyproject.toml":
            content = _toml(file)
            project = _table(content, "project")
            is_poetry = "dependencies" in _table(content, "tool", "poetry")
            return bool(project.get("dependencies")) or _is_dynamic(project, file) or is_poetry
        if file.name == "requirements.txt":
            return any(True for _ in read_requirements(file))
        if file.name in _CONDA:
            return _has_dependencies(file)
        if file.name == "Pipfile":
            return bool(_table(_toml(file), "packages"))
        if file.name in _OF_OTHERS:
            return (
                re.search(r"^[^#\n]*\binstall_requires\s*=", _text(file), re.MULTILINE) is not None
            )
    except UsageError:
        # Reading the file again shows the error.
        return True
    return True


def content_of(file: Path) -> Mapping[str, Any]:
    """Return what a list of packages in another format than pip's has. Empty: it has nothing.

    Raises UsageError: the file can't be read.
    """
    if file.suffix == ".py":
        return _script(file) or {}
    return _yaml(file) if file.suffix in {".yml", ".yaml"} else _toml(file)


def _toml(file: Path) -> dict[str, Any]:
    text = _text(file)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise _malformed(file, str(exc)) from exc


def _text(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except (OSError, ValueError) as exc:
        # A path with a null byte raises a ValueError.
        raise UsageError(
            f"the file {file} can't be read",
            code="file-unreadable",
            why=getattr(exc, "strerror", None) or str(exc),
            fix="pass a file that lists packages: requirements.txt, pyproject.toml, uv.lock, "
            "pylock.toml or a script with a comment `# /// script`",
        ) from exc
    return decoded(raw, file)


def _malformed(file: Path, why: str) -> UsageError:
    return UsageError(
        f"{file.name} can't be read as a list of packages",
        code="packages-malformed",
        where=str(file),
        why=why,
        fix="correct the file",
    )


def _table(content: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a table of a TOML file. Empty: there is no such table."""
    for key in keys:
        value = content.get(key)
        content = value if isinstance(value, Mapping) else {}
    return content


def _strings(value: object, file: Path) -> tuple[str, ...]:
    """Return a list of a file. A text is not a list of its letters."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise _malformed(file, f"a list of texts is needed, not {value!r:.80}")


def _stored(
    file: Path, lines: Sequence[str], names: Sequence[str], *, is_locked: bool = False
) -> PackageList:
    """Store lines for pip in the cache. names: the extras and groups that the user chose."""
    sources = tuple(filter(None, map(SourceLine.of, lines)))
    lines = [line for line in lines if SourceLine.of(line) is None]
    for line in lines:
        reject_source(line, file.parent, str(file))
    text = "".join(f"{line}\n" for line in lines)
    path = cache_home() / "python" / "lists" / f"{digest(text)}.txt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    number = len(sources) + sum(not line.startswith("-") for line in lines)
    summary = ", ".join([f"{file.name}: {counted(number, 'package')}", *names])
    return PackageList(path, summary, str(file), is_locked, sources)


def _of_pip(file: Path) -> PackageList:
    """Read a file in pip's format. pip reads the file itself, unless it names sources."""
    try:
        lines = [as_elsewhere(line, file.parent) for line in read_requirements(file)]
    except UsageError:
        # pip's reader names the place and the fix of each.
        lines = []
    if not any(SourceLine.of(line) for line in lines):
        return PackageList(file, str(file), str(file))
    return _stored(file, lines, ())


def _reject_other_python(required: object, file: Path, node: NodePlatform) -> None:
    """Raise a UsageError if a file requires another Python than the nodes have."""
    if not isinstance(required, str) or not required.strip():
        return
    try:
        # The patch level of the nodes is unknown.
        versions = [f"{node.python}.{patch}" for patch in range(30)]
        if any(True for _ in SpecifierSet(required).filter(versions)):
            return
    except InvalidSpecifier as exc:
        raise _malformed(file, str(exc)) from exc
    raise UsageError(
        f"{file.name} requires Python {required}",
        code="other-python-required",
        where=str(file),
        why=f"the nodes have Python {node.python}",
        fix="allow that version in the file, or use an environment on the cluster with "
        "--env-path, or --container",
    )


# uv.lock and pylock.toml


def _of_uv(file: Path, names: Sequence[str], node: NodePlatform) -> PackageList:
    """Read the lock of uv for a project or for a script. uv itself converts it."""
    is_script = file.name != "uv.lock"
    options = ["--script", str(file.with_suffix(""))] if is_script else []
    if is_script:
        _reject_unknown(names, (), (), file)
    else:
        project = file.with_name("pyproject.toml")
        content = _toml(project)
        extras, groups = _chosen(project, content, names)
        options += ["--no-default-groups", "--no-emit-project"]
        options += [word for extra in extras for word in ("--extra", extra)]
        options += [word for group in groups for word in ("--group", group)]
        names = _described(extras, groups)
    argv = [find_uv_bin(), "export", "--frozen", "--format", "pylock.toml", "--no-header"]
    argv += ["--quiet", "--no-python-downloads", "--directory", str(file.parent), *options]
    result = run(argv)
    if result.rc != 0:
        # uv downloads the files of which a lock has no hash.
        if error := uv_index_error(result.stderr, str(file)):
            raise error
        raise UsageError(
            f"uv can't read {file.name}",
            code="uv-lock-unreadable",
            where=str(file),
            why=result.stderr.strip()[:1000],
            fix=f"write the lock again with `uv lock`; if it is of a newer uv than {version('uv')}, "
            "write pylock.toml with `uv export -o pylock.toml`, and use --requirements pylock.toml",
        )
    if not is_script:
        _reject_stale(file, _toml(file.with_name("pyproject.toml")))
    return _of_pylock(file, tomllib.loads(result.stdout), (), node, names)


def _reject_stale(lock: Path, project: Mapping[str, Any]) -> None:
    """Raise a UsageError if a project depends on packages that its uv.lock does not have."""
    locked = {canonicalize_name(str(one.get("name"))) for one in _locked_by_uv(lock)}
    declared = _strings(_table(project, "project").get("dependencies", ()), lock)
    needed = {canonicalize_name(_requirement(line, lock).name) for line in declared}
    if missing := needed - locked:
        raise UsageError(
            "uv.lock is older than pyproject.toml",
            code="uv-lock-stale",
            where=str(lock),
            why=f"it does not have {', '.join(sorted(missing))}",
            fix="run `uv lock`",
        )


def _locked_by_uv(lock: Path) -> Sequence[Mapping[str, Any]]:
    """Return the tables `[[package]]` of a lock of uv."""
    packages = _toml(lock).get("package", [])
    if not isinstance(packages, list) or not all(isinstance(one, Mapping) for one in packages):
        raise _malformed(lock, f"tables [[package]] are needed, not {packages!r:.80}")
    return packages


def _of_pylock(
    file: Path,
    content: Mapping[str, Any],
    names: Sequence[str],
    node: NodePlatform,
    shown: Sequence[str] | None = None,
) -> PackageList:
    """Choose the wheels of a lock (PEP 751). shown: describes what is chosen. None: ``names``."""
    try:
        lock = Pylock.from_dict(content)
        extras = _known(names, lock.extras)
        groups = _known(names, lock.dependency_groups)
        _reject_unknown(names, {*extras, *groups}, (*(lock.extras or ()), *(groups or ())), file)
        selected = lock.select(
            environment=node.markers,  # type: ignore[arg-type]
            tags=tuple(node.tags),
            extras=extras,
            dependency_groups=[*groups, *(lock.default_groups or ())],
        )
        lines = [_line_of(package, chosen, file) for package, chosen in selected]
    except PylockValidationError as exc:
        raise _malformed(file, str(exc)) from exc
    except PylockSelectError as exc:
        raise UsageError(
            f"{file.name} has no packages for the nodes",
            code="lock-for-others",
            where=str(file),
            why=f"{exc}; the nodes have {node}",
            fix="lock also for these nodes: see `requires-python` and the wheels of the package",
        ) from exc
    shown = names if shown is None else shown
    return _stored(file, sorted(filter(None, lines)), shown, is_locked=True)


def _known(names: Collection[str], known: Collection[str] | None) -> list[str]:
    return [name for name in names if name in (known or ())]


def _reject_unknown(
    names: Sequence[str], chosen: Collection[str], known: Collection[str], file: Path
) -> None:
    if unknown := [name for name in names if name not in chosen]:
        listed = ", ".join(sorted(known))
        raise UsageError(
            f"{file.name} has no extra or group with the name {unknown[0]}",
            code="unknown-extra",
            where=str(file),
            why=f"it has {listed}" if listed else "it has none",
            fix=f"use --requirements '{file.name}[NAME,...]' with these names",
        )


def _line_of(package: Package, chosen: object, lock: Path) -> str:
    """Return the line for a package of a lock. "": the package is sent with the job."""
    match chosen:
        case PackageWheel() | PackageArchive():
            url = chosen.url or f"file://{(lock.parent / (chosen.path or '')).absolute()}"
            return f"{package.name} @ {url}#sha256={_sha256_of(package, chosen, lock)}"
        case PackageSdist() if chosen.url:
            return f"{package.name} @ {chosen.url}#sha256={_sha256_of(package, chosen, lock)}"
        case PackageVcs(type=kind, url=url, commit_id=commit):
            inner = f"#subdirectory={chosen.subdirectory}" if chosen.subdirectory else ""
            return f"{package.name} @ {kind}+{url}@{commit}{inner}"
        case _ if package.directory is not None:
            place = (lock.parent / package.directory.path).resolve()
            return "" if place.is_relative_to(lock.parent.resolve()) else str(place)
        case _:
            return f"{package.name}=={package.version}"


def _sha256_of(
    package: Package, chosen: PackageWheel | PackageArchive | PackageSdist, lock: Path
) -> str:
    if sha256 := chosen.hashes.get("sha256"):
        return sha256
    raise UsageError(
        f"{lock.name} has no SHA-256 of {package.name}",
        code="lock-without-sha256",
        where=str(lock),
        why=f"it has only {', '.join(chosen.hashes)}",
        fix="lock with a tool that writes sha256, such as uv or pip",
    )


# pyproject.toml and scripts


def _of_pyproject(file: Path, names: Sequence[str], node: NodePlatform) -> PackageList:
    content = _toml(file)
    project = _table(content, "project")
    if error := unsupported_packages(file):
        raise error
    _reject_other_python(project.get("requires-python"), file, node)
    _reject_sources_of_uv(file, _table(content, "tool", "uv"), "uv lock")
    extras, groups = _chosen(file, content, names)
    lines = [*_strings(project.get("dependencies", ()), file), *_dynamic(file, content)]
    lines += (line for extra in extras for line in _extra(file, project, extra))
    try:
        tables = _table(content, "dependency-groups")
        lines += resolve_dependency_groups(tables, *groups)
    except ExceptionGroup as exc:
        raise _malformed(file, "; ".join(map(str, exc.exceptions))) from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise _malformed(file, str(exc)) from exc
    own = canonicalize_name(str(project.get("name", "")))
    lines = [line for line in lines if _name(line, file) != own]
    return _stored(file, lines, _described(extras, groups))


def _chosen(
    file: Path, content: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the extras and the dependency groups that a user chose; by default, the groups that
    uv installs by default if the project sets them.
    """
    known_extras = _table(content, "project", "optional-dependencies")
    known_groups = _table(content, "dependency-groups")
    extras = _known(names, known_extras)
    groups = _known(names, known_groups)
    _reject_unknown(names, {*extras, *groups}, {*known_extras, *known_groups}, file)
    defaults = _table(content, "tool", "uv").get("default-groups", ())
    chosen = known_groups if defaults == "all" else _strings(defaults, file)
    return extras, list(dict.fromkeys([*groups, *chosen]))


def _described(extras: Sequence[str], groups: Sequence[str]) -> list[str]:
    return [*(f"extra {name}" for name in extras), *(f"group {name}" for name in groups)]


def _extra(file: Path, project: Mapping[str, Any], extra: str) -> Iterator[str]:
    """Yield the packages of an extra, and of the extras that it names as ``PROJECT[EXTRA]``."""
    own = canonicalize_name(str(project.get("name", "")))
    tables = _table(project, "optional-dependencies")
    pending = [extra]
    seen = set[str]()
    while pending:
        if (name := pending.pop()) in seen:
            continue
        seen.add(name)
        for line in _strings(tables.get(name, ()), file):
            if _name(line, file) == own:
                pending += _requirement(line, file).extras
            else:
                yield line


def _is_dynamic(project: Mapping[str, Any], file: Path) -> bool:
    return "dependencies" in _strings(project.get("dynamic", ()), file)


def _dynamic(file: Path, content: Mapping[str, Any]) -> list[str]:
    """Return a line for each file that has a project's packages in place of pyproject.toml."""
    if not _is_dynamic(_table(content, "project"), file):
        return []
    table = _table(content, "tool", "setuptools", "dynamic", "dependencies")
    listed = table.get("file", ())
    names = (listed,) if isinstance(listed, str) else _strings(listed, file)
    if not names:
        raise UsageError(
            "pyproject.toml leaves its dependencies to a program that builds the package",
            code="dependencies-computed",
            where=str(file),
            why="`dynamic` lists dependencies, and no file is named for them",
            fix="write requirements.txt, such as with `uv pip compile pyproject.toml -o "
            "requirements.txt`, and use --requirements requirements.txt",
        )
    return [include("-r", file.parent / name) for name in names]


def _without_project(file: Path, content: Mapping[str, Any]) -> UsageError:
    poetry = bool(_table(content, "tool", "poetry"))
    command = (
        "poetry export --without-hashes -o requirements.txt"
        if poetry
        else "uv pip compile pyproject.toml -o requirements.txt"
    )
    return UsageError(
        "pyproject.toml lists no packages in [project]",
        code="no-project-table",
        where=str(file),
        why="it lists them in [tool.poetry], which only Poetry reads"
        if poetry
        else "it has neither [project] nor [dependency-groups]",
        fix=f"write requirements.txt with `{command}`, and use --requirements requirements.txt",
    )


def _reject_sources_of_uv(file: Path, table: Mapping[str, Any], command: str) -> None:
    """Raise a UsageError if only uv knows where packages come from, and there is no lock."""
    if used := [name for name in ("sources", "index") if table.get(name)]:
        raise UsageError(
            f"{file.name} has [tool.uv.{used[0]}], but no lock",
            code="uv-lock-missing",
            where=str(file),
            why="only uv finds packages by this table, and pip could find others",
            fix=f"run `{command}`: clusterctl reads the lock",
        )


def _of_script(file: Path, node: NodePlatform) -> PackageList:
    content = _script(file)
    if content is None and (error := unsupported_packages(file)):
        raise error
    if content is None:
        raise UsageError(
            f"{file.name} lists no packages",
            code="no-script-block",
            where=str(file),
            why="it has no comment `# /// script` (PEP 723)",
            fix="pass a file that lists packages, such as requirements.txt",
        )
    _reject_other_python(content.get("requires-python"), file, node)
    uv = _table(content, "tool", "uv")
    _reject_sources_of_uv(file, uv, f"uv lock --script {file.name}")
    return _stored(file, _strings(content.get("dependencies", ()), file), ())


def _script(file: Path) -> dict[str, Any] | None:
    """Return the content of a program's comment `# /// script`. None: it has none."""
    block = script_block(file, _text(file).split("\n"))
    try:
        return None if block is None else tomllib.loads(block)
    except tomllib.TOMLDecodeError as exc:
        raise _malformed(file, f"its comment `# /// script`: {exc}") from exc


def _requirement(line: str, file: Path) -> Requirement:
    try:
        return Requirement(line)
    except InvalidRequirement as exc:
        raise _malformed(file, f"{line}: {exc}") from exc


def _name(line: str, file: Path) -> str:
    return "" if line.startswith("-") else canonicalize_name(_requirement(line, file).name)


# environment.yml


def _of_conda(file: Path, node: NodePlatform) -> PackageList:
    """Read the section `pip` of an environment.yml that needs nothing else of conda than Python."""
    lines, python, others = _conda_entries(file)
    if error := _conda_error(file, others):
        raise error
    _reject_other_python(_python_of_conda(python), file, node)
    return _stored(file, [as_elsewhere(line, file.parent) for line in lines], ())


def _has_dependencies(file: Path) -> bool:
    """Return whether a file named environment.yml is one of conda: other programs have such files."""
    try:
        return isinstance(_yaml(file).get("dependencies"), list)
    except UsageError:
        return False


def _yaml(file: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file. Empty: it has something else."""
    # A slow import, which few files need.
    import yaml

    try:
        content = yaml.safe_load(_text(file))
    except (yaml.YAMLError, ValueError, LookupError, TypeError) as exc:
        # A date such as 2024-13-45 raises a ValueError, `!!bool ""` a KeyError.
        raise _malformed(file, str(exc)) from exc
    return content if isinstance(content, dict) else {}


def _conda_entries(file: Path) -> tuple[list[str], str, list[str]]:
    """Return the lines for pip, the version of Python, and the other packages of conda."""
    entries = _yaml(file).get("dependencies")
    if not isinstance(entries, list):
        raise _malformed(file, "it has no list `dependencies`")
    lines = list[str]()
    python = ""
    others = list[str]()
    for entry in entries:
        if isinstance(entry, dict) and set(entry) == {"pip"}:
            lines += _strings(entry["pip"] or (), file)
        elif isinstance(entry, str) and (spec := _CONDA_SPEC.fullmatch(entry.strip())):
            if spec["name"] == "python":
                python = spec["version"]
            elif spec["name"] != "pip":
                others.append(spec["name"])
        else:
            raise _malformed(file, f"{entry!r:.80} is not a package")
    return lines, python, others


def _conda_error(file: Path, packages: Sequence[str]) -> UsageError | None:
    if not packages:
        return None
    return UsageError(
        f"{file.name} lists packages of conda",
        code="conda-packages",
        where=str(file),
        why=f"only conda installs {first_few(packages)}",
        fix="create the environment on the cluster once, such as with `micromamba create -p DIR -f "
        f"{file.name}`, and use --env-path DIR; or list packages of pip in requirements.txt",
    )


def _python_of_conda(version: str) -> str:
    """Return a version of conda, such as ``=3.11`` or ``>=3.10,<3.13``, as one of pip."""
    if re.fullmatch(r"=\d[\d.*]*", version):
        return f"={version.removesuffix('.*')}.*"
    return version
