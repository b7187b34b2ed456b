"""LocalTransport and ScriptedTransport keep the same contract as SSH."""

from __future__ import annotations

import pytest

from clusterctl.errors import CommandError
from tests.support.here import LocalTransport
from tests.support.messages import refused
from tests.support.scripted import ScriptedTransport, Step

LOCAL = LocalTransport()


def test_output_input_environment_and_exit_status():
    result = LOCAL.run(["sh", "-c", "cat; echo $A >&2; exit 3"], stdin=b"in", env={"A": "b c"}, check=False)
    assert (result.rc, result.stdout, result.stderr) == (3, "in", "b c\n")


def test_a_failed_command_raises():
    with pytest.raises(CommandError) as caught:
        LOCAL.run(["sh", "-c", "echo no >&2; exit 7"])
    assert (caught.value.rc, caught.value.why) == (7, "no")


def test_a_missing_command_raises():
    with refused("command", CommandError, "`/no/such/command`", rc=127):
        LOCAL.run(["/no/such/command"])


def test_a_script_answers_in_order_and_refuses_surprises():
    transport = ScriptedTransport([Step(("squeue", "--jobs=*"), "7\n"), Step(("sacct", "..."), rc=1)])
    assert transport.run(["squeue", "--jobs=1,2"]).stdout == "7\n"
    with pytest.raises(AssertionError, check=lambda error: "scancel" in str(error)):
        transport.run(["scancel", "7"])
    with pytest.raises(CommandError):
        transport.run(["sacct", "-j", "7"])
    assert not transport.left
