"""Interactive allocations of nodes, shells and commands in them, files, forwarded ports.

salloc runs on the controller over its own ssh connection, as long as clusterctl sends keep-alives.
When clusterctl ends in any way (normally, by Ctrl-C or SIGKILL, or with a lost network), the
keep-alives stop, and salloc withdraws its request or releases the nodes.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from clusterctl.errors import (
    Notice,
    SlurmError,
    TransportError,
    UnreachableError,
    UsageError,
    printable,
    raise_together,
    unaccompanied,
)
from clusterctl.jobs.prepare import reject_sent_secrets, reject_without_engine
from clusterctl.jobs.project import folder_project
from clusterctl.jobs.secret_files import reject_own_keys
from clusterctl.jobs.source import Source, source_of
from clusterctl.jobs.ssh_entry import enter
from clusterctl.jobs.submit import SentSource, Submitter, new_token
from clusterctl.scheduler.request.job_secrets import remove_session_secrets, send_secrets
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites.checks import check_partition
from clusterctl.scheduler.sites.script import (
    FILES,
    SECRETS,
    Environment,
    common_words,
    container_command,
    program_variables,
    rank_starter,
    slurm_words,
    with_account,
    with_launcher,
)
from clusterctl.scheduler.sites.site import Site
from clusterctl.scheduler.slurm.refusals import RequestedOptions
from clusterctl.scheduler.slurm.values import expand_nodes
from clusterctl.spec.job import JobSpec, reject_quantities_twice
from clusterctl.spec.job_options import JobOptions
from clusterctl.spec.names import Launcher
from clusterctl.spec.sbatch import directives_of
from clusterctl.state.ledger import IMAGE_FILE, PROGRAM_FOLDER
from clusterctl.transport.base import MARK, Transport, remove_folder, wrap_command
from clusterctl.transport.login import login_of
from clusterctl.transport.openssh import OpenSSH, start_conversation
from clusterctl.transport.tree import ItemKind
from clusterctl.util.assets import payload_hash, render

_SIGN_OF_LIFE_S = 10.0
# Without a keep-alive for this long, the controller releases the nodes.
_SILENCE_S = 60
_PATIENCE_S = 15.0

# The name of the session's script. `launch` in it calls it by this name.
SCRIPT = "job.sbatch"
_FIND = ("find", "-P")
_FILES = (
    "-mindepth",
    "1",
    "(",
    "-type",
    "f",
    "-o",
    "-type",
    "l",
    ")",
    "-printf",
    "%y %s %T@ %P\\0",
)
_MOST_SHOWN = 5

_ANY_SHELL = "command -v bash >/dev/null && exec bash -i; exec sh -i"
_HOLD = (Path(__file__).parent / "remote_hold.sh").read_text(encoding="utf-8")
_PENDING = re.compile(r"salloc: Pending job allocation ([0-9]+)")
_REVOKED = re.compile(rb"salloc: Job allocation [0-9]+ has been revoked")
_COMPLAINT = "salloc: error: "
_ENDED = "ended"
_GRANTED = "granted"
_HERE = "127.0.0.1"
_SYNTAX = re.compile(r"(?:([0-9]{1,5}):)?([0-9]{1,5})", re.ASCII)
_LAST_PORT = 65_535
# Longest wait until all ports are open.
_OPEN_S = 120.0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes that Slurm has allocated to the user."""

    job_id: str
    nodes: tuple[str, ...]
    _environment: Mapping[str, str]
    _ssh: OpenSSH
    _controller: str

    def argv(
        self,
        command: Sequence[str],
        folder: str,
        *,
        terminal: bool,
        forwards: Sequence[Forward] = (),
        in_container: bool = False,
    ) -> list[str]:
        """Return the local command line to run ``command`` (empty: a shell) on the first node.

        command: the words of a command, or a single line for bash.

        The command runs in Slurm's interactive step, so job steps started in it can use the whole
        allocation.

        folder: the session's folder on the cluster. terminal: connect a terminal.
        forwards: ports of the node that the session claims, so that it can say if they are in use.
        in_container: the shell is that of an image, which may have no bash.
        """
        # In a job that sbatch starts, the variable also has the folder of the submission.
        variables = {**self._environment, "SLURM_SUBMIT_DIR": folder}
        if forwards:
            variables["CLUSTERCTL_FORWARDED"] = " ".join(
                str(forward.remote) for forward in forwards
            )
        settings = [f"{name}={value}" for name, value in variables.items()]
        step = ["srun", "--interactive", "--preserve-env", "--nodes=1", "--ntasks=1", "--quiet"]
        if terminal:
            step.append("--pty")
        # As with ssh, a single string is for a shell, and several words are a command, or `launch`.
        # `launch` is a function of bash on the node.
        launches = len(command) > 1 and command[0] == "launch"
        shell = "sh" if in_container and not launches else "bash"
        words = (
            [shell, "-c", *command]
            if len(command) == 1
            else [shell, "-c", '"$@"', "shell", *command]
        )
        own = ["sh", "-c", _ANY_SHELL] if in_container else ["bash", "-i"]
        program = words if command else own
        argv = ["env", *settings, *step, "bash", "-l", f"{folder}/{SCRIPT}", *program]
        return self._ssh.argv(self._controller, argv, "-t" if terminal else "-T")


