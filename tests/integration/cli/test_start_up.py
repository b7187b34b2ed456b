"""What a command imports before it does anything, because each user waits for it at each call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = {"ansible", "jinja2", "paramiko", "pydantic", "ssl", "yaml"}
LOADED = """
import sys
from clusterctl.cli.main import LazyVerb, app

for verb in {verbs!r}:
    LazyVerb(verb).load()
    app.main([verb, "--help"], "clusterctl", standalone_mode=False)
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("verbs", "more"),
    [
        (["status", "jobs", "logs", "wait", "cancel"], set()),
        # The options of jobs are models.
        (["submit"], {"pydantic"}),
    ],
)
def test_commands_about_jobs_import_no_slow_package(verbs: list[str], more: set[str]) -> None:
    argv = [sys.executable, "-c", LOADED.format(verbs=verbs)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()[-1].split()) & SLOW <= more


def test_commands_load_no_plugins_of_pydantic(tmp_path: Path) -> None:
    """To find them, pydantic reads the metadata of all installed packages."""
    (tmp_path / "plugin.py").write_text("import os\nos._exit(9)\n")
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pydantic]\nplugin = plugin:plugin\n")
    argv = [sys.executable, "-m", "clusterctl", "submit", "./missing.py"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}"}
    assert subprocess.run(argv, check=False, env=environ, capture_output=True).returncode == 2
