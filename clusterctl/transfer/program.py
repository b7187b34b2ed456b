"""Our modules as a program for another machine's plain Python."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

_PACKAGE = "clusterctl.transfer.remote"
_FOLDER = Path(__file__).parent / "remote"

# Makes modules of (name, text) pairs, under the names they import each other by; calls the last one's main.
_BOOT = """\
import json, os, sys, types
for name, text in json.loads(sys.argv[1]):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
try:
    module.main(*json.loads(sys.argv[2]))
except OSError as exc:
    place = os.path.abspath(os.fsdecode(exc.filename or "."))
    sys.exit(f"{place!r}: {exc.strerror or exc}")
"""


def remote_argv(*modules: str, arguments: tuple[str, ...]) -> list[str]:
    """The command that runs ``main`` of the last of these modules of ours with arguments.

    They travel as JSON, since they may hold names that are not UTF-8 (as `os.fsdecode` has them).
    """
    return ["python3", "-c", _BOOT, _texts(modules), json.dumps(arguments)]


@cache
def _texts(modules: tuple[str, ...]) -> str:
    parents = [("clusterctl", ""), ("clusterctl.transfer", ""), (_PACKAGE, "")]
    texts = [(f"{_PACKAGE}.{name}", (_FOLDER / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    return json.dumps([*parents, *texts])
