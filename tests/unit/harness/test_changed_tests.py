"""Which tests `make test-changed` runs for a change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts import changed_tests, durations
from scripts.changed_tests import STORIES, STORY, TRAINING, choose
from tests.unit.harness.repository import commit, git

ROOT = Path(__file__).resolve().parents[3]
MODULES = changed_tests.modules_of(ROOT)


@pytest.mark.parametrize(
    ("path", "units", "stories"),
    [
        ("clusterctl/cli/jobs.py", "cli/test_cli_jobs", STORY),
        ("clusterctl/util/disk.py", "util/test_disk cluster/test_down", STORY),
        ("clusterctl/api.py", "cli/test_api", STORY),
        ("clusterctl/scheduler/data/any.toml", "scheduler/test_diagnosis", STORY),
        (
            "clusterctl/providers/base.py",
            "local/test_layout onprem/test_access gcp/test_gcp_api",
            STORY,
        ),
        (
            "ansible/roles/cuda/tasks/install.yml",
            "roles/test_cuda_role configure/test_roles",
            STORY,
        ),
        ("ansible/library/host_snapshot.py", "host_snapshot/test_snapshot_files", STORY),
        ("terraform/gcp/main.tf", "gcp/test_gcp_golden", ""),
        ("payload/nn/layers.py", "payload/test_payload_layers", TRAINING),
        ("README.md", "project/test_links project/test_manual", ""),
        ("pyproject.toml", "project/test_packaging", ""),
        ("scripts/cli_reference.py", "project/test_written_pages harness/test_run_tests", ""),
        (".ci/run", "harness/test_run_tests", ""),
        ("tests/support/residue.py", "harness/test_residue", ""),
        ("tests/conftest.py", "harness/test_conditions", ""),
        ("tests/unit/configure/conftest.py", "configure/test_roles", ""),
        ("tests/e2e/test_jobs.py", "", "tests/e2e/test_jobs.py"),
        ("tests/e2e/conftest.py", "", STORY),
    ],
)
def test_a_changed_file_brings_its_tests(path: str, units: str, stories: str) -> None:
    choice = choose([path], MODULES, {})
    assert {f"tests/unit/{name}.py" for name in units.split()} <= {*choice.units, *choice.left_out}
    assert choice.stories == stories.split()


SHARES = {
    "tests/unit/jobs/test_stage.py": 5.0,
    "tests/unit/jobs/test_users.py": 6.0,
    "tests/unit/jobs/test_near.py": 1.0,
    "tests/unit/jobs/test_long.py": 3.0,
    "tests/unit/runs/test_far.py": 0.1,
    "tests/unit/runs/test_other.py": 0.1,
}
TEXTS: Mapping[str, str] = {
    **dict.fromkeys(SHARES, "import clusterctl.jobs.stages\n"),
    "tests/unit/jobs/test_users.py": "    from clusterctl.jobs import put, stage\n",
    "tests/unit/runs/test_far.py": "from clusterctl.jobs.stage import stage\n",
}


def test_long_runs_leave_out_distant_tests_first() -> None:
    """First come those named like the file, whatever they take, those that import it, then the
    folder's.
    """
    light = {**SHARES, "tests/unit/jobs/test_users.py": 0.5}
    choice = choose(["clusterctl/jobs/stage.py"], TEXTS, light)
    assert [path.rpartition("_")[2] for path in choice.units] == ["stage.py", "users.py", "near.py"]
    assert [path.rpartition("_")[2] for path in choice.left_out] == ["long.py", "far.py"]
    heavy = {**SHARES, "tests/unit/jobs/test_stage.py": 50.0}
    assert choose(["clusterctl/jobs/stage.py"], TEXTS, heavy).units == [
        "tests/unit/jobs/test_stage.py"
    ]


def test_a_name_that_is_a_word_is_looked_for_with_its_folder() -> None:
    text = {"tests/unit/jobs/test_a.py": "run()", "tests/unit/jobs/test_b.py": 'ROOT / ".ci/run"'}
    assert choose([".ci/run"], text, {}).units == ["tests/unit/jobs/test_b.py"]


def test_a_change_is_the_branch_s_and_what_is_not_committed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("ignored\n")
    commit(tmp_path, "old")
    (tmp_path / "ignored").touch()
    (tmp_path / "new").touch()
    assert changed_tests.changed_files(tmp_path) == ["new"]
    git(tmp_path, "checkout", "-q", "-b", "branch")
    commit(tmp_path, "own")
    git(tmp_path, "mv", "old", "moved")
    assert changed_tests.changed_files(tmp_path) == ["moved", "new", "old", "own"]
    git(tmp_path, "checkout", "-q", "-f", "main")
    commit(tmp_path, "of another")
    git(tmp_path, "checkout", "-q", "branch")
    assert changed_tests.changed_files(tmp_path) == ["new", "own"]


def test_the_stories_exist() -> None:
    for story in {*STORIES.values()} - {""}:
        module, _, test = story.partition("::")
        assert f"\ndef {test}(" in (ROOT / module).read_text()


def test_the_recorded_durations_are_those_of_tests() -> None:
    recorded = durations.read(durations.RECORD)
    # Run `make test` and `make durations`.
    assert recorded.keys() & MODULES.keys()
