"""uv, which resolves packages on the user's machine. It gets the user's settings of pip, too."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uv import find_uv_bin

from clusterctl.errors import UsageError
from clusterctl.state.workspace import cache_home
from clusterctl.util.assets import incomplete
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import Result, run
from clusterctl.util.progress import LineReporter

# Sections of pip's settings that hold for `pip download`. The last one wins.
_SECTIONS: Final = ("global", "download", ":env:")
# Settings of pip that are options in a requirements file, with a value each.
_LISTED: Final = ("extra-index-url", "find-links", "constraint")
# Settings of pip -> variables of uv, which the user's own variables precede.
_VARIABLES: Final = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
}
# A build must not find a compiler: its result would fit this machine, and not the nodes.
WITHOUT_COMPILER: Final = dict.fromkeys(("CC", "CXX", "FC", "NVCC"), "false")
_LONGEST_REASON: Final = 1000
_TRACE: Final = re.compile(r"(?:TRACE|DEBUG|INFO|WARN) ")


@dataclass(frozen=True, slots=True)
class PipSettings:
    """The user's settings of pip, of its files and variables: name, such as ``index-url`` -> value."""

    values: Mapping[str, str]

    @classmethod
    def read(cls) -> PipSettings:
        """Ask pip for the settings. Raise a UsageError if pip can't read them."""
        argv = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "config", "list"]
        # pip prints them as messages, which its setting `quiet` hides.
        result = run([*argv, "-vvv"])
        if result.rc != 0:
            raise UsageError(
                "the settings of pip can't be read",
                code="tool-failed",
                about="pip",
                why=f"pip says: {(result.stderr or result.stdout).strip()[-_LONGEST_REASON:]}",
                fix="correct the file or the variable that it names; `python -m pip config debug` "
                "lists them",
            )
        found = [line.partition("=") for line in result.stdout.splitlines()]
        values = {
            key.removeprefix(f"{section}.").removeprefix("default-"): ast.literal_eval(value)
            for section in _SECTIONS
            for key, _, value in found
            if key.startswith(f"{section}.")
        }
        return cls(values)

    def lines(self, *, index: bool) -> Iterator[str]:
        """Yield the settings as lines of a requirements file. index: whether with ``index-url``."""
        if index and (url := self.values.get("index-url")):
            yield f"--index-url {url}"
        if self.has_no_index:
            yield "--no-index"
        for name in _LISTED:
            for value in self.values.get(name, "").split():
                # pip takes a path from the folder in which it runs, uv from that of the lines.
                path = os.path.abspath(value)
                yield f"--{name} {path if os.path.exists(path) else value}"

    @property
    def has_no_index(self) -> bool:
        return self.values.get("no-index", "").lower() in {"1", "true", "yes", "on"}

    @property
    def options(self) -> list[str]:
        hosts = self.values.get("trusted-host", "").split()
        return [word for host in hosts for word in ("--allow-insecure-host", host)]

    @property
    def variables(self) -> dict[str, str]:
        own = {key: self.values[name] for name, key in _VARIABLES.items() if name in self.values}
        if self.values.get("keyring-provider") in {"import", "subprocess"}:
            own["UV_KEYRING_PROVIDER"] = "subprocess"
        return own


def uv_path() -> str:
    """Return the path of uv's program. Raise a ClusterctlError if the installation lacks it."""
    try:
        return find_uv_bin()
    except FileNotFoundError as exc:
        raise incomplete("the program uv") from exc


def _temporary() -> Path:
    """Return the folder for uv's temporary files. uv leaves a lock there of each folder of sources."""
    place = cache_home() / "python" / "uv"
    with translating_write_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    return place


def run_uv(
    words: Sequence[str],
    *,
    cwd: Path,
    heard: LineReporter,
    variables: Mapping[str, str] | None = None,
) -> tuple[Result, str]:
    """Run uv. Return its result, and its trace of its requests.

    heard: called with each line that uv prints for its user. variables: those of the environment
        precede.
    """
    # Only the trace shows that one of several indexes refused the login.
    own = {"NO_COLOR": "1", "RUST_LOG": "uv_client=trace", "TMPDIR": str(_temporary())}
    env = {**(variables or {}), **os.environ, **WITHOUT_COMPILER, **own}
    result = run([uv_path(), *words], cwd=cwd, env=env)
    lines = result.stderr.splitlines(keepends=True)
    said = [line for line in lines if not _TRACE.match(line)]
    for line in said:
        heard(line.rstrip())
    traced = "".join(line for line in lines if _TRACE.match(line))
    return Result(result.rc, result.stdout, "".join(said)), traced
