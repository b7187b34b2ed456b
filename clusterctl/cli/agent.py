"""The commands agent limits and agent log, for users whose agents use `mcp`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

from clusterctl.agent.journal import Journal, RecordedCall
from clusterctl.agent.limits import node_hours_of_day
from clusterctl.cli.agent_tools import limits_of_user
from clusterctl.cli.output import Screen
from clusterctl.errors import Notice
from clusterctl.state.workspace import config_file
from clusterctl.util import formatting


def limits(screen: Screen) -> None:
    """Show the limits of agents, and the node hours that their jobs of the last 24 hours can use.

    The limits are in the section `agent` of your configuration, a file that no command of an agent
    can change.
    """
    file = config_file()
    values = limits_of_user().model_dump(mode="json")
    used = node_hours_of_day(Journal().calls().values())
    rows = [
        (name, _shown(value), formatting.number(used) if name == "node_hours" else "")
        for name, value in values.items()
    ]
    where = str(file) if file.exists() else f"{file}, which does not exist: these are the defaults"
    screen.note(Notice("agent-limits", f"the limits of agents, from {where}"))
    screen.result(
        {
            "file": str(file),
            "exists": file.exists(),
            "limits": values,
            "used": {"node_hours": used},
        },
        *screen.table(["LIMIT", "VALUE", "USED"], rows),
    )


def log(screen: Screen) -> None:
    """Show every call of agents, the last at the end.

    Refused calls are among them. A call without an answer is running, or its server was killed.
    """
    calls = [*Journal().calls().values()]
    empty = Notice("agent-log-empty", "no agent has called anything yet")
    lines = [line for call in calls for line in _lines(call)] or [empty]
    screen.result({"calls": [_answer(call) for call in calls]}, *lines)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return formatting.number(value) if isinstance(value, float) else str(value)


def _answer(call: RecordedCall) -> dict[str, Any]:
    """Return a call as `-o json` shows it."""
    row = asdict(call)
    return {**row, "jobs": [*call.jobs], "answer": row.pop("code")}


def _lines(call: RecordedCall) -> Iterator[str]:
    """Yield the lines about a call: when, what and how it ended, and then each argument."""
    at = f"{datetime.fromtimestamp(call.time).astimezone():%Y-%m-%d %H:%M:%S}"
    parts = [
        f"{at}  {call.verb}: {': '.join(filter(None, (call.code or 'no answer', call.cause)))}"
    ]
    if call.jobs:
        parts.append(f"job {', '.join(call.jobs)}")
    if call.node_hours is None:
        parts.append("node hours unknown")
    elif call.node_hours:
        parts.append(f"at most {formatting.hours(call.node_hours)} node hours")
    yield ", ".join(parts)
    for name, value in call.arguments.items():
        yield f"    {name}: {value if isinstance(value, str) else _words(value)}"


def _words(value: Any) -> str:
    is_words = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return shlex.join(value) if is_words else json.dumps(value)
