"""The proof by the user's first job, on a cluster where the job of `attach` did not start in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from clusterctl.providers.existing.place import Placed
from clusterctl.providers.existing.prove import (
    Proof,
    ProofOptions,
    Unproven,
    probe_texts,
    proof_script,
    read_facts,
)
from clusterctl.providers.existing.site import Site
from clusterctl.transport.base import Transport

_LEAVE: Final = Path(__file__).with_name("remote_leave.sh").read_text(encoding="utf-8")
# A proof ends after at most 300 + 90 s, see remote_leave.sh.
_READ: Final = """\
cd -- "$1/proof.active" 2>/dev/null || exit
grep -qsx end facts || [ -n "$(find job -mmin +7 2>/dev/null)" ] || exit
cat job facts 2>/dev/null || true
"""


def leave_proof(transport: Transport, site: Site, placed: Placed, options: ProofOptions, nodes: int) -> None:
    """Have the user's first job on ``nodes`` nodes or more run the proof before its program."""
    script = proof_script(site, placed, options)
    argv = ["sh", "-c", _LEAVE, "leave", placed.folder, str(nodes), str(len(script))]
    transport.run(argv, stdin=script + probe_texts())


def read_first_proof(transport: Transport, folder: str) -> tuple[str, Proof | Unproven] | None:
    """Return the id of the job that ran the proof, and the outcome. None: no job has run it."""
    result = transport.run(["sh", "-c", _READ, "read", folder], check=False)
    if result.rc:
        return None
    job_id, *lines = result.stdout.splitlines()
    outcome = read_facts(lines)
    if isinstance(outcome, Unproven) and "end" not in lines:
        outcome = replace(outcome, code="ended", why=f"job {job_id} did not finish the proof")
    return job_id, outcome
