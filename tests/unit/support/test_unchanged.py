"""Which kinds of integration tests `make test` leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import unchanged
from scripts.run_tests import result_of
from scripts.unchanged import KINDS, RECORDS, Kind

ROOT = Path(__file__).resolve().parents[3]
(PAYLOAD,) = (kind for kind in KINDS if kind.name == "payload")
TEST = "tests.integration.payload.test_payload_zero"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a file of each kind."""
    for kind in KINDS:
        (tmp_path / kind.inputs[0]).mkdir(parents=True)
        (tmp_path / kind.inputs[0] / "file.py").write_text("first")
    return tmp_path


def passes(checkout: Path, kind: Kind) -> None:
    """Record that the tests of a kind have passed with the files of the checkout."""
    unchanged.record(checkout, {kind: unchanged.content_of(checkout, kind)}, {TEST: 0})


def test_kind_whose_tests_passed_is_left_out(checkout: Path) -> None:
    passes(checkout, PAYLOAD)
    choice = unchanged.choose(checkout, ["payload/file.py"])
    assert choice.passed == (PAYLOAD,)
    assert PAYLOAD not in choice.whole
    assert choice.samples == tuple(
        test for kind in KINDS if kind != PAYLOAD for test in kind.sample
    )


@pytest.mark.parametrize("path", ["payload/file.py", "payload/new.py", "requirements/dev.lock"])
def test_kind_whose_inputs_changed_since_it_passed_runs_whole(checkout: Path, path: str) -> None:
    passes(checkout, PAYLOAD)
    (checkout / path).parent.mkdir(exist_ok=True)
    (checkout / path).write_text("second")
    assert PAYLOAD in unchanged.choose(checkout, [path]).whole


def test_kind_without_record_has_a_sample_while_the_branch_leaves_its_inputs(
    checkout: Path,
) -> None:
    choice = unchanged.choose(checkout, ["clusterctl/cli/jobs.py", "payload.md"])
    assert choice.sampled == KINDS
    assert choice.left_out == {folder for kind in KINDS for folder in kind.tests}
    assert choice.whole == {}


def test_kind_without_record_runs_whole_if_the_branch_changed_its_inputs(checkout: Path) -> None:
    assert [*unchanged.choose(checkout, ["payload/file.py"]).whole] == [PAYLOAD]


def test_all_kinds_run_whole_outside_of_a_checkout(checkout: Path) -> None:
    assert tuple(unchanged.choose(checkout, None).whole) == KINDS


@pytest.mark.parametrize(
    "failures",
    [{TEST: 1}, {}, {"tests.integration.payload_other.test_x": 0}, {TEST: 0, "": 1}],
    ids=str,
)
def test_kind_that_failed_or_did_not_run_is_not_recorded(
    checkout: Path, failures: dict[str, int]
) -> None:
    unchanged.record(checkout, {PAYLOAD: "content"}, failures)
    assert not (checkout / RECORDS).exists()


@pytest.mark.parametrize(("code", "is_recorded"), [(0, True), (3, False)])
def test_kind_is_not_recorded_if_pytest_itself_failed(
    checkout: Path, code: int, is_recorded: bool
) -> None:
    report = checkout / "report.xml"
    report.write_text(f'<testsuite tests="1"><testcase classname="{TEST}"/></testsuite>')
    unchanged.record(checkout, {PAYLOAD: "content"}, result_of(code, report).failures)
    assert (checkout / RECORDS).exists() is is_recorded


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind_names_files_and_tests_that_exist(kind: Kind) -> None:
    for path in kind.all_inputs:
        assert (ROOT / path).exists()
    assert kind.sample
    for test in kind.sample:
        module, _, name = test.partition("::")
        assert module.startswith(kind.tests)
        assert f"\ndef {name}(" in (ROOT / module).read_text()
