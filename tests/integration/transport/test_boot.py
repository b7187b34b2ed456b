"""clusterctl's programs find a newer Python on a host whose `python3` is too old."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from clusterctl.transport.base import BOOT

# An old Python compiles all of the program, and runs the lines before the modules.
OLD = f"import sys; sys.version_info = (3, 6, 8)\n{BOOT}"
TEXTS = '[["hello", "def main(text): print(text)"]]'


def start(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-IS", "-c", program, TEXTS, '["it is\\n\\u00e9"]']
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, env={"PATH": str(folder)}
    )


def test_boot_code_is_valid_for_an_old_python() -> None:
    ast.parse(BOOT, feature_version=(3, 6))


def test_boot_finds_a_newer_python(tmp_path: Path) -> None:
    newer = tmp_path / "python3.11"
    newer.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:])\n")
    newer.chmod(0o755)
    assert start(BOOT, tmp_path).stdout == "it is\né\n"
    assert ast.literal_eval(start(OLD, tmp_path).stdout) == [
        "-IS",
        "-c",
        OLD,
        TEXTS,
        '["it is\\n\\u00e9"]',
    ]


def test_host_with_only_an_old_python_is_refused(tmp_path: Path) -> None:
    done = start(OLD, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "3.6" in done.stderr
