"""Read requirements files in pip's format, with the files and the local wheels that they name."""

from __future__ import annotations

import codecs
import locale
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.packages.sources import ARCHIVES, SourceLine
from clusterctl.util.assets import file_sha256

_MAX_BYTES: Final = 4 << 20
# The mark of UTF-32 begins with that of UTF-16. These decoders leave the mark in the text.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# A comment in one of the first two lines.
_CODING: Final = re.compile(rb"(?:.*\n)?#.*coding[:=]\s*([-\w.]+)")
_INCLUDE: Final = re.compile(r"^(-r|--requirement|-c|--constraint)(?:\s+|\s*=\s*|(?<=-[rc]))(.+)$")
_LINKS: Final = re.compile(r"^(?:-f|--find-links)(?:\s+|\s*=\s*|(?<=-f))(.+)$")
COMMENT: Final = re.compile(r"(^|\s+)#.*$")
_WHEEL: Final = (".whl",)
# The path of a wheel or an archive in a line.
_PATH: Final = re.compile(
    rf"(?:file:|\.{{0,2}}/|(?<![^ ]))\S*(?:{'|'.join(map(re.escape, (*_WHEEL, *ARCHIVES)))})"
)


def contents_of(
    file: Path,
    parents: frozenset[Path] = frozenset(),
    named_in: str = "",
    *,
    constraints: bool = True,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield (folder, content) of a requirements file and included files, and ("", hash) of local
    wheels.
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
        reject_source(line, file.parent, f"{file}:{number}", is_included=bool(parents))
        if (wheel := _local_file(line, file.parent, _WHEEL)) is not None:
            try:
                yield b"", file_sha256(wheel).encode()
            except OSError as exc:
                raise UsageError(
                    f"the wheel {wheel} can't be read",
                    code="file-unreadable",
                    where=f"{file}:{number}",
                    why=exc.strerror or str(exc),
                    fix="make the wheel readable, or remove its line from the requirements file",
                ) from exc


def read_requirements(file: Path) -> Iterator[str]:
    """Yield the lines of a requirements file, without comments, or raise a UsageError."""
    yield from (line for _, line in _lines(_read(file, "")))


def included_by(line: str) -> str | None:
    """Return the file or URL that a line includes. None: it includes none."""
    match = _INCLUDE.match(line)
    return match[2].strip("\"'") if match else None


def as_elsewhere(line: str, folder: Path) -> str:
    """Return a line of a requirements file in ``folder`` as it must be in another folder: relative
    paths are made absolute.
    """
    if match := _INCLUDE.match(line):
        name = match[2].strip("\"'")
        return include(match[1], folder / name) if "://" not in name else line
    # Unlike Path, os.path takes any name.
    if (match := _LINKS.match(line)) and os.path.isdir(folder / match[1].strip("\"'")):
        return include("--find-links", folder / match[1].strip("\"'"))
    if package := _local_file(line, folder, (*_WHEEL, *ARCHIVES)):
        return _PATH.sub(lambda _: package.absolute().as_uri(), line)
    return line


def include(flag: str, file: Path) -> str:
    """Return a line that includes a file. flag: ``-r``, ``-c`` or ``--find-links``. pip splits it as
    a shell does.
    """
    return f"{flag} {shlex.quote(str(file))}"


def reject_source(line: str, folder: Path, where: str, *, is_included: bool = False) -> None:
    """Raise a UsageError if a line of a requirements file in ``folder`` names no wheel.

    is_included: another file includes this one. An archive is rejected, too, since only those of
        the file that the user names are built.
    """
    if (place := _BUILT_THERE.match(line)) is not None and not Path(place["path"]).exists():
        raise UsageError(
            f"{place['name']} is required from a folder that does not exist",
            code="requirement-of-conda",
            where=where,
            why=f"{place['path']} is a place on the machine on which conda or pip built the "
            "package",
            fix=f"write {place['name']}==VERSION; `pip list --format=freeze` writes such lines",
        )
    if source := _source_in(line, folder, is_included=is_included):
        reason, fix = source
        raise UsageError(
            "a requirement has no wheel",
            code="no-wheel",
            where=where,
            why=f"nodes install only wheels, and this line names {reason}",
            fix=fix,
        )


def decoded(raw: bytes, file: Path, where: str = "") -> str:
    """Return the text of a file that lists packages, as pip decodes it: by its byte order mark, by
    its comment `coding` (PEP 263), as UTF-8, or by the user's locale.

    where: the line that names ``file``. Default: ``file``. Raise a UsageError if the file can't be
    decoded.
    """
    encodings = ["utf-8", locale.getencoding()]
    if comment := _CODING.match(raw):
        encodings = [comment[1].decode()]
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            encodings = [encoding]
            break
    for encoding in encodings:
        try:
            return raw.decode(encoding).removeprefix("\ufeff")
        except UnicodeDecodeError as exc:
            line = raw.count(b"\n", 0, exc.start) + 1
            reason = f"line {line} is not {encoding.upper()}: {exc.reason}"
        except LookupError:
            reason = f"its comment names the unknown encoding {encoding}"
    raise UsageError(
        f"{file.name} can't be read as text",
        code="packages-not-text",
        where=where or str(file),
        why=reason,
        fix=f"save the file in UTF-8, such as with `iconv -f LATIN1 -t UTF-8 {shlex.quote(file.name)}`",
    )


def _read(file: Path, named_in: str) -> str:
    name = f"the requirements file {file}"
    fix = "pass a file in pip's requirements format"
    if file.suffix in _OTHER_FORMATS or file.name in OF_TOOLS:
        command = OF_TOOLS.get(
            file.name, "pip list --format=freeze --exclude-editable >requirements.txt"
        )
        raise UsageError(
            f"{file} is not a requirements file",
            code="not-requirements",
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
            code="file-too-large",
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
_EDITABLE: Final = re.compile(r"(?:-e|--editable)(?:\s+|\s*=\s*|(?<=-e))(?P<what>.+)")
_REPOSITORY: Final = re.compile(r"(?:[\w.-]+(?:\[.*\])?\s*@\s*)?(?:git|hg|svn|bzr)\+")
_BUILT_THERE: Final = re.compile(r"(?P<name>[\w.-]+)(?:\[.*\])?\s*@\s*file://(?P<path>/[^\s#;]+)")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the logical lines of a requirements file without comments, each with its first line
    number.
    """
    joined = ""
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start if joined else number
        joined += COMMENT.sub("", line)
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if joined.strip():
            yield start, joined.strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()


def _source_in(line: str, folder: Path, *, is_included: bool) -> tuple[str, str] | None:
    """Return what a line names if pip would clone or build it, and the fix. None: pip would do
    neither, or it is an archive of a file that is not included.
    """
    editable = _EDITABLE.fullmatch(line)
    what = editable["what"] if editable else line
    if _REPOSITORY.match(what):
        reason = "a repository"
        example = "git+https://..."
    elif editable or _is_folder(what, folder):
        reason = "a folder"
        example = "FOLDER"
    elif is_included and SourceLine.of(as_elsewhere(line, folder)):
        reason = "an archive"
        example = "ARCHIVE"
    else:
        return None
    own = "remove the line if it names your script's project, which is sent with the job, and "
    own += "use --requirements pyproject.toml for its packages; "
    wheel = (
        f"build a wheel (`pip wheel --no-deps {example}`) and write the wheel's path in its place"
    )
    if "git+" in what or reason == "an archive":
        own = "write the line in the file that `submit --requirements` names, not in one that it "
        own += "includes, nor in that of the spec; or "
    elif reason == "a repository":
        own = ""
    return reason, own + wheel


def _is_folder(line: str, folder: Path) -> bool:
    path = re.split(r"\s*;|\s+--|\[", line.removeprefix("file://"))[0].strip()
    looks_like_path = path in {".", ".."} or path.startswith(("./", "../", "/"))
    # Unlike Path, this takes any name.
    return looks_like_path and os.path.isdir(folder / path)


def _local_file(line: str, folder: Path, endings: tuple[str, ...]) -> Path | None:
    """Return the file on this machine that a line names, if its name ends so."""
    name = re.split(r"\s*;|\s+--|\s+$|\[", line.rpartition(" @ ")[2].strip())[0].removeprefix(
        "file://"
    )
    path = folder / name
    return path if name.endswith(endings) and "://" not in name and os.path.isfile(path) else None
