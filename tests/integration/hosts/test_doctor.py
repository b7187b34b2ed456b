"""`doctor` probes the local machine with real programs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.hosts import remote_probe as remote
from clusterctl.hosts.probe import (
    PROGRAM,
    GpuFacts,
    HostFacts,
    ProbeRequest,
    Space,
    System,
    parse_report,
)
from tests.unit.hosts.test_doctor import NOTHING, found


def probe_answer(**request: Sequence[str | int]) -> str:
    """Probe the local machine for these facts. Return its answer, which is JSON."""
    argv = ProbeRequest(host=NOTHING | request, node=False).argv()
    return subprocess.run(argv, input=PROGRAM, capture_output=True, check=True).stdout.decode()


def test_databases_leaves_out_those_of_mariadb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "DATABASES", str(tmp_path))
    for name in ("mysql", "sys", "performance_schema", "#innodb_redo", "payroll"):
        (tmp_path / name).mkdir()
    (tmp_path / "ibdata1").touch()
    assert remote.databases() == ["payroll"]
    monkeypatch.setattr(remote, "DATABASES", str(tmp_path / "none"))
    assert remote.databases() == []


def test_processes_that_outlive_their_job_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = tmp_path / "fence"
    fence.write_text(f"#!/bin/sh\n[ $1 = left ] && echo '24 serve me' && echo '25 {'x' * 100}'\n")
    fence.chmod(0o755)
    monkeypatch.setattr(remote, "FENCE", str(tmp_path / "missing"))
    assert remote.processes_left() == []
    monkeypatch.setattr(remote, "FENCE", str(fence))
    assert remote.processes_left() == ["24 serve me", f"25 {'x' * 77}"]
    (finding,) = found({"left": remote.processes_left()})
    assert (finding.level, finding.code) == ("warning", "processes-left")
    assert "24 serve me" in finding.why
    assert finding.fix.endswith("kill -KILL 24 25`")


def test_host_reads_each_fact_that_has_a_field() -> None:
    """A fact that the program does not read would keep its default, on each host."""
    facts = json.loads(probe_answer(paths=("/",)))["host"]
    answers = {
        HostFacts: facts,
        System: facts["system"],
        Space: facts["space"][0],
        GpuFacts: facts["gpus"],
    }
    for model, values in answers.items():
        assert set(values) == set(model.model_fields), model


def test_probe_of_the_local_machine_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names = ("localhost", "no-such-host.invalid")
        paths = ("/", "/no/such/folder")
        files = ("/etc/pass*d", "/etc/no-such-file")
        packages = ("base-files", "filesystem", "no-such-package")  # of Debian, of Red Hat
        answer = probe_answer(
            names=names,
            ports=(port,),
            paths=paths,
            accounts=("root",),
            uids=(1,),
            files=files,
            packages=packages,
            texts=("/proc/self/comm", "/no/such/file", "/dev/zero"),
        )
    facts = parse_report(answer).host
    assert facts is not None
    assert facts.texts == {"/proc/self/comm": "python3\n", "/no/such/file": "", "/dev/zero": ""}
    assert facts.files == ("/etc/passwd",)
    assert len(facts.packages & {"base-files", "filesystem"}) == len(facts.packages) == 1
    assert facts.resolved == {"localhost": ("127.0.0.1",), "no-such-host.invalid": ()}
    assert list(facts.listeners) == [port]
    assert facts.listeners[port] in Path("/proc/self/comm").read_text()
    assert [space.paths for space in facts.space] == [("/", "/no/such/folder")]
    assert facts.accounts["root"] == 0
    assert 1 in facts.accounts.values()
    assert facts.system.cpus == len(os.sched_getaffinity(0))
    assert "127.0.0.1/8" in facts.addresses
    assert abs(facts.time - time.time()) < 60
    assert 0 < facts.booted <= facts.time


LISTENS = """
import ctypes, socket, sys
ctypes.CDLL(None).prctl(15, b"\\nLISTEN 0 0 a")  # PR_SET_NAME
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_listeners_with_a_hostile_process_name_has_one_entry() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        port = int(program.stdout.readline())
        assert remote.listeners({port, 1}) == {str(port): "\nLISTEN 0 0 a"}
        program.communicate()
