"""Choose the kinds of integration tests that `make test` runs (scripts/run_tests.py).

A kind tests a part of the project that has a contract of its own with the rest, so that a change
elsewhere rarely reaches it. `make test` leaves a kind out if its inputs have not changed since its
tests passed in this checkout. Without such a record, it runs a sample of a kind whose inputs are
those of the main branch, where CI has run them all. `make test-all` runs all kinds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Inputs of all kinds.
_OF_ALL = ("requirements", "tests/conftest.py", "tests/integration/conftest.py")
# Which content of which kind has passed. A new environment has no record.
RECORDS = Path(".venv/.tests")


@dataclass(frozen=True)
class Kind:
    """A kind of integration tests.

    tests: folders. inputs: files and folders that decide the results, besides the tests' own.
    sample: a test for each sort of check, as arguments of pytest.
    """

    name: str
    tests: tuple[str, ...]
    inputs: tuple[str, ...]
    sample: tuple[str, ...]

    @property
    def all_inputs(self) -> tuple[str, ...]:
        return (*self.tests, *self.inputs, *_OF_ALL)


KINDS = (
    Kind(
        "payload",
        tests=("tests/integration/payload",),
        # Neither the payload nor clusterctl imports the other.
        inputs=(
            "payload",
            "benchmarks",
            "tests/support/payload.py",
            "tests/support/doubles",
        ),
        sample=(
            "tests/integration/payload/test_payload_training.py::test_training_on_several_ranks_has_the_losses_of_one",
            "tests/integration/payload/test_payload_resume.py::test_stopped_and_killed_run_ends_with_the_same_weights",
            "tests/integration/payload/test_payload_kernels.py::test_cuda_c_is_numpy",
            "tests/integration/payload/test_payload_telemetry.py::test_telemetry_samples_the_node_until_stopped",
            "tests/integration/payload/test_payload_rank.py::test_error_of_a_rank_ends_the_others",
            "tests/integration/payload/test_payload_stage.py::test_copy_has_the_files_modes_and_links_of_the_source",
            "tests/integration/payload/test_payload_pack.py::test_end_of_a_task_has_its_status_as_in_a_shell",
        ),
    ),
    Kind(
        "terraform",
        tests=("tests/integration/gcp", "tests/integration/terraform"),
        inputs=(
            "terraform",
            "clusterctl/providers/gcp",
            "clusterctl/spec",
            "tests/support/google",
            "tests/support/terraform.py",
            "tests/unit/gcp",
        ),
        sample=(
            "tests/integration/gcp/test_gcp_golden.py::test_terraform_plan_equals_its_golden_file",
            "tests/integration/gcp/test_gcp_module.py::test_terraform_module_is_formatted_and_valid",
            "tests/integration/gcp/test_gcp_verbs.py::test_up_lists_all_obstacles_and_creates_nothing",
            "tests/integration/terraform/test_terraform_client.py::test_apply_creates_changes_and_removes_planned_resources",
        ),
    ),
    Kind(
        "roles",
        tests=("tests/integration/configure", "tests/integration/roles"),
        inputs=(
            "ansible",
            "clusterctl/configure",
            "clusterctl/hosts",
            "clusterctl/spec",
            "clusterctl/util/assets.py",
            "tests/support/plays.py",
        ),
        sample=(
            "tests/integration/roles/test_users_role.py::test_users_role_replaces_only_its_own_keys",
            "tests/integration/roles/test_fence.py::test_fence_removes_processes_and_files_of_a_job",
            "tests/integration/roles/test_watcher.py::test_node_that_answers_again_is_fenced_then_resumed",
            "tests/integration/configure/test_configure_inventory.py::test_host_may_have_every_role",
        ),
    ),
    Kind(
        "attach",
        tests=("tests/integration/existing",),
        inputs=(
            "clusterctl/providers/existing",
            "clusterctl/packages",
            "clusterctl/scheduler",
            "clusterctl/transport",
        ),
        sample=(
            "tests/integration/existing/test_place.py::test_place_builds_once_and_keeps_the_mark",
            "tests/integration/existing/test_place.py::test_remove_takes_the_folder_and_nothing_else",
            "tests/integration/existing/test_remote_probe.py::test_named_python_is_found_first",
        ),
    ),
    Kind(
        "transport",
        tests=("tests/integration/transport",),
        inputs=("clusterctl/transport", "clusterctl/util", "tests/support/sshd.py"),
        sample=(
            "tests/integration/transport/test_ssh.py::test_run_returns_output_and_exit_code",
            "tests/integration/transport/test_send.py::test_send_stored_files_again_sends_no_bytes",
            "tests/integration/transport/test_get.py::test_get_resumes_after_a_broken_connection",
            "tests/integration/transport/test_connections.py::test_consecutive_verbs_share_a_connection",
            "tests/integration/transport/test_proxy.py::test_hosts_behind_a_jump_host_share_one_tunnel",
        ),
    ),
    Kind(
        "report",
        tests=("tests/integration/report_page",),
        inputs=("clusterctl/runs", "templates", "tests/unit/runs"),
        sample=(
            "tests/integration/report_page/test_report_page.py::test_chart_is_smoothed_and_logarithmic_on_request",
        ),
    ),
    Kind(
        "packages",
        tests=("tests/integration/packages",),
        inputs=(
            "clusterctl/packages",
            "clusterctl/spec",
            "tests/support/wheels.py",
            "tests/unit/packages",
        ),
        sample=(
            "tests/integration/packages/test_resolve.py::test_lock_has_dependencies_that_nodes_lack",
            "tests/integration/packages/test_wheelhouse.py::test_wheelhouse_downloads_each_locked_wheel_once",
            "tests/integration/packages/test_bundle_apt.py::test_packed_package_has_its_dependencies",
            "tests/integration/packages/test_resolve.py::test_sources_of_pure_python_become_a_wheel_here_once",
            "tests/integration/packages/test_uv_lock.py::test_uv_lock_gives_its_versions_without_the_project_and_its_dev_group",
        ),
    ),
)


@dataclass(frozen=True)
class Choice:
    """The kinds of a run.

    whole: kind -> hash of its inputs. sampled: unchanged since the main branch. passed: unchanged
    since their tests passed here.
    """

    whole: Mapping[Kind, str]
    sampled: tuple[Kind, ...] = ()
    passed: tuple[Kind, ...] = ()

    @property
    def left_out(self) -> set[str]:
        """The folders of tests that do not run whole."""
        return {folder for kind in (*self.sampled, *self.passed) for folder in kind.tests}

    @property
    def samples(self) -> tuple[str, ...]:
        return tuple(test for kind in self.sampled for test in kind.sample)

    def lines(self) -> list[str]:
        """Say what is left out, and how to run it."""
        reasons = {
            "a sample, because the inputs are those of the main branch": self.sampled,
            "nothing, because the inputs have not changed since all passed": self.passed,
        }
        return [
            f"{kind.name}: {reason}; all of them: .venv/bin/pytest -m 'not sweep' {' '.join(kind.tests)}"
            for reason, kinds in reasons.items()
            for kind in kinds
        ]


def choose(root: Path, changed: Sequence[str] | None) -> Choice:
    """Choose the kinds to run in the checkout ``root``.

    changed: paths that differ from the main branch. None: unknown, as outside of a checkout.
    """
    whole: dict[Kind, str] = {}
    sampled: list[Kind] = []
    passed: list[Kind] = []
    for kind in KINDS:
        content = content_of(root, kind)
        if content == recorded(root, kind):
            passed.append(kind)
        elif changed is not None and not any(is_input(path, kind) for path in changed):
            sampled.append(kind)
        else:
            whole[kind] = content
    return Choice(whole, tuple(sampled), tuple(passed))


def is_input(path: str, kind: Kind) -> bool:
    return any(path == given or path.startswith(f"{given}/") for given in kind.all_inputs)


def content_of(root: Path, kind: Kind) -> str:
    """Return a hash of the names and contents of a kind's inputs."""
    content = hashlib.sha256()
    for given in kind.all_inputs:
        top = root / given
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                content.update(f"{path.relative_to(root)}\0".encode())
                content.update(hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


def recorded(root: Path, kind: Kind) -> str:
    """Return the hash of the inputs with which a kind has passed last. "" if there is none."""
    path = root / RECORDS / kind.name
    return path.read_text() if path.exists() else ""


def record(root: Path, whole: Mapping[Kind, str], failures: Mapping[str, int]) -> None:
    """Record the kinds that have passed.

    whole: kind -> hash of its inputs before the tests. failures: test module that ran, such as
        ``tests.unit.spec.test_x`` -> number of its failed tests. "": failures outside of tests, after
        which other tests may not have run.
    """
    if failures.get(""):
        return
    for kind, content in whole.items():
        folders = tuple(f"{folder.replace('/', '.')}." for folder in kind.tests)
        results = [failed for module, failed in failures.items() if module.startswith(folders)]
        if results and not any(results):
            path = root / RECORDS / kind.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
