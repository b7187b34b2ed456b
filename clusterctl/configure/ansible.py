"""Ansible as the rest of clusterctl sees it: install, configure, preview and restore hosts by ansible-runner.

Each run has its own environment and its own processes, none of which outlives it. ansible-runner is imported
when a playbook is run: most calls of `up` run none.
"""

from __future__ import annotations

import importlib.util
import json
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
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.assets import asset
from clusterctl.util.disk import writing
from clusterctl.util.process import SHORT, temporary_folder, under_subreaper
from clusterctl.util.progress import Reporter, follow

MAX_FORKS = 32
LOOK_EVERY_S = 5.0  # while Ansible says nothing
_POLL_S = 0.2  # how often the runner looks whether it was cancelled
_PATIENCE_S = 5.0
_TAIL_LINES = 20
_LONGEST_SOCKET_HOME = 50
_ENDED = "clusterctl_ended"  # the event that has the exit code

# What ansible-runner sets itself; every other ANSIBLE_* of the caller is dropped.
_RUNNER_KEYS = frozenset(
    {"ANSIBLE_STDOUT_CALLBACK", "ANSIBLE_CALLBACK_PLUGINS", "ANSIBLE_RETRY_FILES_ENABLED"}
)

# A playbook that runs: the results of its tasks as they come, then the recap. Closing it ends Ansible.
Results = Generator[TaskResult, None, Recap]


@dataclass(frozen=True, slots=True)
class PlaybookRun:
    """A playbook of ansible/, the inventory it runs on, and the file that gets its whole output.

    hosts: those it is limited to, each with its groups.
    check: only say what would change.
    """

    playbook: str
    inventory: Path
    hosts: Mapping[str, Collection[str]]
    log: Path
    check: bool = False


def run_playbook(run: PlaybookRun) -> Results:
    """Run a playbook, as it is iterated over. An interrupt ends Ansible first.

    Raises:
        ConfigureError: a task failed, a host was not reached, or Ansible itself could not run.
    """
    # A socket's path has 107 characters at most (unix(7)); mitogen's names need about 45. With a longer path
    # its process dies, and the playbook waits for it for ever.
    temporary = tempfile.gettempdir()
    home = Path(temporary) if len(os.fsencode(temporary)) <= _LONGEST_SOCKET_HOME else SHORT
    failed: list[Event] = []
    notes: dict[str, tuple[str, ...]] = {}
    recap: Recap | None = None
    rc = -1
    with (
        temporary_folder(run.log.parent, prefix=".ansible-") as private,  # what modules get may be secret
        temporary_folder(home) as sockets,
        _opened(run.log) as log,
        closing(_events(run, private, sockets)) as told,
    ):
        for event in told:
            data = event.get("event_data", {})
            if text := event.get("stdout"):
                with suppress(OSError):  # a full disk: no reason to leave a host half configured
                    log.write(f"{text}\n".encode(errors="replace"))
            match event["event"]:
                case "runner_on_failed" | "runner_on_unreachable":
                    failed.append(event)
                case "runner_on_ok" if told_notes := data.get("res", {}).get("clusterctl_notes"):
                    notes[data["host"]] = (*notes.get(data["host"], ()), *told_notes)
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


def _opened(log: Path) -> IO[bytes]:
    """Open the log to append to it, without a buffer: what a full disk did not take is not tried again."""
    with writing(log):
        return os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0)


