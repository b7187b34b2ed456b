"""Ansible strategy plugin: mitogen's linear strategy, but with less work on the control host for
each task, and with umask 022 on the hosts.

A playbook needs more processor time on the control host than on any other host. This plugin saves a
process for each host that skips a task, includes a file or sets a variable, repeated compilation of
the same modules, and garbage collections among objects that live as long as the run.
"""

from __future__ import annotations

import builtins
import functools
import gc
import os
from types import CodeType
from typing import Any

import ansible_mitogen.loaders
import ansible_mitogen.module_finder
import ansible_mitogen.services
import ansible_mitogen.strategy
import mitogen.core
import mitogen.master
from ansible._internal._task import TaskContext
from ansible.errors import AnsibleError
from ansible.executor.task_executor import TaskExecutor
from ansible.executor.task_result import _RawTaskResult
from ansible.inventory.host import Host
from ansible.playbook.play_context import PlayContext
from ansible.playbook.task import Task
from ansible.plugins import loader

from clusterctl.util.remote_wanted import content_mark, mark_of_file, short_checksum

# Actions that need no connection to the host.
_WITHOUT_HOST = {
    f"ansible.builtin.{name}"
    for name in ("assert", "include_role", "include_tasks", "include_vars", "set_fact")
}
# Every user must be able to read what roles install, on hosts with umask 027 or 077, too.
_UMASK = 0o022
# New objects before a garbage collection. Python's default is 700.
_GARBAGE = 100_000

# The actions whose result has the checksum of the content to be written.
_WRITES = {"ansible.builtin.copy", "ansible.builtin.template"}
_WRITES_BLOCK = "ansible.builtin.blockinfile"
_RECORDS = "wanted_files"
# Host -> key of a file -> mark, of all plays of this run.
_written: dict[str, dict[str, str]] = {}

_compiled = functools.cache(lambda source, mode: builtins.compile(source, "<module>", mode))


def _compile(source: bytes, _name: str, mode: str) -> CodeType:
    """Compile each source only once. Mitogen compiles a module for each task, to find its
    imports.
    """
    code: CodeType = _compiled(source, mode)
    return code


ansible_mitogen.module_finder.compile = mitogen.master.compile = _compile
gc.set_threshold(_GARBAGE)

_start_connection = ansible_mitogen.services.ContextService._send_module_forwards


def _start_with_umask(
    service: ansible_mitogen.services.ContextService, context: mitogen.core.Context
) -> None:
    """Set the umask of a new process on a host, before it forks the processes of tasks."""
    context.call_no_reply(os.umask, _UMASK)
    _start_connection(service, context)


ansible_mitogen.services.ContextService._send_module_forwards = _start_with_umask

_Linear: Any = ansible_mitogen.loaders.strategy_loader.get("linear", class_only=True)


class StrategyModule(ansible_mitogen.strategy.StrategyMixin, _Linear):  # type: ignore[misc]
    """Linear strategy in which only tasks that need a connection get a process for each host."""

    def _queue_task(
        self, host: Host, task: Task, task_vars: dict[str, Any], play_context: PlayContext
    ) -> None:
        if task.action == _RECORDS:
            task_vars = {**task_vars, "clusterctl_written": _written.get(host.name, {})}
        queued = {"host": host, "task": task, "task_vars": task_vars, "play_context": play_context}
        # Ansible looks up the task of each result here. A loop has results before `_run_here`
        # returns.
        self._queued_task_cache[host.name, task._uuid] = queued
        if (result := self._skipped(task, task_vars)) is not None:
            fields = task.dump_attrs()
        elif task.action in _WITHOUT_HOST and not task.delegate_to:
            result, fields = self._run_here(**queued)
        else:
            super()._queue_task(host, task, task_vars, play_context)
            return
        self._final_q.send_task_result(_RawTaskResult(host, task, result, fields))
        self._pending_results += 1

    def _process_pending_results(self, *args: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = super()._process_pending_results(*args, **kwargs)
        for result in results:
            marks = _written.setdefault(result.host.name, {})
            for item in result._return_data.get("results") or [result._return_data]:
                marks.update(_marks_of(result.task.action, item))
        return results

    def _run_here(
        self, host: Host, task: Task, task_vars: dict[str, Any], play_context: PlayContext
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run a task in this process. Return its result and the values of its attributes."""
        # The run replaces templates in the task and in the variables by values for this host.
        own = task.copy(exclude_parent=True, exclude_tasks=True)
        own._parent = task._parent
        shared = (self._loader, loader, self._final_q, self._variable_manager)
        with TaskContext(own):
            result = TaskExecutor(host, own, task_vars.copy(), play_context.copy(), *shared).run()
        return result, own.dump_attrs()

    def _skipped(self, task: Task, task_vars: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result of a task with a false condition; None if the task may have to run."""
        if not task.when or task.loop is not None or task.delegate_to or task.no_log:
            return None
        failed_condition: dict[str, Any] = {}
        try:
            if task._resolve_conditional(task.when, task_vars, result_context=failed_condition):
                return None
        except AnsibleError:
            # The task's own process reports the error in full.
            return None
        skipped = {"changed": False, "skipped": True, "skip_reason": "Conditional result was False"}
        return {**skipped, **failed_condition}


def _marks_of(action: str, result: Any) -> dict[str, str]:
    """Return the mark of the file that a task wants on the host, from the result of the task."""
    if not isinstance(result, dict) or result.get("failed") or result.get("skipped"):
        return {}
    if action == _WRITES_BLOCK:
        arguments = result["invocation"]["module_args"]
        content = content_mark(f"{arguments['block']}\n".encode())
        return {f"block {arguments['path']}": content}
    path = result.get("dest") or result.get("path")
    if action not in _WRITES or not path or "checksum" not in result or "mode" not in result:
        return {}
    content = short_checksum(result["checksum"])
    mark = mark_of_file(content, int(result["mode"], 8), result["uid"], result["gid"])
    return {f"file {path}": mark}
