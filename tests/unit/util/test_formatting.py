"""Values become text in one place, so that every view of a value has the same text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clusterctl.util import formatting


@pytest.mark.parametrize(
    ("how", "value", "text"),
    [
        (formatting.given, 0.000123456789, "0.000123456789"),
        (formatting.given, True, "true"),
        (formatting.given, "", "-"),
        (formatting.number, 0.1 + 0.2, "0.3"),
        (formatting.number, 1_234_567.4, "1,234,567"),
        (formatting.number, float("nan"), "nan"),
        (formatting.size, 1536, "1.5 KiB"),
        (formatting.size, 4 << 30, "4 GiB"),
        (formatting.size, (1 << 20) - 1, "1 MiB"),
        (formatting.size, 1 - (1 << 30), "-1 GiB"),
        (formatting.duration, None, "-"),
        (formatting.duration, 0.4187, "0.42s"),
        (formatting.duration, 1e-05, "0.00001s"),
        (formatting.duration, 0, "0s"),
        (formatting.duration, 2 * 86_400 + 5401, "2d1h30m1s"),
        (formatting.about, 2 * 86_400 + 5401, "2d1h"),
        (formatting.percent, 98.94, "98.9 %"),
        (formatting.percent, 0.0213, "0.02 %"),
        (formatting.percent, 1e-05, "0.00001 %"),
        (formatting.percent, 0, "0 %"),
        (formatting.percent, 100.0, "100 %"),
        (formatting.cost, 12.3456, "12.35 USD"),
        (formatting.cost, 0.0125, "0.0125 USD"),
        (formatting.cost, 1e-05, "0.00001 USD"),
        (formatting.cost, 0.0, "0.00 USD"),
        (formatting.moment, 1 << 70, str(1 << 70)),
    ],
)
def test_value_has_one_text(how: Callable[..., str], value: object, text: str) -> None:
    assert how(value) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("loss", "0.4123"),
        ("step_s", "0.4123 s"),
        ("step_s.min", "0.4123 s"),
        ("acc_percent", "0.4123 %"),
        ("samples_per_s", "0.4123"),
    ],
)
def test_name_of_a_metric_tells_its_unit(name: str, text: str) -> None:
    assert formatting.metric(0.4123, name) == text


@pytest.mark.parametrize("name", ["mfu", "weak_efficiency"])
def test_share_is_shown_as_it_was_written(name: str) -> None:
    """Also beside others of the same column that are above 1."""
    assert [formatting.metric(value, name) for value in (0.98, 1.02, 42.3)] == [
        "0.98",
        "1.02",
        "42.3",
    ]


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (97.34567, 0.01234, "97.346 ± 0.012"),
        (290.4, 17.1, "290 ± 17"),
        (12_345.6, 1_234.5, "12,300 ± 1,200"),
        (0.5, 0.0, "0.5"),
        (0.1, 1e-17, "0.1"),
        (0.0, 0.25, "0.00 ± 0.25"),
        (-1.5, 0.75, "-1.50 ± 0.75"),
        (1.5e-9, 2.5e-10, "1.50e-09 ± 2.5e-10"),
        (12_845_678.0, 707_107.0, "12,850,000 ± 710,000"),
        (7.245e58, 8.8e58, "7.2e+58 ± 8.8e+58"),
        (6.587e58, 8e58, "6.6e+58 ± 8.0e+58"),
        (3e56, 8.8e58, "0 ± 8.8e+58"),
        (0.5, 0.0996, "0.50 ± 0.10"),
    ],
)
def test_mean_ends_at_the_place_of_its_deviation(mean: float, deviation: float, text: str) -> None:
    assert formatting.spread(mean, deviation) == text