def _events(run: PlaybookRun, private: Path, sockets: Path) -> Generator[Event, None, None]:
    """Run Ansible in a thread and take its events here: an interrupt reaches us, not the runner.

    The last event has the exit code.
    """
    import ansible_runner  # noqa: PLC0415

    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    cancelled = threading.Event()

    def accept(event: Event) -> bool:
        inbox.put(event)
        return False  # keep no file of it

    config = _prepare(ansible_runner.RunnerConfig, run, private, sockets)
    runner = ansible_runner.Runner(config=config, event_handler=accept, cancel_callback=cancelled.is_set)

    def work() -> None:
        why = ""
        try:
            runner.run()
        except (ansible_runner.exceptions.AnsibleRunnerException, OSError) as exc:
            why = str(exc) or type(exc).__name__
        finally:  # whatever it raises: this event is waited for
            # No exit code: a signal ended it.
            inbox.put({"event": _ENDED, "rc": -1 if runner.rc is None else int(runner.rc), "why": why})

    thread = threading.Thread(target=work, name="ansible", daemon=True)
    thread.start()
    pid: int | None = None
    try:
        while (event := _next(inbox, pid))["event"] != _ENDED:
            pid = event["pid"] if event["event"] == "playbook_on_start" else pid
            yield event
    finally:
        _end(thread, pid)
        cancelled.set()  # kills what is left of Ansible's process group
        thread.join()
    if event["why"]:
        raise ConfigureError("Ansible could not be run", code="ansible-not-run", why=event["why"])
    yield event


def _next(inbox: queue.SimpleQueue[Event], pid: int | None) -> Event:
    """The next event. There will be none if a process is dead that Ansible waits for."""
    eldest: int | None = None
    while True:
        try:
            return inbox.get(timeout=LOOK_EVERY_S)
        except queue.Empty:  # it must be dead at two looks in a row: at the end it is for a moment
            before, eldest = eldest, _dead_eldest(pid) if pid is not None else None
            if eldest is not None and eldest == before:
                what = "Ansible lost the process through which it reaches the hosts"
                why = "it was killed, perhaps for want of memory on this machine"
                fix = "run `clusterctl up` again, which goes on from here"
                failure = Failure("ansible-lost", f"{what}: {why}", None, "configure", fix, retryable=True)
                raise ConfigureError(
                    what, code="ansible-lost", why=why, fix=fix, failures=(failure,)
                ) from None


def _end(thread: threading.Thread, pid: int | None) -> None:
    """End Ansible if it still runs; what it leaves, its subreaper ends."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if pid is not None and thread.is_alive():
            with suppress(ProcessLookupError):
                os.kill(pid, sign)
            thread.join(_PATIENCE_S)


def _prepare(config_class: Any, run: PlaybookRun, private: Path, sockets: Path) -> Any:
    """The configuration of ansible-runner."""
    ours = {**_environment(private), "TMPDIR": str(sockets)}
    config = config_class(
        private_data_dir=str(private),
        playbook=str(asset("ansible") / run.playbook),
        inventory=str(run.inventory),
        limit=",".join(run.hosts),
        cmdline="--check --diff" if run.check else None,
        forks=max(1, min(len(run.hosts), MAX_FORKS)),
        envvars=dict(ours),
        fact_cache_type="memory",
        quiet=True,
    )
    config.prepare()
    config.pexpect_timeout, config.suppress_output_file = _POLL_S, True
    keep = _RUNNER_KEYS | set(ours)
    config.env = {k: v for k, v in config.env.items() if not k.startswith("ANSIBLE_") or k in keep}
    program = Path(sys.executable).parent / config.command[0]  # our own, whatever the PATH says
    config.command[0] = str(program) if program.exists() else config.command[0]
    config.command = under_subreaper(config.command)
    return config


def _environment(private: Path) -> Mapping[str, str]:
    """Variables that make a run independent of the caller's Ansible settings, locale and home."""
    here = str(Path(sys.executable).parent)
    if importlib.util.find_spec("ansible_mitogen") is None:
        fix = "install clusterctl again, with its dependencies"
        raise ConfigureError("mitogen is missing", code="mitogen-missing", fix=fix)
    return {
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "LC_ALL": "C.UTF-8",  # Ansible refuses to run without UTF-8
        "PYTHONUNBUFFERED": "1",
        "ANSIBLE_CONFIG": str(asset("ansible") / "ansible.cfg"),
        "ANSIBLE_HOME": str(private / "home"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_STDOUT_CALLBACK": "default",
        "ANSIBLE_CALLBACK_PLUGINS": "",  # the runner adds its own to these, not to the caller's
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=no",  # no master that outlives the run; mitogen keeps its own
        "ANSIBLE_STRATEGY": "clusterctl_linear",
        "ANSIBLE_STRATEGY_PLUGINS": str(asset("ansible") / "strategy_plugins"),
        "ANSIBLE_DEPRECATION_WARNINGS": "False",  # Ansible warns of every foreign strategy
    }


def _error(run: PlaybookRun, failed: Iterable[Event], rc: int) -> ConfigureError:
    failures = events.failures_of(failed)
    then = f"the whole output is in {run.log}"
    if not failures:
        lines = run.log.read_text(errors="replace").splitlines()
        what = f"Ansible ended with exit code {rc} before it could say which host failed"
        why = "\n".join(lines[-_TAIL_LINES:])
        return ConfigureError(what, code="ansible-ended-early", where=run.playbook, why=why, fix=then)
    error = ConfigureError.of_hosts("configuration failed on {hosts}", failures, code="configure", then=then)
    error.where = failures[0].phase or run.playbook
    return error


def _dead_eldest(parent: int) -> int | None:
    """The first process that this one has started and not yet buried, if it is dead."""
    with suppress(OSError, IndexError):  # it has ended, or has started none; or there is no /proc here
        eldest = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]
        state = Path(f"/proc/{eldest}/stat").read_text().rpartition(")")[2].split()[0]
        return int(eldest) if state == "Z" else None
    return None


