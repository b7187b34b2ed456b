"""Sources of packages without a wheel: a commit of a git repository, or an archive. They are fetched
to this machine, so nodes need no internet access.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.version import InvalidVersion, Version

from clusterctl.errors import MachineError
from clusterctl.state.workspace import cache_home
from clusterctl.util.assets import file_sha256
from clusterctl.util.process import run, temporary_folder

# How the names of archives with sources end.
ARCHIVES: Final = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
# A line of a requirements file that names a repository of git, or an archive with sources. The
# extras of a line without a name come last.
_LINE: Final = re.compile(
    r"(?:(?:-e|--editable)(?:\s+|\s*=\s*))?"
    r"(?:(?P<name>[\w.-]+)\s*(?P<extras>\[[^\]]*\])?\s*@\s*)?"
    rf"(?P<url>git\+[^\s#]+|(?:https?|file)://[^\s#]+(?:{'|'.join(map(re.escape, ARCHIVES))}))"
    r"(?P<extras_at_end>\[[^\]]*\])?"
    r"(?:#(?P<fragment>\S*))?(?:\s*;\s*(?P<marker>.+)|\s*)"
)
_PATIENCE_S: Final = 1800.0
_NETWORK_S: Final = 60.0
# Wheels, which are zip archives, can't have times before 1980.
_TIME: Final = 315_532_800
_TAG: Final = re.compile(r"(?P<tag>.+)-(?P<distance>\d+)-g(?P<commit>[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line that names sources. extras: in brackets. marker: "": the line always applies."""

    name: str
    extras: str
    url: str
    fragment: str
    marker: str

    @classmethod
    def of(cls, line: str) -> SourceLine | None:
        """Parse a line of a requirements file. None: it names no sources that can be fetched."""
        if (match := _LINE.fullmatch(line)) is None:
            return None
        fields = match.groupdict(default="")
        extras_at_end = fields.pop("extras_at_end")
        return cls(**{**fields, "extras": fields["extras"] or extras_at_end})

    def option(self, name: str) -> str:
        """Return a value of the URL's fragment, such as ``subdirectory``. "": it has none."""
        pairs = (pair.partition("=") for pair in self.fragment.split("&"))
        return next((unquote(value) for key, _, value in pairs if key == name), "")

    @property
    def key(self) -> str:
        """The line, and the content of an archive on this machine, which may change."""
        path = Path(unquote(urlsplit(self.url).path))
        is_here = self.url.startswith("file:") and path.is_file()
        return f"{self} {file_sha256(path) if is_here else ''}"

    @property
    def shown(self) -> str:
        """The name of the package, or of an archive on this machine, or else the URL."""
        is_here = self.url.startswith("file:")
        place = Path(unquote(self.url)).name if is_here else _without_password(self.url)
        return self.name or self.option("egg") or place


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a package.

    origin: where they are from, without a password: a URL, of a repository with its commit, and the
        package's folder in it.
    archive: the files, in the cache. subfolder: the package's folder in them. "": the top.
    version: of the repository by its tags, for packages that have their version from there.
    """

    origin: str
    archive: Path
    subfolder: str = ""
    version: str = ""


def fetch_source(line: SourceLine) -> Source:
    """Fetch sources to the cache of this machine.

    Raises:
        MachineError: they can't be fetched, or have another hash than the line.
    """
    folder = cache_home() / "python" / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as unfinished:
        if line.url.startswith("git+"):
            return _of_repository(line, unfinished, folder)
        return _of_archive(line, unfinished, folder)


def _of_repository(line: SourceLine, unfinished: Path, folder: Path) -> Source:
    parts = urlsplit(line.url.removeprefix("git+"))
    path, at, wanted = parts.path.rpartition("@")
    if not at:
        path = parts.path
        wanted = ""
    url = urlunsplit(parts._replace(path=path))
    tree = unfinished / "tree"

    def git(*words: str, check: bool = True) -> str:
        return _git(line, words if words[0] == "clone" else ("-C", str(tree), *words), check=check)

    git("clone", "--quiet", "--filter=blob:none", "--no-checkout", "--", url, str(tree))
    commit = ""
    for name in (f"origin/{wanted}", wanted) if wanted else ("HEAD",):
        commit = commit or git(
            "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False
        )
    if not commit:
        # Such as refs/pull/1/head, which is not cloned.
        git("fetch", "--quiet", "--", "origin", wanted)
        commit = git("rev-parse", "FETCH_HEAD^{commit}")
    git("checkout", "--quiet", "--detach", commit)
    git("submodule", "--quiet", "update", "--init", "--recursive")
    version = _version(
        git("describe", "--tags", "--long", "--match", "*[0-9]*", check=False),
        f"{git('rev-list', '--count', 'HEAD')}+g{commit[:9]}",
    )
    archive = unfinished / "source.tar.gz"
    _pack(tree, archive, Path(path).name.removesuffix(".git") or "source")
    subfolder = line.option("subdirectory")
    inner = f"#subdirectory={subfolder}" if subfolder else ""
    origin = f"git+{_without_password(url)}@{commit}{inner}"
    return Source(origin, _kept(archive, folder), subfolder, version)


def _git(line: SourceLine, words: Sequence[str], *, check: bool) -> str:
    """Run git, which asks nothing, and return its output. "": it failed, and ``check`` is not set."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_DIR")}
    for name in ("GIT_WORK_TREE", "GIT_INDEX_FILE"):
        env.pop(name, None)
    try:
        result = run(
            ["git", *words], env={**env, "GIT_TERMINAL_PROMPT": "0"}, timeout_s=_PATIENCE_S
        )
    except OSError as exc:
        raise _not_fetched(line, f"git: {exc.strerror}") from exc
    except subprocess.TimeoutExpired as exc:
        raise _not_fetched(line, f"git takes longer than {_PATIENCE_S:.0f} s") from exc
    if result.rc and check:
        raise _not_fetched(line, f"git says: {result.reason}")
    return "" if result.rc else result.stdout.strip()


