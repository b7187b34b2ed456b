"""The option --notify of the commands that watch jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from clusterctl.cli.options import Words, option
from clusterctl.cli.output import Screen
from clusterctl.errors import Notice
from clusterctl.jobs.messages import TELLS_NOBODY, JobMessages

if TYPE_CHECKING:
    from clusterctl.util.receivers import Receiver

Notify = Annotated[
    Words,
    option(
        "Send messages about the jobs to a command, or a URL of Apprise such as ntfy://TOPIC, while "
        "this command runs. Repeatable. Default: the receivers in notify.txt; `none` sends nothing.",
        metavar="TARGET",
    ),
]


@contextmanager
def telling(
    screen: Screen, receivers: Sequence[Receiver], *, submitted: bool = False
) -> Iterator[JobMessages]:
    """Send messages about jobs in the ``with`` block.

    submitted: see ``JobMessages``.
    """
    if not receivers:
        yield TELLS_NOBODY
        return
    from clusterctl.util.receivers import posting

    names = ", ".join(receiver.name for receiver in receivers)
    text = f"messages are sent to {names} while this command runs, from this machine"
    screen.note(Notice("messages-while-running", text))
    with posting(receivers, screen.note) as post:
        yield JobMessages(post, submitted=submitted)
