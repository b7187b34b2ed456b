"""Commands of Ansible, clusterctl and pip in forks of a process that has imported the program.

A new process would need up to a second of CPU time for imports and YAML files; hundreds of tests
run such commands.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from clusterctl.util.assets import data_folder
from clusterctl.util.process import Result

TIMED_OUT = 1000  # no exit code of a process
_OUTPUTS = ("stdout", "stderr")
_PATIENCE_S = 20  # for a verb that is interrupted


def ansible(
    command: str, argv: Sequence[str | Path], *, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ansible`, `ansible-inventory` or `ansible-playbook` with our roles and modules, by
    pipelining.

    ``environ`` is added to this process's environment; Ansible's own variables have no effect in
    it.
    """
    return _server("ansible").run(
        [command, *map(str, argv)], cwd, {**os.environ, **(environ or {})}
    )


def clusterctl(
    argv: Sequence[str], *, cwd: Path, environ: Mapping[str, str], stdin: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a verb in a process session of its own; ``environ`` is its whole environment. A
    `sitecustomize.py` in its PYTHONPATH is run first.

    A verb that has not ended in time is interrupted, and has the exit code ``TIMED_OUT``.
    """
    return _server("clusterctl").run(list(argv), cwd, environ, stdin, timeout_s)


def pip(argv: Sequence[str], heard: Callable[[str], None], *, env: Mapping[str, str]) -> Result:
    """Take the place of `run_with_lines` for `python -P -m pip`."""
    done = _server("pip").run(["pip", *map(str, argv[4:])], Path.cwd(), env)
    for line in done.stdout.splitlines():
        heard(line)
    return Result(done.returncode, done.stdout, "")


class _Server:
    """The process that forks; it ends with this one."""

    def __init__(self, program: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{program}-"))
        ours = data_folder("ansible")
        environ = {
            "ANSIBLE_HOME": str(self._folder / "home"),
            "ANSIBLE_ROLES_PATH": str(ours / "roles"),
            "ANSIBLE_LIBRARY": str(ours / "library"),
            "ANSIBLE_MODULE_UTILS": str(ours / "module_utils"),
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_STRATEGY_PLUGINS": str(ours / "strategy_plugins"),
            "ANSIBLE_DEPRECATION_WARNINGS": "0",  # Ansible warns of every foreign strategy
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }
        # A test that starts it may have a sitecustomize.py there, for its own commands alone.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, program, self._folder],
            cwd=Path(__file__).parents[2],
            env={**inherited, **(environ if program == "ansible" else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    def _end(self) -> None:
        with self._process as process:
            process.terminate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        argv: list[str],
        cwd: Path,
        environ: Mapping[str, str],
        stdin: str = "",
        timeout_s: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin
        assert self._process.stdout
        # As if it were started here, for the guard in tests/unit/conftest.py.
        sys.audit("subprocess.Popen", argv[0], argv, str(cwd), None)
        (self._folder / "stdin").write_text(stdin)
        request = {"argv": argv, "cwd": str(cwd), "environ": dict(environ), "timeout_s": timeout_s}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        stdout, errors = ((self._folder / name).read_bytes().decode() for name in _OUTPUTS)
        return subprocess.CompletedProcess(argv, code, stdout, errors)


_server = cache(_Server)


def _prepare_ansible() -> Callable[[], object]:
    from ansible.cli import adhoc, inventory, playbook  # noqa: PLC0415
    from ansible.plugins import loader  # noqa: PLC0415

    warnings.simplefilter("ignore")  # that each child configures the finder of collections again
    loader.init_plugin_loader()
    for kind in ("become", "callback", "filter", "inventory", "test", "vars"):
        list(getattr(loader, f"{kind}_loader").all(class_only=True))
    actions = ("assert", "command", "copy", "normal", "package", "set_fact", "template")
    more = (("connection", "local"), ("shell", "sh"), ("strategy", "linear"))
    for kind, name in (*(("action", action) for action in actions), *more):
        getattr(loader, f"{kind}_loader").get(f"ansible.builtin.{name}", class_only=True)
    # The strategy of clusterctl. It imports mitogen.
    loader.strategy_loader.get("clusterctl_linear", class_only=True)
    commands = {
        "ansible": adhoc.AdHocCLI,
        "ansible-inventory": inventory.InventoryCLI,
        "ansible-playbook": playbook.PlaybookCLI,
    }
    return lambda: commands[sys.argv[0]].cli_executor(sys.argv)


def _prepare_clusterctl() -> Callable[[], object]:
    root = data_folder("ansible").parent
    for path in sorted((root / "clusterctl").rglob("*.py")):
        if not path.stem.startswith(("remote_", "__")):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    return importlib.import_module("clusterctl.__main__").main  # type: ignore[no-any-return]


def _prepare_pip() -> Callable[[], object]:
    for name in ("commands.download", "resolution.resolvelib.resolver"):
        importlib.import_module(f"pip._internal.{name}")

    def main() -> None:
        os.dup2(1, 2)
        runpy.run_module("pip", run_name="__main__")

    return main


def _end_of(child: int, timeout_s: float | None) -> int:
    """The exit code of a child in a session of its own, or ``TIMED_OUT``."""
    watched = os.pidfd_open(child)
    late = False
    for sign, patience_s in ((signal.SIGINT, timeout_s), (signal.SIGKILL, _PATIENCE_S)):
        if select.select([watched], [], [], patience_s)[0]:
            break
        late = True
        os.killpg(child, sign)
    os.close(watched)
    _, status = os.waitpid(child, 0)
    return TIMED_OUT if late else os.waitstatus_to_exitcode(status)


def _customize(path: str) -> None:
    """Run the sitecustomize.py of a test, as a new Python would."""
    for folder in filter(None, path.split(os.pathsep)):
        if (file := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(file))


def _serve(program: str, folder: Path) -> None:
    prepare = {"ansible": _prepare_ansible, "clusterctl": _prepare_clusterctl, "pip": _prepare_pip}
    main = prepare[program]()
    gc.freeze()  # else each child looks at, and so copies, all that was imported
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            break
        print(_end_of(child, json.loads(line)["timeout_s"]), file=answers, flush=True)
    else:
        return
    request = json.loads(line)
    os.close(answers.fileno())
    if program != "ansible":
        os.setsid()
    atexit._clear()  # the server's, who goes on
    for number, name in enumerate(("stdin", *_OUTPUTS)):
        os.dup2(
            os.open(folder / name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number else 0)), number
        )
    sys.stdin = os.fdopen(0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]
    code: object = 1
    try:
        _customize(os.environ.get("PYTHONPATH", ""))
        main()
    except SystemExit as exc:
        code = exc.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's own end looks at all of it.
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
