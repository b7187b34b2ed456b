"""The alarms of a job: their kinds, and what happens if the user does not choose."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from clusterctl.spec.units import parse_duration_s

# Kind -> for how many seconds its condition must hold. False alarms are worse than late ones.
# payload/node/alarms.py has the conditions.
ALARMS: Final = MappingProxyType(
    {
        "idle": 1800,
        "data": 1800,
        "throttled": 600,
        "memory": 60,
        "disk": 60,
    }
)


def alarm_rules(options: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return kind -> (action, seconds) of the alarms of a job. options: such as ``idle=end@1h``; the
    last one of a kind counts.
    """
    rules = {kind: ("warn", seconds) for kind, seconds in ALARMS.items()}
    for option in options:
        kind, _, value = option.partition("=")
        action, _, time = value.partition("@")
        rules.pop(kind, None)
        if action != "off":
            rules[kind] = action, parse_duration_s(time) if time else ALARMS[kind]
    return rules


def alarm_options(options: Sequence[str]) -> list[str]:
    """Return the options of job.py for the alarms of a job. options: see ``alarm_rules``."""
    rules = alarm_rules(options)
    if not rules:
        return []
    text = ",".join(f"{kind}={action}@{seconds}" for kind, (action, seconds) in rules.items())
    return [f"--alarms={text}"]
