"""Send a message by Apprise to the service that a URL names.

It is a program of its own: a service that hangs can be ended, and the URL, which may contain a
token, is on no command line. Standard input is JSON with the keys url, title, text and kind (a value
of apprise.NotifyType). It exits with 1, and the reason on stderr, if the message was not sent.
"""

from __future__ import annotations

import json
import logging
import sys

import apprise


def main() -> int:
    """Send the message of standard input. Return the exit code."""
    request = json.load(sys.stdin)
    services = apprise.Apprise()
    with apprise.LogCapture(level=logging.WARNING, fmt="%(message)s") as log:
        is_sent = services.add(request["url"]) and services.notify(
            request["text"],
            title=request["title"],
            notify_type=apprise.NotifyType(request["kind"]),
            body_format=apprise.NotifyFormat.TEXT,
        )
        if not is_sent:
            sys.stderr.write(log.getvalue().strip() or "Apprise did not send it")
    return 0 if is_sent else 1


if __name__ == "__main__":
    sys.exit(main())
