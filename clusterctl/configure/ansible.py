"""Runs of Ansible's playbooks with ansible-runner: install, configure, preview and restore hosts.

Each run has its own environment and processes, and stops all its processes at its end.
ansible-runner is imported only when a playbook runs, because most calls of `up` need no playbook.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from clusterctl.configure import events, inventory_file
from clusterctl.configure.events import Event, Recap, Status, TaskResult
from clusterctl.errors import ConfigureError, Failure
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.openssh import ssh_config_text, write_ssh_files
from clusterctl.util.assets import data_folder
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import SHORT, temporary_folder, under_subreaper
from clusterctl.util.progress import Reporter, report_steps

MAX_FORKS = 32
# While Ansible is silent, its processes are checked this often.
LOOK_EVERY_S = 5.0
# Interval at which the runner checks for cancellation.
_POLL_S = 0.2
_PATIENCE_S = 5.0
_TAIL_LINES = 20
_LONGEST_SOCKET_HOME = 50
# The name of our event with the exit code.
_ENDED = "clusterctl_ended"

# Variables that ansible-runner sets. All other ANSIBLE_* variables of the caller are dropped.
_RUNNER_KEYS = frozenset(
    {"ANSIBLE_STDOUT_CALLBACK", "ANSIBLE_CALLBACK_PLUGINS", "ANSIBLE_RETRY_FILES_ENABLED"}
)

# A running playbook: yields the results of its tasks, and returns the recap. Closing it stops
# Ansible.
Results = Generator[TaskResult, None, Recap]


@dataclass(frozen=True, slots=True)
class PlaybookRun:
    """The input of a playbook run.

    playbook: file name of the playbook in ansible/. inventory: path of the Ansible inventory.
    hosts: host -> its groups. The playbook is limited to these hosts. log: file for the complete
        output.
    check: run in check mode, without changes.
    """

    playbook: str
    inventory: Path
    hosts: Mapping[str, Collection[str]]
    log: Path
    check: bool = False


def run_playbook(run: PlaybookRun) -> Results:
    """Run a playbook: yield the result of each task, and return the summary. Ctrl-C also stops
    Ansible.

    Raise ConfigureError if a task fails, a host is unreachable, or Ansible itself can't run.
    """
    # The path of a socket is limited to 107 characters (unix(7)), and mitogen's names need about
    # 45. With a longer path mitogen's process dies, and the playbook hangs.
    temporary = tempfile.gettempdir()
    home = Path(temporary) if len(os.fsencode(temporary)) <= _LONGEST_SOCKET_HOME else SHORT
    failed: list[Event] = []
    notes: dict[str, tuple[str, ...]] = {}
    recap: Recap | None = None
    rc = -1
    with (
        temporary_folder(run.log.parent, prefix=".ansible-") as private,
        temporary_folder(home) as sockets,
        _open_log(run.log) as log,
        closing(_events(run, private, sockets)) as run_events,
    ):
        for event in run_events:
            data = event.get("event_data", {})
            if text := event.get("stdout"):
                # A full disk must not leave a host half configured.
                with suppress(OSError):
                    log.write(f"{text}\n".encode(errors="replace"))
            match event["event"]:
                case "runner_on_failed" | "runner_on_unreachable":
                    failed.append(event)
                case "runner_on_ok" if host_notes := data.get("res", {}).get("clusterctl_notes"):
                    notes[data["host"]] = (*notes.get(data["host"], ()), *host_notes)
                case "playbook_on_stats":
                    ok = {host: data["ok"].get(host, 0) for host in data["processed"]}
                    recap = Recap(ok, sum(data["changed"].values()), notes)
                case "clusterctl_ended":
                    rc = event["rc"]
            if result := events.result_of(event, run.hosts):
                yield result
    if rc == 0 and recap is not None:
        return recap
    raise _error(run, failed, rc)


def _open_log(log: Path) -> IO[bytes]:
    """Open the log to append. The file is unbuffered, so a failed write to a full disk is not
    repeated.
    """
    with translating_write_errors(log):
        return os.fdopen(
            os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0
        )


def _events(run: PlaybookRun, private: Path, sockets: Path) -> Generator[Event, None, None]:
    """Run Ansible in another thread. Yield ansible-runner's events, then the exit code as an
    event.
    """
    import ansible_runner

    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    cancelled = threading.Event()

    def accept(event: Event) -> bool:
        inbox.put(event)
        # The runner must not store the event in a file.
        return False

    config = _prepare(ansible_runner.RunnerConfig, run, private, sockets)
    runner = ansible_runner.Runner(
        config=config, event_handler=accept, cancel_callback=cancelled.is_set
    )

    def work() -> None:
        reason = ""
        try:
            runner.run()
        except (ansible_runner.exceptions.AnsibleRunnerException, OSError) as exc:
            reason = str(exc) or type(exc).__name__
        finally:
            # The consumer waits for this event, even after an exception. rc is None after a signal.
            inbox.put(
                {"event": _ENDED, "rc": -1 if runner.rc is None else int(runner.rc), "why": reason}
            )

    thread = threading.Thread(target=work, name="ansible", daemon=True)
    thread.start()
    pid: int | None = None
    try:
        while (event := _next_event(inbox, pid))["event"] != _ENDED:
            pid = event["pid"] if event["event"] == "playbook_on_start" else pid
            yield event
    finally:
        _stop(thread, pid)
        # Makes the runner kill the rest of Ansible's process group.
        cancelled.set()
        thread.join()
    if event["why"]:
        raise ConfigureError("Ansible could not be run", code="ansible-not-run", why=event["why"])
    yield event


def _next_event(inbox: queue.SimpleQueue[Event], pid: int | None) -> Event:
    """Wait for the next event. Raise ConfigureError if Ansible (``pid``) waits for a process that
    died.
    """
    eldest: int | None = None
    while True:
        try:
            return inbox.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            # At its normal end, the process is dead for a moment. So it must be dead in two checks
            # in a row.
            previous = eldest
            eldest = _dead_child(pid) if pid is not None else None
            if eldest is not None and eldest == previous:
                text = "Ansible's connection process died"
                cause = "the process was killed, perhaps because this machine ran out of memory"
                fix = "run `clusterctl up` again, which continues from here"
                failure = Failure(
                    "ansible-lost", f"{text}: {cause}", None, "configure", fix, retryable=True
                )
                raise ConfigureError(
                    text, code="ansible-lost", why=cause, fix=fix, failures=(failure,)
                ) from None


def _stop(thread: threading.Thread, pid: int | None) -> None:
    # The subreaper process around Ansible stops Ansible's child processes.
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if pid is not None and thread.is_alive():
            with suppress(ProcessLookupError):
                os.kill(pid, sign)
            thread.join(_PATIENCE_S)


def _prepare(config_class: Any, run: PlaybookRun, private: Path, sockets: Path) -> Any:
    variables = {**_environment(private), "TMPDIR": str(sockets)}
    config = config_class(
        private_data_dir=str(private),
        playbook=str(data_folder("ansible") / run.playbook),
        inventory=str(run.inventory),
        limit=",".join(run.hosts),
        cmdline="--check --diff" if run.check else None,
        forks=max(1, min(len(run.hosts), MAX_FORKS)),
        envvars=dict(variables),
        fact_cache_type="memory",
        quiet=True,
    )
    config.prepare()
    config.pexpect_timeout = _POLL_S
    config.suppress_output_file = True
    keep = _RUNNER_KEYS | set(variables)
    config.env = {k: v for k, v in config.env.items() if not k.startswith("ANSIBLE_") or k in keep}
    # Use the Ansible of this Python environment, even if PATH has another first.
    program = Path(sys.executable).parent / config.command[0]
    config.command[0] = str(program) if program.exists() else config.command[0]
    config.command = under_subreaper(config.command)
    return config


def _environment(private: Path) -> Mapping[str, str]:
    """Return environment variables that replace the user's Ansible settings and locale."""
    here = str(Path(sys.executable).parent)
    if importlib.util.find_spec("ansible_mitogen") is None:
        fix = "install clusterctl again, with its dependencies"
        raise ConfigureError(
            "the Python package mitogen is missing", code="mitogen-missing", fix=fix
        )
    return {
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # Ansible refuses to run without UTF-8.
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "ANSIBLE_CONFIG": str(data_folder("ansible") / "ansible.cfg"),
        "ANSIBLE_HOME": str(private / "home"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_STDOUT_CALLBACK": "default",
        "ANSIBLE_CALLBACK_PLUGINS": "",
        # mitogen keeps its own connections.
        "ANSIBLE_SSH_ARGS": "-o ControlPath=none",
        "ANSIBLE_STRATEGY": "clusterctl_linear",
        "ANSIBLE_STRATEGY_PLUGINS": str(data_folder("ansible") / "strategy_plugins"),
        # Ansible warns about every third-party strategy.
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
    }


def _error(run: PlaybookRun, failed: Iterable[Event], rc: int) -> ConfigureError:
    failures = events.failures_of(failed)
    hint = f"the complete output is in {run.log}"
    if not failures:
        lines = run.log.read_text(errors="replace").splitlines()
        message = f"Ansible stopped with exit code {rc} and reported no failed host"
        tail = "\n".join(lines[-_TAIL_LINES:])
        return ConfigureError(
            message, code="ansible-ended-early", where=run.playbook, why=tail, fix=hint
        )
    error = ConfigureError.of_hosts(
        "configuration failed on {hosts}", failures, code="configure", then=hint
    )
    error.where = failures[0].phase or run.playbook
    return error


def _dead_child(parent: int) -> int | None:
    """Return the pid of a process's oldest child process if the child is a zombie, else None."""
    # The process may have ended or have no child, or this system has no /proc.
    with suppress(OSError, IndexError):
        eldest = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]
        state = Path(f"/proc/{eldest}/stat").read_text().rpartition(")")[2].split()[0]
        return int(eldest) if state == "Z" else None
    return None


