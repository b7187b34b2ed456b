"""Filters that make text from hosts, jobs, users and files safe for a terminal.

Terminals act on control characters: a job's name or log could set the window's title, fill the clipboard,
move the cursor, or hide and forge other output. Such characters are shown in visible form: ``\\x1b``.

``printable`` is for a value of one line. It removes newlines and colors as well.
``LogFilter`` is for a log. It keeps text, and:

- newlines and tabs;
- colors: SGR sequences, ``ESC [ ... m``, which are reset at the end of the log;
- carriage returns, with which progress bars redraw their line. They affect only their own line, because
  ``cli/output.py`` never writes into a line that a log has begun.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from clusterctl.errors import printable, visible

_LONGEST_SGR: Final = 64  # characters
_SGR: Final = rf"\x1b\[[0-9;:]{{0,{_LONGEST_SGR}}}m"
# C0 except \t \n \r, DEL, C1, line and paragraph separators, text direction overrides and isolates,
# and invalid UTF-8, decoded with "surrogateescape": a terminal may take those bytes for C1.
_ACTS: Final = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ud800-\udfff]"
_COLOR_OR_ACTS: Final = re.compile(f"{_SGR}|{_ACTS}")
_BEGUN_SGR: Final = re.compile(rf"\x1b(?:\[[0-9;:]{{0,{_LONGEST_SGR}}})?\Z")
_COLOR: Final = re.compile(_SGR)
# Last characters of a piece, in which its last printed character is found even if colors follow.
_LAST: Final = 4 * _LONGEST_SGR


def without_colors(text: str) -> str:
    return _COLOR.sub("", text)


def plain_line(text: str) -> str:
    """Return a log's line as finally visible: without colors, and without text overwritten after \\r."""
    return printable(without_colors(text).rstrip("\r").rpartition("\r")[2])


class LogFilter:
    """Filter that makes a stream of bytes safe for a terminal. The output is UTF-8.

    The stream may be split anywhere: an incomplete color or character, at most about 70 bytes, is
    held back until the next piece.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._held = ""
        self._colored = False
        # Whether the last output has not ended its line.
        self._in_line = False

    def feed(self, data: bytes) -> bytes:
        text = self._held + self._decoder.decode(data)
        incomplete = _BEGUN_SGR.search(text, max(0, len(text) - _LONGEST_SGR - 2))
        cut = incomplete.start() if incomplete else len(text)
        self._held = text[cut:]
        return self._shown(text[:cut])

    def end(self) -> bytes:
        """Return the bytes still held back, and end the stream's color if a color is active."""
        rest = self._shown(self._held + self._decoder.decode(b"", final=True))
        self._held = ""
        return rest + self._reset()

    def end_line(self) -> bytes:
        """Return the bytes that end the stream's color and line, if necessary, before other
        output.
        """
        in_line = self._in_line
        self._in_line = False
        return self._reset() + b"\n" * in_line

    def _reset(self) -> bytes:
        colored = self._colored
        self._colored = False
        return b"\x1b[0m" if colored else b""

    def _shown(self, text: str) -> bytes:
        shown = _COLOR_OR_ACTS.sub(self._replaced, text)
        if end_of_text := _COLOR.sub("", shown[-_LAST:]):
            self._in_line = end_of_text[-1] != "\n"
        return shown.encode()

    def _replaced(self, match: re.Match[str]) -> str:
        text = match[0]
        if len(text) == 1:
            return visible(text)
        self._colored = text[2:-1].strip("0") != ""
        return text
