"""Sends messages about a job from its first node, to addresses that the user has passed to the job by
`submit --secret CLUSTERCTL_NOTIFY`. Uses only the standard library of Python 3.8 or newer.

    python -IS messages.py FOLDER OFFSET

FOLDER is the job's folder, OFFSET the size of its job.events before this attempt. The first line of
standard input has the addresses, separated by spaces: so they are on no command line. This program
reads the events of the attempt until standard input is closed, and then sends the end.

An address is https://... or http://..., which gets a text, such as a topic of ntfy, or json+https://...,
which gets it as JSON, as Slack, Mattermost and Discord take it. What can't be sent is named in the
job's log and in job.events, without the address, which may be a token.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from payload.node import history, task
from payload.node.history import Event
from payload.node.requeue import JobEvents

VARIABLE = "CLUSTERCTL_NOTIFY"
POLL_S = 1.0
# The time limit of a message, in seconds.
LIMIT_S = 5.0
# How long job.py waits for the last messages at the job's end, in seconds.
LAST_S = 12.0
JSON = "json+"
# Event -> the verb in the title of its message, as in clusterctl/jobs/messages.py.
VERBS = {
    "start": "started",
    "restart": "restarts",
    "hang": "hangs",
    "alarm": "wastes its time",
    "failed": "failed",
    "cancelled": "ended",
    "completed": "completed",
}
# Signals that Slurm sends to all processes of a job.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class MessageProcess:
    """Runs this program beside the job's program. addresses: "": it sends nothing."""

    def __init__(self, addresses: str, offset: int) -> None:
        self._pids: list[int] = []
        if not addresses or "SLURM_ARRAY_TASK_ID" in os.environ:
            return
        reads, self._input = os.pipe()
        command = [sys.executable, "-IS", os.path.abspath(__file__), os.getcwd(), str(offset)]
        with suppress(OSError):
            self._pids.append(task.start(command, reads))
        os.close(reads)
        # After the start of its reader, because a pipe may have less room. Without one, this fails.
        task.write_all(self._input, f"{addresses}\n".encode(errors="surrogateescape"))

    def end(self) -> list[int]:
        """Have it send the end of the job. Return its process, for which the caller waits."""
        if self._pids:
            os.close(self._input)
        return self._pids


def main(folder: str, offset: str) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(folder)
    first = sys.stdin.buffer.readline().decode(errors="surrogateescape")
    post = MessagePoster(first.split())
    seen = 0
    is_over = False
    while not is_over:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        is_over = bool(ready)
        events = events_since(int(offset))
        for event in events[seen:]:
            for kind, text in said_at(event):
                post.send(kind, text)
        seen = len(events)
    for kind, text in said_of_end(events_since(int(offset))):
        post.send(kind, text)


def events_since(offset: int) -> Sequence[Event]:
    """Return the events of this attempt, in whole lines."""
    with suppress(OSError), open(history.EVENTS_FILE, "rb") as file:
        file.seek(offset)
        whole = file.read().rpartition(b"\n")[0]
        return history.events_of(whole.decode(errors="replace"))
    return []


def said_at(event: Event) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of a message about an event that is not the end."""
    if event["event"] == "start":
        nodes = event.get("nodes")
        text = f"on {', '.join(map(str, nodes))}" if isinstance(nodes, list) else ""
        yield "restart" if event.get("restarts") else "start", text
    elif event["event"] in ("hang", "alarm"):
        yield event["event"], str(event.get("summary", ""))


def said_of_end(events: Sequence[Event]) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of the message about the end of an attempt, unless the job is requeued:
    then its next start is told.
    """
    last = history.attempts_of(events)[-1]
    if not last.end or last.is_requeued:
        return
    if last.exit_code is None:
        yield "cancelled", last.state
    elif last.exit_code == 0:
        yield "completed", ""
    else:
        yield "failed", f"exit status {last.exit_code}"


class MessagePoster:
    """Sends messages to addresses, and notes failures."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._has_sent = False

    def send(self, kind: str, text: str) -> None:
        # Without Slurm, the job has an ID of clusterctl, and its folder has its name.
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("CLUSTERCTL_JOB_ID", "")
        name = os.environ.get("SLURM_JOB_NAME") or os.path.basename(os.getcwd())
        cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
        title = f"job {job} ({name}) {VERBS[kind]}" + (f" on {cluster}" if cluster else "")
        whole = "\n".join("".join(filter(str.isprintable, line)) for line in (title, text) if line)
        for number, address in enumerate(self._addresses, start=1):
            reason = post(address, whole)
            if reason:
                what = f'the message "{VERBS[kind]}" to receiver {number} was not sent'
                task.complain(f"{what} from {task.host_name()}: {reason}")
                JobEvents().add("message-not-sent", receiver=number, about=kind, reason=reason)
            elif not self._has_sent:
                self._has_sent = True
                task.complain(f"messages are sent from {task.host_name()}")
                JobEvents().add("messages", node=task.host_name())


def post(address: str, text: str) -> str:
    """Send a text. Return why it was not sent, without the address; "": it was."""
    # job.py imports this module, and most jobs send nothing.
    import urllib.error
    import urllib.request

    is_json = address.startswith(JSON)
    url = address[len(JSON) :] if is_json else address
    if not url.startswith(("https://", "http://")):
        return "its address begins with neither https:// nor http://"
    # Slack and Mattermost take `text`, Discord `content`.
    body = json.dumps({"text": text, "content": text}) if is_json else text
    kind = "application/json" if is_json else "text/plain; charset=utf-8"
    try:
        request = urllib.request.Request(url, body.encode(), {"Content-Type": kind})  # noqa: S310 - checked above
        with urllib.request.urlopen(request, timeout=LIMIT_S):  # noqa: S310
            return ""
    except urllib.error.HTTPError as exc:
        return f"HTTP status {exc.code}"
    except urllib.error.URLError as exc:
        return getattr(exc.reason, "strerror", None) or type(exc.reason).__name__
    except Exception as exc:  # an address may be wrong in any way
        return getattr(exc, "strerror", None) or type(exc).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
