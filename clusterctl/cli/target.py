"""Which cluster a verb means, whatever has become of its spec file, and who is at work on it."""

from __future__ import annotations

import getpass
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.errors import LockedError, NotUpError, SchedulerError, SpecError, TransportError, UsageError

if TYPE_CHECKING:
    from clusterctl.providers.base import OfferedKey, Prompts
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.workspace import Workspace


def spec_of(screen: Screen, options: Options) -> ClusterSpec:
    """The spec that ``-f`` names, or ./cluster.yaml, or the built-in default, which is said.

    With ``--cluster`` it is that cluster's spec as it was raised.
    """
    from clusterctl.spec.load import load_spec

    if options.cluster is not None:
        workspace = _named(options)
        if not workspace.spec.exists():
            raise _unknown(options.cluster)
        return load_spec(workspace.spec)
    return load_spec(_file(screen, options))


def workspace_of(screen: Screen, options: Options) -> Workspace:
    """The workspace of the cluster that is meant: only its name is needed, so a spec file may be wrong.

    Raises:
        UsageError: the file can't be read, or not even its name can.
    """
    from clusterctl.spec.load import default_spec, read_name
    from clusterctl.state.workspace import Workspace

    if options.cluster is not None:
        return _named(options)
    path = _file(screen, options)
    if path is None:
        return Workspace.of(default_spec().name)
    try:
        name, wrong = read_name(path)
    except UsageError as exc:
        why = str(exc.problems[0]) if isinstance(exc, SpecError) else exc.why or exc.what
        raise UsageError(
            "the spec file does not say which cluster is meant",
            where=str(path),
            why=why,
            fix="correct it, or name the cluster: --cluster NAME (`clusterctl list` shows them)",
        ) from exc
    if wrong is not None:
        screen.note(
            f"note: {wrong.what} (see `clusterctl validate`); cluster {name!r} is taken as it was raised"
        )
    return Workspace.of(name)


@contextmanager
def naming_lock_holder(workspace: Workspace) -> Iterator[None]:
    """While another clusterctl raises the cluster or takes it down, that is why it does not answer.

    Raises:
        LockedError: the body failed for want of an answer, and another clusterctl holds its lock.
    """
    try:
        yield
    except (NotUpError, SchedulerError, TransportError) as exc:
        worker = workspace.worker()
        if worker is None or exc.had_side_effects:
            raise
        said = f"{exc.what}: {exc.why}" if exc.why else exc.what
        raise LockedError(
            f"cluster {workspace.root.name!r} is locked",
            why=f"{worker}; until then: {said}",
            fix="wait until it is done",
        ) from exc


def _file(screen: Screen, options: Options) -> Path | None:
    from clusterctl.spec.load import find_spec

    path = options.file or find_spec(Path.cwd())
    if path is None:
        screen.note("no cluster.yaml here: using the built-in local cluster (`clusterctl init` writes one)")
    return path


def _named(options: Options) -> Workspace:
    from clusterctl.spec.models import LABEL
    from clusterctl.state.workspace import Workspace

    name = options.cluster or ""
    if options.file is not None:
        raise UsageError("-f and --cluster name a cluster each", fix="say one of them")
    if not re.fullmatch(LABEL, name):
        raise _unknown(name)
    return Workspace.of(name)


def _unknown(name: str) -> UsageError:
    return UsageError(f"there is no cluster {name!r}", fix="`clusterctl list` shows the clusters there are")


AskBecomePass = Annotated[
    bool,
    typer.Option(
        "--ask-become-pass",
        "-K",
        help="Ask once for the password that sudo wants on machines of your own; without a terminal it is "
        "read from standard input.",
    ),
]
AcceptHostKey = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-host-key",
        metavar="SHA256:...",
        help="The fingerprint of a host key that is right, on machines of your own. Repeatable.",
        show_default=False,
    ),
]
_FINGERPRINT: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def prompts_for(screen: Screen, *, ask_password: bool, accepted: Sequence[str] | None = None) -> Prompts:
    """What `up` needs: who is asked about host keys, and the password, which is asked for at once.

    Raises:
        UsageError: that is no fingerprint, or there is no password.
    """
    from clusterctl.providers.base import Prompts

    for text in accepted or ():
        if not _FINGERPRINT.fullmatch(text):
            raise UsageError(
                f"{text!r} is no fingerprint",
                where="--accept-host-key",
                fix="write it as `ssh-keygen -lf` does: SHA256: and 43 letters",
            )
    return Prompts(
        confirm=_confirming(screen),
        accepted=tuple(accepted or ()),
        password=_password() if ask_password else None,
        note=screen.note,
    )


def read_only_prompts(*, ask_password: bool) -> Prompts:
    """What verbs need that only look: they confirm no keys."""
    from clusterctl.providers.base import Prompts

    return Prompts(password=_password() if ask_password else None)


def _password() -> str:
    """The password for sudo; it is shown and noted nowhere."""
    text = getpass.getpass("sudo password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not text:
        raise UsageError("there is no password", where="--ask-become-pass", fix="type one, or leave it out")
    return text


def _confirming(screen: Screen) -> Callable[[Sequence[OfferedKey]], None]:
    """Shows unknown host keys and asks whether they are right."""

    def confirm(offered: Sequence[OfferedKey]) -> None:
        rows = [[one.title, one.address, one.kind, one.fingerprint] for one in offered]
        with screen.still():
            screen.note("these host keys are not confirmed yet; compare them with the machines' own")
            screen.note(*screen.table(["HOST", "ADDRESS", "KEY", "FINGERPRINT"], rows))
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise UsageError(
                    "host keys must be confirmed",
                    why="there is no terminal to ask on",
                    fix=f"if they are right, run: {_command(offered)}",
                    failures=tuple(one.failure for one in offered),
                )
            screen.confirm("are they right?", yes=False)

    return confirm


def _command(offered: Sequence[OfferedKey]) -> str:
    """What was typed, with the keys."""
    flags = [word for one in offered for word in ("--accept-host-key", one.fingerprint)]
    return shlex.join(["clusterctl", *sys.argv[1:], *flags])
