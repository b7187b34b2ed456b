"""docs/json.md describes each verb, and an answer that it does not describe is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from clusterctl.cli.output import Screen
from clusterctl.cli.verbs import VERBS
from clusterctl.scheduler.ends.ending import Ending
from tests.support.answers import Type, faults_of, hold, hold_output, read_page, verb_of

END = Ending(job_id="7").as_dict()
GOOD: Mapping[str, Any] = {"ok": True, "failures": [], "jobs": [END]}
FAILURE = {
    "code": "x",
    "cause": "",
    "host": None,
    "phase": None,
    "fix": "",
    "retryable": False,
    "about": "",
}


def test_page_describes_every_verb() -> None:
    page = read_page()
    assert page.verbs.keys() <= VERBS.keys()
    # It speaks a protocol of its own.
    assert VERBS.keys() - page.verbs.keys() <= {"mcp"}
    plain = {"any", "array", "boolean", "integer", "null", "number", "object", "string"}
    tables = (page.common, *page.objects.values(), *page.verbs.values())
    kinds = [kind for table in tables for kind in table.values()]
    assert {name for kind in kinds for name in (*kind.names, *kind.of)} <= plain | {*page.objects}
    assert set(page.common) == {"ok", "failures"}


def test_answer_that_the_page_describes_has_no_faults() -> None:
    hold("wait", GOOD)
    hold("wait", {"ok": False, "failures": [FAILURE]})
    hold("", {**GOOD, "more": 1})


@pytest.mark.parametrize(
    "answer",
    [
        {**GOOD, "more": 1},
        {**GOOD, "jobs": [{**END, "more": 1}]},
        {**GOOD, "jobs": [{**END, "exit_code": "0"}]},
        {**GOOD, "jobs": [{**END, "exit_code": True}]},
        {**GOOD, "jobs": [{key: value for key, value in END.items() if key != "states"}]},
        {**GOOD, "jobs": {"7": END}},
        {**GOOD, "jobs": None},
        {"ok": True, "failures": []},
        {"ok": 1, "failures": [], "jobs": []},
        {"failures": [], "jobs": []},
        {"ok": False, "failures": [{**FAILURE, "code": 7}]},
        {"ok": False, "failures": [{**FAILURE, "why": ""}]},
    ],
    ids=str,
)
def test_answer_that_the_page_does_not_describe_fails(answer: Mapping[str, Any]) -> None:
    with pytest.raises(AssertionError):
        hold("wait", answer)


def test_single_job_of_submit_has_its_keys_outside_too() -> None:
    row = {"name": "a", "source": None, "job_id": "1", "dir": "/x"}
    assert [*faults_of("submit", {"ok": True, "failures": [], **row, "jobs": [row]})] == []
    assert [*faults_of("submit", {"ok": True, "failures": [], **row, "job": 1})] == [
        "job is unknown"
    ]


def test_type_is_read_from_the_page() -> None:
    assert Type.read("string | null") == Type(("string", "null"))
    assert Type.read("job[] | null", is_optional=True) == Type(
        ("array", "null"), ("job",), is_optional=True
    )


@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("-o json submit train --nodes 2", "submit"),
        ("-f down --cluster up -ojson jobs", "jobs"),
        ("runs -o json", "runs list"),
        ("-o json runs show 1", "runs show"),
        ("-o json", ""),
    ],
)
def test_verb_of_a_command_line(line: str, verb: str) -> None:
    assert verb_of(line.split()) == verb


def test_answers_of_processes_and_of_this_process_are_held() -> None:
    hold_output(["clusterctl", "list"], "{")
    hold_output(["clusterctl", "ssh", "--", "x", "-o", "json"], "{}")
    with pytest.raises(AssertionError):
        hold_output(["clusterctl", "-o", "json", "list"], '{"ok": true, "failures": []}')

    def wrong(screen: Screen) -> None:
        screen.result({"failures": 1})

    with pytest.raises(AssertionError):
        wrong(Screen(json=True, color=False))
