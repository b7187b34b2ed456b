"""Errors and notes by their codes: tests assert these, and messages.json alone holds the wording.

with refused("subnet-in-use", where="provider.subnet"): ...      # an error of ours, with its fields
assert codes(result) == ["job-unknown"]                             # `-o json`
assert shows(result.stderr, "job-unknown")                          # as a person reads it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.errors import BadValueError, ClusterctlError
from payload.errors import PayloadError, RankError
from scripts import message_reference

if TYPE_CHECKING:
    from tests.support.verbs import CommandResult


@contextmanager
def refused(
    code: str,
    kind: type[ClusterctlError | BadValueError | PayloadError | RankError] = ClusterctlError,
    *values: str,
    **fields: object,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error with this code. The body gets pytest's `caught`.

    kind: the class of the error.
    values: names, numbers and commands that its text shows.
    fields: attributes that it has.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    assert code in codes_of(error), f"{codes_of(error)}: {error}"
    assert [value for value in values if value not in str(error)] == []
    assert {name: getattr(error, name) for name in fields} == fields


def codes_of(error: ClusterctlError | BadValueError | PayloadError | RankError) -> list[str]:
    """Return the code of an error, then those of the failures behind it."""
    failures = error.failures if isinstance(error, ClusterctlError) else ()
    return list(dict.fromkeys([error.code, *(failure.code for failure in failures)]))


def codes(result: CommandResult) -> list[str]:
    """Return the codes of the failures in an answer of `-o json`."""
    return [failure["code"] for failure in result.json["failures"]]


def shows(text: str, code: str) -> bool:
    """Return whether a text for a person has the message of a code in it, with any values filled
    in.

    Raises:
        AssertionError: messages.json has no message of this code (`make reference` writes it).
    """
    patterns = _patterns().get(code)
    assert patterns, f"messages.json lacks {code}"
    return any(pattern.search(" ".join(text.split())) for pattern in patterns)


@cache
def _patterns() -> Mapping[str, list[re.Pattern[str]]]:
    """Return for each code what its messages look like; a message of values alone is left out."""
    return {
        code: [_pattern(text) for text in texts if re.search("[A-Za-z]{3}", text)]
        for code, texts in message_reference.printed_texts().items()
    }


def _pattern(text: str) -> re.Pattern[str]:
    literals = re.split(rf"{message_reference.GAP}|\{{[^}}]*\}}", text)
    return re.compile(".*?".join(map(re.escape, literals)))
