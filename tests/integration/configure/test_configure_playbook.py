"""Playbooks run by Ansible and mitogen on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from clusterctl.configure.ansible import PlaybookRun, preview, run_playbook
from clusterctl.configure.events import TaskStatus
from clusterctl.errors import ConfigureError
from clusterctl.hosts.remote_probe import block_mark, file_mark
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import SILENT, HostStep, Reporter, report_steps
from clusterctl.util.remote_wanted import read_wanted
from tests.support.forks import ansible
from tests.support.messages import condition, refused
from tests.support.plays import run_play
from tests.support.processes import eventually

PLAYBOOKS = Path(__file__).parent / "playbooks"
# Tasks of report.yml.
BREAKS = "It breaks on one host"
LAST = "The others go on"
WriteInventory = Callable[..., Path]
# Files of wanted.yml.
KINDS = ("text", "secret", "one", "two", "template")


def processes_of(inventory: Path) -> list[int]:
    """Return the processes that have an inventory in their command line, the oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if os.fsencode(inventory) in (folder / "cmdline").read_bytes():
                # Numbers of processes begin again after the highest. starttime in proc_pid_stat(5).
                started = (folder / "stat").read_bytes().rpartition(b")")[2].split()[19]
                found.append((int(started), int(folder.name)))
    return [pid for _, pid in sorted(found)]


def make_run(playbook: str, inventory: Path) -> PlaybookRun:
    return PlaybookRun(
        str(PLAYBOOKS / playbook), inventory, ["all"], inventory.parent / "ansible.log"
    )


class Steps(Reporter, list[HostStep]):
    """A reporter that keeps the steps of hosts."""

    def progress(self, message: str | HostStep) -> None:
        assert isinstance(message, HostStep)
        self.append(message)


def test_playbook_records_what_was_to_be_written(tmp_path: Path) -> None:
    """Not what is found on the host, and nothing in check mode."""
    (play,) = yaml.safe_load((PLAYBOOKS / "wanted.yml").read_text())
    record = tmp_path / "one.wanted.json"
    assert run_play(tmp_path, play, ("ctl", "one"), known={}, check=True).returncode == 0
    assert not record.exists()
    for changed in (True, False):
        record.unlink(missing_ok=True)
        done = run_play(tmp_path, play, ("ctl", "one"), known={})
        assert ("changed=0" not in done.stdout) == changed, done.stdout
        found = {
            f"file {path}": file_mark(str(path))
            for path in map(tmp_path.joinpath, (f"one.{kind}" for kind in KINDS))
        }
        block = str(tmp_path / "one.block")
        found[f"block {block}"] = block_mark(block, "# BEGIN", "# END")
        assert read_wanted(str(record)) == {"marks": found}


