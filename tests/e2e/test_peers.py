"""The test suites of other programs, submitted as their users would: peers.toml has the expected results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster

pytestmark = [pytest.mark.sweep, pytest.mark.platform("real", "debian-13")]

SUITES = tomllib.loads(Path(__file__).with_name("peers.toml").read_text())


def source(requirement: str, folder: Path) -> Path:
    """Download a source archive from the package index and return its unpacked folder."""
    words = ["--quiet", "--no-deps", "--no-binary", requirement.partition("==")[0], "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *words, requirement], check=True, timeout=300)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.mark.parametrize("name", SUITES)
def test_suite_has_the_expected_results(cluster: Cluster, name: str, tmp_path: Path) -> None:
    suite: dict[str, Any] = SUITES[name]
    folder = source(suite["source"], tmp_path)
    script, *options = suite["submit"]
    if "script" in suite:
        (folder / script).write_text(suite["script"].lstrip())
    if suite["requirements"]:
        (folder / "suite.txt").write_text("\n".join(suite["requirements"]))
        options += ["--requirements", str(folder / "suite.txt")]
    ran = cluster.quoting("-o", "json", "submit", folder / script, "--time", "10m", "--wait", *options)
    assert ran.returncode == suite["exit_code"], ran
    run = cluster.run_of(json.loads(ran.stdout)["job_id"])
    output = "\n".join((run / name).read_text() for name in ("stdout.log", "stderr.log"))
    assert deviations(suite, output) == []


def deviations(suite: dict[str, Any], output: str) -> list[str]:
    """Return where the output of a suite differs from its expected results."""
    pattern, number = suite["tests"]
    counts = {*re.findall(pattern, output, re.MULTILINE)}
    failed = sorted({*re.findall(suite["failure"], output, re.MULTILINE)})
    known = suite["known"]
    return [
        *(f"{count} tests instead of {number}" for count in counts - {str(number)}),
        *(["no line with the number of tests"] if not counts else []),
        *(f"failed: {test}" for test in failed if not any(part in test for part in known)),
        *(f"no failure: {part}" for part in known if not any(part in test for test in failed)),
    ]
