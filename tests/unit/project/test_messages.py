"""Every error, finding and note has a code, and messages.json has them as they are now."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import click

from clusterctl.cli.main import LazyVerb, app
from scripts import message_reference
from tests.support.messages import shows


def test_snapshot_has_every_code_and_every_place_has_one() -> None:
    found, uncoded = message_reference.messages()
    assert uncoded == []
    assert message_reference.FILE.read_text() == message_reference.snapshot(found), (
        "run `make reference`"
    )


def test_snapshot_has_the_codes_of_data_files() -> None:
    files = (message_reference.ROOT / "clusterctl").rglob("data/*.*")
    texts = [file.read_text() for file in files if file.suffix in {".toml", ".yaml"}]
    code = re.compile(r"^(?:- )?code(?::| =) *['\"]?([\w-]+)", re.MULTILINE)
    codes = {found for text in texts for found in code.findall(text)}
    assert {"sudo-password", "name-taken"} <= codes
    assert codes - message_reference.printed_texts().keys() == set()


SOURCE = """
from clusterctl.errors import Notice, UsageError, StalePlanError

def check(job: str, late: bool) -> None:
    why = "first words"
    if late:
        why = f"{job} is late"
    if job:
        raise UsageError(f"unknown job {job!r}", code="job-unknown", why=why, fix="name " + "another")
    why = "last words"
    raise StalePlanError("nothing fits", why=why)

def other() -> None:
    raise UsageError("no code here")
"""


def test_messages_are_read_from_source(tmp_path: Path) -> None:
    (tmp_path / "clusterctl").mkdir()
    (tmp_path / "clusterctl" / "module.py").write_text(
        SOURCE + "class StalePlanError(Exception):\n    code = 'stale-plan'\n"
    )
    modules = message_reference.modules(tmp_path)
    (unknown, stale), uncoded = message_reference.messages_of(modules, of_data=())
    assert (unknown.code, unknown.whats) == ("job-unknown", ("unknown job …",))
    assert (unknown.whys, unknown.fixes) == (("first words", "… is late"), ("name another",))
    assert (stale.code, stale.whats, stale.whys) == (
        "stale-plan",
        ("nothing fits",),
        ("last words",),
    )
    assert uncoded == ["clusterctl/module.py:14: UsageError"]


def test_shows_takes_any_value_for_a_gap() -> None:
    text = "error: job 7 (train) is already running: ada started it at 9:00 …"
    assert shows(text, "busy")
    assert not shows(text.partition(" already")[0], "busy")


def test_commands_in_messages_have_the_arguments_that_they_need() -> None:
    wrong = []
    for code, texts in json.loads(message_reference.FILE.read_text()).items():
        shown = re.sub(
            rf"{message_reference.GAP}|{{[^}}]*}}", "1", " ".join(itertools.chain(*texts.values()))
        )
        for line in re.findall("`clusterctl ([^`]+)`", shown):
            if "--help" in line:
                continue
            words = line.split()
            known: click.Command = app
            while isinstance(known, click.Group) and words and words[0] in known.commands:
                known = known.commands[words.pop(0)]
            try:
                (known.load() if isinstance(known, LazyVerb) else known).make_context(line, words)
            except click.UsageError as exc:
                wrong.append(f"{code}: {line}: {exc}")
    assert wrong == []
