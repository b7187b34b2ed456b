"""Runs on a host, as root: playbooks, by an Ansible that comes along, and tells their events.

    python3 -I -c THE_PROGRAM REQUEST

REQUEST is a JSON object; ``clusterctl.configure.pull`` says what is in it. Stdin brings a tar, later a line
for each playbooks that have to wait, and its end means that nobody listens any more: Ansible is ended, and
what it was in the middle of may end, such as a package manager. Stdout has one JSON object a line, and one in
between that says no more than that the host is there. All files
lie in one folder that only root can read; it is removed at the end, and what a killed run has left by the
next one. Standard library only, Python 3.9; ``_PLAY`` alone runs in the Python that Ansible needs.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ENDING_S = 600.0  # for what Ansible was in the middle of
_SET_CHILD_SUBREAPER = 36  # prctl(2): what loses its parent becomes our child
_CHUNK = 1 << 16
_STDOUT = threading.Lock()

# Arguments: the folder, the request, the playbooks.
_PLAY = """\
import json, sys
folder, asked, playbooks = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.path.insert(0, f"{folder}/site")
from ansible_runner.config.runner import RunnerConfig
from ansible_runner.runner import Runner
ended = []
def tell(event):
    if event["event"] == "playbook_on_stats":
        ended.append(event)
        if len(ended) < len(playbooks):
            return False  # that of the next counts these tasks, too
    kept = {name: event[name] for name in ("event", "stdout", "event_data", "pid") if name in event}
    line = json.dumps(kept)
    if len(line) > asked["longest"]:
        res = event["event_data"].get("res", {})
        short = {name: str(res.get(name, ""))[-1500:] for name in ("msg", "stderr", "stdout")}
        kept["event_data"]["res"] = {**short, "changed": res.get("changed", False)}
        kept["stdout"] = kept.get("stdout", "")[:1500]
        line = json.dumps(kept)
    print(line, flush=True)
    return False
config = RunnerConfig(
    private_data_dir=f"{folder}/run", playbook=playbooks[-1], inventory=f"{folder}/inventory.yml",
    limit=asked["host"], cmdline=asked["options"], envvars=asked["environment"], fact_cache_type="memory",
    quiet=True,
)
config.prepare()
config.pexpect_timeout, config.suppress_output_file = 0.2, True
config.command[:1] = [sys.executable, "-I", f"{folder}/ansible-playbook"]  # where programs may not be, too
config.command[-1:] = [f"{folder}/ansible/{name}" for name in playbooks]
sys.exit(Runner(config=config, event_handler=tell).run()[1])
"""
_ANSIBLE = """\
import sys
sys.path.insert(0, "{folder}/site")
from ansible.cli.playbook import main
main()
"""


class Session:
    """What the other side has said, and the Ansible that runs meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.may_go_on = threading.Event()
        self.lost = False
        self.process: subprocess.Popen[bytes] | None = None

    def watch(self) -> None:
        """Read stdin to its end."""
        while data := os.read(0, _CHUNK):
            if b"\n" in data:
                self.may_go_on.set()
        self.lost = True
        self.may_go_on.set()
        if self.process is not None:
            with suppress(OSError):
                self.process.terminate()
            end_ansible(self.folder)


def main() -> None:
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"])
    threading.Thread(target=stay_alive, args=(asked["alive_s"],), daemon=True).start()
    # A lock that leaves no file. The run of a clusterctl that is gone ends first.
    fcntl.flock(os.open(folder.parent, os.O_RDONLY), fcntl.LOCK_EX)
    end_ansible(folder)  # of a run that was killed itself
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        code = run(asked, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)  # the thread reads stdin until then


def run(asked: Mapping[str, Any], folder: Path) -> int:
    """The exit code of the first playbooks that fail, or 0."""
    before = os.umask(0o077)
    unpack(folder)
    os.umask(before)  # what tasks make is for others, too
    program = folder / "ansible-playbook"
    program.write_text(_ANSIBLE.format(folder=folder))
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    session = Session(folder)
    threading.Thread(target=session.watch, daemon=True).start()
    for number, playbooks in enumerate(asked["steps"]):
        if number:
            write_line(json.dumps({"waits": number}).encode() + b"\n")
            session.may_go_on.wait()
        if session.lost:
            return 1
        words = ["-I", "-c", _PLAY, str(folder), json.dumps(asked), json.dumps(playbooks)]
        session.process = process = subprocess.Popen(
            [asked["python"], *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        for line in process.stdout or ():
            write_line(line)
        code = process.wait()
        if code or session.lost:
            await_children()
            return code or 1
    return 0


def write_line(line: bytes) -> None:
    """Write a line as a whole, if anybody listens."""
    with _STDOUT, suppress(OSError):
        while line:
            line = line[os.write(1, line) :]


def stay_alive(every_s: float) -> None:
    """Say again and again that this host is there."""
    while True:
        time.sleep(every_s)
        write_line(b'{"alive": true}\n')


def unpack(folder: Path) -> None:
    """What stdin brings: a tar of files, of which one is a compressed tar."""
    plain = tarfile.TarFile.__dict__.get("extraction_filter") or (lambda member, _path: member)
    tarfile.TarFile.extraction_filter = staticmethod(plain)
    with open(0, "rb", buffering=0, closefd=False) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extractall(folder)  # noqa: S202 - from clusterctl itself
    common = folder / "common.tgz"
    with tarfile.open(common) as tar:
        tar.extractall(folder)  # noqa: S202 - likewise
    common.unlink()


def end_ansible(folder: Path) -> None:
    """End all processes of the Ansible there, each of which leads a session of its own; not its modules."""
    program = os.fsencode(folder / "ansible-playbook")
    found = True
    while found:  # until none was started meanwhile
        found = False
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and program in (entry / "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        time.sleep(0.05)


def await_children() -> None:
    """Wait for what Ansible has left running, so that nothing meets it; not for ever."""
    until = time.monotonic() + ENDING_S
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)


if __name__ == "__main__":
    main()