Verb = Literal["configure", "install_first", "introduce", "restore", "seal"]
_SEALED: Final = ("configure", "install_first")


def run(verb: Verb, inventory: Inventory, workspace: Workspace, *, hosts: Collection[str]) -> Results:
    """Run a playbook on these hosts of the cluster. Run again, it changes nothing.

    - configure: everything. The Ansible inventory must be written, and Slurm's files lie in
      ``workspace.rendered``. Some of the hosts are enough only if nothing but these has changed since all
      were configured: they may need what others hold.
    - install_first: the install half of every role, as configure does first where nothing is baked.
    - introduce: which hosts belong to the cluster: names, addresses, the firewall; nothing is restarted.
    - restore: release hosts as they were before they were configured; the notes say what was left, and why.
      One that is released already, or was never configured, is left alone.
    - seal: note what was done to hosts of the user's, after a failure; later changes may be theirs.

    Raises:
        ConfigureError: tasks failed; one failure a host. The whole output is in ``workspace.logs``.
    """
    playbook = "site" if verb == "configure" and not inventory.baked else verb
    try:
        return (yield from _play(playbook, inventory, workspace, hosts))
    except ConfigureError:
        if verb in _SEALED and inventory.traits.user_owned:
            with suppress(ConfigureError):
                yield from run("seal", inventory, workspace, hosts=hosts)
        raise


def restore(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, reporter: Reporter
) -> Mapping[str, tuple[str, ...]]:
    """Put back what was on these hosts before the cluster. Return what was left on each, and why."""
    inventory_file.write_restore_inventory(inventory, workspace)
    record_inventory(inventory, workspace)
    return follow(run("restore", inventory, workspace, hosts=hosts), reporter).notes


def record_inventory(inventory: Inventory, workspace: Workspace) -> None:
    """Write the inventory where ordinary ssh and clusterctl read it."""
    write_ssh_files(inventory, workspace)
    write_atomic(workspace.inventory, inventory.model_dump_json(indent=2) + "\n")
    workspace.joining.unlink(missing_ok=True)  # all of it stands there now


def preview(
    inventory: Inventory, workspace: Workspace, *, hosts: Collection[str]
) -> tuple[tuple[TaskResult, ...], tuple[Failure, ...]]:
    """What configuring would change on these hosts, by Ansible's check mode; and where that can't be told.

    Raises:
        ConfigureError: Ansible itself could not run.
    """
    playbook = "configure" if inventory.baked else "site"
    found: list[TaskResult] = []
    failures: tuple[Failure, ...] = ()
    try:
        found.extend(_play(playbook, inventory, workspace, hosts, check=True))
    except ConfigureError as exc:
        failures = exc.failures
        if failures[0].host is None:
            raise
    return tuple(task for task in found if task.how == Status.CHANGED), failures


