"""A number and its noun in a message come from `counted`, which knows the singular."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "clusterctl"
BY_HAND = re.compile(
    r"\{(?:len\([^{}]*\)|[\w.]+)(?::,)?\} ?[\w ]*\{(?:'s'|'') if [^{}]+ else (?:'s'|'')\}"
)
# These import nothing of clusterctl: the lowest layer, and programs that are sent to hosts.
ALONE = re.compile(r"errors\.py|remote_\w+\.py")


def test_number_with_a_noun_is_never_written_by_hand() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if "_assets" not in path.parts]
    assert len(paths) > 100
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in paths
        if not ALONE.fullmatch(path.name)
        for line in path.read_text().splitlines()
        if BY_HAND.search(line)
    ]
    assert found == []
