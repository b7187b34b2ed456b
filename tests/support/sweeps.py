"""Mark cases of a test that only `make test-sweeps` runs."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet


def in_sweep(*cases: Any) -> list[ParameterSet]:
    """Further cases on a path through the code that another one has taken: `["pipe",
    *in_sweep("link")]`.
    """
    return [
        pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.sweep) for c in cases
    ]
