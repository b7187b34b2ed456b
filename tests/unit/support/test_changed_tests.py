"""Which tests `make test-changed` runs for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import changed_tests
from scripts.changed_tests import EL, GCP, STORIES, STORY, TRAINING, UNIT, choose

MODULES = changed_tests.modules_of(Path(__file__).resolve().parents[3])


@pytest.mark.parametrize(
    ("path", "integration", "stories"),
    [
        ("clusterctl/cli/jobs.py", "cli/test_cli_jobs", STORY),
        ("clusterctl/util/disk.py", "util/test_disk", STORY),
        ("clusterctl/transport/ssh.py", "transport/test_ssh transport/test_deadlines", STORY),
        (
            "ansible/roles/cuda/tasks/install.yml",
            "roles/test_cuda_role",
            "tests/e2e/test_gpus.py",
        ),
        ("ansible/roles/repositories/tasks/main.yml", "configure/test_roles", EL),
        ("ansible/roles/slurmd/tasks/install.yml", "configure/test_roles", f"{STORY} {EL}"),
        ("terraform/gcp/main.tf", "gcp/test_gcp_golden", GCP),
        ("clusterctl/providers/onprem/login.py", "onprem/test_login", "tests/e2e/test_onprem.py"),
        ("payload/training/stopping.py", "payload/test_payload_stopping", TRAINING),
        ("tests/support/residue.py", "support/test_residue", ""),
        ("tests/integration/jobs/test_files.py", "jobs/test_files", ""),
        ("tests/integration/jobs/test_deleted.py", "", ""),
        ("tests/e2e/test_jobs.py", "", "tests/e2e/test_jobs.py"),
        ("tests/e2e/conftest.py", "", STORY),
    ],
)
def test_choose_takes_tests_that_name_or_import_a_changed_file(
    path: str, integration: str, stories: str
) -> None:
    units, chosen = choose([path], MODULES)
    assert {UNIT, *(f"tests/integration/{name}.py" for name in integration.split())} <= {*units}
    assert chosen == sorted(stories.split())


def test_choose_leaves_out_integration_tests_that_do_not_use_the_file() -> None:
    texts = {
        "tests/integration/jobs/test_a.py": "    from clusterctl.jobs import put, stage\n",
        "tests/integration/jobs/test_b.py": "from clusterctl.jobs.stages import stage\n",
        "tests/integration/runs/test_c.py": "from clusterctl.jobs.stage import stage\n",
    }
    units, _ = choose(["clusterctl/jobs/stage.py"], texts)
    assert units == [UNIT, "tests/integration/jobs/test_a.py", "tests/integration/runs/test_c.py"]


def test_change_of_a_file_is_one_of_the_links_to_it(tmp_path: Path) -> None:
    for name in ("here/link.py", "here/other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(f"../there/{Path(name).name}")
    tracked = [f"120000 0123abcd 0\there/{name}.py" for name in ("link", "other")]
    tracked.append("100644 0123abcd 0\tthere/link.py")
    found = changed_tests.with_links(tmp_path, ["there/link.py"], tracked)
    assert found == ["here/link.py", "there/link.py"]


def test_stories_are_tests_that_exist() -> None:
    for story in {story for chosen in STORIES.values() for story in chosen}:
        module, _, test = story.partition("::")
        assert f"\ndef {test or 'test_'}" in MODULES[module]
