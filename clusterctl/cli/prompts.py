"""What the user is asked about on-prem hosts: their keys, and the password for sudo."""

from __future__ import annotations

import functools
import getpass
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError
from clusterctl.providers.base import OfferedKey, Prompts
from clusterctl.util.progress import SILENT, Reporter

AskBecomePass = Annotated[
    bool,
    typer.Option(
        "--ask-become-pass",
        "-K",
        help="Prompt for the sudo password of on-prem hosts; without a terminal it is read from stdin.",
    ),
]
AcceptHostKey = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-host-key",
        metavar="SHA256:...",
        help="Accept the host key of an on-prem host that has this fingerprint. Repeatable.",
        show_default=False,
    ),
]
_FINGERPRINT: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def prompts_for(
    screen: Screen,
    *,
    ask_password: bool,
    accepted: Sequence[str] | None = None,
    reporter: Reporter = SILENT,
) -> Prompts:
    """What `up` needs: who is asked about host keys, and the password, which is asked for at once.

    reporter: gets the provider's progress if a verb has no other for it.

    Raises:
        UsageError: that is no fingerprint, or there is no password.
    """
    for text in accepted or ():
        if not _FINGERPRINT.fullmatch(text):
            raise UsageError(
                f"{text!r} is no fingerprint",
                code="not-a-fingerprint",
                where="--accept-host-key",
                fix="write it as `ssh-keygen -lf` does: SHA256: and 43 letters",
            )
    return Prompts(
        confirm=functools.partial(_confirm, screen),
        accepted=tuple(accepted or ()),
        password=_password() if ask_password else None,
        reporter=reporter,
    )


def read_only_prompts(*, ask_password: bool) -> Prompts:
    """What verbs need that only look: they confirm no keys."""
    return Prompts(password=_password() if ask_password else None)


def _password() -> str:
    """The password for sudo; it is shown and noted nowhere."""
    text = getpass.getpass("sudo password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not text:
        raise UsageError(
            "there is no password",
            code="no-password",
            where="--ask-become-pass",
            fix="type one, or leave it out",
        )
    return text


def _confirm(screen: Screen, offered: Sequence[OfferedKey]) -> None:
    """Show unknown host keys, and ask whether they are right."""
    rows = [[one.title, one.address, one.kind, one.fingerprint] for one in offered]
    with screen.still():
        screen.note("these host keys are not confirmed yet; compare them with the machines' own")
        screen.note(*screen.table(["HOST", "ADDRESS", "KEY", "FINGERPRINT"], rows))
        if not screen.can_prompt:
            flags = [word for one in offered for word in ("--accept-host-key", one.fingerprint)]
            raise UsageError(
                "host keys must be confirmed",
                code="host-keys-unconfirmed",
                why="there is no terminal to prompt on",
                fix=f"if they are right, run: {shlex.join(['clusterctl', *sys.argv[1:], *flags])}",
                failures=tuple(one.failure for one in offered),
            )
        screen.confirm("are they right?", yes=False)