def _play(
    playbook: str,
    inventory: Inventory,
    workspace: Workspace,
    hosts: Collection[str],
    *,
    logs: Workspace | None = None,
    check: bool = False,
) -> Results:
    """Run a playbook on these hosts by the Ansible inventory that the workspace has.

    logs: the workspace that gets the output. Default: the same.
    """
    groups = {host.name: host.roles for host in inventory.hosts if host.name in hosts}
    log = (logs or workspace).logs / f"ansible-{time.strftime('%Y%m%dT%H%M%S')}.log"
    return run_playbook(PlaybookRun(f"{playbook}.yml", workspace.ansible_inventory, groups, log, check))


def install_image(
    spec: ClusterSpec, image: Host, *, wheels: Path, lock: Path, workspace: Workspace
) -> Results:
    """Run the install half of every role on an image that has a route to its mirror. No service is started.

    Slurm is of the release that ``spec`` asks for. ``wheels`` is a folder with every wheel that ``lock``, a
    requirements file with hashes, names.

    Raises:
        ConfigureError: a task failed. The whole output is in ``workspace.logs``.
    """
    with _image_inventory((image,), workspace) as (alone, own):
        text = inventory_file.image_inventory_text(spec, alone, own.ssh_config, wheels, lock)
        write_atomic(own.ansible_inventory, text)
        return (yield from _play("install", alone, own, alone.names, logs=workspace))


def configure_class(
    images: Sequence[Host],
    variables: inventory_file.Variables,
    slurm: Mapping[str, str],
    *,
    workspace: Workspace,
) -> Results:
    """Configure on images what hosts of their groups have in common; ``variables``: see ``class_variables``.

    ``slurm`` has the texts of Slurm's files there, by name: a controller's accounting runs with them.

    Raises:
        ConfigureError: a task failed. The whole output is in ``workspace.logs``.
    """
    with _image_inventory(images, workspace) as (alone, own):
        for name, content in {**slurm, inventory_file.HEALTH_FILE: _no_health(alone)}.items():
            write_atomic(own.rendered / name, content)
        text = inventory_file.class_inventory_text(alone, own.ssh_config, variables, own.rendered)
        write_atomic(own.ansible_inventory, text)
        return (yield from _play("class", alone, own, alone.names, logs=workspace))


def make_image(
    spec: ClusterSpec,
    inventory: Inventory,
    variables: inventory_file.Variables,
    *,
    workspace: Workspace,
    logs: Workspace,
) -> Results:
    """Install the compute host of this inventory, configure what such have in common, and make it nobody's.

    ``workspace`` is the inventory's alone, with its ssh_config; the output is kept in that of ``logs``.

    Raises:
        ConfigureError: a task failed.
    """
    health = workspace.rendered / inventory_file.HEALTH_FILE
    write_atomic(health, _no_health(inventory))
    text = inventory_file.image_of_class_text(spec, inventory, workspace, variables, health)
    write_atomic(workspace.ansible_inventory, text)
    return _play("image", inventory, workspace, [host.name for host in inventory.compute], logs=logs)


def _no_health(inventory: Inventory) -> str:
    """The file of what each node must have, before it is known."""
    return json.dumps({host.name: {} for host in inventory.hosts})


@contextmanager
def _image_inventory(images: Sequence[Host], workspace: Workspace) -> Iterator[tuple[Inventory, Workspace]]:
    """Yield an inventory of images alone, and a workspace for it with the keys of this cluster."""
    place = dict.fromkeys(("cluster", "cluster_id", "provider", "network", "shared"), "")
    alone = Inventory(hosts=tuple(images), baked=False, **place)
    with temporary_folder() as folder:
        own = Workspace(folder / "image")
        own.create()
        write_atomic(own.known_hosts, alone.known_hosts())
        write_atomic(own.ssh_config, alone.ssh_config(key=workspace.key, known_hosts=own.known_hosts))
        yield alone, own
