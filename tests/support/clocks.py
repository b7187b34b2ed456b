"""A clock for one module, which the threads of other tests do not see and can't move."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def replace_clock(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, **functions: Callable[..., Any]
) -> None:
    """Replace functions of ``time``, such as ``sleep``, in these modules alone."""
    clock = SimpleNamespace(**{**vars(time), **functions})
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
