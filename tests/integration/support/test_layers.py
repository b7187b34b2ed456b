"""The import rules are in force: the tree as it is passes, and each kind of breach is seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of both packages and their rules."""
    for package in ("clusterctl", "payload"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def check(tree: Path) -> tuple[int, str]:
    argv = [str(LINT_IMPORTS), "--no-cache"]
    done = subprocess.run(argv, cwd=tree, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def append(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}\n{line}\n")


@pytest.mark.parametrize(
    ("breach", "module", "line"),
    [
        (
            "an import upwards inside a function",
            "clusterctl/spec/base.py",
            "def f():\n    import clusterctl.state.run_record",
        ),
        (
            "a provider knows another",
            "clusterctl/providers/local/capacity.py",
            "import clusterctl.providers.gcp.costs",
        ),
        (
            "a provider imports another inside a function",
            "clusterctl/providers/existing/site_description.py",
            "def f():\n    import clusterctl.providers.onprem.login",
        ),
        (
            "a provider reaches another through the registry",
            "clusterctl/providers/gcp/costs.py",
            "import clusterctl.providers.registry",
        ),
        (
            "code outside providers imports a provider's folder",
            "clusterctl/cluster/plan.py",
            "from clusterctl.providers.onprem import release",
        ),
        (
            "code that all providers share imports a provider's folder",
            "clusterctl/providers/base.py",
            "from clusterctl.providers import gcp",
        ),
        (
            "code outside providers and the spec knows the settings of a provider",
            "clusterctl/cli/spec.py",
            "from clusterctl.spec.providers.gcp import GcpSettings",
        ),
        (
            "code outside providers asks for local nodes by their settings",
            "clusterctl/state/inventory.py",
            "from clusterctl.spec.providers.local import LocalSettings",
        ),
        ("clusterctl knows the payload", "clusterctl/state/workspace.py", "import payload"),
        (
            "a module outside of scheduler/ knows the client of a scheduler",
            "clusterctl/jobs/queue.py",
            "from clusterctl.scheduler.slurm.client import SlurmClient",
        ),
        (
            "a module outside of scheduler/ asks whose cluster it is",
            "clusterctl/cluster/status.py",
            "from clusterctl.scheduler.sites import kinds",
        ),
        ("the payload knows clusterctl", "payload/training/metrics.py", "import clusterctl.errors"),
    ],
)
def test_a_breach_is_seen(tree: Path, breach: str, module: str, line: str) -> None:
    append(tree / module, line)
    code, said = check(tree)
    assert code == 1, f"{breach}: {said}"
    assert "BROKEN" in said, f"{breach}: {said}"


def test_a_subpackage_without_a_layer_is_seen(tree: Path) -> None:
    (tree / "clusterctl" / "attic.py").write_text("")
    code, said = check(tree)
    assert code == 1
    assert "attic" in said
