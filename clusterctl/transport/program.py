"""Our modules as a program for another machine's plain Python."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^from (clusterctl\.[a-z_.]+) import ", re.MULTILINE)

# Makes modules of (name, text) pairs, under the names they import each other by; calls the last one's main.
# The program ends as soon as its stdout is closed: the clusterctl that runs it has ended, or has given it up.
BOOT = """\
import _thread, json, os, select, sys, types
def watch():
    poll = select.poll()
    poll.register(1, 0)
    poll.poll()
    os._exit(141)
_thread.start_new_thread(watch, ())
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


def remote_argv(module: str, *arguments: str) -> list[str]:
    """The command that runs ``main`` of a module of ours, such as ``clusterctl.jobs.remote_follow``.

    The modules of ours that it imports go with it. Arguments travel as JSON, since they may hold names that
    are not UTF-8 (as `os.fsdecode` has them). Python is isolated: it imports nothing from the home of the
    account, where a job, or `clusterctl put json.py`, may have left modules.
    """
    return ["python3", "-I", "-c", BOOT, _texts(module), json.dumps(arguments)]


@cache
def _texts(module: str) -> str:
    texts: dict[str, str] = {}
    _add(module, texts)
    packages = {parent for name in texts for parent in _packages(name)}
    return json.dumps([*((name, "") for name in sorted(packages)), *texts.items()])


def _packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _add(module: str, texts: dict[str, str]) -> None:
    """Put a module after all that it imports."""
    if module not in texts:
        text = (_ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for name in _IMPORT.findall(text):
            _add(name, texts)
        texts[module] = text
