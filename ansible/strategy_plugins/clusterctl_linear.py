"""Ansible strategy plugin: mitogen's linear strategy, with less work of the control host for each task.

A playbook of ours costs a processor more on the control host than on any host. What is saved here of it:
a process for each host that skips a task, the same modules compiled again for each task, and collections of
garbage among objects that all live as long as the run.
"""

from __future__ import annotations

import builtins
import functools
import gc
from types import CodeType
from typing import Any

import ansible_mitogen.loaders
import ansible_mitogen.module_finder
import ansible_mitogen.strategy
import mitogen.master
from ansible.errors import AnsibleError
from ansible.executor.task_result import _RawTaskResult
from ansible.inventory.host import Host
from ansible.playbook.play_context import PlayContext
from ansible.playbook.task import Task

_GARBAGE = 100_000  # objects made since the last collection; Python's own number is 700

_compiled = functools.cache(lambda source, mode: builtins.compile(source, "<module>", mode))


def _compile(source: bytes, _name: str, mode: str) -> CodeType:
    """``compile``, once for each source: mitogen compiles modules to read their imports, for each task."""
    code: CodeType = _compiled(source, mode)
    return code


ansible_mitogen.module_finder.compile = mitogen.master.compile = _compile
gc.set_threshold(_GARBAGE)

_Linear: Any = ansible_mitogen.loaders.strategy_loader.get("linear", class_only=True)


class StrategyModule(ansible_mitogen.strategy.StrategyMixin, _Linear):  # type: ignore[misc]
    """A host that skips a task does so here; one that runs it has a process, as in Ansible's own."""

    def _queue_task(
        self, host: Host, task: Task, task_vars: dict[str, Any], play_context: PlayContext
    ) -> None:
        if (result := self._skipped(task, task_vars)) is None:
            super()._queue_task(host, task, task_vars, play_context)
            return
        self._queued_task_cache[host.name, task._uuid] = {
            "host": host,
            "task": task,
            "task_vars": task_vars,
            "play_context": play_context,
        }
        self._tqm.send_callback("v2_runner_on_start", host, task)
        self._final_q.send_task_result(_RawTaskResult(host, task, result, task.dump_attrs()))
        self._pending_results += 1

    def _skipped(self, task: Task, task_vars: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a task whose condition does not hold; None if it does, or can't be told here."""
        if not task.when or task.loop is not None or task.delegate_to or task.no_log:
            return None
        why: dict[str, Any] = {}
        try:
            if task._resolve_conditional(task.when, task_vars, result_context=why):
                return None
        except AnsibleError:  # which the task's own process tells in full
            return None
        return {"changed": False, "skipped": True, "skip_reason": "Conditional result was False", **why}
