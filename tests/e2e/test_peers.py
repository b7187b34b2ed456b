"""The test suites of other programs, submitted as their users would: peers.toml has the expected
results.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, raised

pytestmark = [pytest.mark.sweep, pytest.mark.platform("real", "debian-13")]

SUITES = tomllib.loads(Path(__file__).with_name("peers.toml").read_text())
SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
software: {{packages: {packages}}}
partitions:
  - {{name: train, nodes: 2, cpus: 4}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with cores for a suite and for the jobs that it submits, and with packages of the
    suites.
    """
    name = f"p{secrets.token_hex(3)}"
    home = tmp_path_factory.mktemp("home")
    cwd = tmp_path_factory.mktemp("cwd")
    packages = json.dumps(
        [package for suite in SUITES.values() for package in suite.get("packages", ())]
    )
    with raised(name, SPEC.format(name=name, packages=packages), home, cwd) as one:
        yield one


def source(requirement: str, folder: Path) -> Path:
    """Download a source archive from the package index and return its unpacked folder."""
    words = [
        "--quiet",
        "--no-deps",
        "--no-binary",
        requirement.partition("==")[0],
        "--dest",
        str(folder),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *words, requirement], check=True, timeout=300
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.mark.parametrize("name", SUITES)
def test_suite_has_the_expected_results(cluster: Cluster, name: str, tmp_path: Path) -> None:
    suite: dict[str, Any] = SUITES[name]
    folder = source(suite["source"], tmp_path) if "source" in suite else tmp_path
    script, *options = suite["submit"]
    if "script" in suite:
        (folder / script).write_text(suite["script"].lstrip())
    if "requirements" in suite:
        (folder / "suite.txt").write_text("\n".join(suite["requirements"]))
        options += ["--requirements", str(folder / "suite.txt")]
    ran = cluster.quoting(
        "-o", "json", "submit", folder / script, "--time", "10m", "--wait", *options
    )
    assert ran.returncode == suite["exit_code"], ran
    run = cluster.run_of(json.loads(ran.stdout)["job_id"])
    output = "\n".join((run / name).read_text() for name in ("stdout.log", "stderr.log"))
    assert deviations(suite, output) == [], output


def deviations(suite: dict[str, Any], output: str) -> list[str]:
    """Return where the output of a suite differs from its expected results."""
    pattern, number = suite["tests"]
    counts = {*re.findall(pattern, output, re.MULTILINE)}
    failed = sorted({*re.findall(suite["failure"], output, re.MULTILINE)})
    known = suite.get("known", {})
    return [
        *(f"{count} tests instead of {number}" for count in counts - {str(number)}),
        *(["no line with the number of tests"] if not counts else []),
        *(f"failed: {test}" for test in failed if not any(part in test for part in known)),
        *(f"no failure: {part}" for part in known if not any(part in test for test in failed)),
    ]
