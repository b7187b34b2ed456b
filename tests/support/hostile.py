"""Names that files may have on Linux and that careless programs trip over."""

from __future__ import annotations

HOSTILE_NAMES = (
    b"two words",
    b"new\nline",
    b"-rf",
    b"$(touch pwned); `id`",
    b'it\'s "quoted"',
    b"back\\slash",
    b"\xff\xfe not utf-8",
    "\u00e9\u202e".encode(),
    b"*?[a]",
    b"~",
    b"#x",
    b"!x",
    b" ",
    b"x" * 255,
)