@dataclass(frozen=True)
class SessionFolder:
    """A folder on the cluster for the files of an interactive session.

    source: the local files that were sent to it. sent: their size. Both are None without --folder.
    hosts: names of the hosts that have the folder, with a connection to each.
    """

    path: str
    source: Source | None
    sent: SentSource | None
    hosts: Sequence[tuple[str, Transport]]

    @property
    def program_dir(self) -> str:
        return f"{self.path}/{PROGRAM_FOLDER}"

    @cached_property
    def changes(self) -> tuple[tuple[str, str], ...] | TransportError:
        """(host, path below ``program_dir``) of each file that the session has written, listed at
        first use.

        An error if a host can't list its files.
        """
        try:
            return tuple(sorted(self._changed_files()))
        except TransportError as exc:
            return exc

    def _changed_files(self) -> Iterator[tuple[str, str]]:
        facts_sent: dict[bytes, bytes] = {}
        for item in self.source.items if self.source is not None else ():
            is_file = item.kind is ItemKind.FILE
            sent = b"%d %d" % (item.size, item.mtime_ns // 10**9) if is_file else b"l"
            facts_sent[os.fsencode(item.path)] = sent
        for host, transport in self.hosts:
            listing = b"".join(transport.stream([*_FIND, self.program_dir, *_FILES]))
            for row in listing.split(b"\0")[:-1]:
                kind, size, seconds, path = row.split(b" ", 3)
                facts = b"%s %s" % (size, seconds.partition(b".")[0]) if kind == b"f" else b"l"
                is_bytecode = b"__pycache__" in path.split(b"/")
                if not is_bytecode and facts_sent.get(path) != facts:
                    yield host, printable(os.fsdecode(path))


def shell_request(options: JobOptions, site: Site) -> Request:
    """Return the request of an interactive session. The ``script`` of its job, a folder, never
    runs.

    Raises UsageError if the folder of --folder can't be sent, or options exclude each other.
    """
    reject_quantities_twice(options.given)
    for directive in directives_of(options.slurm):
        if directive.option is not None and not directive.option.salloc:
            raise UsageError(
                f"--slurm {directive.own_name} does not apply to a shell",
                about="salloc",
                why="salloc, which allocates the nodes, has no such option",
                fix="leave it out; --env sets variables, and < redirects the input of a command",
            )
    job = JobSpec(name="shell", script=Path.cwd(), folder=False).model_copy(update=options.given)
    if not job.folder and (job.include or job.exclude):
        raise unaccompanied("--include" if job.include else "--exclude", "--folder DIR")
    if job.mount and job.container is None:
        raise unaccompanied("--mount", "--container")
    if isinstance(job.folder, Path):
        job = job.model_copy(update={"project": folder_project(job.folder)})
    request = with_account(site, Request.read(job))
    return request.of(with_launcher(request.job, has_pmix=site.inventory.pmix))


def shell_script(job: JobSpec, environment: Environment) -> str:
    """Return the script that sets a job's variables and starts the shell, or `launch`'s ranks."""
    words = slurm_words(job)
    settings = [
        f"{name}={value}" for name, value in program_variables(job, is_alone=job.tasks == 1).items()
    ]
    # A container has the session's folder, but not always the home; nor have all nodes of a site.
    home = '"$([[ -d $HOME ]] && echo "$HOME" || echo "$start")"'
    start = '"$start"' if job.folder or job.container else home
    # The shell passes its secrets on to the ranks that it launches.
    secrets = [SECRETS] if job.secret else []
    launched = job.model_copy(update={"secret": {}})
    container = (
        container_command(
            launched,
            environment,
            words,
            [*program_variables(job, is_alone=False), *job.secret],
            needs_programs=True,
            converts=True,
        )
        if job.container
        else ""
    )
    python = "python3" if container else environment.python
    ranks = [*rank_starter(launched, python, words), words.start]
    if job.launcher is Launcher.TORCHRUN:
        starter = [*words.launcher, *([container] if container else []), *ranks]
    else:
        starter = [*words.launcher, *ranks, *([container] if container else [])]
    return render(
        "job.sbatch.j2",
        **common_words(job, environment, payload_hash()),
        shell_script=True,
        own_directives=(),
        options=(),
        array=False,
        launcher=job.launcher,
        starter=starter,
        container=container,
        program=[*secrets, "env", "-C", start, f"SLURM_SUBMIT_DIR={FILES}", *settings],
    )


@contextmanager
def session_folder(
    submitter: Submitter, request: Request, environment: Environment
) -> Iterator[SessionFolder]:
    """Create an interactive session's folder on the cluster, and send the files of --folder.

    When the ``with`` block ends, remove the folder, unless the session has written files into it.

    Raises:
        UsageError: a file can't be sent, or the job's partition does not exist or is too small.
        TransferError, TransportError: the files could not be sent.
    """
    session = submitter.session
    job = request.job
    source = source_of(request) if job.folder else None
    raise_together(check_partition(session.site, request))
    partition = request.partition_name_in(session.inventory)
    nodes = session.transports_of_partition(partition)
    hosts = session.hosts_with_files((session.transport.host, *(node.host for node in nodes)))
    reject_without_engine(session, job, partition)
    container, image_file = submitter.place_image(job, nodes)
    job = job.model_copy(update={"container": container})
    script = shell_script(job, environment)
    reject_sent_secrets(job, script, source)
    reject_own_keys(source.items if source else (), session.workspace)
    ours = {SCRIPT: script.encode(errors="surrogateescape")}
    if image_file:
        ours[IMAGE_FILE] = image_file
    path, sent, _ = submitter.stage(f"shell.{new_token()}", source, ours, nodes)
    folder = SessionFolder(path, source, sent, hosts)
    try:
        send_secrets(job, path, (session.transport, *nodes))
        yield folder
    finally:
        if job.secret:
            remove_session_secrets(session, path, (session.transport, *nodes))
        # If a host does not answer, the folder stays.
        if folder.changes == ():
            with suppress(TransportError):
                remove_folder((session.transport, *nodes), path)


def kept_notice(session: Session, folder: str, files: Sequence[tuple[str, str]]) -> Notice:
    """Return a message about files that an interactive session has written, with the command to
    fetch them.

    files: (host, path below the folder of the program's files) of each file.
    """
    names = ", ".join(dict.fromkeys(path for _, path in files[:_MOST_SHOWN]))
    more = f" and {len(files) - _MOST_SHOWN} more" if len(files) > _MOST_SHOWN else ""
    place = f"{folder}/{PROGRAM_FOLDER}"
    fix = f"`clusterctl get {shlex.quote(folder)}` copies the folder here"
    hosts = sorted({host for host, _ in files})
    if hosts != [session.transport.host]:
        place = f"{place} on {', '.join(hosts)}"
        fix = f"look at it with `clusterctl ssh {hosts[0]}`"
    return Notice("shell-files-kept", f"the session wrote files into {place}: {names}{more}; {fix}")


@contextmanager
def requested_nodes(session: Session, ssh: OpenSSH, request: Request) -> Iterator[Lease]:
    """Directive nodes from Slurm. At the block's end, release them or withdraw the request.

    request: of ``shell_request``. ssh: logs in as the job user. Raises UsageError on clusters without
        Slurm.
    """
    session.site.reject_without_slurm()
    controller = session.transport.host
    options = [*map(str, request.options)]
    hold = ["bash", "-c", _HOLD, "hold", str(_SILENCE_S), "--job-name=shell", *options]
    line, script = wrap_command(
        hold, session.inventory.variables, path=session.inventory.slurm_path
    )
    asked = session.site.asked(request.options)
    lease = Lease(session, ssh, ssh.alone(controller, line), script, asked)
    try:
        yield lease
    finally:
        lease.release()


class Lease:
    """An ssh connection to salloc on the controller, in a new session, out of Ctrl-C's reach."""

    def __init__(
        self,
        session: Session,
        ssh: OpenSSH,
        argv: Sequence[str],
        script: bytes,
        asked: RequestedOptions,
    ) -> None:
        self._session = session
        self._ssh = ssh
        self._asked = asked
        self._over = threading.Event()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout  # noqa: S101, PT018 - pipes were asked for
        self._input = self._process.stdin
        self._output = self._process.stdout
        with suppress(BrokenPipeError):
            self._input.write(script)
        threading.Thread(target=self._keep_alive, daemon=True).start()
        self._lines = self._salloc_lines()

    def allocation(self) -> str | Allocation:
        """Wait for the nodes and return them; the job's id if they are busy: call again to wait.

        Raises:
            SlurmError: Slurm rejected the request. The error has its message and the valid choices.
            UnreachableError: the connection to the controller was lost.
        """
        controller = self._session.transport.host
        refusal = list[str]()
        for line in self._lines:
            if line == _ENDED:
                break
            if pending := _PENDING.match(line):
                return pending[1]
            if line == _GRANTED:
                variables = dict(iter(lambda: next(self._lines, "").partition("=")[::2], ("", "")))
                nodes = expand_nodes(variables["SLURM_JOB_NODELIST"])
                return Allocation(
                    variables["SLURM_JOB_ID"], nodes, variables, self._ssh, controller
                )
            if line.startswith(_COMPLAINT):
                refusal.append(line.removeprefix(_COMPLAINT))
        if refusal:
            reason = "; ".join(refusal)
            raise SlurmError(
                "Slurm did not allocate the nodes",
                about="allocation",
                where=" ".join(["salloc", *map(str, self._asked.options)]),
                why=reason,
                fix=self._asked.fix(reason),
            )
        assert self._process.stderr  # noqa: S101 - a pipe was asked for
        raise UnreachableError(
            f"{controller}: the connection ended before Slurm allocated the nodes",
            why=self._process.stderr.read().decode(errors="replace").strip(),
            fix="check the cluster with `clusterctl status`; if it is broken, "
            f"{self._session.site.advice.repair}",
            host=controller,
        )

    def was_revoked(self) -> bool:
        """Return whether Slurm has revoked the allocation: time limit or cancellation."""
        os.set_blocking(self._output.fileno(), False)
        return _REVOKED.search(self._output.read() or b"") is not None

    def release(self) -> None:
        """Release the nodes or withdraw the request. Wait a limited time for Slurm to confirm."""
        self._over.set()
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            # The controller notices the missing keep-alives and releases the nodes.
            self._process.kill()
            self._process.wait()
        for stream in filter(None, (self._process.stdout, self._process.stderr)):
            stream.close()

    def _salloc_lines(self) -> Iterator[str]:
        """Yield salloc's lines, without those of the login shell, until the connection ends."""
        lines = iter(self._output.readline, b"")
        for line in lines:
            if line.endswith(MARK):
                break
        for line in lines:
            yield line.decode(errors="replace").rstrip("\n")

    def _keep_alive(self) -> None:
        # The connection has ended or is being closed.
        with suppress(OSError, ValueError):
            while not self._over.wait(_SIGN_OF_LIFE_S):
                self._input.write(b"\n")


@dataclass(frozen=True, slots=True)
class Forward:
    """A forwarded port: ``local`` on this machine's loopback leads to ``remote`` on the node."""

    local: int
    remote: int


def parse_forwards(texts: Sequence[str]) -> tuple[Forward, ...]:
    """Parse ``8888`` or ``9000:8888`` (local:remote). Raises UsageError if malformed or in use
    locally.
    """
    forwards: dict[int, Forward] = {}
    for text in texts:
        match = _SYNTAX.fullmatch(text)
        ports = [int(port) for port in match.groups(default=match[2])] if match else []
        if not ports or not all(0 < port <= _LAST_PORT for port in ports):
            raise UsageError(
                f"--forward {text!r} is neither a port nor LOCAL:REMOTE",
                about="port",
                fix="use --forward 8888, or --forward 9000:8888 for port 9000 of this machine",
            )
        forward = Forward(*ports)
        if forward.local in forwards:
            raise UsageError(
                f"--forward uses the local port {forward.local} twice",
                about="port-twice",
                fix="use another local port: --forward LOCAL:REMOTE",
            )
        _check_free(forward)
        forwards[forward.local] = forward
    return tuple(forwards.values())


@contextmanager
def forwarded(
    session: Session, ssh: OpenSSH, allocation: Allocation, forwards: Sequence[Forward]
) -> Iterator[None]:
    """Forward local ports to the first node of ``allocation`` during the ``with`` block.

    Raises UnreachableError if that fails. Nodes of an attached cluster need no SSH service; see
    ``entry``.
    """
    if not forwards:
        yield
        return
    node = allocation.nodes[0]
    options = ["-o", "ExitOnForwardFailure=yes", "-o", "ClearAllForwardings=no"]
    options += [
        word for f in forwards for word in ("-L", f"{_HERE}:{f.local}:localhost:{f.remote}")
    ]
    # `cat` ends with its input, so the ports close when clusterctl ends. It answers once all ports
    # are open.
    line, script = wrap_command(["cat"])
    if login_of(session.workspace.ssh_config) is None:
        argv = ssh.alone(node, line, *options)
    else:
        argv = enter(session, allocation.job_id).ssh("-T", "-o", "BatchMode=yes", *options, line)
    with ExitStack() as stack:
        try:
            remote = (node, ["cat"])
            talk = stack.enter_context(
                start_conversation(argv, silence_s=_OPEN_S, remote=remote, script=script)
            )
            talk.send(b"\n")
            if talk.receive() != b"\n":
                # This call raises the error with the cause.
                talk.finish()
        except TransportError as exc:
            raise UnreachableError(
                f"ports can't be forwarded to {node}", why=exc.why, host=node
            ) from exc
        yield


def _check_free(forward: Forward) -> None:
    with socket.socket() as probe:
        # ssh also sets this option, so a port that ssh can use counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HERE, forward.local))
        except OSError as exc:
            raise UsageError(
                f"port {forward.local} of this machine can't be forwarded",
                code="in-use",
                about="port",
                why=exc.strerror or str(exc),
                fix=f"use another local port: --forward LOCAL:{forward.remote}",
            ) from exc