Verb = Literal["configure", "install_first", "introduce", "restore", "seal"]
_SEALED: Final = ("configure", "install_first")


def run(
    verb: Verb, inventory: Inventory, workspace: Workspace, *, hosts: Collection[str]
) -> Results:
    """Run a playbook on these hosts of the cluster. A repeated run changes nothing. ``verb``:

    - configure: configure everything. The Ansible inventory and the files in ``workspace.rendered``
      must be written. A subset of hosts is valid only if nothing else has changed since all hosts
      were configured, because hosts depend on each other.
    - install_first: run the install part of every role, for hosts that do not start from an
      installed image.
    - introduce: update the list of the cluster's hosts: names, addresses, the firewall. Restart
      nothing.
    - restore: give hosts back the state that they had before the first `up`. The returned summary
      has notes on everything that could not be restored. Restored or never configured hosts stay as
      they are.
    - seal: after a failure, record clusterctl's changes so far, to tell them from later changes by
      the user.

    Raise ConfigureError, with a failure for each host, if tasks fail. The output is in
    ``workspace.logs``.
    """
    playbook = "site" if verb == "configure" and not inventory.baked else verb
    try:
        return (yield from _play(playbook, inventory, workspace, hosts))
    except ConfigureError:
        if verb in _SEALED and inventory.traits.adopts_hosts:
            with suppress(ConfigureError):
                yield from run("seal", inventory, workspace, hosts=hosts)
        raise


