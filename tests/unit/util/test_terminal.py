"""Tests that output of hosts and jobs can't make a terminal do anything but show text and
colors.
"""

from __future__ import annotations

import io
import json
import re
import tracemalloc

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.errors import printable
from clusterctl.util.terminal import LogFilter, plain_line

SGR = re.compile(r"\x1b\[[0-9;:]*m")
ACTS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

# Comments explain a terminal's reaction if it is not obvious.
HOSTILE = {
    "title": b"\x1b]0;owned\x07",
    "title that ends with ST": b"\x1b]2;owned\x1b\\",
    "clipboard": b"\x1b]52;c;Y3VybCBldmlsIHwgc2g=\x07",
    "hyperlink": b"\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "clear": b"\x1b[2J\x1b[H",
    "scroll back cleared": b"\x1b[3J",
    "line up, erased": b"\x1b[1A\x1b[2K",
    "cursor": b"\x1b[5;5H",
    "saved cursor": b"\x1b7\x1b8\x1b[s\x1b[u",
    "other screen": b"\x1b[?1049h",
    "mouse reports": b"\x1b[?1000h\x1b[?1006h",
    "hidden cursor": b"\x1b[?25l",
    "bracketed paste": b"\x1b[?2004h",
    "answers as if typed": b"\x1b[6n\x1b[c\x1b[0c\x1b[>c\x1b[21t",
    "reset": b"\x1bc\x1b[!p",
    "margins": b"\x1b[2;4r",
    "other letters": b"\x1b(0\x0e\x1b%@",
    "double height": b"\x1b#3\x1b#8",
    "device control": b'\x1bP$q"p\x1b\\',
    "program command": b"\x1b_Gf=32\x1b\\",
    "privacy message": b"\x1b^pm\x1b\\",
    "start of string": b"\x1bXsos\x1b\\",
    "C1 as UTF-8": "\x9b2J\x9d0;owned\x9c\x90q\x9c\x84\x85\x8d".encode(),
    "C1 as bytes": b"\x9b2J\x9d0;owned\x9c\x90q\x9c",
    "keys, which end as a color does": b"\x1b[>4;2m\x1b[?4m",
    "control character inside of a color": b"\x1b[3\x081m",
    "color that is broken off": b"\x1b[31\x18\x1b[\x1a\x1b[1;\x1b[2J",
    "endless color": b"\x1b[" + b"1;" * 5000 + b"m",
    "backspaces": b"secret\b\b\b\b\b\bpublic",
    "bell, form feed, vertical tab, null, delete": b"\a\f\v\0\x7f",
    "direction": "\u202egpj.exe\u202c \u2066x\u2069".encode(),
    "lines that are none": "a\u2028b\u2029c\u0085d".encode(),
    "half a character, then a sequence": b"\xe2\x82\x1b[2J\xf0\x9f\x1b]0;x\x07",
    "surrogates and overlong": b"\xed\xa0\x80\xc0\x9b\xc0\x80\xf8\x88\x80\x80\x80",
    "sequence in a sequence": b"\x1b\x1b[0m[2J\x1b\x1b[31m]0;owned\x07",
}


def shown(*pieces: bytes) -> bytes:
    stream = LogFilter()
    return b"".join([*map(stream.feed, pieces), stream.end()])


def is_harmless(data: bytes) -> bool:
    """Return whether the output is UTF-8 with only text, newlines, tabs, carriage returns and
    colors.
    """
    return ACTS.search(SGR.sub("", data.decode())) is None


@pytest.mark.parametrize("value", range(256))
def test_filter_of_each_byte_is_harmless(value: int) -> None:
    byte = bytes([value])
    passes = 0x20 <= value < 0x7F or byte in b"\t\n\r"
    assert shown(byte) == (byte if passes else f"\\x{value:02x}".encode())
    assert shown(b"a" + byte + b"z") == b"a" + shown(byte) + b"z"
    assert is_harmless(shown(b"\x1b" + byte))
    assert is_harmless(shown(b"\x1b[" + byte + b"m"))


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_filter_of_a_split_sequence_is_harmless(hostile: bytes) -> None:
    whole = shown(b"before" + hostile + b"after")
    assert is_harmless(whole)
    # It can be seen.
    assert b"\\" in whole
    data = b"before" + hostile + b"after"
    cuts = range(0, len(data), max(1, len(data) // 200))
    assert {shown(data[:cut], data[cut:]) for cut in cuts} == {whole}
    assert shown(*(bytes([byte]) for byte in data)) == whole


PIECES = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.sampled_from(
            [
                *HOSTILE.values(),
                b"\x1b",
                b"[",
                b";",
                b"1",
                b"m",
                b"\x1b[31m",
                b"\x1b[0m",
                b"\r",
                b"\n",
            ]
        ),
        st.text(max_size=4).map(lambda text: text.encode(errors="surrogatepass")),
    ),
    max_size=12,
)


@given(PIECES)
def test_filter_of_pieces_equals_filter_of_the_whole(pieces: list[bytes]) -> None:
    whole = shown(b"".join(pieces))
    assert shown(*pieces) == whole
    assert is_harmless(whole)
    colors = SGR.findall(whole.decode())
    # No color continues after the end.
    assert not colors or not colors[-1].strip("\x1b[0m")


@given(st.text())
def test_printable_is_one_line_of_printable_text(text: str) -> None:
    value = printable(text)
    assert value.isprintable()
    assert printable(value) == value
    value.encode()  # it has no surrogates


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_printable_shows_a_hostile_name(hostile: bytes) -> None:
    name = printable(hostile.decode(errors="surrogateescape"))
    assert name.isprintable()
    assert "\\" in name


def test_values_are_written_as_python_writes_them() -> None:
    assert printable("a\nb\tc\x1b[0m\u202e\x9b\udcff") == r"a\nb\tc\x1b[0m\u202e\x9b\xff"
    assert printable("Zoë 中文 🙂 C:\\new") == "Zoë 中文 🙂 C:\\new"


COLORED = (
    "\x1b[1;38;5;208mwarm\x1b[0m \x1b[38:2::255:0:0mred\x1b[m \x1b[4:3mwavy\x1b[24m Zoë 中文 🙂\r\n"
    "\ttab"
)


def test_filter_passes_colors_text_and_progress_bars() -> None:
    assert shown(COLORED.encode()) == COLORED.encode() + b"\x1b[0m"
    bar = b"\r  0%|          |\r 50%|#####     |\r100%|##########|\n"
    assert shown(bar) == bar


@pytest.mark.parametrize(
    ("log", "end", "end_of_line"),
    [
        (b"", b"", b""),
        (b"done\n", b"", b""),
        (b"50%", b"", b"\n"),
        (b"50%\r", b"", b"\n"),
        (b"\x1b[31mred", b"\x1b[0m", b"\x1b[0m\n"),
        (b"\x1b[0;31mred", b"\x1b[0m", b"\x1b[0m\n"),
        (b"\x1b[31mred\x1b[m", b"", b"\n"),
        (b"\x1b[31mred\n\x1b[0m", b"", b""),
        (b"\x1b[31mred\x1b[0m\x1b[8m\n", b"\x1b[0m", b"\x1b[0m"),
    ],
)
def test_log_filter_ends_color_before_other_text(
    log: bytes, end: bytes, end_of_line: bytes
) -> None:
    whole = LogFilter()
    interrupted = LogFilter()
    whole.feed(log)
    assert whole.end() == end
    interrupted.feed(log)
    assert interrupted.end_line() == end_of_line
    assert interrupted.end_line() == b""


def test_filter_shows_a_truncated_color_as_text() -> None:
    stream = LogFilter()
    stream.feed(b"\x1b[31")
    assert stream.end() == rb"\x1b[31"


def test_filter_of_an_endless_sequence_uses_bounded_memory() -> None:
    """For a sequence that never ends, and for a sequence that begins again and again."""
    stream = LogFilter()
    piece = b"1;" * 32768
    tracemalloc.start()
    try:
        stream.feed(b"\x1b[")
        for _ in range(64):
            assert len(stream.feed(piece)) >= len(piece) - 70
        for _ in range(50_000):
            stream.feed(b"\x1b[")
        assert tracemalloc.get_traced_memory()[0] < 1 << 16
    finally:
        tracemalloc.stop()


def test_plain_line_drops_colors_and_overwritten_text() -> None:
    assert plain_line("\x1b[31mERROR\x1b[0m: 3\x07") == r"ERROR: 3\x07"
    assert plain_line("  0%|   |\r 50%|#  |\r100%|###|\r") == "100%|###|"
    assert plain_line("Windows\r") == "Windows"


def asked_of_a_terminal(data: bytes) -> set[str]:
    """Return the actions that output requests of a terminal, besides text and colors."""
    log = io.StringIO()
    pyte.ByteStream(pyte.DebugScreen(log)).feed(data)
    sequences = {json.loads(line)[0] for line in log.getvalue().splitlines()}
    return sequences - {"draw", "select_graphic_rendition", "linefeed", "carriage_return", "tab"}


EVERYTHING = b"\r\n".join(HOSTILE.values())


def test_filter_passes_only_text_and_color_to_a_terminal() -> None:
    """The unfiltered output requests many actions."""
    assert {
        "set_title",
        "erase_in_display",
        "cursor_position",
        "set_mode",
        "reset",
    } <= asked_of_a_terminal(EVERYTHING)
    assert asked_of_a_terminal(shown(EVERYTHING)) == set()
    assert (
        asked_of_a_terminal(printable(EVERYTHING.decode(errors="surrogateescape")).encode())
        == set()
    )
