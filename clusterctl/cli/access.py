"""The commands ssh, shell and code, which lead to hosts and into jobs."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from clusterctl.cli.options import JobId, Words, argument, hosts, job_flags, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.submit import preparer
from clusterctl.errors import Failure, Notice, TransportError, UsageError, excluded
from clusterctl.jobs.environment import Environments
from clusterctl.jobs.shell import (
    SessionFolder,
    forwarded,
    kept_notice,
    parse_forwards,
    requested_nodes,
    session_folder,
    shell_request,
)
from clusterctl.jobs.ssh_entry import enter
from clusterctl.jobs.submit import Submitter
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, Session, open_session
from clusterctl.scheduler.sites.script import Environment
from clusterctl.spec.job_options import OPTIONS, JobOptions, job_options
from clusterctl.spec.names import ADMIN_USER, reject_unknown
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.inventory import Inventory, inventory_of
from clusterctl.state.run_names import cluster_of_jobs
from clusterctl.transport.login import login_of
from clusterctl.transport.openssh import NO_CONNECTION, OpenSSH, run_attached, run_captured
from clusterctl.transport.ssh import Connections

Command = Annotated[Words, argument("A command, after --.", metavar="COMMAND")]
_ALLOCATION: Final = [
    replace(option, help=option.in_shell) if isinstance(option.in_shell, str) else option
    for option in OPTIONS.values()
    if option.in_shell
]


def ssh(
    screen: Screen,
    host: Annotated[str | None, argument("Host name. Default: the controller.", tab=hosts)] = None,
    command: Command = None,
    user: Annotated[
        str | None, option("Login user. Default: the job user.", "--user", "-u")
    ] = None,
    admin: Annotated[
        bool,
        option(
            f"Log in as the administrator: {ADMIN_USER}, or you on your own machines, with sudo "
            "rights."
        ),
    ] = False,
) -> int:
    """Open a shell on a host, or run a command there.

    A single string is parsed by the remote shell, as with ssh; several words after -- are passed
    unchanged.
    """
    if admin and user is not None:
        raise excluded("--admin", "--user")
    workspace = screen.chosen().workspace()
    with naming_lock_holder(workspace):
        inventory = inventory_of(workspace)
    host, words = _host_and_command(inventory, host, command or [])
    _refuse_shell_as_json(screen, words)
    login = user or (None if admin else inventory.job_user)
    with Connections(workspace.ssh_config) as connections:
        connections.prepare(host)
        argv = OpenSSH(workspace.ssh_config, login).argv(
            host, words[0] if len(words) == 1 else words
        )
        code, answer = _run(screen, argv, {"host": host})
    if screen.json:
        screen.result(answer)
    if code == NO_CONNECTION and not (admin or user or login_of(workspace.ssh_config)):
        screen.note(
            f"note: if {login} may not log in to {host}, log in as the administrator: "
            f"clusterctl ssh --admin {host}"
        )
    return code


@takes(job_flags(_ALLOCATION))
def shell(
    screen: Screen,
    command: Command = None,
    forward: Annotated[
        Words, option("Forward a local port to the node: 8888, or LOCAL:REMOTE. Repeatable.")
    ] = None,
    **given: object,
) -> int:
    """Open a shell, or run a command, on allocated nodes.

    Runs on the first node of a new allocation, with a job's variables. In it, `launch PROGRAM`
    starts the program's ranks as submit does. The allocation is released afterwards.
    """
    options = job_options(given)
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not screen.json
    _refuse_shell_as_json(screen, command)
    if not command and not terminal:
        raise UsageError(
            "a shell needs a terminal",
            code="terminal-needed",
            fix="pass a command: clusterctl shell -- COMMAND",
        )
    forwards = parse_forwards(forward or [])
    with open_session(screen.chosen()) as session, ExitStack() as stack:
        ssh = OpenSSH(session.workspace.ssh_config, session.inventory.job_user)
        request = shell_request(options, session.site)
        environment = _environment(screen, session, options)
        folder = _folder(screen, stack, session, request, environment)
        lease = stack.enter_context(requested_nodes(session, ssh, request))
        with screen.working("waiting for nodes"):
            while isinstance(allocation := lease.allocation(), str):
                _note_wait(screen, session, allocation)
        stack.enter_context(forwarded(session, ssh, allocation, forwards))
        screen.note(f"job {allocation.job_id} holds {', '.join(allocation.nodes)} until you exit")
        for port in forwards:
            screen.note(
                f"localhost:{port.local} forwards to port {port.remote} of {allocation.nodes[0]}"
            )
        argv = allocation.argv(
            command or [],
            folder.path,
            terminal=terminal,
            forwards=forwards,
            in_container=request.job.container is not None,
        )
        code, answer = _run(screen, argv, {"job_id": allocation.job_id, "nodes": allocation.nodes})
        files = folder.changes
        if isinstance(files, TransportError):
            screen.note(f"note: the session's folder {folder.path} stays: {files.cause}")
        elif files:
            screen.note(kept_notice(session, folder.path, files))
            answer |= {"dir": folder.program_dir, "files": [path for _, path in files]}
        if screen.json:
            screen.result(answer)
        if lease.was_revoked():
            screen.note(
                f"note: Slurm ended the allocation; see `clusterctl jobs {allocation.job_id}`"
            )
    return code


def code(
    screen: Screen,
    job_id: JobId,
    open_editor: Annotated[bool, option("Open the job's folder in VS Code.", "--open")] = False,
) -> int:
    """Connect ssh, and editors that use it, to a running job.

    Writes an SSH host entry, for VS Code, PyCharm, rsync, scp and ssh -L. It leads to the job's
    first node, with the job's variables and GPUs, and ends with the job.
    """
    if open_editor and shutil.which("code") is None:
        raise UsageError(
            "this machine has no program `code`",
            code="tool-missing",
            fix="install VS Code with its command `code`, or leave out --open",
        )
    chosen = cluster_of_jobs([job_id], screen.chosen())
    with (
        open_session(chosen, patience_s=SHOWN_PATIENCE_S) as session,
        screen.working("entering the job"),
    ):
        entry = enter(session, job_id)
    include = f"for programs without -F: put `Include {entry.config}` first in ~/.ssh/config"
    screen.note(Notice("include-entries", include))
    answer = {
        **asdict(entry),
        "config": str(entry.config),
        "ssh": entry.ssh(),
        "editor": entry.editor,
    }
    screen.result(answer, shlex.join(entry.ssh()), shlex.join(entry.editor))
    return run_attached(entry.editor) if open_editor else 0


def _environment(screen: Screen, session: Session, options: JobOptions) -> Environment:
    with screen.working("resolving requirements"):
        environment = preparer(screen).environment(session, options)
    with screen.transfers() as progress:
        Environments(screen.note, progress=progress).build_for(session, environment, None)
    return environment


def _folder(
    screen: Screen, stack: ExitStack, session: Session, request: Request, environment: Environment
) -> SessionFolder:
    """Create the session's folder on the cluster. Closing ``stack`` removes it if no files were
    written.
    """
    with screen.transfers() as progress:
        submitter = Submitter(session, screen.note, progress)
        folder = stack.enter_context(session_folder(submitter, request, environment))
    for note in folder.source.notes if folder.source is not None else ():
        screen.note(f"note: {note}")
    if folder.sent is not None:
        screen.note(folder.sent.summary)
    return folder


def _host_and_command(
    inventory: Inventory, host: str | None, words: list[str]
) -> tuple[str, list[str]]:
    """Return (host name, command's words). The host of `ssh -- COMMAND` is the controller."""
    if host is None:
        return inventory.controller.name, words
    names = [entry.name for entry in inventory.hosts]
    after_dashes = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if host not in names and (host in after_dashes[:1] or " " in host):
        return inventory.controller.name, [host, *words]
    reject_unknown([host], names, "the cluster has no host")
    return host, words


def _refuse_shell_as_json(screen: Screen, command: Sequence[str] | None) -> None:
    if screen.json and not command:
        raise UsageError(
            "an interactive shell can't print JSON",
            about="output",
            fix="pass a command after --, or remove -o json",
        )


def _note_wait(screen: Screen, session: Session, job_id: str) -> None:
    (job,) = session.scheduler.jobs([job_id]) or (None,)
    reason = f" ({job.reason})" if job is not None and job.reason not in {"", "None"} else ""
    screen.note(f"job {job_id} is waiting in the queue{reason}; Ctrl-C cancels the job")


def _run(screen: Screen, argv: Sequence[str], answer: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run a command line. Return its exit code, and for JSON the answer with its output."""
    if not screen.json:
        return run_attached(argv), answer
    result = run_captured(argv)
    answer |= {"exit_code": result.rc, "stdout": result.stdout, "stderr": result.stderr}
    if result.rc != 0:
        failure = Failure(
            "tool-failed", f"the command ended with exit status {result.rc}", about="command"
        )
        answer |= {"ok": False, "failures": [asdict(failure)]}
    return result.rc, answer
