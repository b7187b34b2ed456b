"""Interactive allocations of nodes, shells and commands inside them, and forwarded ports.

salloc runs on the controller over its own ssh connection, as long as clusterctl sends keep-alives. When
clusterctl ends in any way (normally, by Ctrl-C or SIGKILL, or with a lost network), the keep-alives stop, and
salloc withdraws its request or releases the nodes.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import SlurmError, TransportError, UnreachableError, UsageError
from clusterctl.scheduler.script import Environment, resource_options
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm import fix_for_refusal
from clusterctl.scheduler.slurm_parse import expand_nodes
from clusterctl.spec.job_options import JobOptions
from clusterctl.transport.base import MARK, wrap_command
from clusterctl.transport.openssh import ALONE, OpenSSH, start_conversation

_SIGN_OF_LIFE_S = 10.0
# Without a keep-alive for this long, the controller releases the nodes.
_SILENCE_S = 60
_PATIENCE_S = 15.0

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

    def argv(self, command: Sequence[str], environment: Environment, *, terminal: bool) -> list[str]:
        """Return the local command line to run ``command`` (empty: a shell) on the first node.

        command: the words of a command, or a single line for bash.

        The command runs in Slurm's interactive step, so job steps started in it can use the whole allocation.

        environment: the command's Python environment, already on the cluster. terminal: connect a terminal.
        """
        settings = [f"{name}={value}" for name, value in self._environment.items()]
        step = ["srun", "--interactive", "--preserve-env", "--nodes=1", "--ntasks=1", "--quiet"]
        step += ["--pty"] if terminal else []
        profile = environment.profile
        start = f'[[ ! -r {profile} ]] || . {profile}; export PATH={environment.path}:"$PATH"; exec "$@"'
        # As with ssh, a single string is for a shell, and several words are a command.
        words = ["bash", "-c", *command] if len(command) == 1 else command or ["bash", "-i"]
        program = ["bash", "-lc", start, "shell", *words]
        argv = ["env", *settings, *step, *program]
        return self._ssh.argv(self._controller, argv, "-t" if terminal else "-T")


@contextmanager
def requested_nodes(session: Session, ssh: OpenSSH, words: JobOptions) -> Iterator[Lease]:
    """Request nodes from Slurm. When the ``with`` block ends, release the nodes or withdraw the request.

    words: options of the request. ssh: logs in as the job user. Raises UsageError on clusters without Slurm.
    """
    # This property raises an error if the cluster has no Slurm.
    _ = session.slurm
    controller = session.transport.host
    options = ["--job-name=shell", *resource_options(words, JobOptions.model_fields)]
    hold = ["bash", "-c", _HOLD, "hold", str(_SILENCE_S), *options]
    line, script = wrap_command(hold)
    lease = Lease(session, ssh, ssh.argv(controller, line, *ALONE), script)
    try:
        yield lease
    finally:
        lease.release()


class Lease:
    """An ssh connection to salloc on the controller. ssh runs in a new session, out of reach of Ctrl-C."""

    def __init__(self, session: Session, ssh: OpenSSH, argv: Sequence[str], script: bytes) -> None:
        self._session, self._ssh = session, ssh
        self._over = threading.Event()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout  # noqa: S101, PT018 - pipes were asked for
        self._input, self._output = self._process.stdin, self._process.stdout
        with suppress(BrokenPipeError):
            self._input.write(script)
        threading.Thread(target=self._keep_alive, daemon=True).start()
        self._lines = self._salloc_lines()

    def allocation(self) -> str | Allocation:
        """Wait for the nodes and return them. If they are busy, return the job's id: call again to wait.

        Raises:
            SlurmError: Slurm rejected the request. The error has its message and the valid choices.
            UnreachableError: the connection to the controller was lost.
        """
        controller, refusal = self._session.transport.host, list[str]()
        for line in self._lines:
            if line == _ENDED:
                break
            if pending := _PENDING.match(line):
                return pending[1]
            if line == _GRANTED:
                variables = dict(iter(lambda: next(self._lines, "").partition("=")[::2], ("", "")))
                nodes = expand_nodes(variables["SLURM_JOB_NODELIST"])
                return Allocation(variables["SLURM_JOB_ID"], nodes, variables, self._ssh, controller)
            if line.startswith(_COMPLAINT):
                refusal.append(line.removeprefix(_COMPLAINT))
        if refusal:
            reason = "; ".join(refusal)
            message = "Slurm did not allocate the nodes"
            raise SlurmError(message, code="allocation-refused", why=reason, fix=fix_for_refusal(reason))
        assert self._process.stderr  # noqa: S101 - a pipe was asked for
        raise UnreachableError(
            f"{controller}: the connection ended before Slurm allocated the nodes",
            why=self._process.stderr.read().decode(errors="replace").strip(),
            fix="check the cluster with `clusterctl status`; `clusterctl up` repairs it",
            host=controller,
        )

    def was_revoked(self) -> bool:
        """Return whether Slurm has revoked the allocation after its time limit or a cancellation."""
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

    def _salloc_lines(self) -> Iterator[str]:
        """Yield the output lines of salloc, without those of the login shell, until the connection ends."""
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
    """Parse ``8888`` or ``9000:8888`` (local:remote). Raises UsageError if malformed or in use locally."""
    forwards: dict[int, Forward] = {}
    for text in texts:
        match = _SYNTAX.fullmatch(text)
        ports = [int(port) for port in match.groups(default=match[2])] if match else []
        if not ports or not all(0 < port <= _LAST_PORT for port in ports):
            raise UsageError(
                f"--forward {text!r} is neither a port nor LOCAL:REMOTE",
                code="not-a-port",
                fix="use --forward 8888, or --forward 9000:8888 for port 9000 of this machine",
            )
        forward = Forward(*ports)
        if forward.local in forwards:
            raise UsageError(
                f"--forward uses the local port {forward.local} twice",
                code="port-twice",
                fix="use another local port: --forward LOCAL:REMOTE",
            )
        _check_free(forward)
        forwards[forward.local] = forward
    return tuple(forwards.values())


@contextmanager
def forwarded(ssh: OpenSSH, node: str, forwards: Sequence[Forward]) -> Iterator[None]:
    """Forward local ports to ``node`` during the ``with`` block. Raises UnreachableError if that fails."""
    if not forwards:
        yield
        return
    ports = [word for f in forwards for word in ("-L", f"{_HERE}:{f.local}:localhost:{f.remote}")]
    # `cat` ends with its input, so the ports close when clusterctl ends. It answers once all ports are open.
    line, script = wrap_command(["cat"])
    argv = ssh.argv(node, line, *ALONE, "-o", "ExitOnForwardFailure=yes", *ports)
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
            raise UnreachableError(f"ports can't be forwarded to {node}", why=exc.why, host=node) from exc
        yield


def _check_free(forward: Forward) -> None:
    with socket.socket() as probe:
        # ssh sets this option too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HERE, forward.local))
        except OSError as exc:
            raise UsageError(
                f"port {forward.local} of this machine can't be forwarded",
                code="port-unusable",
                why=exc.strerror or str(exc),
                fix=f"use another local port: --forward LOCAL:{forward.remote}",
            ) from exc
