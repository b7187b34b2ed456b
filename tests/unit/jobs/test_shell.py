"""What salloc says over the connection that holds an allocation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import SlurmError
from clusterctl.jobs.shell import Allocation, Lease
from clusterctl.scheduler.script import Environment
from clusterctl.transport.base import MARK
from clusterctl.transport.openssh import OpenSSH
from tests.support.messages import refused

PENDING = "salloc: Pending job allocation 7"


@pytest.fixture
def lease(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The connection to a salloc that says these lines, after a login shell with a line of its own."""
    said = tmp_path / "said"
    said.write_bytes(b"granted\nWelcome" + MARK + "".join(f"{one}\n" for one in request.param).encode())
    session: Any = SimpleNamespace(transport=SimpleNamespace(host="ctl"))
    made = Lease(session, OpenSSH(tmp_path / "config"), ["sh", "-c", f"cat {said}; cat >/dev/null"], b"")
    yield made
    made.release()


@pytest.mark.parametrize("lease", [[PENDING, "", "salloc: error: Invalid qos", "ended"]], indirect=True)
def test_an_empty_line_of_salloc_does_not_end_the_connection(lease: Lease) -> None:
    """Such as those of a job submit plugin, which the site has written."""
    assert lease.allocation() == "7"
    with refused("allocation-refused", SlurmError, "Invalid qos"):
        lease.allocation()


GRANTED = ["granted", "SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n[1-2]", "SLURM_JOB_NAME=a=b", ""]


@pytest.mark.parametrize("lease", [[PENDING, *GRANTED]], indirect=True)
def test_nodes_that_were_waited_for(lease: Lease) -> None:
    assert lease.allocation() == "7"
    held = lease.allocation()
    assert isinstance(held, Allocation)
    assert (held.job_id, held.nodes) == ("7", ("n1", "n2"))
    assert "SLURM_JOB_NAME=a=b" in " ".join(held.argv([], Environment(), terminal=False))
    assert not lease.was_revoked()


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["echo a b; echo $((1 + 1)) | cat"], "a b\n2\n"),
        (["printf"], ""),
        (["printf", "%s,", "a b", "$HOME;"], "a b,$HOME;,"),
    ],
)
def test_shell_command_is_read_as_ssh_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], output: str
) -> None:
    """A single string is a line for the shell, and several words arrive verbatim."""
    monkeypatch.setattr(OpenSSH, "argv", lambda _self, _host, words, _flag: [*words])
    allocation = Allocation("7", ("n1",), {}, OpenSSH(tmp_path / "config"), "ctl")
    argv = allocation.argv(command, Environment(), terminal=False)
    program = argv[argv.index("bash") :]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}
    )
    assert done.stdout == output
