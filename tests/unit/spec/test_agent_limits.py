"""The section `agent` of the user's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import SpecError
from clusterctl.spec.agent import AgentLimits, read_limits
from tests.support.messages import refused


def _limits(tmp_path: Path, text: str) -> AgentLimits:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return read_limits(path)


def test_limits_without_a_file_allow_only_clusters_of_this_machine(tmp_path: Path) -> None:
    limits = read_limits(tmp_path / "missing.yaml")
    assert limits.clusters is None
    assert (limits.discard, limits.others_jobs, limits.secrets, limits.folders) == (
        False,
        False,
        (),
        (),
    )
    assert limits.usd_per_day == 0
    assert None not in {
        limits.node_hours_per_day,
        limits.jobs_at_once,
        limits.failures_in_a_row,
        limits.commands_per_hour,
    }


def test_limits_take_unlimited_numbers_and_folders_beside_the_file(tmp_path: Path) -> None:
    limits = _limits(
        tmp_path,
        "agent:\n  clusters: [lab]\n  node_hours_per_day: unlimited\n  usd_per_day: 12.5\n"
        "  jobs_at_once: 3\n  folders: [data]\n",
    )
    assert limits.clusters == ("lab",)
    assert limits.node_hours_per_day is None
    assert limits.usd_per_day == 12.5
    assert limits.jobs_at_once == 3
    assert limits.folders == (str(tmp_path / "data"),)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("node_hours_per_day: lots", "not-a-limit"),
        ("node_hours_per_day: -1", "not-a-limit"),
        ("node_hours_per_day: .inf", "not-a-limit"),
        ("usd_per_day: true", "not-a-limit"),
        ("jobs_at_once: 1.5", "not-a-limit"),
        ("discard: 'yes'", "wrong-type"),
        ("clusters: lab", "wrong-type"),
        ("job_at_once: 3", "unknown-key"),
    ],
)
def test_limits_that_are_wrong_are_errors_with_file_and_line(
    tmp_path: Path, line: str, code: str
) -> None:
    """A limit that is not understood must not become the default."""
    with refused(code, SpecError) as caught:
        _limits(tmp_path, f"agent:\n  {line}\n")
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == (str(tmp_path / "config.yaml"), 2)


@pytest.mark.parametrize(
    "text",
    ["", "# agent:\n", "---\n", "null\n", "{}\n", "\ufeff", "agent:\n  # discard: true\n"],
    ids=["nothing", "comment", "dashes", "null", "mapping", "byte-order-mark", "section"],
)
def test_limits_of_an_empty_file_are_the_defaults(tmp_path: Path, text: str) -> None:
    assert _limits(tmp_path, text) == AgentLimits()


def test_limits_behind_a_dangling_link_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").symlink_to(tmp_path / "gone.yaml")
    with refused("no-such-file"):
        read_limits(tmp_path / "config.yaml")
