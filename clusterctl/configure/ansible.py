"""Runs of Ansible's playbooks: install, configure and preview hosts, and remove clusters.

Each run has its own environment and processes, and stops all its processes at its end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal

from clusterctl.configure import events, inventory_file
from clusterctl.configure.events import Event, Recap, TaskResult, TaskStatus
from clusterctl.errors import ConfigureError, Failure
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.openssh import ssh_config_text, write_ssh_files
from clusterctl.transport.sudo import PASSWORDS
from clusterctl.util.assets import data_folder
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import SHORT, lines_in_time, running, temporary_folder
from clusterctl.util.progress import Reporter

MAX_FORKS = 32
# While Ansible is silent, its processes are checked this often.
LOOK_EVERY_S = 5.0
_TAIL_LINES = 20
_LONGEST_SOCKET_HOME = 50
# Begins an event in a line of Ansible's output.
_EVENT = b"\x1e"

# A running playbook: yields the results of its tasks, and returns the recap. Closing it stops
# Ansible.
Results = Generator[TaskResult, None, Recap]


@dataclass(frozen=True, slots=True)
class PlaybookRun:
    """The input of a playbook run.

    playbook: file name of the playbook in ansible/. inventory: path of the Ansible inventory.
    hosts: the playbook is limited to these hosts. log: file for the complete output.
    check: run in check mode, without changes. passwords: host -> its password for sudo; a host
    without one asks for none.
    """

    playbook: str
    inventory: Path
    hosts: Collection[str]
    log: Path
    check: bool = False
    passwords: Mapping[str, str] = field(default_factory=dict, repr=False)


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
    recap: Recap | None = None
    with (
        temporary_folder(run.log.parent, prefix=".ansible-") as private,
        temporary_folder(home) as sockets,
        _open_log(run.log) as log,
        running(
            _argv(run),
            env={**_environment(private, run), "TMPDIR": str(sockets)},
            stdin=json.dumps(run.passwords).encode() if run.passwords else b"",
            has_terminal=False,
        ) as (process, output),
    ):
        for event in _events(output, log):
            match event["event"]:
                case "failed" | "unreachable":
                    failed.append(event)
                case "end":
                    recap = Recap(event["ok"], event["changed"])
            if result := events.result_of(event):
                yield result
        rc = process.wait()
    if rc == 0 and recap is not None:
        return recap
    raise _error(run, failed, rc)


def _argv(run: PlaybookRun) -> list[str]:
    return [
        # The Ansible of this Python environment, even if PATH has another first.
        *(sys.executable, "-P", "-m", "ansible.cli.playbook"),
        f"--inventory={run.inventory}",
        f"--limit={','.join(run.hosts)}",
        f"--forks={max(1, min(len(run.hosts), MAX_FORKS))}",
        *(("--check", "--diff") if run.check else ()),
        str(data_folder("ansible") / run.playbook),
    ]


def _open_log(log: Path) -> IO[bytes]:
    """Open the log to append. The file is unbuffered, so a failed write to a full disk is not
    repeated.
    """
    with translating_write_errors(log):
        return os.fdopen(
            os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0
        )


def _events(output: IO[bytes], log: IO[bytes]) -> Iterator[Event]:
    """Yield the events in Ansible's output (ansible/callback_plugins/clusterctl_events.py), and
    write the rest to the log.

    Raise ConfigureError if Ansible waits for a process that died.
    """
    pid = dead_child = None
    for line in lines_in_time(output, every_s=LOOK_EVERY_S):
        if line is None:
            # At its normal end, the process is dead for a moment. So it must be dead in two checks
            # in a row.
            previous = dead_child
            dead_child = _dead_child(pid) if pid is not None else None
            if dead_child is not None and dead_child == previous:
                raise _lost()
            continue
        dead_child = None
        text, _, said = line.partition(_EVENT)
        event = _event(said)
        if shown := text if event else line:
            # A full disk must not leave a host half configured.
            with suppress(OSError):
                log.write(shown + b"\n")
        if event:
            pid = event.get("pid", pid)
            yield event


def _event(said: bytes) -> Event | None:
    """Return the event in a line; None if it has none, or if another process's output cut it."""
    with suppress(ValueError):
        event: Event = json.loads(said)
        return event
    return None


def _lost() -> ConfigureError:
    text = "Ansible's connection process died"
    cause = "the process was killed, perhaps because this machine ran out of memory"
    fix = "run `clusterctl up` again, which continues from here"
    failure = Failure(
        "configure-failed",
        f"{text}: {cause}",
        None,
        "configure",
        fix,
        retryable=True,
        about="connection",
    )
    return ConfigureError(text, about="connection", why=cause, fix=fix, failures=(failure,))


