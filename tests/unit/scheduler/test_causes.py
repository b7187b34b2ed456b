"""Tests of the lists of causes: their patterns, and the texts that they write."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.scheduler.case import Case, Evidence
from clusterctl.scheduler.causes import ENDED, WAITING, Cause, Patterns
from clusterctl.scheduler.program_error import CONSEQUENCES, NOISE
from tests.unit.scheduler.test_diagnosis import GUEST, JOB, OPERATOR

OF_OPERATORS = ("clusterctl up", "--admin", "sudo", "in the spec", "`scontrol update`")


def several(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


def texts_of(cause: Cause, **reader: Any) -> Iterator[tuple[str, str]]:
    """Yield cause and fix for each combination of the cause's patterns, with groups that are "7"
    or empty.
    """
    bare = Case.of(Evidence(job=JOB, **reader))
    patterns = (several(part) or ("",) for part in (cause.reason, cause.launcher, cause.log))
    for combination in itertools.product(*patterns):
        for value in ("7", ""):
            names = [name for one in combination for name in re.compile(one).groupindex]
            case = replace(bare, groups=dict.fromkeys(names, value))
            numbers = {"peak": "7", "most": "8"} if "peak" in names else {}
            case = replace(case, groups={**case.groups, **numbers})
            yield tuple(
                text if isinstance(text, str) else text(case) for text in (cause.why, cause.fix)
            )


def test_causes_give_guests_no_operator_commands() -> None:
    """Fixes for a cluster that other people operate, and fixes with a command that repairs a
    cluster.
    """
    assert [
        cause.code
        for cause in (*WAITING, *ENDED)
        if isinstance(cause, Cause)
        for _, fix in texts_of(cause, **GUEST)
        if any(words in fix for words in OF_OPERATORS)
    ] == []


def test_causes_have_patterns_that_do_not_fit_everything() -> None:
    causes = [cause for cause in ENDED if isinstance(cause, Cause)]
    assert len({cause.code for cause in causes}) >= 60
    of_causes = (one for cause in causes for one in (*several(cause.log), *several(cause.launcher)))
    for pattern in (*NOISE, *CONSEQUENCES, *of_causes):
        assert not re.search(pattern, "", re.MULTILINE), f"{pattern} fits everything"


@pytest.mark.parametrize("causes", [WAITING, ENDED])
def test_last_cause_always_applies(causes: Sequence[object]) -> None:
    last = causes[-1]
    assert isinstance(last, Cause)
    assert last == Cause(last.code, why=last.why, fix=last.fix)
    assert last(Case.of(Evidence(job=JOB)))


@pytest.mark.parametrize("reader", ["operator", "guest"])
def test_causes_write_their_texts_from_the_groups_of_each_pattern(reader: str) -> None:
    readers = {"operator": OPERATOR, "guest": GUEST}
    for cause in (*WAITING, *ENDED):
        if isinstance(cause, Cause):
            for texts in texts_of(cause, **readers[reader]):
                assert "None" not in "".join(texts), cause.code
