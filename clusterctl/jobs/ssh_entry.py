"""An SSH host entry that leads into a running job, for editors, rsync, scp and forwarded ports.

ssh connects by a ProxyCommand: srun starts `sshd -i` in the job, so nodes need no SSH service and
no root.
"""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import SchedulerError, UnreachableError
from clusterctl.jobs.queue import running_job
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.session import Session
from clusterctl.state.workspace import Workspace, draw_key_pair, state_home, write_atomic
from clusterctl.transport.base import wrap_command
from clusterctl.transport.openssh import OpenSSH, run_captured
from clusterctl.util.disk import translating_write_errors

_ENTER, _SSHD = (
    (Path(__file__).parent / name).read_text(encoding="utf-8")
    for name in ("remote_enter.sh", "remote_sshd.sh")
)
_NOT_FOUND: Final = "has no program sshd"
_CONFIG: Final = """\
Host {host}
    User {user}
    IdentityFile "{folder}/key"
    IdentitiesOnly yes
    UserKnownHostsFile "{folder}/known_hosts"
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    ProxyCommand sh "{folder}/connect"
    ServerAliveInterval 15
    ServerAliveCountMax 4
"""
# When the job ends, the second ssh ends. The first must notice, so no other process may keep its
# pipe open.
_CONNECT: Final = """\
exec 3<&0
cat {file} - <&3 3<&- | {ssh} 3<&- &
exec 3<&- <&- >&-
wait $!
"""


@dataclass(frozen=True, slots=True)
class SshEntry:
    """An SSH host entry of a running job.

    host: its name. config: the ssh_config for `ssh -F`, with the entries of all clusters.
    node: the node to which it leads. folder: the folder there with the files of the job's program.
    """

    job_id: str
    host: str
    config: Path
    node: str
    folder: str

    @property
    def editor(self) -> list[str]:
        """The command that opens the job's folder in VS Code."""
        return ["code", "--remote", f"ssh-remote+{self.host}", self.folder]

    def ssh(self, *words: str) -> list[str]:
        """Return a command line of ssh with this entry."""
        return ["ssh", "-F", str(self.config), self.host, *words]


def enter(session: Session, job_id: str) -> SshEntry:
    """Write an SSH host entry for a running job, and connect once. Remove ended jobs' entries.

    Raises:
        UsageError: the job is not running, or is an array; or the cluster has no Slurm.
        SchedulerError: there is no such job, or its node has no sshd.
        UnreachableError: the connection failed.
    """
    session.site.reject_without_slurm()
    _remove_ended(session)
    job = running_job(session, job_id)
    entry = SshEntry(
        job.id,
        f"clusterctl-{session.inventory.cluster}-{job.id}",
        state_home() / "ssh_config",
        job.nodes[0],
        _program_folder(session, job),
    )
    _write(session, entry)
    result = run_captured(entry.ssh("-o", "BatchMode=yes", "true"))
    if _NOT_FOUND in result.stderr:
        raise SchedulerError(
            f"job {job.id} can't be entered, because {entry.node} has no program sshd",
            code="tool-missing",
            about="sshd",
            where=entry.node,
            fix="have openssh-server installed on the nodes; its service need not run",
        )
    if result.rc != 0:
        raise UnreachableError(
            f"job {job.id} can't be entered by ssh",
            about="job",
            where=entry.node,
            why=result.stderr.strip(),
            fix=f"`clusterctl jobs {job.id}` shows whether the job is running",
            host=entry.node,
        )
    return entry


def _program_folder(session: Session, job: JobInfo) -> str:
    entry = session.ledger.find(job.id)
    folder = entry.program_dir if entry is not None else ""
    task = "" if job.task is None else f"/task-{job.task}"
    return f"{folder}{task}" if folder else job.work_dir


def _write(session: Session, entry: SshEntry) -> None:
    """Write an entry's ssh_config, its keys, and the script that connects to sshd in the job."""
    folder = _folder_of_entries(session.workspace) / entry.job_id
    with translating_write_errors(folder):
        for directory in (folder.parent, folder):
            directory.mkdir(mode=0o700, exist_ok=True)
    user_key = _public_key(folder / "key")
    host_key = _public_key(folder / "host_key")
    _write_connect(session, folder, entry.job_id, user_key)
    write_atomic(folder / "known_hosts", f"{entry.host} {host_key}\n")
    config = _CONFIG.format(host=entry.host, user=session.inventory.job_user, folder=folder)
    write_atomic(folder / "ssh_config", config)
    write_atomic(
        entry.config,
        f'# Written by clusterctl\nInclude "{state_home()}/*/entries/*/ssh_config"\n',
    )


def _public_key(path: Path) -> str:
    """Create a key pair, unless it exists. Return the line of its public key."""
    return draw_key_pair(path, comment=b" clusterctl").read_text().strip()


def _write_connect(session: Session, folder: Path, job_id: str, user_key: str) -> None:
    """Write the script that starts sshd in the job through the login node, and its input.

    user_key: the public key that sshd accepts.
    """
    inventory = session.inventory
    private_host_key = (folder / "host_key").read_bytes()
    sshd = [_SSHD, "sshd", str(len(private_host_key)), user_key]
    command = ["sh", "-c", _ENTER, "enter", job_id, *sshd]
    line, script = wrap_command(command, inventory.variables, path=inventory.slurm_path)
    # The command on the login node is the first part of its input. The host key, a secret, follows.
    input_file = folder / "input"
    write_atomic(input_file, script + private_host_key)
    login = OpenSSH(session.workspace.ssh_config, inventory.job_user)
    ssh = login.argv(inventory.controller.name, line, "-T")
    connect = _CONNECT.format(file=shlex.quote(str(input_file)), ssh=shlex.join(ssh))
    write_atomic(folder / "connect", connect)


def _folder_of_entries(workspace: Workspace) -> Path:
    return workspace.root / "entries"


def _remove_ended(session: Session) -> None:
    """Remove the entries of jobs that have ended."""
    folders = {folder.name: folder for folder in _folder_of_entries(session.workspace).glob("*")}
    with suppress(SchedulerError):
        running = {job.id for job in session.scheduler.jobs([*folders]) if not job.ended}
        for job_id in folders.keys() - running:
            shutil.rmtree(folders[job_id], ignore_errors=True)
