"""Ansible's commands without their start: a process that has imported Ansible forks one for each command.

A start costs a second of CPU time, most of it the same imports and YAML files, and a hundred tests each have one.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clusterctl.util.assets import asset

_WARM_UP = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.file: {path: /, state: directory}
    - ansible.builtin.assert: {that: 1 == 1, quiet: true}
"""


def ansible(
    command: str, argv: Sequence[str | Path], *, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ansible`, `ansible-inventory` or `ansible-playbook` with our roles and modules, by pipelining.

    ``environ`` is added to this process's environment; Ansible's own variables have no effect in it.
    """
    server, folder = _server()
    words = [command, *map(str, argv)]
    request = {"argv": words, "cwd": str(cwd), "environ": {**os.environ, **(environ or {})}}
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    said, errors = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, code, said, errors)


@cache
def _server() -> tuple[subprocess.Popen[str], Path]:
    folder = Path(tempfile.mkdtemp(prefix="ansible-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ours = asset("ansible")
    environ = {
        **os.environ,
        "ANSIBLE_HOME": str(folder / "home"),
        "ANSIBLE_ROLES_PATH": str(ours / "roles"),
        "ANSIBLE_LIBRARY": str(ours / "library"),
        "ANSIBLE_MODULE_UTILS": str(ours / "module_utils"),
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, folder],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return server, folder


def _serve(folder: Path) -> None:
    from ansible.cli import adhoc, inventory, playbook  # noqa: PLC0415
    from ansible.parsing.vault import VaultSecretsContext  # noqa: PLC0415

    commands = {
        "ansible": adhoc.AdHocCLI,
        "ansible-inventory": inventory.InventoryCLI,
        "ansible-playbook": playbook.PlaybookCLI,
    }
    answers = os.fdopen(os.dup(1), "w")
    _redirect(folder)
    (folder / "warm.yml").write_text(_WARM_UP)
    here = ["-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"]
    playbook.PlaybookCLI(["ansible-playbook", *here, str(folder / "warm.yml")]).run()
    VaultSecretsContext._current = None  # else each child fails, which initializes it again
    warnings.simplefilter("ignore")  # that each child configures the finder of collections again
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(commands[request["argv"][0]], request, folder)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _redirect(folder: Path) -> None:
    for number, name in enumerate(("stdout", "stderr"), start=1):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), number)


def _run(command: Any, request: dict[str, Any], folder: Path) -> None:
    code: Any = 1
    try:
        _redirect(folder)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environ"])
        command.cli_executor(request["argv"])
    except SystemExit as exc:
        code = exc.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
