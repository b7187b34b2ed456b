"""Doubles of ssh and sudo for tests of on-prem hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.inventory import Host, Inventory

# Plays ssh: runs the command here, with a played sudo on the PATH. What sudo reads as a password is
# checked.
_SSH = """\
#!{python}
import os, subprocess, sys
host, command = sys.argv[sys.argv.index("--") + 1 :]
os.environ["PATH"] = {bin!r} + ":" + os.environ["PATH"]
os.environ["PLAYED_HOST"] = host
sys.exit(subprocess.run(["sh", "-c", command], start_new_session=True).returncode)
"""
_SUDO = """\
#!{python}
import os, sys
words, how = sys.argv[1:], open({folder!r} + "/" + os.environ["PLAYED_HOST"]).read().strip()
flags = set()
while words[0].startswith("-"):
    flags.add(words.pop(0))
    if "-p" in flags and words[0] == "":
        words.pop(0)
if how.startswith("requiretty "):
    # Its words: sudo 1.9, plugins/sudoers/sudoers.c.
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        sys.exit("sudo: sorry, you must have a tty to run sudo")
    how = how.partition(" ")[2]
if how == "nobody":
    sys.exit("rocky is not in the sudoers file.")
if how == "expired" and "-n" not in flags:
    sys.exit("sudo: Account expired or PAM config lacks an account section for sudo")
denies = how.startswith("denies ")  # after the password
how = how.removeprefix("denies ")
if how.startswith("trial "):  # asks for no password for other commands
    how = how.partition(" ")[2] if words == ["sh", "-c", ":"] else "free"
if how != "free":
    if "-n" in flags:
        sys.exit("sudo: a password is required")
    said = b""
    while not said.endswith(b"\\n"):
        read = os.read(0, 1)
        if not read:
            break
        said += read
    if said.decode().rstrip("\\n") != how:
        sys.exit("Sorry, try again.\\nsudo: no password was provided\\nsudo: 1 incorrect password attempt")
if denies:
    sys.exit("Sorry, user rocky is not allowed to execute '/usr/bin/sh -c :' as root on gpu9.")
os.execvp(words[0], words)
"""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each host: `free`, `nobody`, `expired`, or the password that its sudo
    asks for,
    after `requiretty` if sudo also requires a terminal, after `trial` if it asks for the first
    command only, or after `denies` if its rules then refuse the command.
    """
    folder = tmp_path / "hosts"
    programs = tmp_path / "bin"
    for one in (folder, programs):
        one.mkdir()
    for name, text in {"ssh": _SSH, "sudo": _SUDO}.items():
        path = programs / name
        path.write_text(text.format(python=sys.executable, bin=str(programs), folder=str(folder)))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return folder


def one_machine(machine: OnpremHost, host_key: str) -> Inventory:
    """Return a cluster of a single machine."""
    host = Host(
        name="node",
        address=str(machine.address),
        port=machine.port or 22,
        user=str(machine.user),
        key_file=machine.key,
        roles=("controller",),
        host_key=host_key,
    )
    return Inventory(
        cluster="demo",
        cluster_id="a12345",
        provider="onprem",
        hosts=(host,),
        network="",
        shared="",
        baked=False,
    )
