"""What is told about jobs by messages, from their states one after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterctl.errors import MachineError, UsageError
from clusterctl.jobs import messages
from clusterctl.jobs.messages import JobEvent, JobMessages, chosen_receivers, happenings
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends import judge as judging
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.scheduler.history import Alarm, Hang
from clusterctl.util.receivers import Message
from tests.support.messages import refused

JOB = JobInfo(number=12, name="train", user="ada", state=JobState.PENDING, reason="", restarts=0)
RUNNING = replace(JOB, state=JobState.RUNNING, nodes=("n1",))
DONE = replace(RUNNING, state=JobState.COMPLETED, restarts=None)
HANG = Hang(summary="rank 1 waits in MPI", since=10, noticed=60, until=100)
IDLE = Alarm(kind="idle", summary="GPU 1 of n2 is idle", since=10, until=100)
DISK = Alarm(kind="disk", summary="/tmp is 96 % full", since=10, until=100)
SESSION = cast(Any, SimpleNamespace(inventory=SimpleNamespace(cluster="demo")))


class Outbox:
    """Keeps the messages."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(each.values["JOB"], each.values["EVENT"]) for each in self.sent]


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster there are no causes."""
    monkeypatch.setattr(judging, "judge", lambda *_: {})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, JOB, []),
        (JOB, RUNNING, ["start"]),
        (None, RUNNING, ["start"]),
        (RUNNING, RUNNING, []),
        (RUNNING, DONE, ["completed"]),
        (None, DONE, ["completed"]),
        (DONE, DONE, []),
        (RUNNING, replace(RUNNING, state=JobState.OUT_OF_MEMORY), ["failed"]),
        (RUNNING, replace(RUNNING, state=JobState.TIMEOUT), ["cancelled"]),
        (RUNNING, replace(RUNNING, state=JobState.COMPLETING), []),
        (replace(RUNNING, state=JobState.SUSPENDED), RUNNING, []),
        (RUNNING, replace(JOB, restarts=1), ["restart"]),
        (replace(JOB, restarts=1), replace(RUNNING, restarts=1), ["start"]),
        (RUNNING, replace(RUNNING, restarts=1), ["restart"]),
        (replace(RUNNING, state=JobState.FAILED), replace(JOB, restarts=1), ["restart"]),
        # The accounting does not know the number.
        (replace(RUNNING, restarts=None), replace(RUNNING, restarts=1), []),
        (RUNNING, replace(RUNNING, hang=HANG), ["hang"]),
        (replace(RUNNING, hang=HANG), replace(RUNNING, hang=HANG._replace(until=200)), []),
        (RUNNING, replace(RUNNING, alarms=(IDLE,)), ["alarm"]),
        (replace(RUNNING, alarms=(IDLE,)), replace(RUNNING, alarms=(IDLE, DISK)), ["alarm"]),
        (
            replace(RUNNING, alarms=(IDLE,)),
            replace(RUNNING, alarms=(IDLE._replace(summary="GPU 1 and 2 of n2 are idle"),)),
            [],
        ),
        (replace(RUNNING, alarms=(IDLE, DISK)), replace(RUNNING, alarms=(IDLE,)), []),
    ],
)
def test_happenings_between_two_states(
    before: JobInfo | None, after: JobInfo, expected: list[str]
) -> None:
    assert [*happenings(before, after)] == expected


def test_first_look_at_older_jobs_tells_nothing(outbox: Outbox) -> None:
    telling = JobMessages(cast(Any, outbox))
    telling.look(SESSION, [RUNNING, replace(DONE, number=11)])
    assert outbox.told == []
    telling.look(SESSION, [replace(RUNNING, hang=HANG), replace(DONE, number=11)])
    assert outbox.told == [("12", "hang")]
    assert "rank 1 waits in MPI" in outbox.sent[0].text
    assert "rank 1 waits in MPI" in outbox.sent[0].values["CAUSE"]


def test_first_look_at_submitted_jobs_tells_all(outbox: Outbox) -> None:
    JobMessages(cast(Any, outbox), submitted=True).look(SESSION, [replace(DONE, end_time=5)])
    assert outbox.told == [("12", "completed")]
    assert outbox.sent[0].kind == "success"


def test_old_job_that_the_accounting_shows_again_is_not_told(outbox: Outbox) -> None:
    telling = JobMessages(cast(Any, outbox))
    telling.look(SESSION, [RUNNING])
    now = int(time.time())
    telling.look(
        SESSION,
        [
            RUNNING,
            replace(DONE, number=3, end_time=now - 86400),
            replace(DONE, number=13, end_time=now + 2),
        ],
    )
    assert outbox.told == [("13", "completed")]


def test_killed_job_is_told_once_it_can_not_be_requeued(outbox: Outbox) -> None:
    telling = JobMessages(cast(Any, outbox), submitted=True)
    killed = replace(RUNNING, state=JobState.FAILED, reason="RaisedSignal:9(Killed)")
    telling.look(SESSION, [RUNNING])
    telling.look(SESSION, [replace(killed, end_time=int(time.time()))])
    assert outbox.told == [("12", "start")]
    telling.look(SESSION, [replace(killed, end_time=int(time.time()) - 60)])
    assert outbox.told[1:] == [("12", "failed")]


def tasks(states: str) -> list[JobInfo]:
    """Tasks of an array: P pending, R running, F failed, C completed."""
    known = {state.value[0]: state for state in (JobState.PENDING, JobState.RUNNING)}
    known |= {state.value[0]: state for state in (JobState.FAILED, JobState.COMPLETED)}
    return [replace(JOB, task=task, state=known[state]) for task, state in enumerate(states)]


def test_array_is_told_once_for_each_happening_and_at_its_end(outbox: Outbox) -> None:
    telling = JobMessages(cast(Any, outbox), submitted=True)
    for states in ("PPPP", "RRPP", "CFRR", "CFFR", "CFFC", "CFFC"):
        telling.look(SESSION, tasks(states))
    assert outbox.told == [("12_0", "start"), ("12_1", "failed"), ("12", "failed")]
    assert "2 COMPLETED, 2 FAILED" in outbox.sent[-1].text


def test_job_that_one_look_did_not_list_is_not_told_again(outbox: Outbox) -> None:
    telling = JobMessages(cast(Any, outbox), submitted=True)
    for jobs in ([RUNNING], [], [RUNNING]):
        telling.look(SESSION, jobs)
    assert outbox.told == [("12", "start")]


def test_clusters_of_a_command_have_jobs_of_their_own(outbox: Outbox) -> None:
    first = JobMessages(cast(Any, outbox))
    second = first.of_cluster()
    first.look(SESSION, [RUNNING])
    second.look(SESSION, [JOB])
    second.look(SESSION, [RUNNING])
    assert outbox.told == [("12", "start")]


def test_message_hides_secrets_and_control_characters(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log may contain a token, and a service shows messages to others."""
    token = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8x"
    diagnosis = Diagnosis(
        job_id=RUNNING.id, cause="it \x1b[31m failed", fix="-", lines=(f"token={token}",) * 99
    )
    monkeypatch.setattr(judging, "judge", lambda *_: {RUNNING.id: diagnosis})
    failed = replace(RUNNING, state=JobState.FAILED, name="a\nb")
    JobMessages(cast(Any, outbox), submitted=True).look(SESSION, [failed])
    (message,) = outbox.sent
    assert token not in f"{message.title}{message.text}"
    assert "\x1b" not in message.text + message.values["CAUSE"]
    assert "\n" not in message.title
    assert len(message.text.splitlines()) < 40


