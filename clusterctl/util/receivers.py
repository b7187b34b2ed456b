"""Receivers of messages: commands of the user, and services such as ntfy, Slack or mail by Apprise.

Each receiver has its own thread, and each message its own process with a time limit, so that a
receiver that hangs or crashes delays nothing else. Receivers often contain tokens, so no text that
this module returns has any part of one.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Final
from urllib.parse import unquote

from clusterctl.errors import MachineError, Notice, UsageError, printable
from clusterctl.util.numbers import counted
from clusterctl.util.process import run
from clusterctl.util.progress import Deadline
from clusterctl.util.redact import redactor

# The time limit of a process that sends a message, in seconds.
LIMIT_S: Final = 20.0
# How long a command waits for its last messages at its end, in seconds.
LAST_S: Final = 25.0
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://.*", re.IGNORECASE | re.DOTALL)
_NOT_WORD: Final = re.compile(r"[^\w.~+-]+")
_MOST_REASON: Final = 300  # characters
_PROGRAM: Final = str(Path(__file__).with_name("apprise_send.py"))
_PREFIX: Final = "CLUSTERCTL_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to the user.

    kind: info, success, warning or failure, as Apprise names them.
    values: name of a variable without ``CLUSTERCTL_`` -> its value, for commands.
    """

    title: str
    text: str
    kind: str = "info"
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Receiver:
    """A command or a service. name: what users see, without any secret. url: "" for a command."""

    name: str
    argv: tuple[str, ...]
    url: str = ""

    def send(self, message: Message) -> str:
        """Send a message. Return why it was not sent; "": it was."""
        text = f"{message.title}\n{message.text}".rstrip("\n") + "\n"
        if self.url:
            request = {"url": self.url, "title": message.title, "kind": message.kind}
            text = json.dumps({**request, "text": message.text or message.title})
        variables = {f"{_PREFIX}{name}": value for name, value in message.values.items()}
        try:
            result = run(self.argv, stdin=text, env={**os.environ, **variables}, timeout_s=LIMIT_S)
        except TimeoutExpired:
            return f"no answer within {LIMIT_S:g} s"
        except (OSError, ValueError) as exc:
            return self._without_secrets(str(exc))
        return self._without_secrets(result.reason) if result.rc else ""

    def _without_secrets(self, reason: str) -> str:
        redact = redactor(secret_parts(self.url or shlex.join(self.argv[1:])))
        return printable(redact(reason).strip()[-_MOST_REASON:])


def secret_parts(target: str) -> list[str]:
    """Return the target and its words: any of them may be a token."""
    texts = (target, unquote(target))
    return [*texts, *(word for text in texts for word in _NOT_WORD.split(text) if word)]


def receivers_of(targets: Sequence[str], where: str) -> tuple[Receiver, ...]:
    """Return the receivers of messages. targets: commands and URLs of Apprise. where: a file or an
    option that has them, for errors.

    Raises:
        UsageError: a target is neither a command nor a URL that Apprise knows. The error names its
            place, because the target may contain a token.
        MachineError: a target is a URL, and Apprise is not installed.
    """
    return tuple(_receiver(target, number, where) for number, target in enumerate(targets, start=1))


def _receiver(target: str, number: int, where: str) -> Receiver:
    def invalid(why: str) -> UsageError:
        return UsageError(
            f"receiver {number} of messages is wrong",
            about="notify",
            where=where,
            why=why,
            fix="write a command, such as 'notify-send clusterctl', or a URL of Apprise, such as "
            "ntfy://TOPIC",
        )

    if (url := _URL.fullmatch(target.strip())) is not None:
        if not _is_known(target.strip()):
            raise invalid("Apprise does not know the service, or the URL is incomplete")
        sender = (sys.executable, "-P", _PROGRAM)
        return Receiver(f"receiver {number} ({url[1].lower()})", sender, target.strip())
    try:
        argv = shlex.split(target)
    except ValueError as exc:
        raise invalid(str(exc)) from exc
    if not argv:
        raise invalid("it is empty")
    if shutil.which(argv[0]) is None:
        raise invalid("its program does not exist, or can't be executed")
    return Receiver(f"receiver {number} ({printable(Path(argv[0]).name)})", tuple(argv))


def _is_known(url: str) -> bool:
    """Return whether Apprise can send to the URL. Raises MachineError if it is not installed."""
    try:
        # Only few users need it.
        import apprise  # noqa: PLC0415
    except ImportError as exc:
        raise MachineError(
            "messages to URLs need Apprise, which is not installed here",
            code="tool-missing",
            about="apprise",
            why=str(exc),
            fix="pip install 'clusterctl[notify]'",
        ) from exc
    # Its log names the URL.
    with apprise.LogCapture(), suppress(TypeError):
        return bool(apprise.Apprise().add(url))
    return False


class MessageQueue:
    """Sends messages to receivers, each in a thread of its own."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._queues = {receiver: queue.SimpleQueue[Message]() for receiver in receivers}
        self._waiting = dict.fromkeys(receivers, 0)
        self._failures = queue.SimpleQueue[Notice]()
        self._changed = threading.Condition()
        for receiver in receivers:
            threading.Thread(target=self._work, args=[receiver], daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message to all receivers. Never waits."""
        for receiver, messages in self._queues.items():
            with self._changed:
                self._waiting[receiver] += 1
            messages.put(message)

    def failures(self) -> Iterator[Notice]:
        """Yield a note about each message that was not sent, since the last call."""
        with suppress(queue.Empty):
            while True:
                yield self._failures.get_nowait()

    def wait(self, seconds: float) -> None:
        """Wait until all messages are sent or have failed, at most so long. The others fail."""
        limit = Deadline.within(seconds)
        with self._changed:
            # Short waits can be interrupted.
            while any(self._waiting.values()) and limit.rest_s > 0:
                self._changed.wait(min(0.2, limit.rest_s))
            waiting = dict(self._waiting)
        for receiver, count in waiting.items():
            if count:
                self._fail(receiver, f"{counted(count, 'message')} not sent within {seconds:g} s")

    def _work(self, receiver: Receiver) -> None:
        while True:
            message = self._queues[receiver].get()
            reason = receiver.send(message)
            if reason:
                self._fail(receiver, reason, message.title)
            with self._changed:
                self._waiting[receiver] -= 1
                self._changed.notify_all()

    def _fail(self, receiver: Receiver, reason: str, title: str = "") -> None:
        what = f'the message "{title}"' if title else "a message"
        text = f"{what} to {receiver.name} was not sent: {reason}"
        self._failures.put(Notice("message-not-sent", f"note: {text}"))


@contextmanager
def posting(receivers: Sequence[Receiver], note: Callable[[str], None]) -> Iterator[MessageQueue]:
    """Send messages in the ``with`` block, and wait for the last of them at its end. ``note`` is
    called there with each failure that the caller has not fetched.
    """
    post = MessageQueue(receivers)
    try:
        yield post
    finally:
        try:
            post.wait(LAST_S)
        finally:
            for failure in post.failures():
                note(failure)
