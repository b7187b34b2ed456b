"""The commands agent limits, agent log and agent resume, for users whose agents use `mcp`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from clusterctl.agent.journal import DONE, Journal, RecordedCall
from clusterctl.agent.limits import LedgerUse, usage, uses
from clusterctl.cli.agent_calls import Uses
from clusterctl.cli.agent_tools import limits_of_user
from clusterctl.cli.options import option
from clusterctl.cli.output import Screen
from clusterctl.errors import Notice
from clusterctl.state.workspace import config_file
from clusterctl.util import formatting

_NONE: Final = "-"
_RECENT: Final = 20
_MOST_LETTERS: Final = 60
# Limit -> the field of Usage that counts against it.
_COUNTED: Final = {
    "node_hours_per_day": "node_hours",
    "usd_per_day": "usd",
    "jobs_at_once": "jobs",
    "failures_in_a_row": "failures",
}


def limits(screen: Screen) -> None:
    """Show what agents may do through `mcp`, and what they use of it. Asks what became of their
    jobs.

    The limits are in the section `agent` of your configuration, a file that no command of an agent
    can change.
    """
    file = config_file()
    values = limits_of_user().model_dump(mode="json")
    journal = Journal()
    with screen.working("asking what became of the agents' jobs"):
        silent = Uses(Path.cwd(), journal).ask()
    used = usage(journal.read())
    counted = {name: getattr(used, key) for name, key in _COUNTED.items()}
    rows = [
        (name, _shown(value) or "on this machine", _shown(counted.get(name)))
        for name, value in values.items()
    ]
    where = str(file) if file.exists() else f"{file}, which does not exist: these are the defaults"
    screen.note(Notice("agent-limits", f"the limits of agents, from {where}"))
    for name in silent:
        text = f"cluster {name} does not answer: its jobs count as they were when it last did"
        screen.note(Notice("agent-jobs-unasked", text))
    screen.result(
        {
            "file": str(file),
            "exists": file.exists(),
            "limits": values,
            "used": counted,
            "silent": silent,
        },
        *screen.table(["LIMIT", "VALUE", "USED"], rows),
    )


def log(
    screen: Screen,
    last: Annotated[
        int, option("Show so many calls.", "--last", "-n", least=1, metavar="N")
    ] = _RECENT,
) -> None:
    """Show the calls of agents, the last at the end.

    Refused calls are among them. A call without an answer is running, or its server was killed; it
    counts at its bound for a day.
    """
    calls = [*Journal().read().calls.values()][-last:]
    head = ["TIME", "COMMAND", "CLUSTER", "ANSWER", "JOBS", "NODE_HOURS", "USD"]
    found = uses(calls)
    rows = [_row(call, found[call.id]) for call in calls]
    empty = [Notice("agent-log-empty", "no agent has called anything yet")]
    screen.result(
        {"calls": [_answer(call, found[call.id]) for call in calls]},
        *(screen.table(head, rows) if rows else empty),
    )


def resume(screen: Screen) -> None:
    """Let agents submit again after failed jobs in a row."""
    journal = Journal()
    with journal.lock() as history:
        failures = usage(history).failures
        journal.resume()
    text = f"agents may submit again; {failures} jobs had failed in a row"
    screen.result({"failed_in_a_row": failures}, text)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return formatting.number(value)
    return "" if value is None else str(value)


def _answer(call: RecordedCall, use: LedgerUse) -> dict[str, Any]:
    """Return a call as `-o json` shows it: with what it used, or can use at most."""
    return {
        "id": call.id,
        "time": call.time,
        "verb": call.verb,
        "arguments": call.arguments,
        "project": call.project,
        "cluster": call.cluster.partition(" ")[0],
        "answer": call.code,
        "refused": call.refused,
        "jobs": [*call.jobs],
        "seconds": call.seconds,
        "node_hours": use.node_hours,
        "usd": use.usd,
        "is_bound": use.is_bound,
    }


def _row(call: RecordedCall, use: LedgerUse) -> list[str]:
    words = shlex.join([call.verb, *_words(call.arguments)])
    cost = [formatting.hours(use.node_hours), formatting.cost(use.usd, "")]
    return [
        f"{datetime.fromtimestamp(call.time).astimezone():%m-%d %H:%M:%S}",
        words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}...",
        call.cluster.partition(" ")[0] or _NONE,
        f"{'refused: ' if call.refused and call.code != DONE else ''}{call.code or 'no answer'}",
        ", ".join(call.jobs) or _NONE,
        *cost,
    ]


def _words(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in arguments.items()]
