"""How a run ends when the world around it does: no reader, no room, no home, no color, Ctrl-C, a
bug.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl import errors
from clusterctl.cli.options import COMMON, command
from clusterctl.cli.output import Screen
from tests.support.messages import shows
from tests.support.terminal import on_terminal, terminal
from tests.support.verbs import SCRIPT, Clusterctl

ESCAPE = "\x1b"


def shell(cli: Clusterctl, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `clusterctl` is the console script; its status is the first
    program's.
    """
    text = f'clusterctl() {{ "{SCRIPT}" "$@"; }}\n{line}\nexit "${{PIPESTATUS[0]}}"'
    env = {**os.environ, "CLUSTERCTL_HOME": str(cli.home)}
    argv = ["bash", "-c", text]
    nothing = subprocess.DEVNULL
    return subprocess.run(
        argv,
        cwd=cli.cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=nothing,
        check=False,
    )


def test_closed_pipe_of_the_reader_is_no_error(cli: Clusterctl) -> None:
    done = shell(cli, "clusterctl schema | head -n 1")
    assert done.stdout == "{\n"
    assert done.stderr == ""
    done = shell(cli, "clusterctl schema | true")
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE
    assert shell(cli, "clusterctl --help | true").stderr == ""
    done = shell(cli, "clusterctl validate 2>&1 >/dev/null | true")
    assert done.returncode in {0, 128 + signal.SIGPIPE}


@pytest.mark.parametrize(
    "verb",
    [
        "schema",
        "--help",
        "validate",
        "status -o json",
    ],
)
def test_output_to_a_full_disk_is_one_error(cli: Clusterctl, verb: str) -> None:
    done = shell(cli, f"clusterctl {verb} >/dev/full")
    assert done.returncode == 1
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert "\n  fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


def test_exit_code_reports_failure_if_stderr_cannot_be_written(cli: Clusterctl) -> None:
    assert shell(cli, "clusterctl status 2>/dev/full").returncode in {1, 2}
    done = shell(cli, "clusterctl -f missing.yaml status 2>/dev/full")
    assert done.returncode == 2


def test_errors_are_red_on_a_terminal_only(cli: Clusterctl) -> None:
    with terminal(cli, "-f", "missing.yaml", "validate", NO_COLOR="") as screen:
        assert screen.end() == 2
        assert ESCAPE in screen.shown
    assert ESCAPE not in cli("-f", "missing.yaml", "validate", rc=2).stderr


@pytest.mark.parametrize(
    ("argv", "no_color"),
    [
        (["-f", "missing.yaml", "validate", "--no-color"], ""),
        (["--no-color", "launch"], ""),
        (["launch"], "1"),
    ],
)
def test_plain_text_is_plain(cli: Clusterctl, argv: list[str], no_color: str) -> None:
    with terminal(cli, *argv, NO_COLOR=no_color) as screen:
        assert screen.end() == 2
        assert "error: " in screen.shown
        assert ESCAPE not in screen.shown


