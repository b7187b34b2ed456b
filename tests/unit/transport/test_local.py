"""LocalTransport and ScriptedTransport keep the same contract as SSH."""

from __future__ import annotations

import pytest

from clusterctl.errors import CommandError, UnreachableError
from tests.support.here import LocalTransport
from tests.support.messages import refused
from tests.support.processes import gone, noted
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


def test_a_timeout_ends_the_command_and_its_children(tmp_path):
    def attempt(timeout_s: float) -> None:
        with refused("unreachable", UnreachableError):
            LOCAL.run(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait"], timeout_s=timeout_s)

    assert gone(noted(tmp_path / "pid", attempt))


def test_stream():
    assert b"".join(LOCAL.stream(["printf", "\\377a"])) == b"\xffa"


def test_a_stream_of_a_failed_command_raises():
    with pytest.raises(CommandError) as caught:
        list(LOCAL.stream(["sh", "-c", "echo oh >&2; exit 4"]))
    assert (caught.value.rc, caught.value.stderr) == (4, "oh\n")


def test_closing_a_stream_ends_the_command():
    stream = LOCAL.stream(["sh", "-c", "echo $$; sleep 1000; :"])
    pid = int(next(stream))
    stream.close()
    assert gone(pid)


def test_a_script_answers_in_order_and_refuses_surprises():
    transport = ScriptedTransport([Step(("squeue", "--jobs=*"), "7\n"), Step(("sacct", "..."), rc=1)])
    assert transport.run(["squeue", "--jobs=1,2"]).stdout == "7\n"
    with pytest.raises(AssertionError, check=lambda error: "scancel" in str(error)):
        transport.run(["scancel", "7"])
    with pytest.raises(CommandError):
        transport.run(["sacct", "-j", "7"])
    assert not transport.left
