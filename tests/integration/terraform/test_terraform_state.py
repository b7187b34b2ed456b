"""An interrupted Terraform writes its state, and the next run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.errors import ProvisionError
from clusterctl.providers.gcp.terraform_run import run
from clusterctl.util.progress import HostStep, Reporter
from tests.support.messages import refused
from tests.support.terraform import Work

APPLIES = """
import sys
from pathlib import Path
from tests.support.terraform import terraform_in
from clusterctl.util.progress import PhaseLines
terraform = terraform_in(Path(sys.argv[1]), PhaseLines(lambda line: print(line, flush=True), verbose=True))
terraform.apply(terraform.plan())
"""

# It is interrupted by itself.
WINDS_UP = """
import os, signal, sys
from pathlib import Path
from clusterctl.providers.gcp.terraform_run import run
from clusterctl.util.progress import SILENT
run(["sh", "-c", sys.argv[1]], Path(sys.argv[2]), SILENT, heard=lambda _: os.kill(os.getpid(), signal.SIGINT))
"""


def wait_for(path: Path) -> None:
    """Wait until a program has written the file; the test's time limit ends this."""
    while not path.exists():
        time.sleep(0.05)


def test_empty_state_is_no_state_and_a_torn_one_an_error(work: Work) -> None:
    """A killed Terraform leaves an empty file, a full disk a part of it."""
    work.terraform.apply(work.terraform.plan())
    state = work.folder / "terraform.tfstate"
    whole = state.read_bytes()
    state.write_bytes(b"")
    assert len(work.terraform.plan().real_changes) == 3
    state.write_bytes(whole[:100])
    with refused(
        "record-damaged/terraform-state",
        ProvisionError,
        "terraform.tfstate.backup",
        where=str(state),
    ):
        work.terraform.plan()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_killed_or_interrupted_terraform_writes_its_state_first(
    work: Work, sign: signal.Signals
) -> None:
    work.hosts(seconds=1, **{f"host{n}": "small" for n in range(5)})
    argv = [sys.executable, "-c", APPLIES, str(work.folder)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(": created" in line for line in process.stdout)
        process.stdout.close()  # as of a `| head` that ended
        process.send_signal(sign)
    # The plan waits until Terraform has released its lock.
    assert work.terraform.plan(destroy=True).real_changes


# It takes until it is let, a minute at most.
WRITES_ITS_STATE = """
write() {
    touch interrupted
    for _ in $(seq 600); do [ -e go ] && break; sleep 0.1; done
    touch state
    exit
}
trap write INT
echo at work
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt()),
        # A shell whose window is closed sends SIGHUP twice.
        (SystemExit(129), SystemExit(129)),
    ],
)
def test_second_interrupt_leaves_terraform_to_write_its_state(
    tmp_path: Path, first: BaseException, second: BaseException
) -> None:
    class Impatient(Reporter):
        def progress(self, _: str | HostStep) -> None:
            wait_for(tmp_path / "interrupted")
            raise second

    def hear(_: str) -> None:
        raise first

    with pytest.raises(type(first)):
        run(["sh", "-c", WRITES_ITS_STATE], tmp_path, Impatient(), heard=hear)
    (tmp_path / "go").touch()
    wait_for(tmp_path / "state")


def test_sigkill_while_terraform_writes_its_state_keeps_the_state(tmp_path: Path) -> None:
    """The kernel tells the reaper, which was told to end before and took that for a second
    signal.
    """
    with subprocess.Popen([sys.executable, "-c", WINDS_UP, WRITES_ITS_STATE, tmp_path]) as process:
        wait_for(tmp_path / "interrupted")
        process.kill()
    (tmp_path / "go").touch()
    wait_for(tmp_path / "state")
