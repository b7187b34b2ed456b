"""Ansible callback plugin: prints events as JSON for clusterctl, besides the usual output.

Each event is a line of its own in the output: the character RS (as in RFC 7464) and an object with `event`:

    start        pid: of Ansible
    ok, changed, failed, unreachable
                 host; role ("" outside of roles); task; of: the number of the play's hosts;
                 result: what the module returned, but after `ok` only its notes
    end          ok: host -> number of tasks; changed: number of tasks that changed something, on all hosts

An ignored failure is no event. Ansible has removed results of tasks with `no_log` already.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: clusterctl_events
type: notification
short_description: What happens, as JSON
description: Prints a line of JSON for each result of a task.
"""

MARK = "\x1e"
NOTES = "clusterctl_notes"


def say(event: str, **fields: Any) -> None:
    line = json.dumps({"event": event, **fields}, default=str)
    sys.stdout.write(f"{MARK}{line}\n")
    sys.stdout.flush()


class CallbackModule(CallbackBase):  # type: ignore[misc]
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "clusterctl_events"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.hosts = 0

    def v2_playbook_on_start(self, playbook: Any) -> None:  # noqa: ARG002
        say("start", pid=os.getpid())

    def v2_playbook_on_play_start(self, play: Any) -> None:
        inventory = play.get_variable_manager()._inventory
        self.hosts = len(inventory.get_hosts(play.hosts))

    def v2_runner_on_ok(self, result: Any) -> None:
        if result._result.get("changed"):
            self._say("changed", result)
        else:
            self._say("ok", result, keys=(NOTES,))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            self._say("failed", result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._say("unreachable", result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        ok = {host: stats.ok.get(host, 0) for host in stats.processed}
        say("end", ok=ok, changed=sum(stats.changed.values()))

    def _say(self, event: str, result: Any, keys: tuple[str, ...] | None = None) -> None:
        task = result._task
        say(
            event,
            host=result._host.get_name(),
            role=task._role.get_name() if task._role else "",
            task=task.name or task.action,
            of=self.hosts,
            result={
                key: value for key, value in result._result.items() if keys is None or key in keys
            },
        )
