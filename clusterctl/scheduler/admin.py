"""The scheduler for administrators: drain and resume nodes, reconfigure Slurm, and run an MPI test
job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from clusterctl.errors import CommandError, SlurmError
from clusterctl.scheduler.base import JobInfo, Jobs, Nodes
from clusterctl.scheduler.session import PATIENCE_S
from clusterctl.scheduler.sites.mpirun import MpirunClient
from clusterctl.scheduler.sites.script import VERIFICATION_PER_NODE_S, verification_argv
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.spec.names import PROOF_ACCOUNT, PROOF_MEMORY_MIB, PROOF_PARTITION, ROOT
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import Connect, RootTransport, as_user
from clusterctl.util.process import Result

_START_TIMEOUT_S = 30
_VERIFICATION_S = 20
_CLEAN_UP_S = 20
# On failure scontrol prints only a number, so print the new errors in slurmctld's log.
_RECONFIGURE = """\
log=/var/log/slurm/slurmctld.log
from=$(stat -c %s "$log" || echo 0)
scontrol reconfigure && exit
tail -c "+$((from + 1))" "$log" |
    sed -n 's/^.*] \\(\\(error\\|fatal\\): .*\\)/\\1/p; /^fatal: /q' | tail -n 5 >&2
exit 1"""


@dataclass
class SlurmNodes(SlurmClient, Nodes):
    """Client for administrators of Slurm. The user of ``transport`` is root.

    job_user: the account that the verification job runs as.
    root: clusterctl's folder on each node, with the jobs' Python.
    """

    job_user: str = ""
    root: str = ROOT

    drains_nodes = True

    def drain(self, nodes: Sequence[str], reason: str) -> tuple[str, ...]:
        self._update(nodes, "state=drain", f"reason={reason}")
        return tuple(nodes)

    def set_down(self, nodes: Sequence[str], reason: str) -> None:
        self._update(nodes, "state=down", f"reason={reason}")

    def resume(self, nodes: Sequence[str]) -> None:
        self._update(nodes, "state=resume")

    def _update(self, nodes: Sequence[str], *values: str) -> None:
        self.transport.run(["scontrol", "update", f"nodename={','.join(nodes)}", *values])

    def run_verification_job(self, hosts: tuple[str, ...]) -> Result:
        # The job's partition has priority over the partitions of users' jobs.
        limit_s = _VERIFICATION_S + VERIFICATION_PER_NODE_S * len(hosts)
        patience_s = _START_TIMEOUT_S + limit_s + _CLEAN_UP_S
        allocation = (
            f"--partition={PROOF_PARTITION}",
            f"--account={PROOF_ACCOUNT}",
            "--job-name=clusterctl-probe",
            f"--nodes={len(hosts)}",
            f"--nodelist={','.join(hosts)}",
            "--ntasks-per-node=1",
            f"--mem={PROOF_MEMORY_MIB}M",
            f"--time={math.ceil((limit_s + _CLEAN_UP_S) / 60)}",
            f"--immediate={_START_TIMEOUT_S}",
            "--chdir=/tmp",
        )
        profile = f"{self.root}/job-profile.sh"
        program = (
            *("/usr/bin/timeout", "--kill-after=2", str(limit_s)),
            *("bash", "-c", f'[[ ! -r {profile} ]] || . {profile}; exec "$@"', "probe"),
        )
        argv = (
            *as_user(self.job_user),
            *("timeout", "--kill-after=5", str(patience_s)),
            *("srun", *allocation, "--mpi=pmix", "--kill-on-bad-exit=1"),
            # Open MPI 5 needs HOME.
            "--export=HOME,OMP_NUM_THREADS=1",
            *program,
            *verification_argv(self.root, hosts),
        )
        return self.transport.run(argv, timeout_s=patience_s + 30, check=False)

    def release_held_jobs(self) -> tuple[str, ...]:
        released = []
        for job_id in (job.id for job in self.all_jobs() if job.failed_to_launch):
            with suppress(CommandError):  # already cancelled
                self.transport.run(["scontrol", "release", job_id])
                released.append(job_id)
        return tuple(released)

    def reconfigure(self) -> None:
        result = self.transport.run(["sh", "-c", _RECONFIGURE], check=False)
        if result.rc != 0:
            raise SlurmError(
                "slurmctld did not accept its new configuration",
                about="configuration",
                why="; ".join(result.stderr.strip().splitlines()),
                fix="if the error is about a setting of `slurm` in the spec, correct it; "
                "then run `clusterctl up` again",
                host=self.transport.host,
            )


def scheduler_of(inventory: Inventory, to: Connect, *, patience_s: float = PATIENCE_S) -> Nodes:
    """Return the client for the cluster's scheduler that `up` and other administrative commands
    use.
    """
    controller = to(inventory.controller.name)
    if inventory.scheduler_needs.has_daemons or not inventory.job_user:
        return SlurmNodes(
            RootTransport(controller),
            patience_s=patience_s,
            job_user=inventory.job_user,
            root=inventory.root,
        )
    return MpirunClient(inventory, inventory.job_user, controller, to, patience_s=patience_s)


def active_jobs(scheduler: Jobs) -> tuple[JobInfo, ...]:
    """Return all users' pending and running jobs that this user may see."""
    return tuple(job for job in scheduler.all_jobs() if not job.ended)