def restore(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, reporter: Reporter
) -> Mapping[str, tuple[str, ...]]:
    """Restore the state that these hosts had before `up`. Return host -> things that can't be
    restored.
    """
    inventory_file.write_restore_inventory(inventory, workspace)
    record_inventory(inventory, workspace)
    return report_steps(run("restore", inventory, workspace, hosts=hosts), reporter).notes


def record_inventory(inventory: Inventory, workspace: Workspace) -> None:
    """Write the inventory to hosts.json, and ssh_config and known_hosts for its hosts."""
    write_ssh_files(inventory, workspace)
    write_atomic(workspace.inventory, inventory.text)
    # hosts.json now has all hosts of joining.json.
    workspace.joining.unlink(missing_ok=True)


def preview(
    inventory: Inventory, workspace: Workspace, *, hosts: Collection[str]
) -> tuple[tuple[TaskResult, ...], tuple[Failure, ...]]:
    """Run Ansible's check mode on these hosts. Return (the tasks that would change something,
    failures).

    After a failure on a host, later tasks are not checked there. ConfigureError: Ansible itself
    can't run.
    """
    playbook = "configure" if inventory.baked else "site"
    results: list[TaskResult] = []
    failures: tuple[Failure, ...] = ()
    try:
        results.extend(_play(playbook, inventory, workspace, hosts, check=True))
    except ConfigureError as exc:
        failures = exc.failures
        if failures[0].host is None:
            raise
    return tuple(task for task in results if task.how == Status.CHANGED), failures


