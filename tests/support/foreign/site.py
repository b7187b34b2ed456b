"""A Slurm cluster that clusterctl did not configure, with users who have ordinary accounts.

    with site("national") as one:
        one.ssh("stud", "sbatch job.sh")
        with one.slurm("JobRequeue=0"):
            ...

`campus` is Debian 12 with Slurm 22.05 and no accounting. `national` is Debian 13 with Slurm 24.11
and accounting that demands an account. Each has two login nodes, two compute nodes without sshd and
without a route out, and homes of 450 MB together. Its people are `stud` (bash), `carla` (tcsh) and
`finn` (fish), with startup files that print something. A context manager of `Site` changes the
running site, and undoes the change afterwards.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from tests.support.foreign.layer import DATA
from tests.support.lab import Box, Lab, lab
from tests.support.processes import eventually
from tests.support.verbs import CommandResult

LOGINS: Final = ("login1", "login2")
NODES: Final = ("c1", "c2")
HOSTS: Final = (*LOGINS, *NODES)
PASSWORD: Final = "correct horse"  # noqa: S105  (the second factor)
HOMES: Final = "size=450m,mode=755"
# The account's startup files print something on stdout, also without a terminal.
_HOMES: Final = r"""
for person in stud carla finn; do
    home=/home/$person
    find "$home" -mindepth 1 -delete 2>/dev/null || true
    mkdir -p "$home/.ssh" "$home/.config/fish"
    cp /root/.ssh/authorized_keys "$home/.ssh/"
done
printf '# no check for a terminal, as in many accounts\necho hello\n' >/home/stud/.bashrc
echo '. ~/.bashrc' >/home/stud/.profile
printf 'echo "hello from cshrc"\nset path = ($path ~/bin)\n' >/home/carla/.cshrc
echo 'echo "hello from fish"' >/home/finn/.config/fish/config.fish
for person in stud carla finn; do
    chown -R "$person:students" "/home/$person"
    chmod -R go= "/home/$person"
