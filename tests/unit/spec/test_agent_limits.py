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


def test_limits_without_a_file_are_in_force_and_keep_what_destroys_off(tmp_path: Path) -> None:
    limits = read_limits(tmp_path / "missing.yaml")
    assert limits.verbs_off == ("down", "node remove")
    assert limits.folders == ()
    assert None not in {limits.node_hours, limits.nodes, limits.time}


def test_limits_take_unlimited_numbers_and_folders_beside_the_file(tmp_path: Path) -> None:
    limits = _limits(
        tmp_path,
        "agent:\n  node_hours: unlimited\n  nodes: 3\n  time: 90m\n  folders: [data]\n"
        "  verbs_off: []\n",
    )
    assert (limits.node_hours, limits.nodes, limits.time) == (None, 3, 5400)
    assert limits.folders == (str(tmp_path / "data"),)
    assert limits.verbs_off == ()
    assert limits.model_dump(mode="json")["time"] == "1h30m"
    assert _limits(tmp_path, "agent: {time: unlimited}\n").time is None


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("node_hours: lots", "not-a-limit"),
        ("node_hours: -1", "not-a-limit"),
        ("node_hours: .inf", "not-a-limit"),
        ("node_hours: true", "not-a-limit"),
        ("nodes: 1.5", "not-a-limit"),
        ("time: long", "not-a-time"),
        ("verbs_off: up", "wrong-type"),
        ("node_hour: 3", "unknown-key"),
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
    ["", "# agent:\n", "---\n", "null\n", "{}\n", "\ufeff", "agent:\n  # nodes: 3\n"],
    ids=["nothing", "comment", "dashes", "null", "mapping", "byte-order-mark", "section"],
)
def test_limits_of_an_empty_file_are_the_defaults(tmp_path: Path, text: str) -> None:
    assert _limits(tmp_path, text) == AgentLimits()


def test_limits_behind_a_dangling_link_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").symlink_to(tmp_path / "gone.yaml")
    with refused("not-found/file"):
        read_limits(tmp_path / "config.yaml")
