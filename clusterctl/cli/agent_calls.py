"""A call of an agent: decided by the user's limits, journalled, and carried out by clusterctl.

What costs or destroys takes two calls: a dry run gives a token, and the token carries it out once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from clusterctl.agent.journal import DONE, FREE, CallBound, History, Journal
from clusterctl.agent.limits import NOWHERE, CallCluster, RequestedCall, check, identity, uses
from clusterctl.agent.tokens import VALID_S, PlannedCall, Tokens
from clusterctl.cli.agent_program import (
    CommandAnswer,
    Program,
    Runner,
    environment,
    error_answer,
    run_program,
    write_end,
)
from clusterctl.cli.agent_tools import TOOLS, checked, limits_of_user, words_of
from clusterctl.cli.all_clusters import ALL
from clusterctl.cli.verbs import VERBS, Effect, Scope
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.spec.agent import AgentLimits
from clusterctl.spec.names import SPEC_NAME
from clusterctl.spec.sbatch import directive_lines, values_in
from clusterctl.spec.units import parse_slurm_time_s
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.inventory import inventory_if_known
from clusterctl.state.workspace import Workspace, clusters_up, config_file, state_home
from clusterctl.transport.login import calls_of_last_hour
from clusterctl.util.confine import Confinement, LimitError, cluster_changed
from clusterctl.util.disk import file_error, read_text
from clusterctl.util.progress import SILENT

# The longest and the usual time of a `wait`.
MOST_WAIT_S: Final = 1800
_WAIT: Final = "10m"
# Clusters are asked of the agents' jobs at most this often, because a decision needs it.
_PACE_S: Final = 20.0
# Likewise those that the decision is not about.
_SELDOM_S: Final = 300.0


def place_of(
    verb: str, arguments: Mapping[str, Any], project: Path, confined: Confinement
) -> CallCluster:
    """Return the cluster that a call is about. LimitError: its spec is a file outside."""
    scope = VERBS[verb].scope
    if scope is Scope.NONE:
        return NOWHERE
    name = arguments.get("cluster", ALL if scope is Scope.EVERY else None)
    if name == ALL:
        most = max((_commands(Workspace.of(each)) for each in clusters_up()), default=0)
        return CallCluster(ALL, ALL, here=False, commands=most)
    file = arguments.get("file")
    confined.reject_read(file or SPEC_NAME)
    chosen = ChosenCluster(project / file if file else None, name, SILENT.note)
    # A job may name its cluster.
    if jobs := [*arguments.get("ids", ()), *filter(None, [arguments.get("job_id")])]:
        chosen = chosen.of_jobs(jobs)
    workspace = chosen.workspace()
    inventory = inventory_if_known(workspace)
    traits = inventory.traits if inventory is not None else spec_of(chosen).provider
    return CallCluster(
        name=workspace.root.name,
        id=identity(workspace),
        here=traits.shares_kernel,
        commands=_commands(workspace),
        account=inventory.account if inventory is not None else "",
    )


def _commands(workspace: Workspace) -> int:
    """Return how many commands ran in the last hour on the login node of a cluster."""
    login = read_text(workspace.login)
    if not login:
        return 0
    same = (each for each in state_home().glob("[!.]*/login") if read_text(each) == login)
    return sum(len(calls_of_last_hour(Workspace(each.parent).calls)) for each in same)


@dataclass
class Uses:
    """Asks what became of the agents' jobs, which the ledgers of their clusters then tell.

    project: the folder in which programs run. run: runs a program of clusterctl.
    """

    project: Path
    journal: Journal
    run: Runner = run_program
    _asked_at: dict[str, float] = field(default_factory=dict)

    def ask(self, cluster: str = "") -> list[str]:
        """Ask of the jobs that have not ended, unless that was asked just now. Return the names of
        the clusters that did not answer.

        cluster: the identity of the cluster that a decision is about; it is asked most often.
        """
        still: dict[str, list[str]] = {}
        # Also against other calls of this server, which read the same journal.
        with self.journal.lock() as history:
            for call_id, use in uses(history.calls.values()).items():
                if use.open:
                    still.setdefault(history.calls[call_id].cluster, []).extend(use.open)
        silent = []
        for other, jobs in still.items():
            pace_s = _PACE_S if other == cluster else _SELDOM_S
            last = self._asked_at.get(other, -pace_s)
            if time.monotonic() - last >= pace_s:
                self._asked_at[other] = time.monotonic()
                name = other.partition(" ")[0]
                words = ["jobs", "--all", f"--cluster={name}", "--", *jobs]
                program = Program(words, self.project, environment(()))
                if not self.run(program, lambda _: None).body.get("ok"):
                    silent.append(name)
        return silent

    def forget(self, cluster: str) -> None:
        """Let the next call ask a cluster again, because jobs there have ended."""
        self._asked_at.pop(cluster, None)


@dataclass
class Calls:
    """The calls of an agent in a project's folder.

    run: runs a program of clusterctl. Tests replace it.
    """

    project: Path
    journal: Journal = field(default_factory=Journal)
    run: Runner = run_program

    def __post_init__(self) -> None:
        self.uses = Uses(self.project, self.journal, self.run)

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.journal.folder)

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
        call = _Call(self, verb, dict(given), heard, started)
        try:
            return call.answer()
        except ClusterctlError as exc:
            return self._refuse(call, exc)
        except Exception as exc:
            error = file_error(exc) or ClusterctlError(
                "unexpected error, this is a bug",
                code="bug",
                why=f"{type(exc).__name__}: {exc}",
                fix="report it",
            )
            return self._refuse(call, error)

    def _refuse(self, call: _Call, error: ClusterctlError) -> CommandAnswer:
        """Write that a call was refused, and return the answer."""
        try:
            with self.journal.lock():
                self.journal.refuse(
                    _short(call.verb),
                    call.shown,
                    project=str(self.project),
                    cluster=call.place.id,
                    code=error.code,
                )
        except ClusterctlError as unwritable:
            return error_answer(unwritable)
        return error_answer(error)

    def confined(self, limits: AgentLimits) -> Confinement:
        """Return what commands of agents may use."""
        folders = [self.project, *(path.expanduser() for path in map(Path, limits.folders))]
        kept = (state_home(), config_file().parent)
        return Confinement(
            tuple(str(path.resolve()) for path in folders),
            tuple(str(path.resolve()) for path in kept),
            limits.secrets,
        )


@dataclass
class _Call:
    """A single call, while it is decided and carried out."""

    calls: Calls
    verb: str
    given: dict[str, Any]
    heard: Callable[[str], None]
    started: Callable[[Program], None]
    place: CallCluster = NOWHERE

    def __post_init__(self) -> None:
        self.token = self.given.pop("token", None)

    @property
    def shown(self) -> dict[str, Any]:
        """The arguments for the journal, which no agent can make large."""
        return {str(name)[:40]: _short(value) for name, value in [*self.given.items()][:60]}

    def answer(self) -> CommandAnswer:
        if self.verb not in TOOLS:
            raise UsageError(
                "agents have no such command",
                code="agent-verb-unknown",
                why=str(self.verb)[:60],
                fix=f"the commands of agents: {', '.join(TOOLS)}",
            )
        effect = VERBS[self.verb].effect
        self._limits = limits_of_user()
        self.given = checked(self.verb, self.given)
        self._command = words_of(self.verb, self._timed())
        self._confined = self.calls.confined(self._limits)
        self._check_discard()
        self.place = place_of(self.verb, self.given, self.calls.project, self._confined)
        asked = RequestedCall(
            verb=self.verb,
            place=self.place,
            changes=not effect.only_shows and effect is not Effect.FETCHES,
            submits=effect is Effect.SUBMITS,
        )
        if not effect.needs_plan:
            return self._simple(asked)
        return self._dry_run(asked) if self.token is None else self._carry_out(asked)

    def _check_discard(self) -> None:
        limits = self._limits
        if self.given.get("discard") and not limits.discard:
            raise LimitError(
                "agents may not discard what exists only on a cluster",
                code="agent-discard",
                why="the limit `agent.discard` of the user is false",
                fix=f"`collect` first; only the user may change `agent.discard` in {config_file()}",
                limit={"name": "discard", "value": False},
            )

    def _simple(self, asked: RequestedCall) -> CommandAnswer:
        """Carry out a call that neither costs nor destroys."""
        with self.calls.journal.lock() as history:
            check(self._limits, config_file(), history, asked)
            call = self._begin(FREE)
        return self._run(
            call, self._command, acts=not VERBS[self.verb].effect.only_shows, free=True
        )

    def _timed(self) -> dict[str, Any]:
        """Return the arguments, of which those of a `wait` make it end in time."""
        if self.verb != "wait":
            return self.given
        text = str(self.given.get("timeout", _WAIT))
        try:
            seconds = min(parse_slurm_time_s(text), MOST_WAIT_S)
        except ValueError:
            # The command itself reports it.
            return self.given
        return {**self.given, "timeout": f"{seconds}s"}

    def _dry_run(self, asked: RequestedCall) -> CommandAnswer:
        with self.calls.journal.lock() as history:
            check(self._limits, config_file(), history, asked)
            self._check_jobs(history)
            call = self._begin(FREE)
        words = self._words("--dry-run")
        answer = self._run(call, words, acts=False, free=True)
        digest = answer.body.get("digest")
        if answer.code != DONE or not isinstance(digest, str):
            return answer
        planned = PlannedCall(
            verb=self.verb,
            arguments=self.given,
            project=str(self.calls.project),
            cluster=self.place.id,
            digest=digest,
            bound=_bound_of(self.verb, answer.body.get("at_most") or {}),
            accounts=_accounts_of(answer.body) if asked.submits else (),
        )
        self._ask_of_jobs()
        with self.calls.journal.lock() as history:
            # What would be refused gets no token.
            self._check_planned(history, asked, planned)
            token = self.calls.tokens.give(planned)
        told = {"token": token, "token_valid_s": VALID_S}
        return CommandAnswer({**_without_scripts(answer.body), **told}, answer.rc)

    def _carry_out(self, asked: RequestedCall) -> CommandAnswer:
        self._ask_of_jobs()
        with self.calls.journal.lock() as history:
            project = str(self.calls.project)
            planned = self.calls.tokens.take(str(self.token), self.verb, self.given, project)
            if planned.cluster != self.place.id:
                raise cluster_changed("planned", planned.cluster, self.place.id)
            self._check_planned(history, asked, planned)
            self._check_jobs(history)
            call = self._begin(planned.bound)
        words = self._words(f"--if-digest={planned.digest}")
        return self._run(call, words, acts=True)

    def _ask_of_jobs(self) -> None:
        """Ask what became of the agents' jobs, if the decision is about jobs."""
        if VERBS[self.verb].effect is Effect.SUBMITS:
            self.calls.uses.ask(self.place.id)

    def _check_planned(self, history: History, asked: RequestedCall, planned: PlannedCall) -> None:
        """Raise LimitError if a limit forbids what a dry run has shown."""
        own = self.place.account
        # clusterctl writes the user's own default account into scripts.
        named = [
            "" if account == own and account not in self._limits.accounts else account
            for account in planned.accounts
        ]
        asked = replace(asked, bound=planned.bound, accounts=named)
        check(self._limits, config_file(), history, asked)

    def _words(self, option: str) -> list[str]:
        """Return the words of the command with this option, which is never one of its values."""
        count = len(self.verb.split())
        return [*self._command[:count], option, *self._command[count:]]

    def _check_jobs(self, history: History) -> None:
        """Raise an error if the call cancels jobs that no agent has submitted."""
        if self.verb != "cancel" or self._limits.others_jobs:
            return
        own = history.jobs_of(self.place.id)
        for text in self.given["ids"]:
            if text.removeprefix(f"{self.place.name}/").partition("_")[0] not in own:
                raise LimitError(
                    f"agents may not cancel {text[:40]!r}: no agent has submitted such a job to "
                    f"{self.place.name}",
                    code="agent-others-job",
                    why="the limit `agent.others_jobs` of the user is false",
                    fix="cancel by the job ID, such as 12 or 12_3; or ask the user",
                    limit={"name": "others_jobs", "value": False},
                )

    def _begin(self, bound: CallBound) -> str:
        """Write that the call begins."""
        return self.calls.journal.begin(
            self.verb,
            self.shown,
            project=str(self.calls.project),
            cluster=self.place.id,
            bound=bound,
        )

    def _run(
        self, call: str, words: Sequence[str], *, acts: bool, free: bool = False
    ) -> CommandAnswer:
        """Run the command, and write how it ended.

        acts: whether it is carried out to its end, even if the client or the server is gone.
        free: whether it can have used nothing.
        """
        # An agent may replace the spec meanwhile.
        cluster = "" if self.place.name == ALL else self.place.name
        confined = replace(self._confined, cluster=cluster)
        program = Program(
            words,
            self.calls.project,
            environment(self._limits.secrets) | confined.environ,
            call=call if acts else "",
        )
        self.started(program)
        started_at = time.monotonic()
        try:
            answer = self.calls.run(program, self.heard)
        except OSError as exc:
            error = ClusterctlError(
                "clusterctl can't be started", code="agent-no-start", why=exc.strerror or str(exc)
            )
            # Nothing was started.
            answer = error_answer(error, UsageError.exit_code)
        seconds = time.monotonic() - started_at
        try:
            write_end(self.calls.journal, call, answer, seconds=seconds, free=free)
        except ClusterctlError as exc:
            # The call counts at its bound, and the agent must know what it did.
            return CommandAnswer({**answer.body, "journal": exc.cause}, answer.rc)
        if self.verb in {"wait", "cancel"}:
            self.calls.uses.forget(self.place.id)
        return answer


