"""The packages that a project's files declare: uv.lock, pylock.toml, pyproject.toml, a comment of a
script (PEP 723), or a requirements file. uv reads them. This module decides the rest: which file
belongs to a program, whether the nodes have the Python that it requires, and the advice on files of
other tools.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from packaging.pylock import is_valid_pylock_path
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from clusterctl.errors import Notice, UsageError
from clusterctl.packages.index_failures import index_error
from clusterctl.packages.locked_packages import lines_of, unknown_extra
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.package_files import (
    CONDA,
    OF_OTHERS,
    is_dynamic,
    malformed,
    strings_of,
    table_of,
    text_of,
    toml_of,
)
from clusterctl.packages.requirement_files import (
    INDEX_URL,
    OF_TOOLS,
    OPTION,
    contents_of,
)
from clusterctl.packages.uv_program import run_uv
from clusterctl.spec.program import script_block
from clusterctl.util.assets import digest
from clusterctl.util.numbers import counted
from clusterctl.util.progress import SILENT

_LOCKS_OF_OTHERS: Final = ("poetry.lock", "pdm.lock")
# Keys of a requirement in a uv.lock that say where its package is, in place of versions.
_PLACES: Final = frozenset({"url", "git", "path", "directory", "editable", "virtual"})
# FILE[NAME,...] chooses extras and dependency groups.
_CHOICE: Final = re.compile(r"(?P<file>.+)\[(?P<names>[\w.,\s-]+)\]")


@dataclass(frozen=True, slots=True)
class PackageList:
    """The packages in a file that the user chose.

    file: the file. extras, groups: the project's extras and groups that the user chose.
    summary: the file and its packages for the user, such as "uv.lock: 4 packages, group train".
    lines: of a lock: the nodes' packages, as ``NAME @ URL#HASH``. None: uv has to choose.
    included: files that list the packages in place of ``file``. has_project: whether uv reads
        packages of ``file`` besides those of groups. has_indexes: whether the project tells uv where
        packages come from.
    """

    file: Path
    summary: str
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    lines: tuple[str, ...] | None = None
    included: tuple[Path, ...] = ()
    has_project: bool = True
    has_indexes: bool = False

    @classmethod
    def read(cls, choice: Path, node: NodePlatform) -> PackageList:
        """Read a file that the user chose: ``FILE`` or, with extras and groups, ``FILE[NAME,...]``.

        Raises:
            UsageError: the file can't be read, declares no packages, or names packages that nodes
                can't have.
            MachineError: an index can't be read.
        """
        file, names = _split(choice)
        if _is_of_uv(file):
            return _of_uv(file, names, node)
        if is_valid_pylock_path(file):
            return _locked(file, lines_of(toml_of(file), file, node, names), names)
        if file.name == "pyproject.toml":
            return _of_pyproject(file, names, node)
        if names:
            raise UsageError(
                f"{file.name} has no extras or groups to choose",
                about="extra",
                where=str(file),
                why="pyproject.toml, uv.lock and pylock.toml may have them",
                fix=f"use --requirements {file}",
            )
        if file.suffix == ".py":
            return _of_script(file, node)
        if file.name in CONDA:
            raise _conda_error(file)
        return cls(file, str(file))

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def is_locked(self) -> bool:
        return self.lines is not None

    @property
    def is_of_pip(self) -> bool:
        return is_of_pip(self.file)

    @property
    def contents(self) -> Iterator[bytes]:
        """The inputs on which the result of resolving depends."""
        if self.lines is not None:
            yield "\n".join(self.lines).encode()
            return
        yield from (name.encode() for name in (*self.extras, "", *self.groups, ""))
        yield from _contents(self.file)
        for file in self.included:
            yield from _contents(file)

    @property
    def options(self) -> list[str]:
        """The lines of a requirements file that say where packages are, for pip."""
        if not self.is_of_pip or self.is_locked:
            return []
        return [
            f"{match[1]} {_from_folder(match[1], match[2], Path(os.fsdecode(folder)))}"
            for folder, content in contents_of(self.file, constraints=False)
            for match in OPTION.finditer(content.decode(errors="replace"))
        ]

    @property
    def has_index_url(self) -> bool:
        return any(INDEX_URL.match(line) for line in self.options)

    def words(self, folder: Path) -> list[str]:
        """Return the arguments with which uv reads the packages. folder: for a temporary file."""
        if self.lines is not None:
            locked = folder / f"{digest(str(self.file))}.txt"
            locked.write_text("\n".join((*self.lines, "")))
            return [str(locked)]
        words = [str(file) for file in self.included or (self.file,)] if self.has_project else []
        words += [word for name in self.extras for word in ("--extra", name)]
        return words + [word for name in self.groups for word in ("--group", f"{self.file}:{name}")]


def content_hash(choices: Sequence[Path]) -> str:
    """Return a hash of files that list packages, and of the files that these include.

    Raise a UsageError if a file can't be read.
    """
    parts = list[bytes]()
    for file, names in map(_split, choices):
        parts += (name.encode() for name in names)
        parts += _contents(file)
    return digest(*parts)


def _contents(file: Path) -> Iterator[bytes]:
    if is_of_pip(file):
        yield from (part for pair in contents_of(file) for part in pair)
    else:
        yield text_of(file).encode()


def _from_folder(option: str, value: str, folder: Path) -> str:
    """Return an option's value in a file of ``folder`` as it must be in another folder."""
    value = value.strip(" \t=").strip("\"'")
    # Unlike Path, this takes any name.
    path = os.path.join(folder, value)
    return f'"{path}"' if option in {"-f", "--find-links"} and os.path.exists(path) else value


