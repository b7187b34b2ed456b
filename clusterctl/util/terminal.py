"""Makes text that comes from hosts, jobs, users and files fit for a terminal.

A terminal acts upon some characters: with them a job's name or log could set the window's title, fill the
clipboard, move the cursor, or hide and forge what stands on the screen. They become visible: ``\\x1b``.

``printable`` is for a value of one line: nothing passes but what is printed, no newline and no color.
``LogFilter`` is for a log. What passes it besides text:

- newlines and tabs;
- colors: SGR sequences, ``ESC [ ... m``. They end with the log;
- carriage returns, with which progress bars draw their line anew. They reach no further than their own line,
  and ``cli/output.py`` writes nothing of ours to a line that a log has begun.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from clusterctl.errors import printable, visible

_LONGEST_SGR: Final = 64  # characters between ESC [ and m; real ones have up to 40
_SGR: Final = rf"\x1b\[[0-9;:]{{0,{_LONGEST_SGR}}}m"
# C0 but \t \n \r, DEL, C1, line and paragraph separators, overrides and isolates of the text's direction, and
# bytes that are not UTF-8, as "surrogateescape" decodes them: a terminal may take those for C1.
_ACTS: Final = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ud800-\udfff]"
_COLOR_OR_ACTS: Final = re.compile(f"{_SGR}|{_ACTS}")
_BEGUN_SGR: Final = re.compile(rf"\x1b(?:\[[0-9;:]{{0,{_LONGEST_SGR}}})?\Z")
_COLOR: Final = re.compile(_SGR)
_LAST: Final = 4 * _LONGEST_SGR  # characters that show whether a line is ended, though colors may follow


def plain_line(text: str) -> str:
    """A line of a log as it stands at last: without colors, and without what carriage returns wrote over."""
    return printable(_COLOR.sub("", text).rstrip("\r").rpartition("\r")[2])


class LogFilter:
    """Makes one stream fit for a terminal, piece by piece; what comes out is UTF-8.

    Where the pieces begin and end makes no difference: what may become a color, or a character, is held back
    until more comes, at most about 70 bytes.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._held = ""
        self._colored = False
        self._in_line = False  # what came out has begun a line

    def feed(self, data: bytes) -> bytes:
        text = self._held + self._decoder.decode(data)
        begun = _BEGUN_SGR.search(text, max(0, len(text) - _LONGEST_SGR - 2))
        cut = begun.start() if begun else len(text)
        self._held = text[cut:]
        return self._shown(text[:cut])

    def end(self) -> bytes:
        """What was held back, and the end of the stream's color if it has one."""
        rest = self._shown(self._held + self._decoder.decode(b"", final=True))
        self._held = ""
        return rest + self._reset()

    def end_line(self) -> bytes:
        """What ends the stream's color and its line, if it has begun one, so that another text may follow."""
        in_line, self._in_line = self._in_line, False
        return self._reset() + b"\n" * in_line

    def _reset(self) -> bytes:
        colored, self._colored = self._colored, False
        return b"\x1b[0m" if colored else b""

    def _shown(self, text: str) -> bytes:
        shown = _COLOR_OR_ACTS.sub(self._replaced, text)
        if last := _COLOR.sub("", shown[-_LAST:]):
            self._in_line = last[-1] != "\n"
        return shown.encode()

    def _replaced(self, found: re.Match[str]) -> str:
        text = found[0]
        if len(text) == 1:
            return visible(text)
        self._colored = text[2:-1].strip("0") != ""
        return text