def _bound_of(verb: str, at_most: Mapping[str, Any]) -> CallBound:
    """Return the most that a call can use, by its dry run."""
    effect = VERBS[verb].effect
    if effect is Effect.SUBMITS:
        tasks = at_most.get("tasks")
        jobs = at_most.get("jobs")
        count = None if tasks is None or jobs is None else max(tasks, jobs)
        return CallBound(count, at_most.get("node_hours"), at_most.get("usd"))
    # The node hours of a cluster are those of its jobs.
    if effect is Effect.RAISES:
        return CallBound(0, 0.0, at_most.get("usd"), int(at_most.get("nodes") or 0))
    return FREE


def _accounts_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the account of each job of a dry run; "" for a job that names none."""
    scripts = [str(job.get("script") or "") for job in body.get("jobs") or [body]]
    found = (values_in(text.splitlines(), "--account") for text in scripts)
    return tuple(values.get("--account", "") for values in found)


def _short(value: Any, most: int = 400) -> Any:
    """Return a value for the journal: of a long one, the beginning as text."""
    if isinstance(value, bool | int | float) or value is None:
        return value
    texts = [each for each in value if isinstance(each, str)] if isinstance(value, list) else None
    if texts == value and texts is not None and len("".join(texts)) + len(texts) <= most:
        return texts
    text = value if isinstance(value, str) else str(value)
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} letters)"


def _without_scripts(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a dry run with the #SBATCH lines in place of whole scripts. The keys of a
    single job are only in ``jobs``.
    """
    rows = [row for row in body.get("jobs") or () if isinstance(row, dict) and "script" in row]
    if not rows:
        return dict(body)
    short = [
        {**row, "script": [line for _, line in directive_lines(str(row["script"]).splitlines())]}
        for row in rows
    ]
    return {**{key: value for key, value in body.items() if key not in rows[0]}, "jobs": short}
