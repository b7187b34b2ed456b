"""Write clusterctl/spec/job_keywords.py, the types of a job's options in the Python interface."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from clusterctl.spec.job_options import OPTIONS, JobOption, plain_type
from clusterctl.spec.sweep import Scaling, Sweep

FILE: Final = Path(__file__).resolve().parent.parent / "clusterctl" / "spec" / "job_keywords.py"
HEAD: Final = '''\
"""The options of a job as keyword arguments, for the Python interface.

Written by scripts/job_keywords.py from JobOptions: `make reference` after a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict
'''
# Type of a field -> the values that callers pass.
TYPES: Final[Mapping[Any, str]] = {
    Path: "str | Path",
    tuple: "Sequence[str]",
    Mapping: "Mapping[str, str] | Sequence[str]",
    Sweep: "Mapping[str, Any] | Sequence[str]",
    Scaling: "Mapping[str, Any]",
}


def text() -> str:
    """Return the content of the file."""
    options = [option for option in OPTIONS.values() if not option.is_argument]
    parts = [HEAD, _class("ReplayKeywords", "TypedDict", "replay", options, in_replay=True)]
    parts.append(_class("JobKeywords", "ReplayKeywords", "submit", options, in_replay=False))
    return "\n\n".join(parts)


def _class(name: str, base: str, verb: str, options: list[JobOption], *, in_replay: bool) -> str:
    head = f'class {name}({base}, total=False):\n    """The options of `{verb}`."""\n\n'
    lines = (line for o in options if o.in_replay == in_replay for line in _field(o))
    return head + "\n".join(lines) + "\n"


def _field(option: JobOption) -> Iterator[str]:
    yield from (f"    # {line}" for line in textwrap.wrap(option.help, 94))
    yield f"    {option.name}: {type_of(option)}"


def type_of(option: JobOption) -> str:
    """Return the type of an option's values as callers pass them."""
    plain, is_parsed = plain_type(option.type)
    if plain is int:
        return "int | str" if is_parsed else "int"
    if plain is bool:
        return "bool | str | Path" if is_parsed else "bool"
    or_false = "Literal[False] | " if "Literal[False]" in str(option.type) else ""
    return or_false + TYPES.get(plain, "str")


def main() -> int:
    """Write the file."""
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
