"""Read requirements files in pip's format, with the files and the local wheels that they name."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from clusterctl.errors import UsageError
from clusterctl.util.assets import file_sha256

_MAX_BYTES: Final = 4 << 20
_INCLUDE: Final = re.compile(r"^(-r|--requirement|-c|--constraint)(?:\s+|\s*=\s*|(?<=-[rc]))(.+)$")
# The options that say where packages are, and the value of each.
OPTION: Final = re.compile(
    r"^(-[if]|--(?:index-url|extra-index-url|find-links|no-index|trusted-host)\b)([^\n]*?)(?:\s+#.*)?$",
    re.MULTILINE,
)
INDEX_URL: Final = re.compile(r"-i|--index-url")
_COMMENT: Final = re.compile(r"(^|\s+)#.*$")
_HASHED: Final = re.compile(r"([A-Za-z0-9][\w.-]*).*?((?:\s--hash[ =]\S+)+)")
_SHA256: Final = re.compile(r"sha256:(\w+)")
_FILES: Final = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
# The files of a folder that say what its package depends on.
_OF_FOLDER: Final = ("pyproject.toml", "setup.cfg", "setup.py")


def contents_of(
    file: Path,
    parents: frozenset[Path] = frozenset(),
    named_in: str = "",
    *,
    constraints: bool = True,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield (folder, content) of a requirements file and included files, and ("", hash) of local
    wheels, archives, and files of projects.
    """
    file = file.absolute()
    if file in parents:
        return
    text = _read(file, named_in)
    yield str(file.parent).encode(errors="surrogateescape"), text.encode()
    for number, line in _lines(text):
        if match := _INCLUDE.match(line):
            name = match[2].strip("\"'")
            visited = parents | {file}
            if "://" not in name and (constraints or match[1] in {"-r", "--requirement"}):
                place_of_name = f"{file}:{number}"
                yield from contents_of(
                    file.parent / name, visited, place_of_name, constraints=constraints
                )
            continue
        _reject_line_of_conda(line, f"{file}:{number}")
        for local in _local_files(line, file.parent):
            try:
                yield b"", file_sha256(local).encode()
            except OSError as exc:
                raise UsageError(
                    f"the file {local} can't be read",
                    code="file-unreadable",
                    where=f"{file}:{number}",
                    why=exc.strerror or str(exc),
                    fix="make the file readable, or remove its line from the requirements file",
                ) from exc


def read_requirements(file: Path) -> Iterator[str]:
    """Yield the lines of a requirements file, without comments, or raise a UsageError."""
    yield from (line for _, line in _lines(_read(file, "")))


def included_by(line: str) -> str | None:
    """Return the file or URL that a line includes. None: it includes no file."""
    match = _INCLUDE.match(line)
    return match[2].strip("\"'") if match else None


def hashes_in(files: Iterable[Path]) -> dict[str, frozenset[str]]:
    """Return the SHA-256 that requirements files allow: normalized name -> of its files."""
    found = dict[str, frozenset[str]]()
    for file in files:
        for _, content in contents_of(file):
            for _, line in _lines(content.decode()):
                if match := _HASHED.match(line):
                    name = canonicalize_name(match[1])
                    found[name] = found.get(name, frozenset()).union(_SHA256.findall(match[2]))
    return found


def _reject_line_of_conda(line: str, where: str) -> None:
    if (place := _BUILT_THERE.match(line)) is not None and not Path(place["path"]).exists():
        raise UsageError(
            f"{place['name']} is required from a folder that does not exist",
            code="packages-unmet",
            about="conda-line",
            where=where,
            why=f"{place['path']} is a place on the machine on which conda or pip built the "
            "package",
            fix=f"write {place['name']}==VERSION; `pip list --format=freeze` writes such lines",
        )


def decoded(raw: bytes, file: Path) -> str:
    """Return the text of a file that lists packages. Raise a UsageError if it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        encoding = "UTF-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "LATIN1"
        line = raw.count(b"\n", 0, exc.start) + 1
        raise UsageError(
            f"{file.name} can't be read as text",
            code="file-invalid",
            about="not-text",
            where=str(file),
            why=f"line {line} is not UTF-8: {exc.reason}",
            fix=f"save the file in UTF-8, such as with `iconv -f {encoding} -t UTF-8 "
            f"{shlex.quote(file.name)}`",
        ) from exc


def _read(file: Path, named_in: str) -> str:
    name = f"the requirements file {file}"
    fix = "pass a file in pip's requirements format"
    if file.suffix in _OTHER_FORMATS or file.name in OF_TOOLS:
        command = OF_TOOLS.get(
            file.name, "pip list --format=freeze --exclude-editable >requirements.txt"
        )
        raise UsageError(
            f"{file} is not a requirements file",
            code="file-invalid",
            about="requirements",
            where=named_in,
            why=f"requirements files have a package per line; {file.name} is for another tool",
            fix=f"write a requirements file, such as with `{command}`",
        )
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as exc:
        # A path with a null byte raises a ValueError.
        reason = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"{name} can't be read", code="file-unreadable", where=named_in, why=reason, fix=fix
        ) from exc
    if len(raw) > _MAX_BYTES:
        raise UsageError(
            f"{name} is larger than {_MAX_BYTES >> 20} MiB",
            code="file-invalid",
            about="too-large",
            where=named_in,
            fix=fix,
        )
    return decoded(raw, file)


# Formats of conda, of Python projects, and of other tools.
_OTHER_FORMATS: Final = frozenset({".yml", ".yaml", ".toml", ".cfg", ".json", ".py", ".whl"})
# Files of other tools -> the command that writes their packages as a requirements file, without the
# project.
OF_TOOLS: Final = {
    "uv.lock": "uv export --no-emit-project -o requirements.txt",
    "pyproject.toml": "uv export --no-emit-project -o requirements.txt",
    "pylock.toml": "uv export --no-emit-project -o requirements.txt",
    "poetry.lock": "poetry export -o requirements.txt",
    "pdm.lock": "pdm export --no-self -o requirements.txt",
    "Pipfile": "pipenv requirements >requirements.txt",
    "Pipfile.lock": "pipenv requirements >requirements.txt",
    "setup.cfg": "uv pip compile setup.cfg -o requirements.txt",
    "setup.py": "uv pip compile setup.py -o requirements.txt",
}
_BUILT_THERE: Final = re.compile(r"(?P<name>[\w.-]+)(?:\[.*\])?\s*@\s*file://(?P<path>/[^\s#;]+)")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the logical lines of a requirements file without comments, each with its first line
    number.
    """
    joined = ""
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start if joined else number
        joined += _COMMENT.sub("", line)
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if joined.strip():
            yield start, joined.strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()


def _local_files(line: str, folder: Path) -> Iterator[Path]:
    """Yield the files on this machine that a line names: a wheel, an archive, or a project's."""
    what = line.rpartition(" @ ")[2].removeprefix("-e ").removeprefix("--editable").strip(" =")
    name = re.split(r"\s*;|\s+--|\s+$|\[", what)[0].removeprefix("file://")
    # Unlike Path, os.path takes any name.
    path = os.path.join(folder, name)
    if name.endswith(_FILES) and os.path.isfile(path):
        yield Path(path)
    elif name.startswith((".", "/")) and os.path.isdir(path):
        yield from (
            Path(path, one) for one in _OF_FOLDER if os.path.isfile(os.path.join(path, one))
        )
