"""`doctor` probes the local machine with real programs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.hosts import remote_probe as remote
from clusterctl.hosts.probe import (
    PROGRAM,
    DiskSpace,
    GpuFacts,
    HostFacts,
    ProbeRequest,
    System,
    parse_report,
)
from tests.unit.hosts.test_doctor import NOTHING


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


def test_host_reads_each_fact_that_has_a_field() -> None:
    """A fact that the program does not read would keep its default, on each host."""
    facts = json.loads(probe_answer(paths=("/",)))["host"]
    answers = {
        HostFacts: facts,
        System: facts["system"],
        DiskSpace: facts["space"][0],
        GpuFacts: facts["gpus"],
    }
    for model, values in answers.items():
        assert set(values) == set(model.model_fields), model


def test_probe_of_the_local_machine_answers() -> None:
    answer = probe_answer(
        paths=("/", "/no/such/folder"),
        accounts=("root",),
        uids=(1,),
        files=("/etc/pass*d", "/etc/no-such-file"),
        packages=("base-files", "filesystem", "no-such-package"),  # of Debian, of Red Hat
        texts=("/proc/self/comm", "/no/such/file", "/dev/zero"),
    )
    facts = parse_report(answer).host
    assert facts is not None
    assert facts.texts == {"/proc/self/comm": "python3\n", "/no/such/file": "", "/dev/zero": ""}
    assert facts.files == ("/etc/passwd",)
    assert len(facts.packages & {"base-files", "filesystem"}) == len(facts.packages) == 1
    assert [space.paths for space in facts.space] == [("/", "/no/such/folder")]
    assert facts.accounts["root"] == 0
    assert 1 in facts.accounts.values()
    assert facts.system.cpus == len(os.sched_getaffinity(0))
    assert "127.0.0.1/8" in facts.addresses
    assert abs(facts.time - time.time()) < 60