def _environment(private: Path, run: PlaybookRun) -> Mapping[str, str]:
    """Return this process's environment, with other Ansible settings and locale than the
    user's.
    """
    here = str(Path(sys.executable).parent)
    for package, name in (("ansible", "ansible-core"), ("ansible_mitogen", "mitogen")):
        if importlib.util.find_spec(package) is None:
            fix = "install clusterctl again, with its dependencies"
            raise ConfigureError(
                f"the Python package {name} is missing",
                code="internal",
                about="installation",
                fix=fix,
            )
    given = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    plugins = str(data_folder("ansible") / "password_plugins")
    return {
        **given,
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # Ansible refuses to run without UTF-8.
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "ANSIBLE_CONFIG": str(data_folder("ansible") / "ansible.cfg"),
        "ANSIBLE_HOME": str(private / "home"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_STDOUT_CALLBACK": "default",
        "ANSIBLE_CALLBACK_PLUGINS": str(data_folder("ansible") / "callback_plugins"),
        "ANSIBLE_CALLBACKS_ENABLED": "clusterctl_events",
        # mitogen keeps its sessions, over the shared connection if that is open: a key that wants a
        # touch is asked once. It would wait for a new shared connection to end.
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=no",
        "ANSIBLE_STRATEGY": "clusterctl_linear",
        "ANSIBLE_STRATEGY_PLUGINS": str(data_folder("ansible") / "strategy_plugins"),
        # Ansible warns about every third-party strategy.
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
        # This plugin reads stdin.
        **({"ANSIBLE_VARS_PLUGINS": plugins} if run.passwords else {}),
    }


def _error(run: PlaybookRun, failed: Iterable[Event], rc: int) -> ConfigureError:
    failures = events.failures_of(failed)
    hint = f"the complete output is in {run.log}"
    if not failures:
        lines = run.log.read_text(errors="replace").splitlines()
        message = f"Ansible stopped with exit code {rc} and reported no failed host"
        tail = "\n".join(lines[-_TAIL_LINES:])
        return ConfigureError(
            message,
            about="ansible",
            where=run.playbook,
            why=tail,
            fix=hint,
        )
    error = ConfigureError.of_hosts("configuration failed on {hosts}", failures, then=hint)
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


Verb = Literal["configure", "install_first", "introduce", "remove", "ended"]
_ENDED: Final = ("configure", "install_first")


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
    - remove: remove the cluster's files, lines and accounts from hosts, and move their owner's files
      back. The results have notes on everything that stays. Hosts without the cluster stay as they
      are.
    - ended: after a failure, note clusterctl's changes so far, to tell them from later changes by the
      user.

    Raise ConfigureError, with a failure for each host, if tasks fail. The output is in
    ``workspace.logs``.
    """
    playbook = "site" if verb == "configure" and not inventory.baked else verb
    try:
        return (yield from _play(playbook, inventory, workspace, hosts))
    except ConfigureError:
        if verb in _ENDED and inventory.traits.adopts_hosts:
            with suppress(ConfigureError):
                yield from run("ended", inventory, workspace, hosts=hosts)
        raise


def remove_from(
    inventory: Inventory, hosts: Collection[str], workspace: Workspace, reporter: Reporter
) -> None:
    """Remove the cluster from these hosts, and move their owner's files back. Report what stays as
    soon as a host says it, because a host that has forgotten the cluster can't say it again.
    """
    variables = {
        "shared_storage_cluster_id": inventory.cluster_id,
        "clusterctl_keeps": inventory.traits.adopts_hosts,
    }
    inventory_file.write_inventory(inventory, workspace, variables)
    record_inventory(inventory, workspace)
    with closing(run("remove", inventory, workspace, hosts=hosts)) as results:
        for result in results:
            reporter.progress(result)
            for note in result.notes:
                reporter.note(f"left on {result.host}: {note}")


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
    return tuple(task for task in results if task.how == TaskStatus.CHANGED), failures


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
    names = [host.name for host in inventory.hosts if host.name in hosts]
    log = (logs or workspace).logs / f"ansible-{time.strftime('%Y%m%dT%H%M%S')}.log"
    return run_playbook(
        PlaybookRun(
            f"{playbook}.yml",
            workspace.ansible_inventory,
            names,
            log,
            check,
            PASSWORDS.of(names),
        )
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
        variables = inventory_file.image_variables(spec, inventory.distribution, wheels, lock)
        inventory_file.write_inventory(inventory, own, variables)
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
        sources = inventory_file.class_sources(own.rendered)
        inventory_file.write_inventory(inventory, own, {**variables, **sources})
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
    all_variables = inventory_file.machine_image_variables(spec, inventory, workspace, variables)
    inventory_file.write_inventory(inventory, workspace, all_variables)
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
