"""Interactive allocations of nodes, shells and commands inside them, and forwarded ports.

The allocation lives by a lease. salloc runs on the controller behind an ssh connection of its own and goes on
for as long as that connection brings a sign of life. However clusterctl ends (done, Ctrl-C, SIGKILL, a lost
network), the signs stop, salloc takes back its request or gives up the nodes, and nothing is left held.
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
from clusterctl.scheduler.slurm import fix_of
from clusterctl.scheduler.slurm_parse import expand_nodes
from clusterctl.spec.job_options import JobOptions
from clusterctl.transport.base import MARK, wrapped
from clusterctl.transport.openssh import ALONE, OpenSSH, talking

_SIGN_OF_LIFE_S = 10.0
_SILENCE_S = 60  # after which the controller gives up on us
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
_OPEN_S = 120.0  # until all ports are open


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes that are ours, first to last."""

    job_id: str
    nodes: tuple[str, ...]
    _environment: Mapping[str, str]
    _ssh: OpenSSH
    _controller: str

    def argv(self, command: Sequence[str], environment: Environment, *, terminal: bool) -> list[str]:
        """The local command line that runs ``command`` on the first node; a shell if it is empty.

        ``environment`` is the Python that they find; it must be on the cluster.
        It is Slurm's interactive step: job steps that are started in it get all of the allocation.
        """
        settings = [f"{name}={value}" for name, value in self._environment.items()]
        step = ["srun", "--interactive", "--preserve-env", "--nodes=1", "--ntasks=1", "--quiet"]
        step += ["--pty"] if terminal else []
        profile = environment.profile
        start = f'[[ ! -r {profile} ]] || . {profile}; export PATH={environment.path}:"$PATH"; exec "$@"'
        program = ["bash", "-lc", start, "shell", *(command or ("bash", "-i"))]
        words = ["env", *settings, *step, *program]
        return self._ssh.argv(self._controller, words, "-t" if terminal else "-T")


@contextmanager
def asking(session: Session, ssh: OpenSSH, words: JobOptions) -> Iterator[Lease]:
    """Ask Slurm for nodes. They are given back, or the request is taken back, at the end of the ``with``.

    ``ssh`` is the job user's.

    Raises:
        UsageError: this cluster has no Slurm; nothing was started.
    """
    _ = session.slurm  # without it nothing can be allocated
    controller = session.transport.host
    options = ["--job-name=shell", *resource_options(words, JobOptions.model_fields)]
    hold = ["bash", "-c", _HOLD, "hold", str(_SILENCE_S), *options]
    line, script = wrapped(hold)
    lease = Lease(session, ssh, ssh.argv(controller, line, *ALONE), script)
    try:
        yield lease
    finally:
        lease.release()