def is_of_pip(file: Path) -> bool:
    """Return whether a file has pip's own format, by its name."""
    others = {"pyproject.toml", *CONDA}
    is_lock = _is_of_uv(file) or is_valid_pylock_path(file)
    return not is_lock and file.name not in others and file.suffix != ".py"


def _is_of_uv(file: Path) -> bool:
    """Return whether a file is a lock of uv, for a project or for a script."""
    return file.name == "uv.lock" or file.name.endswith(".py.lock")


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
    """Return why pip can't install the packages in a file, and the fix. None: pip can."""
    if file.name in CONDA:
        return _conda_error(file)
    if file.name in OF_OTHERS:
        return UsageError(
            f"{file} is not a requirements file",
            code="file-invalid",
            about="requirements",
            where=str(file),
            why=f"only {OF_OTHERS[file.name]} reads {file.name}",
            fix=f"write requirements.txt with `{OF_TOOLS[file.name]}`, and use --requirements "
            "requirements.txt",
        )
    if file.name == "pyproject.toml":
        content = toml_of(file)
        if not table_of(content, "project") and not table_of(content, "dependency-groups"):
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
    content = toml_of(project)
    tables = {
        **table_of(content, "project", "optional-dependencies"),
        **table_of(content, "dependency-groups"),
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
        source = table_of(package, "source")
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


def content_of(file: Path) -> Mapping[str, Any]:
    """Return the content of a list of packages in another format than pip's. Empty: the file is
    empty.

    Raises UsageError: the file can't be read.
    """
    if file.suffix == ".py":
        return _script(file) or {}
    return {} if file.name in CONDA else toml_of(file)


def _locked(file: Path, lines: Sequence[str], shown: Sequence[str]) -> PackageList:
    return PackageList(file, _summary(file, len(lines), shown), lines=tuple(lines))


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
        raise malformed(file, str(exc)) from exc
    raise UsageError(
        f"{file.name} requires Python {required}",
        code="packages-unmet",
        about="python",
        where=str(file),
        why=f"the nodes have Python {node.python}",
        fix="allow that version in the file, or use an environment on the cluster with "
        "--env-path, or --container",
    )


# uv.lock


def _of_uv(file: Path, names: Sequence[str], node: NodePlatform) -> PackageList:
    """Read the lock of uv for a project or for a script. uv itself converts it."""
    is_script = file.name != "uv.lock"
    options = ["--script", str(file.with_suffix(""))] if is_script else []
    if is_script and names:
        raise unknown_extra(file, names[0], ())
    if not is_script:
        project = toml_of(file.with_name("pyproject.toml"))
        extras, groups = _chosen(file.with_name("pyproject.toml"), project, names)
        options += ["--no-default-groups", "--no-emit-project"]
        options += [word for extra in extras for word in ("--extra", extra)]
        options += [word for group in groups for word in ("--group", group)]
        names = _described(extras, groups)
    # With --locked, uv refuses a lock of another index than this machine's, such as a mirror.
    argv = ["export", "--frozen", "--format", "pylock.toml", "--no-header", "--quiet"]
    argv += ["--no-python-downloads", *options]
    result, traced = run_uv(argv, cwd=file.parent, heard=SILENT.note)
    if result.rc != 0:
        # uv downloads the files of which a lock has no hash.
        if error := index_error(result, traced, str(file)):
            raise error
        raise UsageError(
            f"uv can't use {file.name}",
            code="file-invalid",
            about="uv-lock",
            where=str(file),
            why=result.stderr.strip()[:1000],
            fix=f"choose extras and groups that fit together; or write the lock again with `uv "
            f"lock`; if it is of a newer uv than {version('uv')}, write pylock.toml with `uv export "
            "-o pylock.toml`, and use --requirements pylock.toml",
        )
    if not is_script:
        _reject_stale(file, project)
    return _locked(file, lines_of(tomllib.loads(result.stdout), file, node), names)


def _reject_stale(lock: Path, project: Mapping[str, Any]) -> None:
    """Raise a UsageError if a uv.lock was written when its project depended on something else.

    The locked versions don't show that: uv leaves out packages that no Python of the project needs,
    and `override-dependencies` replaces versions.
    """
    table = table_of(project, "project")
    own = canonicalize_name(str(table.get("name", "")))
    packages = (one for one in _locked_by_uv(lock) if one.get("name") == own)
    metadata = table_of(next(packages, {}), "metadata")
    known = [
        one for one in metadata.get("requires-dist", ()) if "extra ==" not in str(one.get("marker"))
    ]
    declared = strings_of(table.get("dependencies", ()), lock)
    for needed in (_requirement(line, lock) for line in declared):
        name = canonicalize_name(needed.name)
        if not any(one.get("name") == name and _is_same(one, needed.specifier) for one in known):
            raise UsageError(
                "uv.lock is older than pyproject.toml",
                code="packages-unmet",
                about="lock-stale",
                where=str(lock),
                why=f"pyproject.toml requires {needed}, and did not when uv.lock was written",
                fix="run `uv lock`",
            )


def _is_same(locked: Mapping[str, Any], specifier: SpecifierSet) -> bool:
    """Return whether an entry of `requires-dist` has these versions. uv notes no versions of a URL
    or a folder.
    """
    known = SpecifierSet(str(locked.get("specifier", "")))
    return known == specifier or not _PLACES.isdisjoint(locked)


def _locked_by_uv(lock: Path) -> Sequence[Mapping[str, Any]]:
    """Return the tables `[[package]]` of a lock of uv."""
    packages = toml_of(lock).get("package", [])
    if not isinstance(packages, list) or not all(isinstance(one, Mapping) for one in packages):
        raise malformed(lock, f"tables [[package]] are needed, not {packages!r:.80}")
    return packages


# pyproject.toml and scripts


def _of_pyproject(file: Path, names: Sequence[str], node: NodePlatform) -> PackageList:
    content = toml_of(file)
    project = table_of(content, "project")
    if error := unsupported_packages(file):
        raise error
    _reject_other_python(project.get("requires-python"), file, node)
    extras, groups = _chosen(file, content, names)
    lines = strings_of(project.get("dependencies", ()), file)
    included = _dynamic(file, content)
    # uv would run the program that builds the package.
    if included and extras:
        raise _computed(file, "the packages of its extras")
    return PackageList(
        file,
        _summary(file, len(lines), _described(extras, groups)),
        extras=tuple(extras),
        groups=tuple(groups),
        included=included,
        has_project=bool(project),
        has_indexes=_has_indexes(content),
    )


def _summary(file: Path, number: int, chosen: Sequence[str]) -> str:
    return ", ".join([f"{file.name}: {counted(number, 'package')}", *chosen])


def _has_indexes(content: Mapping[str, Any]) -> bool:
    table = table_of(content, "tool", "uv")
    return any(
        table.get(name) for name in ("index", "index-url", "extra-index-url", "index-strategy")
    )


def _chosen(
    file: Path, content: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the extras and the dependency groups that a user chose; by default, the groups that
    uv installs by default if the project sets them.
    """
    known_extras = table_of(content, "project", "optional-dependencies")
    known_groups = table_of(content, "dependency-groups")
    extras = [name for name in names if name in known_extras]
    groups = [name for name in names if name in known_groups]
    for name in names:
        if name not in {*extras, *groups}:
            raise unknown_extra(file, name, {*known_extras, *known_groups})
    defaults = table_of(content, "tool", "uv").get("default-groups", ())
    chosen = known_groups if defaults == "all" else strings_of(defaults, file)
    return extras, list(dict.fromkeys([*groups, *chosen]))


def _described(extras: Sequence[str], groups: Sequence[str]) -> list[str]:
    return [*(f"extra {name}" for name in extras), *(f"group {name}" for name in groups)]


def _dynamic(file: Path, content: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files that have a project's packages in place of pyproject.toml."""
    if not is_dynamic(table_of(content, "project"), file):
        return ()
    table = table_of(content, "tool", "setuptools", "dynamic", "dependencies")
    listed = table.get("file", ())
    names = (listed,) if isinstance(listed, str) else strings_of(listed, file)
    if not names:
        raise _computed(file, "its dependencies")
    return tuple(file.parent / name for name in names)


def _computed(file: Path, what: str) -> UsageError:
    return UsageError(
        f"only a build of the package tells {what}",
        code="packages-unmet",
        about="computed",
        where=str(file),
        why="`dynamic` lists dependencies",
        fix="write requirements.txt, such as with `uv pip compile pyproject.toml -o "
        "requirements.txt`, and use --requirements requirements.txt",
    )


def _without_project(file: Path, content: Mapping[str, Any]) -> UsageError:
    poetry = bool(table_of(content, "tool", "poetry"))
    command = (
        "poetry export --without-hashes -o requirements.txt"
        if poetry
        else "uv pip compile pyproject.toml -o requirements.txt"
    )
    return UsageError(
        "pyproject.toml lists no packages in [project]",
        code="packages-unmet",
        about="project-table",
        where=str(file),
        why="it lists them in [tool.poetry], which only Poetry reads"
        if poetry
        else "it has neither [project] nor [dependency-groups]",
        fix=f"write requirements.txt with `{command}`, and use --requirements requirements.txt",
    )


def _of_script(file: Path, node: NodePlatform) -> PackageList:
    content = _script(file)
    if content is None and (error := unsupported_packages(file)):
        raise error
    if content is None:
        raise UsageError(
            f"{file.name} lists no packages",
            code="packages-unmet",
            about="script-block",
            where=str(file),
            why="it has no comment `# /// script` (PEP 723)",
            fix="pass a file that lists packages, such as requirements.txt",
        )
    _reject_other_python(content.get("requires-python"), file, node)
    if _has_indexes(content):
        raise UsageError(
            f"{file.name} has indexes in [tool.uv], but no lock",
            code="packages-unmet",
            about="lock-missing",
            where=str(file),
            why="uv reads the indexes of a script only to lock it",
            fix=f"run `uv lock --script {file.name}`: clusterctl reads the lock",
        )
    lines = strings_of(content.get("dependencies", ()), file)
    return PackageList(file, _summary(file, len(lines), ()))


def _script(file: Path) -> dict[str, Any] | None:
    """Return the content of a program's comment `# /// script`. None: it has no such comment."""
    block = script_block(file, text_of(file).split("\n"))
    try:
        return None if block is None else tomllib.loads(block)
    except tomllib.TOMLDecodeError as exc:
        raise malformed(file, f"its comment `# /// script`: {exc}") from exc


def _requirement(line: str, file: Path) -> Requirement:
    try:
        return Requirement(line)
    except InvalidRequirement as exc:
        raise malformed(file, f"{line}: {exc}") from exc


def _name(line: str, file: Path) -> str:
    return "" if line.startswith("-") else canonicalize_name(_requirement(line, file).name)


# environment.yml


def _conda_error(file: Path) -> UsageError:
    return UsageError(
        f"{file.name} lists packages of conda",
        code="packages-unmet",
        about="conda",
        where=str(file),
        why="only conda installs them",
        fix="create the environment on the cluster once, such as with `micromamba create -p DIR -f "
        f"{file.name}`, and use --env-path DIR; or use an image that has it, with --container; or "
        "list packages of pip in requirements.txt",
    )
