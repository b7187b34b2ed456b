"""Golden files: `UPDATE_GOLDEN=1 pytest ...` writes them anew; look at the diff before you commit it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Asserts that a text is what the golden file of that name holds."""

    def same(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; UPDATE_GOLDEN=1 writes it anew"

    return same