class Lease:
    """The connection that holds an allocation. It is its own process session: Ctrl-C is ours to handle."""

    def __init__(self, session: Session, ssh: OpenSSH, argv: Sequence[str], script: bytes) -> None:
        """Start ssh, whose command reads ``script`` first; see ``wrapped``."""
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
        threading.Thread(target=self._live, daemon=True).start()
        self._lines = self._said()

    def allocation(self) -> str | Allocation:
        """Wait for the nodes. If they are not free, the id of the job that waits for them; ask again then.

        Raises:
            SlurmError: Slurm refused; says its words, and the valid choices where they are known.
            UnreachableError: the connection to the controller broke.
        """
        controller, refusal = self._session.transport.host, list[str]()
        for line in self._lines:
            if line == _ENDED:
                break
            if pending := _PENDING.match(line):
                return pending[1]
            if line == _GRANTED:
                found = dict(iter(lambda: next(self._lines, "").partition("=")[::2], ("", "")))
                nodes = expand_nodes(found["SLURM_JOB_NODELIST"])
                return Allocation(found["SLURM_JOB_ID"], nodes, found, self._ssh, controller)
            if line.startswith(_COMPLAINT):
                refusal.append(line.removeprefix(_COMPLAINT))
        if refusal:
            why = "; ".join(refusal)
            what = "Slurm did not give the nodes"
            raise SlurmError(what, code="allocation-refused", why=why, fix=fix_of(why))
        assert self._process.stderr  # noqa: S101 - a pipe was asked for
        raise UnreachableError(
            f"{controller}: the connection ended before Slurm gave the nodes",
            why=self._process.stderr.read().decode(errors="replace").strip(),
            fix="see how the cluster is with `clusterctl status`; `clusterctl up` repairs it",
            host=controller,
        )

    def was_revoked(self) -> bool:
        """Return whether Slurm has taken the nodes back: the time limit, or a cancel."""
        os.set_blocking(self._output.fileno(), False)
        return _REVOKED.search(self._output.read() or b"") is not None

    def release(self) -> None:
        """Give the nodes back, or take back the request; waits for Slurm to hear of it, within bounds."""
        self._over.set()
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the controller notices the silence
            self._process.wait()

    def _said(self) -> Iterator[str]:
        """Yield the lines of salloc, which follow those of the login shell, until the connection ends."""
        lines = iter(self._output.readline, b"")
        for line in lines:
            if line.endswith(MARK):
                break
        for line in lines:
            yield line.decode(errors="replace").rstrip("\n")

    def _live(self) -> None:
        with suppress(OSError, ValueError):  # the connection ended, or is being closed
            while not self._over.wait(_SIGN_OF_LIFE_S):
                self._input.write(b"\n")


@dataclass(frozen=True, slots=True)
class Forward:
    """``local`` on this machine's loopback leads to ``remote`` on the node."""

    local: int
    remote: int


def parse_forwards(texts: Sequence[str]) -> tuple[Forward, ...]:
    """``8888`` or ``LOCAL:REMOTE``, each, with local ports that are free.

    Raises:
        UsageError: one is neither, or its local port is taken.
    """
    forwards: dict[int, Forward] = {}
    for text in texts:
        match = _SYNTAX.fullmatch(text)
        ports = [int(port) for port in match.groups(default=match[2])] if match else []
        if not ports or not all(0 < port <= _LAST_PORT for port in ports):
            raise UsageError(
                f"--forward {text!r} is not a port",
                code="not-a-port",
                fix="say --forward 8888, or --forward LOCAL:REMOTE such as 9000:8888",
            )
        forward = Forward(*ports)
        if forward.local in forwards:
            raise UsageError(f"--forward names the local port {forward.local} twice", code="port-twice")
        _check_free(forward)
        forwards[forward.local] = forward
    return tuple(forwards.values())


@contextmanager
def forwarded(ssh: OpenSSH, node: str, forwards: Sequence[Forward]) -> Iterator[None]:
    """Open the ports until the end of the ``with``. They lead to the node's own loopback too.

    Raises:
        UnreachableError: the node can't be reached, or a port was taken meanwhile.
    """
    if not forwards:
        yield
        return
    ports = [word for f in forwards for word in ("-L", f"{_HERE}:{f.local}:localhost:{f.remote}")]
    # `cat` ends when its input does: however we end, the ports are closed. It answers once all are open.
    line, script = wrapped(["cat"])
    argv = ssh.argv(node, line, *ALONE, "-o", "ExitOnForwardFailure=yes", *ports)
    with ExitStack() as stack:
        try:
            remote = (node, ["cat"])
            talk = stack.enter_context(talking(argv, silence_s=_OPEN_S, remote=remote, script=script))
            talk.send(b"\n")
            if talk.receive() != b"\n":
                talk.finish()  # which says why
        except TransportError as exc:
            raise UnreachableError(f"{node}: no port could be forwarded", why=exc.why, host=node) from exc
        yield


def _check_free(forward: Forward) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ssh does
        try:
            probe.bind((_HERE, forward.local))
        except OSError as exc:
            raise UsageError(
                f"port {forward.local} of this machine can't be forwarded",
                code="port-unusable",
                why=exc.strerror or str(exc),
                fix=f"take another: --forward LOCAL:{forward.remote}",
            ) from exc
