"""The bar of a transfer: one, whoever tells of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from clusterctl.cli.output import Screen, _Bar

if TYPE_CHECKING:
    from rich.progress import Progress


class Counting(Screen):
    """Counts its bars; making one takes long enough for other threads to come by."""

    def __init__(self) -> None:
        super().__init__(json=False, color=False)
        self.bars: list[Progress] = []

    def bar(self) -> Progress:
        bar = super().bar()
        self.bars.append(bar)
        time.sleep(0.1)
        return bar


def test_many_threads_share_one_bar() -> None:
    screen = Counting()
    bar = _Bar(screen, silent_s=0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bar("hashing", n, 8), range(8)))
    bar.stop()
    (only,) = screen.bars
    assert [task.description for task in only.tasks] == ["hashing"]