@pytest.fixture
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    return tmp_path / "notify.txt"


def test_receivers_of_the_file_are_the_default(defaults: Path) -> None:
    assert chosen_receivers(()) == ()
    defaults.write_text("# mine\n\ncat\n  sh -c 'cat >&2'\n")
    assert [each.argv for each in chosen_receivers(())] == [("cat",), ("sh", "-c", "cat >&2")]
    assert [each.argv for each in chosen_receivers(["true"])] == [("true",)]
    assert chosen_receivers(["none"]) == ()


@pytest.mark.parametrize(
    "target",
    [
        "",
        "sh -c 'S3cretToken",
        "S3cretToken/no-program",
        "nosuch://S3cretToken",
        "slack://S3cretToken",
    ],
)
def test_wrong_receiver_is_refused_without_its_secret(target: str) -> None:
    with refused("option-invalid/notify", UsageError) as caught:
        chosen_receivers(["true", target])
    assert "S3cretToken" not in str(caught.value)
    assert "receiver 2" in str(caught.value)


def test_url_without_apprise_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cast("dict[str, Any]", sys.modules), "apprise", None)
    with refused("tool-missing/apprise", MachineError) as caught:
        chosen_receivers(["ntfy://S3cretToken"])
    assert caught.value.fix == "pip install 'clusterctl[notify]'"
    assert "S3cretToken" not in str(caught.value)
    # A command does not need it.
    assert len(chosen_receivers(["true"])) == 1


def test_every_happening_has_its_words() -> None:
    words: Mapping[JobEvent, str] = messages._VERBS
    assert {*words} == {*JobEvent}
