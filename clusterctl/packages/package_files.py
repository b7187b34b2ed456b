"""Which file beside a program lists its packages. Each submission of a program asks this, so that
nothing slow is imported here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import UsageError
from clusterctl.packages.requirement_files import decoded, read_requirements
from clusterctl.spec.program import head_of, script_block

# The files in a project's folder that are looked for, the first of which counts.
LOOKED_FOR: Final = (
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
OF_OTHERS: Final = {"Pipfile": "Pipenv", "setup.cfg": "setuptools", "setup.py": "setuptools"}
CONDA: Final = frozenset({"environment.yml", "environment.yaml"})


def find_package_file(script: Path, top: Path) -> Path | None:
    """Return the file that lists the packages of a Python program. None: there is no such file.

    It is the program itself if it has a comment `# /// script`; otherwise the first of
    ``LOOKED_FOR`` in the nearest folder that has one, from the program's folder up to ``top``.
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
        for name in LOOKED_FOR:
            if (folder / name).is_file() and _lists_packages(folder / name):
                return folder / name
    return None


def _lists_packages(file: Path) -> bool:
    """Return whether a file that was found lists packages, as its only purpose may be another."""
    try:
        if file.name == "pyproject.toml":
            content = toml_of(file)
            project = table_of(content, "project")
            is_poetry = "dependencies" in table_of(content, "tool", "poetry")
            return bool(project.get("dependencies")) or is_dynamic(project, file) or is_poetry
        if file.name == "requirements.txt":
            return any(True for _ in read_requirements(file))
        if file.name in CONDA:
            # Other programs have files of this name.
            return re.search(r"^dependencies\s*:", text_of(file), re.MULTILINE) is not None
        if file.name == "Pipfile":
            return bool(table_of(toml_of(file), "packages"))
        if file.name in OF_OTHERS:
            return (
                re.search(r"^[^#\n]*\binstall_requires\s*=", text_of(file), re.MULTILINE)
                is not None
            )
    except UsageError:
        # Reading the file again shows the error.
        return True
    return True


def toml_of(file: Path) -> dict[str, Any]:
    text = text_of(file)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise malformed(file, str(exc)) from exc


def text_of(file: Path) -> str:
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


def table_of(content: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a table of a TOML file. Empty: there is no such table."""
    for key in keys:
        value = content.get(key)
        content = value if isinstance(value, Mapping) else {}
    return content


def strings_of(value: object, file: Path) -> tuple[str, ...]:
    """Return a list of a file. A text is not a list of its letters."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise malformed(file, f"a list of texts is needed, not {value!r:.80}")


def is_dynamic(project: Mapping[str, Any], file: Path) -> bool:
    return "dependencies" in strings_of(project.get("dynamic", ()), file)


def malformed(file: Path, why: str) -> UsageError:
    return UsageError(
        f"{file.name} can't be read as a list of packages",
        code="file-invalid",
        about="packages",
        where=str(file),
        why=why,
        fix="correct the file",
    )


@contextmanager
def suggesting_no_requirements() -> Iterator[None]:
    """Add to the fix of a UsageError that a job can be submitted without the packages of a file, which
    the user may not have named.
    """
    try:
        yield
    except UsageError as exc:
        exc.fix += "; --requirements none submits the job without these packages"
        raise
