"""Sizes and durations: strict, exact, and the same for Python and the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.errors import BadValueError
from clusterctl.spec.units import (
    DURATION_PATTERN,
    MAX_DURATION_S,
    MAX_SIZE_MIB,
    SIZE_PATTERN,
    parse_duration_s,
    parse_size_mib,
    parse_slurm_memory_mib,
    parse_slurm_time_s,
)
from clusterctl.util import formatting
from tests.support.messages import refused


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        *((text, 512) for text in ("512MiB", "512M", "512mb", "0.5GiB")),
        *(("2048KiB", 2), ("1.3GiB", 1331), ("0.5T", 524288), ("1024TiB", MAX_SIZE_MIB)),
    ],
)
def test_size_is_read_in_mib(text: str, mib: int) -> None:
    assert parse_size_mib(text) == mib
    assert re.search(SIZE_PATTERN, text)


NOT_SIZES = [*"5 GiB -5GiB +5GiB 0GiB 0.0GiB 5GIB 5Gib/s 1e3G ٣GiB 5.GiB .5GiB 1,5GiB inf".split()]
NOT_SIZES += ["", "5 GiB", " 5GiB", "5GiB\n", "9" * 400 + "G", 5, 5.0, True, None, [], {}]


@pytest.mark.parametrize("value", NOT_SIZES, ids=lambda v: repr(v)[:20])
def test_size_in_a_wrong_format_is_refused(value: object) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_size_mib(value)
    assert caught.value.code in {"not-a-size", "size-too-small"}
    if isinstance(value, str) and not value.endswith("\n"):
        assert not re.search(SIZE_PATTERN, value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("1h30m", 5400), ("1d1h1m1s", 90061), ("3650d", MAX_DURATION_S)],
)
def test_duration_is_read_in_seconds(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds
    assert re.search(DURATION_PATTERN, text)


NOT_DURATIONS = [*"0s 0h0m 5 -5s 1.5h 30m1h 1H s 1w ٣s".split()]
NOT_DURATIONS += ["", "1h 30m", "5s\n", "9" * 5000 + "s", 5, 1.5, True, None, [], {}]


@pytest.mark.parametrize("value", NOT_DURATIONS, ids=lambda v: repr(v)[:20])
def test_duration_in_a_wrong_format_is_refused(value: object) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_duration_s(value)
    assert caught.value.code in {"not-a-duration", "duration-zero"}
    if isinstance(value, str) and not value.endswith("\n"):
        assert not re.search(DURATION_PATTERN, value)


@pytest.mark.parametrize(
    ("parse", "text", "code"),
    [
        (parse_size_mib, "1023KiB", "size-too-small"),
        (parse_size_mib, "1025TiB", "size-too-large"),
        (parse_duration_s, "3650d1s", "duration-too-long"),
    ],
)
def test_size_or_duration_out_of_range_is_refused(
    parse: Callable[[str], int], text: str, code: str
) -> None:
    with refused(code, BadValueError):
        parse(text)


@given(st.integers(1, MAX_SIZE_MIB))
def test_size_is_read_back_from_its_text(mib: int) -> None:
    assert parse_size_mib(formatting.exact_size(mib)) == mib
    assert re.search(SIZE_PATTERN, formatting.exact_size(mib))


@given(st.integers(1, MAX_DURATION_S))
def test_duration_is_read_back_from_its_text(seconds: int) -> None:
    assert parse_duration_s(formatting.duration(seconds)) == seconds
    assert re.search(DURATION_PATTERN, formatting.duration(seconds))


@given(st.text(alphabet="0123456789dhmsKMGTiB. -:", max_size=12))
def test_pattern_of_the_schema_accepts_what_python_accepts(text: str) -> None:
    """Where they may differ is the range, which a pattern can't express."""
    for parse, pattern in ((parse_size_mib, SIZE_PATTERN), (parse_duration_s, DURATION_PATTERN)):
        try:
            parse(text)
        except ValueError as exc:
            out_of_range = {
                "size-too-large",
                "size-too-small",
                "duration-too-long",
                "duration-zero",
            }
            in_range = not isinstance(exc, BadValueError) or exc.code not in out_of_range
            assert not (in_range and re.search(pattern, text))
        else:
            assert re.search(pattern, text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("01:30:00", 5400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:05", 131405),
        ("0-00:00:01", 1),
        ("1h30m", 5400),
        ("45s", 45),
    ],
)
def test_slurm_time_is_read_in_seconds(text: str, seconds: int) -> None:
    assert parse_slurm_time_s(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "0:00", "-1", "1:2:3:4", "1-", "-12", "1.5", "soon", "UNLIMITED", "99999999", "1 h"],
)
def test_slurm_time_in_a_wrong_format_is_refused(text: str) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_slurm_time_s(text)
    assert caught.value.code in {"not-a-time", "duration-zero", "duration-too-long"}


@pytest.mark.parametrize(
    ("text", "mib"), [("4096", 4096), ("4G", 4096), ("4GiB", 4096), ("512M", 512)]
)
def test_slurm_memory_is_read_in_mib(text: str, mib: int) -> None:
    assert parse_slurm_memory_mib(text) == mib


@pytest.mark.parametrize(
    "text", ["", "0", "0G", "-4G", "4 G", "lots", "4.5", "99999999999999", "1e3"]
)
def test_slurm_memory_in_a_wrong_format_is_refused(text: str) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_slurm_memory_mib(text)
    assert caught.value.code in {"not-a-memory-size", "size-too-small"}