@pytest.mark.parametrize(
    ("ending", "code", "shown"),
    [
        ("n\r", 2, "nothing was done"),
        ("\x03", 130, "interrupted"),
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (signal.SIGHUP, 128 + signal.SIGHUP, ""),
    ],
    ids=["no", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_question_ends_with_the_code_of_its_answer_or_signal(
    cli: Clusterctl, ending: str | signal.Signals, code: int, shown: str
) -> None:
    (cli.home / "local").mkdir(parents=True)
    with terminal(cli, "down") as screen:
        screen.read_until("[y/N]")
        if isinstance(ending, str):
            screen.type(ending)
        else:
            screen.process.send_signal(ending)
        assert screen.end() == code
        assert shown in screen.shown
        assert "Traceback" not in screen.shown
        assert shown or "error" not in screen.shown


def test_background_run_is_ended_by_sigterm_only(cli: Clusterctl) -> None:
    """A script has Ctrl-C ignored there, and nohup that a terminal is closed."""
    (cli.home / "local").mkdir(parents=True)
    env = {**os.environ, "TERM": "xterm", "CLUSTERCTL_HOME": str(cli.home)}
    argv = ["env", "--ignore-signal=INT,HUP", cli.script, "down"]
    with on_terminal(argv, env, cli.cwd) as screen:
        screen.read_until("[y/N]")
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            screen.process.send_signal(number)
        assert screen.end() == 128 + signal.SIGTERM
        assert "Traceback" not in screen.shown


def test_ctrl_c_while_modules_are_read(cli: Clusterctl) -> None:
    program = (
        "import builtins, sys\n"
        "import clusterctl.__main__ as entry\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'clusterctl.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "entry.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 130
    assert done.stderr == ""


def test_clusterctl_home_of_an_unknown_user_is_refused(cli: Clusterctl) -> None:
    homeless = Clusterctl(cli.home, cli.cwd, {"CLUSTERCTL_HOME": "~nobody-of-that-name/x"})
    result = homeless("list", rc=1)
    assert "CLUSTERCTL_HOME" in result.stderr
    assert "bug" not in result.stderr


def test_list_names_a_damaged_workspace_beside_the_others(cli: Clusterctl) -> None:
    folder = cli.home / "broken"
    folder.mkdir(parents=True)
    (folder / "hosts.json").write_text("{}")  # no version of clusterctl writes this
    assert cli("-o", "json", "list").json["clusters"][0]["state"] == "damaged"
    spec = cli.cwd / "broken.yaml"
    spec.write_text(
        "version: 1\nname: broken\nprovider: {type: local}\npartitions: [{name: a, nodes: 1}]\n"
    )
    result = cli("status", "-f", spec, rc=2)
    assert str(folder / "hosts.json") in result.stderr
    assert "clusterctl up" in result.stderr


BUGGY = """#!{python}
from clusterctl.__main__ import main
from clusterctl.cli.main import app
from clusterctl.cli.messages import Notify
from clusterctl.cli.options import command

def bug(screen, notify: Notify = None):
    {{}}["nothing"]

app.add_command(command("bug", bug))
main()
"""


def test_bug_leaves_its_traceback_in_the_state_folder(cli: Clusterctl) -> None:
    """Without -v one line; the traceback is where that line says, for this user only, without the
    tokens of receivers.
    """
    script = cli.cwd / "buggy"
    token = "T0ken-Zq8vN3xW7pL2"  # noqa: S105
    script.write_text(BUGGY.format(python=sys.executable))
    script.chmod(0o700)
    result = Clusterctl(cli.home, cli.cwd, script=script)(
        "bug",
        "--notify",
        f"slack://{token}/x",
        f"--notify=curl -d @- https://ntfy.sh/{token}",
        rc=1,
    )
    (report,) = (cli.home / ".errors").iterdir()
    assert str(report) in result.stderr
    assert "\nTraceback " in report.read_text()
    assert token not in report.read_text()
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    assert stat.S_IMODE(report.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("package", "text", "verb"),
    [
        ("pydantic/__init__", "raise ImportError('of another Python')", "validate"),
        ("pydantic", "x = 1", "validate"),
        ("click", "raise RuntimeError('old')", "list"),
        ("ruamel/yaml", "1 / 0", "submit x.yaml --dry-run"),
    ],
)
def test_foreign_package_of_pythonpath_is_named(
    cli: Clusterctl, tmp_path: Path, package: str, text: str, verb: str
) -> None:
    file = tmp_path / "site" / f"{package}.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (cli.cwd / "x.yaml").write_text("job: train\n")
    # Not a fork of a process that has imported the right package.
    script = cli.cwd / "clusterctl"
    script.symlink_to(cli.script)
    environ = {"PYTHONPATH": f"{tmp_path}/none:{file.parents[package.count('/')]}"}
    result = Clusterctl(cli.home, cli.cwd, environ, script)(*verb.split(), rc=2)
    assert str(file) in result.stderr
    assert "env -u PYTHONPATH" in result.stderr


def test_folder_above_clusterctl_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package_folder = Path(errors.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{package_folder.parent}:{package_folder}:{tmp_path}")
    assert (
        errors.foreign_package_error(
            ImportError(path=str(package_folder / "clusterctl" / "api.py"))
        )
        is None
    )
    found = errors.foreign_package_error(ImportError(path=str(tmp_path / "click.py")))
    assert found is not None
    assert found.where == str(tmp_path / "click.py")


SIGNALLED_IN_A_FINALIZER = """
import signal, time, weakref
from clusterctl.cli.main import end_by_signals

class Thing: pass

end_by_signals()
thing = Thing()
ref = weakref.ref(thing, lambda _: signal.raise_signal({number}))
del thing
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_signal_is_not_lost_in_a_finalizer(number: signal.Signals, code: int) -> None:
    """Python only reports what is raised there: the run would go on, with a traceback on the
    screen.
    """
    program = SIGNALLED_IN_A_FINALIZER.format(number=int(number))
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=25, check=False)
    assert done.returncode == code
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("named", ["/", None])
def test_full_disk_anywhere_is_not_reported_as_a_bug(
    named: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(screen: Screen) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), named)

    other = command("other", fail)
    assert other.main([], standalone_mode=False, obj=dict.fromkeys(COMMON)) == 1
    shown = capsys.readouterr().err
    assert os.strerror(errno.ENOSPC) in shown
    assert "bug" not in shown


def test_path_without_permission_is_not_reported_as_a_bug(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(screen: Screen) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/inventory")

    other = command("other", fail)
    assert other.main([], standalone_mode=False, obj=dict.fromkeys(COMMON)) == 1
    assert shows(capsys.readouterr().err, "path-not-permitted")
