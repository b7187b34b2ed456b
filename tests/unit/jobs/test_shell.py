"""What salloc says over the connection that holds an allocation."""

from __future__ import annotations

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
