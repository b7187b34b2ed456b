"""A call of an agent: journalled, and carried out by clusterctl within the user's limits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterctl.agent.journal import Journal
from clusterctl.cli.agent_program import (
    CommandAnswer,
    Program,
    Runner,
    error_answer,
    run_program,
    write_end,
)
from clusterctl.cli.agent_tools import MOST, TOOLS, checked, limits_of_user, words_of
from clusterctl.cli.verbs import VERBS
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.spec.agent import AgentLimits
from clusterctl.spec.sbatch import directive_lines
from clusterctl.spec.units import parse_slurm_time_s
from clusterctl.state.workspace import cache_home, config_file, state_home
from clusterctl.util.confine import Asked, Confinement, check
from clusterctl.util.disk import file_error
from clusterctl.util.process import temporary_beginnings

# The longest and the usual time of a `wait`.
MOST_WAIT_S: Final = 1800
_WAIT: Final = "10m"


@dataclass
class Calls:
    """The calls of an agent in a project's folder.

    run: runs a program of clusterctl. Tests replace it.
    """

    project: Path
    journal: Journal = field(default_factory=Journal)
    run: Runner = run_program

    def call(
        self,
        verb: str,
        given: Mapping[str, Any],
        heard: Callable[[str], None] = lambda _: None,
        started: Callable[[Program], None] = lambda _: None,
    ) -> CommandAnswer:
        """Carry out a call, or refuse it. Return what the agent is told.

        heard: called with each note of the command. started: called with the program that runs.
        """
        started_at = time.monotonic()
        try:
            call = self.journal.begin(
                str(verb)[:60], _for_journal(given), project=str(self.project)
            )
        except ClusterctlError as exc:
            return error_answer(exc)
        try:
            program = self._program(call, verb, given)
            started(program)
            answer = self.run(program, heard)
        except ClusterctlError as exc:
            answer = error_answer(exc)
        except Exception as exc:
            error = file_error(exc) or ClusterctlError(
                "unexpected error, this is a bug",
                why=f"{type(exc).__name__}: {exc}",
                fix="report it",
            )
            answer = error_answer(error)
        try:
            write_end(self.journal, call, answer, seconds=time.monotonic() - started_at)
        except ClusterctlError as exc:
            # The agent must know what the call did.
            return CommandAnswer({**answer.body, "journal": exc.cause}, answer.rc)
        return CommandAnswer(_without_scripts(answer.body), answer.rc)

    def _program(self, call: str, verb: str, given: Mapping[str, Any]) -> Program:
        """Return the program that carries out a call. Raises the error of a call that is refused."""
        if verb not in TOOLS:
            raise UsageError(
                "agents have no such command",
                code="not-found",
                about="verb",
                why=str(verb)[:60],
                fix=f"the commands of agents: {', '.join(TOOLS)}",
            )
        confined = self.confined(limits_of_user(), call)
        check(confined, Asked(verb=verb))
        arguments = checked(verb, given)
        acts = not VERBS[verb].effect.only_shows and not arguments.get("dry_run")
        return Program(
            words_of(verb, _timed(verb, arguments)),
            self.project,
            {**os.environ, **confined.environ},
            call=call if acts else "",
        )

    def confined(self, limits: AgentLimits, call: str = "") -> Confinement:
        """Return what a command of agents may do."""
        folders = [self.project, *(path.expanduser() for path in map(Path, limits.folders))]
        kept = (state_home(), config_file().parent)
        return Confinement(
            folders=tuple(str(path.resolve()) for path in folders),
            kept=tuple(str(path.resolve()) for path in kept),
            made=(f"{cache_home().resolve()}/", *temporary_beginnings()),
            node_hours=limits.node_hours,
            nodes=limits.nodes,
            time_s=limits.time,
            verbs_off=limits.verbs_off,
            file=str(config_file()),
            call=call,
        )


def _timed(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, of which those of a `wait` make it end in time."""
    if verb != "wait":
        return arguments
    text = str(arguments.get("timeout", _WAIT))
    try:
        seconds = min(parse_slurm_time_s(text), MOST_WAIT_S)
    except ValueError:
        # The command itself reports it.
        return arguments
    return {**arguments, "timeout": f"{seconds}s"}


def _for_journal(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, or, of those that are refused for their size, the size."""
    try:
        text = json.dumps(dict(given))
    except (TypeError, ValueError, RecursionError) as exc:
        return {"unreadable": str(exc)}
    return dict(given) if len(text) <= MOST else {"bytes": len(text)}


def _without_scripts(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a dry run with the #SBATCH lines in place of whole scripts. The keys of a
    single job are only in ``jobs``.
    """
    jobs = body.get("jobs")
    rows = [row for row in jobs if isinstance(row, dict) and "script" in row] if jobs else []
    if not rows or not body.get("dry_run"):
        return dict(body)
    short = [
        {**row, "script": [line for _, line in directive_lines(str(row["script"]).splitlines())]}
        for row in rows
    ]
    return {**{key: value for key, value in body.items() if key not in rows[0]}, "jobs": short}