done
"""
Kind = Literal["campus", "national"]


@dataclass(frozen=True)
class Site:
    """A site that runs on the hosts of ``lab``, with the lab's key for each account."""

    name: Kind
    lab: Lab

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the login nodes."""
        return tuple(self.lab.host(name).address for name in LOGINS)

    @property
    def login(self) -> str:
        """The address of the login node where slurmctld runs."""
        return self.addresses[0]

    def ssh(
        self, person: str, command: str, *, rc: int | None = 0, login: str = "login1"
    ) -> CommandResult:
        """Run a command as a person on a login node, as plain ssh does."""
        return self.lab.ssh(f"{person}@{login}", command, rc=rc)

    def root(self, host: str, script: str, *, rc: int | None = 0, timeout_s: float = 60) -> str:
        """Run a shell script as root on a host; its stdout."""
        ran = self.lab.enter(host, ["sh", "-euc", script], timeout_s=timeout_s)
        assert rc is None or ran.rc == rc, f"no exit {rc}\n{ran}"
        return ran.stdout

    def await_idle(self) -> None:
        """Wait until both compute nodes are idle."""
        states = "sinfo --noheader --Node --states=all --format=%T | sort -u"
        eventually(
            lambda: self.root("login1", states, rc=None).split() == ["idle"], 60, pause_s=0.2
        )

    def jobs_named(self, name: str) -> list[str]:
        """The ids of all jobs of this name that slurmctld knows, once no sbatch waits for its
        answer.
        """
        eventually(lambda: not self.root("login1", "pgrep -x sbatch", rc=None))
        ask = f"squeue --noheader --states=all --name={name} --format=%A | sort -n"
        return self.root("login1", ask).split()

    def await_end(self, job_id: str) -> None:
        """Wait until a job has ended."""
        ask = f"squeue --noheader --jobs={job_id} --states=PENDING,RUNNING,COMPLETING"
        eventually(lambda: not self.root("login1", ask, rc=None), 300, pause_s=0.2)

    def reset_homes(self) -> None:
        """Give every person the home of an account that has logged in once. fish then writes files
        there.
        """
        self.root("login1", _HOMES)
        self.ssh("finn", "true")

    def listing(self, person: str) -> list[str]:
        """Everything in a person's home: type, rights, owner, size, target and path of each
        file.
        """
        look = f"cd /home/{person} && find . -printf '%y %m %U:%G %s %l %p\\n' | sort"
        return self.root("login1", look).splitlines()

    @contextmanager
    def changed(self, hosts: Sequence[str], script: str, undo: str) -> Iterator[None]:
        """Run a script as root on some hosts, and another afterwards."""
        with ExitStack() as stack:
            for host in hosts:
                self.root(host, script)
                stack.callback(self.root, host, undo)
            yield

    @contextmanager
    def file(self, hosts: Sequence[str], path: str, text: str) -> Iterator[None]:
        """Let a file have another text on some hosts. A new file is removed afterwards."""
        quoted = shlex.quote(path)
        kept = shlex.quote(f"{path}.kept")
        script = (
            f"[ ! -e {quoted} ] || cp -a {quoted} {kept}\nprintf %s {shlex.quote(text)} >{quoted}"
        )
        undo = f"if [ -e {kept} ]; then cp -a {kept} {quoted}; rm {kept}; else rm -f {quoted}; fi"
        with self.changed(hosts, script, undo):
            yield

    @contextmanager
    def slurm(self, *lines: str) -> Iterator[None]:
        """Let slurm.conf have these lines in place of those with the same keys. Nothing may run
        then.
        """
        path = "/etc/slurm/slurm.conf"
        was = self.root("login1", f"cat {path}")
        keys = tuple(f"{line.partition('=')[0]}=" for line in lines)
        rest = [line for line in was.splitlines() if not line.startswith(keys)]
        with self.file(HOSTS, path, "\n".join([rest[0], *lines, *rest[1:]]) + "\n"):
            self._restart()
            yield
        self._restart()

    def _restart(self) -> None:
        self.root("login1", "systemctl restart slurmctld")
        for node in NODES:
            self.root(node, "systemctl restart slurmd")
        self.await_idle()

    @contextmanager
    def second_factor(self, person: str) -> Iterator[None]:
        """Let sshd ask this person for PASSWORD after the key."""
        text = f"Match User {person}\nAuthenticationMethods publickey,keyboard-interactive\n"
        text += "KbdInteractiveAuthentication yes\n"
        # A reload returns before sshd listens again, a restart does not. Sessions go on.
        restart = "systemctl restart ssh"
        path = "/etc/ssh/sshd_config.d/00-second-factor.conf"
        secret = shlex.quote(f"{person}:{PASSWORD}")
        change = f"echo {secret} | chpasswd; printf %s {shlex.quote(text)} >{path}; {restart}"
        with self.changed(LOGINS, change, f"rm -f {path}; passwd -q -d {person}; {restart}"):
            yield

    @contextmanager
    def sacct(self, how: Literal["refused", "truncated"]) -> Iterator[None]:
        """Let sacct be root's alone, or its output end in the middle of a line."""
        real = "/usr/bin/sacct.real"
        script = {
            "refused": "chmod 700 /usr/bin/sacct",
            "truncated": f"cp -a /usr/bin/sacct {real}\n"
            f"printf '#!/bin/sh\\n{real} \"$@\" | head -c 40\\n' >/usr/bin/sacct",
        }[how]
        undo = f"if [ -e {real} ]; then mv {real} /usr/bin/sacct; fi; chmod 755 /usr/bin/sacct"
        with self.changed(LOGINS, script, undo):
            yield

    @contextmanager
    def silent_slurmctld(self) -> Iterator[None]:
        """Let slurmctld stand still, so that Slurm's commands wait for its answers."""
        kill = "systemctl kill --signal={} slurmctld"
        with self.changed(("login1",), kill.format("STOP"), kill.format("CONT")):
            yield

    @contextmanager
    def limits(self, person: str, **limits: str) -> Iterator[None]:
        """Set limits of a person's association with proj1: `MaxSubmitJobs="4"`,
        `QOS="long,brief"`.
        """
        where = f"where user={person} account=proj1"
        words = " ".join(f"{name}={value}" for name, value in limits.items())
        was = " ".join(f"{name}={_LIMITS[name]}" for name in limits)
        modify = "sacctmgr -i modify user"
        with self.changed(
            ("login1",), f"{modify} {where} set {words}", f"{modify} {where} set {was}"
        ):
            yield


# The limits of a new association.
_LIMITS: Final = {"MaxSubmitJobs": "20", "MaxJobs": "4", "QOS": "normal"}


@contextmanager
def site(kind: Kind) -> Iterator[Site]:
    """Raise a site, and remove it afterwards."""
    with lab(
        kind, [Box(name) for name in HOSTS], user="root", shared="/home", shared_options=HOMES
    ) as hosts:
        one = Site(kind, hosts)
        lines = "".join(f"{hosts.host(name).address} {name}\n" for name in HOSTS)
        for name in HOSTS:
            known = f"127.0.0.1 localhost\n{lines}"
            one.root(name, f"printf %s {shlex.quote(known)} >/etc/hosts; systemctl start munge")
        if kind == "national":
            one.root("login1", (DATA / "accounting.sh").read_text())
        one.root("login1", "systemctl start slurmctld")
        for node in NODES:
            one.root(
                node, "systemctl mask --quiet --now ssh.service ssh.socket; systemctl start slurmd"
            )
        one.await_idle()
        one.reset_homes()
        yield one