def _version(description: str, untagged: str) -> str:
    """Return the version that setuptools-scm gives a commit.

    description: of `git describe --long`. untagged: the number and name of a commit without a tag.
    """
    match = _TAG.fullmatch(description)
    if match is None:
        return f"0.1.dev{untagged}"
    try:
        tag = Version(re.sub(r"^\D*", "", match["tag"]))
    except InvalidVersion:
        return ""
    if match["distance"] == "0":
        return str(tag)
    *first, last = tag.release
    if tag.pre is None:
        last += 1
    release = ".".join(map(str, (*first, last)))
    return f"{release}.dev{match['distance']}+g{match['commit']}"


def _pack(tree: Path, archive: Path, name: str) -> None:
    """Pack the files of a commit. The same files give the same archive."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if ".git" in Path(member.name).parts:
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = _TIME
        member.mode = 0o755 if member.mode & 0o100 else 0o644
        return member

    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as content,
    ):
        # `add` sorts the names in each folder.
        content.add(tree, name, filter=plain)


def _of_archive(line: SourceLine, unfinished: Path, folder: Path) -> Source:
    parts = urlsplit(line.url)
    archive = unfinished / Path(unquote(parts.path)).name
    try:
        if parts.scheme == "file":
            shutil.copyfile(unquote(parts.path), archive)
        else:
            _download(line.url, archive)
    except (OSError, ValueError) as exc:
        # requests names the URL, which may have a password.
        why = str(exc).replace(line.url, _without_password(line.url))
        raise _not_fetched(line, why) from exc
    wanted = line.option("sha256")
    if wanted and wanted != (found := file_sha256(archive)):
        raise _not_fetched(line, f"its SHA-256 is {found}, not {wanted}")
    kept = _kept(archive, folder)
    return Source(_without_password(line.url), kept, line.option("subdirectory"))


def _download(url: str, target: Path) -> None:
    import requests

    certificates = os.environ.get("PIP_CERT") or True
    with requests.get(url, timeout=_NETWORK_S, verify=certificates, stream=True) as answer:
        answer.raise_for_status()
        with target.open("wb") as file:
            for piece in answer.iter_content(1 << 20):
                file.write(piece)


def _kept(archive: Path, folder: Path) -> Path:
    """Move an archive to the cache, under its hash and its name."""
    place = folder / file_sha256(archive)
    place.mkdir(exist_ok=True)
    return archive.replace(place / archive.name)


def _without_password(url: str) -> str:
    kind, git, rest = url.rpartition("git+")
    parts = urlsplit(rest)
    _, at, host = parts.netloc.rpartition("@")
    return kind + git + urlunsplit(parts._replace(netloc=host if at else parts.netloc))


def _not_fetched(line: SourceLine, why: str) -> MachineError:
    return MachineError(
        f"the sources of {line.shown} can't be fetched",
        code="source-not-fetched",
        where=_without_password(line.url),
        why=why,
        fix="check the URL, and that this machine reaches it (for a repository: `git ls-remote URL`)",
    )