def test_playbook_reports_progress_and_recap(
    local_inventory: WriteInventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of temporary files is too long for sockets of mitogen."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run = make_run("report.yml", local_inventory("one", "two"))
    told = Steps()
    recap = report_steps(run_playbook(run), told)
    assert (recap.ok, recap.changed) == ({"one": 4, "two": 4}, 2)
    assert {step.of for step in told} == {2}
    assert [(step.task, step.how) for step in told if step.host == "one"] == [
        ("Same as before", TaskStatus.OK),
        ("Something new", TaskStatus.CHANGED),
        (LAST, TaskStatus.OK),
    ]
    assert "every outcome" in run.log.read_text()
    assert run.log.stat().st_mode & 0o077 == 0
    assert not list(folder.iterdir())


def test_failure_names_host_task_and_cause(local_inventory: WriteInventory, tmp_path: Path) -> None:
    inventory = local_inventory("good", "bad")
    config = tmp_path / "ssh_config"
    config.write_text("Host away\n    HostName 127.0.0.1\n    Port 1\n")
    away = f"away ansible_connection=ssh ansible_ssh_common_args='-F {config}'\n"
    inventory.write_text(away + inventory.read_text())
    run = make_run("report.yml", inventory)
    told: list[HostStep] = []
    with pytest.raises(ConfigureError) as raised:
        told.extend(run_playbook(run))
    failures = {failure.host: failure for failure in raised.value.failures}
    assert {host: condition(one) for host, one in failures.items()} == {
        "away": "unreachable",
        "bad": "configure-failed",
    }
    assert failures["away"].retryable
    assert failures["bad"].phase == BREAKS
    assert "all is lost" in failures["bad"].cause
    assert str(run.log) in raised.value.fix
    assert [progress.task for progress in told if progress.host == "good"][-1] == LAST


def test_preview_without_mitogen_is_refused(
    inventory: Inventory, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without mitogen, check mode can't tell the host of a failing task."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with refused("internal/installation", ConfigureError):
        preview(inventory, workspace, hosts=[])


def test_skipped_tasks_start_no_process(local_inventory: WriteInventory, tmp_path: Path) -> None:
    """Results and errors of conditions equal those of Ansible itself."""
    argv = ["-v", "-i", local_inventory("one", "two"), PLAYBOOKS / "skipped.yml"]
    done = ansible("ansible-playbook", argv, cwd=tmp_path)
    failed = [line for line in done.stdout.splitlines() if line.startswith("fatal: ")]
    assert (done.returncode, len(failed)) == (2, 1), done.stdout
    assert failed[0].startswith("fatal: [two]")
    assert "'nowhere' is undefined" in failed[0]
    one, two = ((tmp_path / host).read_text().split() for host in ("one", "two"))
    assert one == two  # asked once for each host, by one and the same process
    assert len(one) == 1
    assert "whisper" not in done.stdout


def test_tasks_without_a_connection_run_without_a_process(
    local_inventory: WriteInventory, tmp_path: Path
) -> None:
    """Each host has its own variables, in loops too, and its own errors."""
    argv = ["-i", local_inventory("one", "two"), PLAYBOOKS / "without_host.yml"]
    (tmp_path / "one.yml").write_text("of_file: one\n")
    for host in ("one", "two"):
        set_fact = [{"ansible.builtin.set_fact": {"included": host}}]
        (tmp_path / f"tasks-{host}.yml").write_text(json.dumps(set_fact))
    role = tmp_path / "greeter" / "tasks"
    role.mkdir(parents=True)
    (role / "main.yml").write_text(
        '[{"ansible.builtin.set_fact": {"greeted": "{{ greeter_of }}"}}]'
    )
    done = ansible("ansible-playbook", argv, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    callers = {pid for host in ("one", "two") for pid in (tmp_path / host).read_text().split()}
    assert len(callers) == 1


def test_tasks_have_umask_022_if_the_host_has_another(
    local_inventory: WriteInventory, tmp_path: Path
) -> None:
    """As with UMASK 077 in login.defs, which benchmarks of hardening ask for."""
    run = make_run("umask.yml", local_inventory("one", folder=tmp_path))
    umask = os.umask(0o077)
    try:
        report_steps(run_playbook(run), SILENT)
    finally:
        os.umask(umask)
    assert (tmp_path / "of-a-module").stat().st_mode & 0o777 == 0o755


# Asks on the terminal, as sudo does, and runs the command with the host's name in BECAME.
SUDO = """\
#!/bin/sh
while [ "$1" != -- ]; do [ "$1" != -p ] || prompt=$2; shift; done
shift
exec 3<>/dev/tty
printf %s "$prompt" >&3
IFS= read -r answer <&3
[ "$answer" = "$(cat "$0.password")" ] || exit 1
BECAME=$(basename "$0") exec "$@"
"""


@pytest.fixture
def asking(local_inventory: WriteInventory, tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Return a function that writes an inventory of hosts whose sudo asks for these passwords."""

    def write(passwords: dict[str, str]) -> Path:
        for host, password in passwords.items():
            (tmp_path / host).write_text(SUDO)
            (tmp_path / host).chmod(0o755)
            (tmp_path / f"{host}.password").write_text(password)
        inventory = local_inventory(*passwords)
        text = inventory.read_text()
        for host in passwords:
            text = text.replace(f"{host} ", f"{host} ansible_become_exe={tmp_path / host} ", 1)
        inventory.write_text(text)
        return inventory

    return write


def test_password_of_each_host_reaches_sudo_by_a_pipe(
    asking: Callable[[dict[str, str]], Path],
) -> None:
    """With mitogen. Ansible must not read a password as a template."""
    passwords = {"one": "correct horse {{ battery }}", "two": "correct horse 'staple\""}
    run = replace(make_run("become.yml", asking(passwords)), passwords=passwords)
    recap = report_steps(run_playbook(run), SILENT)
    assert recap.ok == dict.fromkeys(passwords, 3)
    assert "correct horse" not in run.log.read_text() + repr(run)


def test_wrong_password_is_an_error_of_its_host(
    asking: Callable[[dict[str, str]], Path],
) -> None:
    inventory = asking({"one": "right", "two": "right"})
    run = replace(make_run("become.yml", inventory), passwords={"one": "right", "two": "wrong"})
    with pytest.raises(ConfigureError) as raised:
        report_steps(run_playbook(run), SILENT)
    assert {failure.host for failure in raised.value.failures} == {"two"}


def test_unreadable_playbook_has_the_message_of_ansible(
    local_inventory: WriteInventory,
) -> None:
    run = make_run("no-such-playbook.yml", local_inventory("one"))
    with pytest.raises(ConfigureError) as raised:
        report_steps(run_playbook(run), SILENT)
    assert "no-such-playbook.yml" in raised.value.why


def test_ansible_settings_of_the_user_are_ignored(
    local_inventory: WriteInventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = tmp_path / "caller"
    caller.mkdir()
    (caller / ".ansible.cfg").write_text("[defaults]\nroles_path=/caller\nstrategy=free\n")
    (caller / "ansible.cfg").write_text("[defaults]\nroles_path=/caller\nstrategy=free\n")
    before = sorted(caller.iterdir())
    monkeypatch.chdir(caller)
    monkeypatch.setenv("HOME", str(caller))
    monkeypatch.setenv("LC_ALL", "C")
    for key, value in {
        "STRATEGY": "free",
        "ROLES_PATH": "/caller",
        "STDOUT_CALLBACK": "minimal",
        "HOST_KEY_CHECKING": "False",
        "VAULT_PASSWORD_FILE": "/caller/none",
    }.items():
        monkeypatch.setenv(f"ANSIBLE_{key}", value)
    recap = report_steps(run_playbook(make_run("settings.yml", local_inventory("one"))), SILENT)
    assert recap.ok == {"one": 1}
    assert sorted(caller.iterdir()) == before


def test_error_in_the_progress_callback_ends_ansible(
    local_inventory: WriteInventory, tmp_path: Path
) -> None:
    class Refusing(Reporter):
        def progress(self, message: str | HostStep) -> None:
            raise RuntimeError(str(message))

    inventory = local_inventory("one", never=tmp_path / "never")
    with pytest.raises(RuntimeError) as raised:
        report_steps(run_playbook(make_run("forever.yml", inventory)), Refusing())
    assert "Begin" in str(raised.value)
    assert not processes_of(inventory)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder for temporary files of its own, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


PROGRAM = """
import sys
from pathlib import Path
from clusterctl.configure.ansible import PlaybookRun, run_playbook
run = PlaybookRun(sys.argv[1], Path(sys.argv[2]), ["all"], Path(sys.argv[3]))
for task in run_playbook(run):
    print(task, flush=True)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_interrupt_stops_all_processes_and_leaves_only_the_log(
    local_inventory: WriteInventory, tmp_path: Path, short_tmp: Path, ending: signal.Signals
) -> None:
    inventory = local_inventory("one", never=tmp_path / "never")
    log = tmp_path / "log"
    argv = [sys.executable, "-c", PROGRAM, PLAYBOOKS / "forever.yml", inventory, log]
    env = {**os.environ, "TMPDIR": str(short_tmp)}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        assert process.stdout
        assert "Begin" in process.stdout.readline()
        eventually(lambda: "Wait" in log.read_text(), 120)
        os.kill(process.pid, ending)
        process.communicate(timeout=120)
    eventually(lambda: not processes_of(inventory), 120)
    if ending == signal.SIGINT:
        assert list(short_tmp.iterdir()) == []
        assert {path.name for path in tmp_path.iterdir()} == {inventory.name, "log"}


def test_killed_mitogen_process_is_an_error(
    local_inventory: WriteInventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ansible itself would wait for its task for ever."""
    monkeypatch.setattr("clusterctl.configure.ansible.LOOK_EVERY_S", 0.5)
    begun = tmp_path / "begun"
    inventory = local_inventory("one", begun=begun)
    run = make_run("stuck.yml", inventory)

    def kill_it() -> None:
        eventually(begun.exists, 120)
        _reaper, _ansible, mitogens, *_ = processes_of(inventory)
        os.kill(mitogens, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_it)
        with refused("configure-failed/connection", ConfigureError) as raised:
            report_steps(run_playbook(run), SILENT)
        killed.result()
    (failure,) = raised.value.failures
    assert failure.retryable
    assert not processes_of(inventory)
