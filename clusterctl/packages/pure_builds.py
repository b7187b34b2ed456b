"""Wheels of packages that have only sources, built on the user's machine if they are pure Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from clusterctl.errors import Notice, UsageError
from clusterctl.packages.locked_packages import path_in
from clusterctl.packages.uv_program import WITHOUT_COMPILER
from clusterctl.state.workspace import cache_home
from clusterctl.util.assets import digest, file_sha256
from clusterctl.util.process import run, temporary_folder
from clusterctl.util.progress import LineReporter

NOT_BUILT: Final = "source"
_PURE: Final = "-none-any.whl"
_PATIENCE_S: Final = 600.0
_LONGEST_REASON: Final = 1000
# The output of the build, in pip's output.
_OUTPUT: Final = re.compile(r"lines? of output\]\n(.*?)\n *\[end of output\]", re.DOTALL)
_SHOWN_LINES: Final = 6
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]+@")


def is_of_sources(line: str) -> bool:
    """Return whether a line ``NAME @ URL`` names sources, and no wheel."""
    return not path_in(line).endswith(".whl")


def pure_wheel(line: str, options: Sequence[str], report: LineReporter) -> Path:
    """Return the wheel of the sources that a line ``NAME @ URL`` names, of an earlier build or built
    now by pip, which checks a hash in the line before it runs anything.

    options: lines of a requirements file with the user's indexes.

    Raises:
        UsageError: the build fails, or its wheel is not pure Python.
    """
    name, _, url = line.partition(" @ ")
    path = Path(path_in(line))
    content = file_sha256(path) if url.startswith("file:") and path.is_file() else ""
    folder = cache_home() / "python" / "builds" / digest(line, content)
    if (wheel := next(folder.glob("*.whl"), None)) is not None:
        return wheel
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) as unfinished:
        wanted = unfinished / "wanted.txt"
        wanted.write_text("\n".join((*options, line, "")))
        argv = [sys.executable, "-P", "-m", "pip", "wheel", "--no-input", "--no-deps", "--quiet"]
        argv += ["--disable-pip-version-check", "--progress-bar=off", "--no-cache-dir"]
        argv += ["--wheel-dir", str(unfinished / "wheels"), "--requirement", str(wanted)]
        env = {**os.environ, **WITHOUT_COMPILER, "NO_COLOR": "1"}
        try:
            result = run(argv, env=env, timeout_s=_PATIENCE_S)
        except subprocess.TimeoutExpired as exc:
            raise not_built(name, f"its build takes longer than {_PATIENCE_S:.0f} s") from exc
        wheel = next((unfinished / "wheels").glob("*.whl"), None)
        if wheel is None:
            raise not_built(name, _cause(result.stderr or result.stdout))
        if not wheel.name.endswith(_PURE):
            raise not_built(name, f"its build gives {wheel.name}, which is not pure Python")
        report(Notice("built-from-source", f"built {wheel.name} of its sources on this machine"))
        try:
            wheel.parent.rename(folder)
        except OSError:
            # Another clusterctl may have built the same.
            if not folder.is_dir():
                raise
    return next(folder.glob("*.whl"))


def _cause(output: str) -> str:
    """Return the last lines that a build printed, without the stack of a traceback."""
    parts = _OUTPUT.findall(output)
    lines = textwrap.dedent(parts[-1] if parts else output).splitlines()
    return "\n".join([line for line in lines if line[:1].strip()][-_SHOWN_LINES:])


def not_built(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name} has no wheel for the nodes, and none of pure Python can be built of its sources",
        code="packages-unmet",
        about=NOT_BUILT,
        where=name,
        why=_PASSWORD.sub("", why.strip()[-_LONGEST_REASON:]),
        fix=f"require a version of {name} with a wheel; or build it in the job, with the nodes' "
        f"compiler, by --build 'python -m pip install --no-deps --target . {name}' in place of the "
        "line; or use an environment that has it, with --env-path or --container",
    )
