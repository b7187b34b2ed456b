"""The jobs with which `attach` proves MPI, on a cluster whose Slurm is played."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from clusterctl.cluster import attach as proving
from clusterctl.cluster.attach import prove
from clusterctl.errors import SchedulerError
from clusterctl.providers.attached import AttachedCluster, AttachRequest, MpiProof
from clusterctl.providers.base import Provider
from clusterctl.scheduler.session import Session, site_of
from clusterctl.spec.load import parse_spec
from clusterctl.spec.names import Launcher
from clusterctl.state.ledger import runs_folders
from tests.support.played.cluster import SPEC, PlayedCluster

BOTH = (Launcher.SRUN, Launcher.MPIRUN)
# The answer of the ranks of `probe`, which runs without MPI here.
RIGHT = json.dumps({"ok": True, "ranks": [{"glibc": "glibc 2.36"}, {"glibc": "glibc 2.9"}]})


def attached(session: Session, **more: object) -> AttachedCluster:
    values = {
        "workspace": session.workspace,
        "spec": parse_spec(SPEC, "spec"),
        "folder": "",
        "account": "",
        "partitions": ("train",),
        "proof_nodes": 2,
        "minutes": "7",
        "needs_time": True,
        "launchers": BOTH,
        "modules": (),
        "other_modules": (),
        "waiting": "",
        "has_launcher": False,
        "site_python": "/usr/bin/python3",
        "facts": (),
        "site": {},
    }
    return AttachedCluster(**{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def launchers(cluster: PlayedCluster) -> Callable[..., None]:
    """Let srun and mpirun run a text in a shell in place of the ranks of `probe`."""

    def write(**texts: str) -> None:
        for name, text in texts.items():
            path = cluster.root / "bin" / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)

    return write


def last(session: Session, cluster: AttachedCluster, request: AttachRequest) -> MpiProof:
    """Return what is known in the end."""
    return list(prove(session, cluster, request))[-1]


def asked(cluster: PlayedCluster, job_id: str) -> str:
    """Return the script of a job."""
    return (Path(cluster.job(job_id)["dir"]) / "job.sbatch").read_text()


def test_second_launcher_is_tried_after_the_first(
    session: Session,
    cluster: PlayedCluster,
    launchers: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both runs are collected, but not listed. The cluster keeps only the folder of the failed."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(cluster.root / "workspace"))
    launchers(srun="echo no PMI >&2; exit 1", mpirun=f"echo '{RIGHT}'")
    proof = last(session, attached(session), AttachRequest("."))
    assert (proof.state, proof.launcher, proof.job_id) == ("proven", Launcher.MPIRUN, "2")
    assert (proof.hosts, proof.glibc) == (("n1",), "2.9")
    assert "#SBATCH --time=00:07:00" in asked(cluster, "1")
    entries = session.ledger.entries()
    assert all(entry.run_dir for entry in entries)
    assert [Path(entry.remote_dir or "").exists() for entry in entries] == [True, False]
    assert not runs_folders()


@pytest.mark.parametrize(
    "answer", ["true", f"echo '{RIGHT}'; echo '{RIGHT}'", 'echo \'{"ok": false, "ranks": []}\'']
)
def test_job_without_a_single_right_answer_proves_nothing(
    session: Session, launchers: Callable[..., None], answer: str
) -> None:
    """srun without PMIx starts several programs of one rank each."""
    launchers(srun=answer, mpirun="exit 1")
    proof = last(session, attached(session), AttachRequest("."))
    assert (proof.state, proof.lacks_python) == ("failed", False)
    assert all(launcher in proof.why for launcher in BOTH)


def test_missing_python_ends_the_trials(session: Session, launchers: Callable[..., None]) -> None:
    launchers(srun="exit 127", mpirun="exit 127")
    proof = last(session, attached(session), AttachRequest("."))
    assert (proof.state, proof.job_id, proof.lacks_python) == ("failed", "2", False)
    site = site_of(replace(session.inventory, root="/nowhere"))
    proof = last(replace(session, site=site), attached(session), AttachRequest("."))
    assert (proof.state, proof.job_id, proof.lacks_python) == ("failed", "3", True)


def test_job_without_a_log_shows_that_the_folder_is_not_shared(
    session: Session, cluster: PlayedCluster, launchers: Callable[..., None]
) -> None:
    """Each node may have a disk of its own under this name."""
    launchers(srun=f"find {cluster.root} -name 'std*.log' -delete; exit 127", mpirun="exit 1")
    proof = next(each for each in prove(session, attached(session), AttachRequest(".")) if each.fix)
    assert (proof.state, proof.job_id, proof.lacks_python) == ("failed", "1", False)
    assert "--folder" in proof.fix


def test_waiting_job_is_waited_for_again(
    session: Session, cluster: PlayedCluster, launchers: Callable[..., None]
) -> None:
    """If it was cancelled meanwhile, another is submitted."""
    launchers(srun=f"until [ -e {cluster.root}/go ]; do sleep 0.1; done; echo '{RIGHT}'")
    request = AttachRequest(".", patience_s=0.5)
    first = last(session, attached(session), request)
    assert (first.state, first.job_id) == ("pending", "1")
    again = attached(session, waiting=first.job_id)
    assert last(session, again, request).job_id == "1"
    (cluster.root / "go").touch()
    assert last(session, again, AttachRequest(".")).state == "proven"
    cluster.change("1", state="CANCELLED")
    assert last(session, again, AttachRequest(".")).job_id == "2"


def test_job_that_slurm_refuses_has_its_words(
    session: Session, launchers: Callable[..., None]
) -> None:
    launchers(sbatch="echo 'sbatch: error: the words of the site' >&2; exit 1")
    proof = last(session, attached(session), AttachRequest("."))
    assert (proof.state, proof.job_id) == ("refused", "")
    assert "the words of the site" in proof.why


def test_job_is_known_before_the_wait_for_it(
    session: Session, cluster: PlayedCluster, launchers: Callable[..., None]
) -> None:
    """An error of the wait is none of the job, which goes on."""
    launchers(srun="sleep 60")
    proofs = prove(session, attached(session), AttachRequest("."))
    first = next(proofs)
    assert (first.state, first.launcher, first.job_id) == ("pending", Launcher.SRUN, "1")
    launchers(squeue="echo 'slurm_load_jobs error: no access' >&2; exit 1", sacct="exit 1")
    with pytest.raises(SchedulerError):
        next(proofs)


def test_job_is_recorded_before_the_wait_for_it(
    session: Session, launchers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "connect_session", lambda *_: nullcontext(session))
    monkeypatch.setattr(proving, "job_inventory", lambda _: session.inventory)
    launchers(srun=f"echo '{RIGHT}'")
    provider = create_autospec(Provider, instance=True)
    provider.attach.return_value = cluster = attached(session)
    provider.record_proof.return_value = cluster
    proving.attach(provider, AttachRequest("."))
    recorded = [call.args[1].state for call in provider.record_proof.call_args_list]
    assert recorded == ["pending", "proven"]


def test_refusal_of_the_second_launcher_keeps_the_cause_of_the_first(
    session: Session, launchers: Callable[..., None]
) -> None:
    launchers(srun="exit 3")
    proofs = prove(session, attached(session), AttachRequest("."))
    assert [next(proofs).state, (failed := next(proofs)).state] == ["pending", "failed"]
    launchers(sbatch="echo 'sbatch: error: the words of the site' >&2; exit 1")
    (refused,) = proofs
    assert (refused.state, refused.job_id) == ("refused", "")
    assert failed.why in refused.why
    assert "the words of the site" in refused.why


@pytest.mark.parametrize(("nodes", "tasks"), [(2, 1), (1, 2)])
def test_job_has_several_ranks(
    session: Session,
    cluster: PlayedCluster,
    launchers: Callable[..., None],
    nodes: int,
    tasks: int,
) -> None:
    launchers(srun="exit 1", mpirun="exit 1")
    last(session, attached(session, proof_nodes=nodes, minutes=""), AttachRequest("."))
    script = asked(cluster, "1")
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={tasks}\n" in script
    assert "--time" not in script
