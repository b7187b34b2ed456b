"""An upgrade of Slurm that is cut off at a certain point: a program is killed there, or the power fails.

A shim in front of a program holds it at that point, once, until whoever asked for it has acted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from clusterctl.providers.local.layout import machine_name
from tests.support.cluster import Cluster
from tests.support.faults import cause
from tests.support.victim import Ended, Victim

# In /var: a boot keeps it.
_SHIM = r"""#!/bin/bash
words="$0 $*" when={when}
if [[ $words == $when ]] && mkdir /var/tmp/point 2>/dev/null; then
    {half}
    echo $$ >/var/tmp/point/pid
    {then}
fi
exec {program} "$@"
"""
_APT = 'DPkg::Path "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin";'
_REACHED = "timeout 240 bash -c 'until [ -e /var/tmp/point/pid ]; do sleep 0.1; done'"
_APT_FILE = "/etc/apt/apt.conf.d/zz-point"
_UNLOCK = "systemctl stop point-lock 2>/dev/null || true"
# A lock makes the conversion of the accounting's tables wait, as MariaDB's list of threads shows.
_LOCK = (
    "systemd-run --quiet --collect --unit=point-lock mariadb slurm_acct_db -e "
    "'lock tables {cluster}_job_table read; select sleep(600)'; "
    "until mariadb -e 'show processlist' | grep -q 'sleep(600)'; do sleep 0.1; done"
)
_CONVERTS = (
    'timeout 240 bash -c \'until mariadb -e "show processlist" | grep -q "Waiting for table metadata lock"; '
    "do sleep 0.1; done'"
)


@dataclass(frozen=True)
class Point:
    """Where it is cut off: on which host, as which program is called. ``half``: what that has done then."""

    program: str
    when: str  # a pattern of bash's for the words of the call
    half: str = ""
    host: str = "ctl"
    number: int = 1  # of the host among the cluster's machines
    converts: bool = False


def _packages(host: str = "ctl", number: int = 1, package: str = "slurmctld") -> Point:
    return Point("dpkg-deb", f"*--fsys-tarfile*{package}_*", host=host, number=number)


POINTS = {
    "packages": _packages(),
    "packages unpacked": Point("deb-systemd-helper", "*slurmdbd*"),
    "accounting": Point("mariadb-dump", "*", half='/usr/bin/mariadb-dump "$@" | head -c 3000'),
    "state": Point("tar", "*-cf*state.tar*", half="echo half >backup.part/state.tar"),
    "conversion": Point("tar", "*-cf*state.tar*", converts=True),
    "packages of a node": _packages("train-2", 3, "slurmd"),
    "accounting brought back": Point(
        "mariadb", "*mariadb slurm_acct_db", half='head -c 30000 | /usr/bin/mariadb "$@"'
    ),
}


@contextmanager
def held_at(cluster: Cluster, point: Point) -> Iterator[None]:
    """Have the next `up` that comes to a point stop there."""
    host, shim, program = (
        f"{cluster.name}-{point.host}",
        f"/usr/local/sbin/{point.program}",
        f"/usr/bin/{point.program}",
    )
    half, then = (
        (_LOCK.format(cluster=cluster.name), "") if point.converts else (point.half, "exec sleep infinity")
    )
    text = _SHIM.format(when=shlex.quote(point.when), half=half, then=then, program=program)
    made = (
        f"printf %s {shlex.quote(text)} >{shim}",
        f"chmod 755 {shim}",
        f"echo {shlex.quote(_APT)} >{_APT_FILE}",
    )
    as_root(cluster, host, "; ".join(made))
    try:
        yield
    finally:
        as_root(cluster, host, f"rm -rf /var/tmp/point {_APT_FILE} {shim}; {_UNLOCK}", rc=None)


def as_root(cluster: Cluster, host: str, command: str, rc: int | None = 0) -> str:
    return cluster.ssh(host, f"sudo bash -c {shlex.quote(command)}", rc=rc)


def cut_off(cluster: Cluster, point: Point, how: str, *argv: str) -> Ended:
    """Run `up` until it stops at the point, and act there.

    `program`: kill that program alone, and let `up` end; `exchange`: all of what exchanges the packages of
    that host; `power`: cut its power, and kill `up`, too.
    """
    host = f"{cluster.name}-{point.host}"
    victim = Victim(cluster.runner, "-o", "json", "-f", cluster.spec, "up", *argv)
    as_root(cluster, host, _CONVERTS if point.converts else _REACHED)
    if how == "power":
        cluster_id = (cluster.workspace / "id").read_text().strip()
        cause("stop", machine_name(cluster_id, point.number))
        return victim.hit("kill-all")
    if how == "exchange":
        as_root(cluster, host, f"systemctl kill --signal=KILL 'run-*.service'; {_UNLOCK}")
    elif point.converts:
        as_root(cluster, host, f"kill -9 $(pidof slurmdbd); {_UNLOCK}")
    else:
        as_root(cluster, host, "kill -9 $(pidof dpkg) $(cat /var/tmp/point/pid)")
    return victim.end(patience_s=240)
