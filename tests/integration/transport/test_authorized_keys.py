"""A spec accepts the same options of authorized_keys as sshd."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pydantic import ValidationError

from clusterctl.spec.common import User
from tests.integration.transport.conftest import Sshd

TAKEN = [
    "restrict",
    ",restrict,,pty,",
    "no-pty,No-X11-Forwarding,no-user-rc,no-agent-forwarding,no-port-forwarding",
    "restrict,pty,x11-forwarding,user-rc,agent-forwarding,port-forwarding",
    "no-touch-required,touch-required,verify-required,no-verify-required",
    'command="echo \\"a, b\\" \\n"',
    'from="127.0.0.0/8,::1,*"',
    'expiry-time="29990101",expiry-time="299901012359Z",expiry-time="29990101235959"',
    'environment="A_1=b c",environment="B="',
    'permitopen="host:22",permitopen="[::1]:*",permitlisten="8080",permitlisten="localhost:80"',
    'tunnel="0",no-port-forwarding',
]
REFUSED = [
    "no-such-option",
    "no-restrict",
    "restrict=yes",
    "cert-authority",
    'principals="ada"',
    "command=true",
    'command="true",command="false"',
    'from="127.0.0.1",from="*"',
    'expiry-time="tomorrow"',
    'environment="no value"',
    'environment="a-b=c"',
    'permitopen="22"',
    'permitopen="host:0"',
    'permitlisten="host:http!"',
    'tunnel="tap"',
]


def accepts(sshd: Sshd, config: Path, user: str, key: str) -> bool:
    """Return whether sshd lets a user in whose authorized_keys has only this line."""
    (sshd.folder / "authorized_keys").write_text(f"{key}\n")
    alone = ("-o", "ControlPath=none")
    argv = ["ssh", "-F", config, *alone, "-l", user, "-o", "BatchMode=yes", "-n", "node", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 or "Permission denied" in done.stderr, done
    return done.returncode == 0


def takes(key: str) -> bool:
    try:
        User(name="ada", uid=2001, ssh_keys=(key,))
    except ValidationError:
        return False
    return True


def test_spec_takes_the_options_that_sshd_takes(sshd: Sshd, me: str) -> None:
    key = (sshd.folder / "authorized_keys").read_text().strip()
    config = sshd.config()
    lines = [f"{options} {key} ada" for options in (*TAKEN, *REFUSED)]
    answers = {line: takes(line) for line in lines}
    assert [line for line, taken in answers.items() if taken] == lines[: len(TAKEN)]
    assert {line: accepts(sshd, config, me, line) for line in lines} == answers
