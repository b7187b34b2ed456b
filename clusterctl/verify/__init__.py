"""The proof that a cluster works: exact node states, then an MPI job across every node, its answer checked.

The job runs in a hidden partition of its own, so it never waits behind users' jobs. Nodes that are busy with
users' jobs are taken at their slurmd's word and named as not probed; so are those that a person set aside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterctl.assets import payload_hash
from clusterctl.distributions import JOB_PROFILE
from clusterctl.errors import Failure, VerifyError
from clusterctl.inventory import Inventory
from clusterctl.slurm.client import SlurmClient
from clusterctl.spec.models import ADMIN_USER, PROOF_PARTITION
from clusterctl.transport.base import Result, Transport
from clusterctl.verify.diagnose import Connect, cut_off, each_alone
from clusterctl.verify.states import Aside, astray, settle

__all__ = ["Aside", "Proof", "astray", "verify"]

READY_TIMEOUT_S = 60.0
START_TIMEOUT_S = 30
PROBE_S = 20
PROBE_PER_NODE_S = 3  # many local nodes start their ranks on few cores
CLEAN_UP_S = 20
_TAKEN = "Requested nodes are busy"  # srun's words when --immediate has run out
_TIMED_OUT = 124  # timeout(1)'s exit code


@dataclass(frozen=True, slots=True)
class Proof:
    """``probed`` hosts ran the job together; ``busy`` ones run users' jobs, ``aside`` ones a person drained.

    ``resumed`` has the nodes that Slurm had taken out of service, with the state they were in.
    """

    probed: tuple[str, ...]
    busy: tuple[str, ...] = ()
    aside: tuple[Aside, ...] = ()
    resumed: Mapping[str, str] = field(default_factory=dict)


def verify(inventory: Inventory, to: Connect, *, timeout_s: float = READY_TIMEOUT_S) -> Proof:
    """Prove the cluster through its controller; ``to`` connects to a host.

    Raises:
        VerifyError: nodes are missing or sick, or the job failed; names hosts and causes.
    """
    controller = to(inventory.controller.name)
    for tries_left in (1, 0):
        stand = settle(inventory, SlurmClient(controller), timeout_s=timeout_s)
        proof = Proof(stand.idle, stand.busy, stand.aside, stand.resumed)
        if not stand.idle:
            return proof
        result = _probe(stand.idle, controller)
        if tries_left and result.rc != 0 and _TAKEN in result.stderr:
            continue  # a user's job was faster: its nodes count as busy now
        if not _is_right(result, stand.idle):
            raise _failed(result, stand.idle, inventory, to)
        return proof
    raise AssertionError("the last try returns")


def _probe(hosts: tuple[str, ...], transport: Transport) -> Result:
    """Run the bundled probe, one rank a host. It ends by itself if it hangs; should srun hang, that too."""
    limit_s = PROBE_S + PROBE_PER_NODE_S * len(hosts)
    patience_s = START_TIMEOUT_S + limit_s + CLEAN_UP_S
    argv = [
        *("timeout", "--kill-after=5", str(patience_s)),
        "srun",
        f"--partition={PROOF_PARTITION}",
        f"--account={ADMIN_USER}",
        "--job-name=clusterctl-probe",
        f"--nodes={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        "--ntasks-per-node=1",
        "--mem=64M",
        "--mpi=pmix",
        f"--time={math.ceil((limit_s + CLEAN_UP_S) / 60)}",
        f"--immediate={START_TIMEOUT_S}",
        "--chdir=/tmp",
        "--kill-on-bad-exit=1",
        f"--export=PYTHONPATH=/opt/clusterctl/payload/{payload_hash()},OMP_NUM_THREADS=1",
        *("/usr/bin/timeout", "--kill-after=2", str(limit_s)),
        *("bash", "-c", f'[[ ! -r {JOB_PROFILE} ]] || . {JOB_PROFILE}; exec "$@"', "probe"),
        *("/opt/clusterctl/env/bin/python", "-m", "payload", "probe", "--expect-hosts", ",".join(hosts)),
    ]
    return transport.run(argv, timeout_s=patience_s + 30, check=False)


def _is_right(result: Result, hosts: tuple[str, ...]) -> bool:
    """Whether as many ranks agreed as there are hosts."""
    try:
        answer = json.loads(result.stdout)
        return result.rc == 0 and answer["ok"] is True and answer["world_size"] == len(hosts)
    except (ValueError, KeyError, TypeError):
        return False


def _failed(result: Result, hosts: tuple[str, ...], inventory: Inventory, to: Connect) -> VerifyError:
    """Who is to blame, and for what: found out by smaller questions where the job itself does not say."""
    said = _words(result)
    if _TAKEN in result.stderr:
        failures = tuple(Failure("verify", said, host, "verify") for host in hosts)
    else:
        failures = _blamed_by_probe(result) or _blamed_by_parts(hosts, inventory, to)
    if not failures:
        named = tuple(host for host in hosts if host in said) or hosts
        failures = tuple(Failure("verify", said, host, "verify") for host in named)
    hosts_of = {failure.cause: str(failure.host) for failure in reversed(failures)}
    told = (cause if host in cause else f"{host}: {cause}" for cause, host in hosts_of.items())
    return VerifyError(
        f"the proof job failed on {', '.join(str(f.host) for f in failures)}",
        why="; ".join(told),
        fix="correct the cause on these hosts, then run `clusterctl up` again",
        failures=failures,
    )


def _blamed_by_probe(result: Result) -> tuple[Failure, ...]:
    """The hosts of which the probe itself says what is wrong."""
    try:
        found = json.loads(result.stdout)["failures"]
        return tuple(Failure("verify", str(one["cause"]), str(one["host"]), "verify") for one in found)
    except (ValueError, KeyError, TypeError):
        return ()


def _blamed_by_parts(hosts: tuple[str, ...], inventory: Inventory, to: Connect) -> tuple[Failure, ...]:
    controller = to(inventory.controller.name)

    def alone(host: str) -> str | None:
        result = _probe((host,), controller)
        return None if _is_right(result, (host,)) else _words(result)

    return cut_off(inventory, hosts, to) or (each_alone(hosts, alone) if len(hosts) > 1 else ())


def _words(result: Result) -> str:
    said = (result.stderr.strip() or result.stdout.strip())[-2000:]
    if result.rc == _TIMED_OUT:
        said = f"it did not end in time\n{said}".strip()
    return said or f"srun ended with exit code {result.rc} and said nothing"
