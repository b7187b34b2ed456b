"""Machines of tests, as this machine sees them."""

from __future__ import annotations

import pytest

from tests.support import nested

NO_PROCESS = 2**31 - 1


def test_machine_that_ends_while_it_is_looked_at_has_no_first_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nested.machine, "running", lambda: {"node": NO_PROCESS})
    assert nested.leader("node") is None