def _play(
    playbook: str,
    inventory: Inventory,
    workspace: Workspace,
    hosts: Collection[str],
    *,
    logs: Workspace | None = None,
    check: bool = False,
) -> Results:
    """Run a playbook with the workspace's Ansible inventory. ``logs``: the workspace for Ansible's
    output.
    """
    groups = {host.name: host.roles for host in inventory.hosts if host.name in hosts}
    log = (logs or workspace).logs / f"ansible-{time.strftime('%Y%m%dT%H%M%S')}.log"
    return run_playbook(
        PlaybookRun(f"{playbook}.yml", workspace.ansible_inventory, groups, log, check)
    )


def install_image(
    spec: ClusterSpec, image: Host, *, wheels: Path, lock: Path, workspace: Workspace
) -> Results:
    """Run the install part of every role on ``image``, a host that becomes a disk image. Start no
    service.

    spec: sets Slurm's release. wheels: folder with all wheels of ``lock``, a requirements file with
    hashes. Raise ConfigureError if a task fails. Ansible's output goes to ``workspace.logs``.
    """
    with _image_inventory((image,), workspace) as (inventory, own):
        text = inventory_file.image_inventory_text(spec, inventory, own.ssh_config, wheels, lock)
        write_atomic(own.ansible_inventory, text)
        return (yield from _play("install", inventory, own, inventory.names, logs=workspace))


def configure_class(
    images: Sequence[Host],
    variables: inventory_file.Variables,
    slurm: Mapping[str, str],
    *,
    workspace: Workspace,
) -> Results:
    """Run Ansible on machines that become images: apply the configuration that all hosts of a group
    share.

    variables: the variables of the roles; see ``class_variables``.
    slurm: name -> content of the Slurm files that set up the accounting database on a controller.
    Raise ConfigureError if a task fails. Ansible's output goes to ``workspace.logs``.
    """
    with _image_inventory(images, workspace) as (inventory, own):
        for name, content in slurm.items():
            write_atomic(own.rendered / name, content)
        text = inventory_file.class_inventory_text(
            inventory, own.ssh_config, variables, own.rendered
        )
        write_atomic(own.ansible_inventory, text)
        return (yield from _play("class", inventory, own, inventory.names, logs=workspace))


def make_image(
    spec: ClusterSpec,
    inventory: Inventory,
    variables: inventory_file.Variables,
    *,
    workspace: Workspace,
    logs: Workspace,
) -> Results:
    """Make the compute host of this inventory ready to be an image: install, configure, remove keys
    and logs.

    workspace: a workspace with the inventory's ssh_config. logs: the workspace for Ansible's
        output.
    """
    text = inventory_file.image_of_class_text(spec, inventory, workspace, variables)
    write_atomic(workspace.ansible_inventory, text)
    return _play(
        "image", inventory, workspace, [host.name for host in inventory.compute], logs=logs
    )


@contextmanager
def _image_inventory(
    images: Sequence[Host], workspace: Workspace
) -> Iterator[tuple[Inventory, Workspace]]:
    """Yield (inventory of the machines ``images``, temporary workspace with SSH settings for
    them).
    """
    inventory = Inventory(
        cluster="",
        cluster_id="",
        provider="",
        hosts=tuple(images),
        network="",
        shared="",
        baked=False,
    )
    with temporary_folder() as folder:
        own = Workspace(folder / "image")
        own.create()
        write_atomic(own.known_hosts, inventory.known_hosts())
        write_atomic(own.ssh_config, ssh_config_text(inventory, own, workspace.key))
        yield inventory, own
