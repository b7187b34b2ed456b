"""The commands attach and detach, for a Slurm cluster that other people operate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from clusterctl.cli.advice import first_job, with_cluster
from clusterctl.cli.options import Words, argument, option
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import NoWait
from clusterctl.cluster.attach import attach as attach_and_prove
from clusterctl.cluster.detach import DetachOptions
from clusterctl.cluster.detach import detach as remove_from_site
from clusterctl.errors import Failure, excluded
from clusterctl.providers.attached import AttachedCluster, AttachRequest, MpiProof
from clusterctl.providers.registry import provider_of
from clusterctl.scheduler.sites.advice import ANOTHER_FOLDER
from clusterctl.spec.models import ClusterSpec, settings_of_login
from clusterctl.state.chosen_spec import spec_of_existing
from clusterctl.state.workspace import WAIT_S
from clusterctl.util.progress import PhaseLines

_LATER: Final = "`clusterctl attach` again waits for it, and reads its result"


def attach(
    screen: Screen,
    login: Annotated[
        str | None,
        argument(
            "The login node: an alias of ~/.ssh/config, USER@HOST or ssh://USER@HOST:PORT, or a "
            "dot for this machine. Default: the login node of the chosen cluster.",
            metavar="[LOGIN]",
        ),
    ] = None,
    name: Annotated[
        str | None, option("Name of the cluster on this machine. Default: Slurm's ClusterName.")
    ] = None,
    folder: Annotated[
        str | None,
        option("Folder for clusterctl's files there. Default: ~/clusterctl.", metavar="PATH"),
    ] = None,
    account: Annotated[
        str | None, option("Slurm account of jobs. Default: the first that works.")
    ] = None,
    qos: Annotated[str | None, option("Quality of service of jobs. Default: Slurm's.")] = None,
    partition: Annotated[str | None, option("Partition of jobs. Default: Slurm's.")] = None,
    module: Annotated[
        Words, option("Environment module that jobs load. Repeatable. Default: what MPI needs.")
    ] = None,
    time: Annotated[
        str | None,
        option("Time limit of the job that tests MPI. Default: 5m, or what the site accepts."),
    ] = None,
    slurm: Annotated[
        Words,
        option(
            "Option of sbatch that the site demands, for all jobs that do not set it. Repeatable. "
            "Such as --slurm=--constraint=cpu.",
            metavar="OPTION",
        ),
    ] = None,
    python: Annotated[
        str | None,
        option("A Python there, 3.11 or newer. Default: the first on PATH.", metavar="PATH"),
    ] = None,
    no_wait: NoWait = False,
) -> int:
    """Use an existing Slurm cluster with your own account.

    Finds your account and partitions, creates a folder with Python and MPI in your home on the
    cluster, and tests with a job on two nodes that MPI works. What it finds is written to the
    cluster's spec, from which it starts when you run it again. Options replace what is there; an
    empty value, such as --partition '', lets it search again.
    """
    spec: ClusterSpec | None = None
    if login is None:
        spec = spec_of_existing(screen.chosen())
        provider = provider_of(spec.provider)
        login = provider.attached_place().login
        name = name or spec.name
    else:
        if screen.file is not None or screen.cluster is not None:
            raise excluded("LOGIN", "-f or --cluster, which attach a known cluster again")
        provider = provider_of(settings_of_login(login))
    request = AttachRequest(
        login=login,
        name=name or "",
        folder=folder,
        account=account,
        qos=qos,
        partition=partition,
        modules=tuple(filter(None, module)) if module else None,
        time=time,
        slurm=tuple(filter(None, slurm)) if slurm else None,
        python=python,
        spec=spec,
        wait_s=0 if no_wait else WAIT_S,
        reporter=PhaseLines(screen.note, verbose=screen.verbose),
    )
    attached, proof = attach_and_prove(provider, request)
    failure = proof_failure(attached, proof)
    screen.result(_answer(attached, proof, failure), *summary(attached, proof, failure))
    return 1 if failure else 0


def _answer(attached: AttachedCluster, proof: MpiProof, failure: Failure | None) -> dict[str, Any]:
    """Return the JSON answer of `attach`."""
    return {
        "ok": failure is None,
        "failures": [asdict(failure)] if failure else [],
        "cluster": attached.spec.name,
        "provider": attached.spec.provider.type,
        "workspace": str(attached.workspace.root),
        "folder": attached.folder,
        "account": attached.account,
        "partitions": attached.partitions,
        "proven": proof.state == "proven",
        "proof": {**asdict(proof), "modules": attached.modules},
        "facts": [asdict(fact) for fact in attached.facts],
        "site": attached.site,
    }


def summary(attached: AttachedCluster, proof: MpiProof, failure: Failure | None) -> list[str]:
    """Return the summary of `attach`."""
    name = attached.spec.name
    width = max(len(fact.fact) for fact in attached.facts)
    lines = [f"{fact.fact:{width}}  {fact.value}  ({fact.learned})" for fact in attached.facts]
    if failure is not None:
        lines += ["", f"not proven: {failure.cause}", f"  fix: {failure.fix}"]
    elif proof.state == "pending":
        again = " again" if attached.has_launcher else ""
        lines += ["", f"not proven{again} yet: {proof.why}"]
        lines.append(with_cluster(_LATER, f"--cluster {name}", name))
    minutes = attached.minutes if attached.needs_time else ""
    advice = first_job(attached.proof_nodes, minutes=minutes)
    lines += [f"cluster {name!r} is attached", with_cluster(advice, f"--cluster {name}", name)]
    return lines


def detach(
    screen: Screen,
    dry_run: Annotated[bool, option("List what would be removed, and remove nothing.")] = False,
    cancel: Annotated[
        bool, option("First cancel your pending and running jobs on the cluster.")
    ] = False,
    discard: Annotated[
        bool, option("Also delete runs and files that exist only on the cluster.")
    ] = False,
    forget: Annotated[
        bool, option("Remove only the records on this machine. The folder and the jobs stay.")
    ] = False,
    no_wait: NoWait = False,
) -> None:
    """Remove clusterctl's files from an attached cluster.

    Also removes the cluster's records from this machine. Refuses, with exit code 1, while jobs run,
    or while runs or files exist only on the cluster.
    """
    workspace = screen.chosen().workspace(named=True)
    name = workspace.root.name
    options = DetachOptions(
        dry_run,
        cancel,
        discard,
        forget,
        0 if no_wait else WAIT_S,
        PhaseLines(screen.note, verbose=screen.verbose),
    )
    result = remove_from_site(workspace, options)
    answer = {
        "cluster": name,
        "folder": result.folder,
        "removed": not dry_run and not forget,
        "entries": [asdict(entry) for entry in result.entries],
        "only_there": result.only_there.lines,
        "cancelled": result.cancelled,
        "left": result.left,
    }
    done = "would remove" if dry_run else "removed"
    lines = [f"{done} {entry}" for entry in result.entries]
    lines += [
        f"exists only there: {line}" for line in result.only_there.lines if dry_run and not forget
    ]
    lines += [f"left there: {line}" for line in result.left]
    if not dry_run:
        gone = f"; {result.folder} is gone" if result.folder and not forget else ""
        lines.append(f"cluster {name!r} is detached{gone}")
    screen.result(answer, *lines)


def proof_failure(attached: AttachedCluster, proof: MpiProof) -> Failure | None:
    """Return why MPI is not proven. None: it is, or the job has not ended yet."""
    if proof.state in {"proven", "pending"}:
        return None
    name = attached.spec.name
    fixes = [proof.fix]
    if proof.state == "failed":
        # `module avail` does not list a module that another one must be loaded for.
        such = (
            f"such as {', '.join(attached.other_modules)}"
            if attached.other_modules
            else "and before it those that `module spider openmpi` on the login node shows"
        )
        fixes.append(f"if its MPI is wrong, name the site's with --module, {such}")
    else:
        # `sbatch --test-only` has accepted a job with these options in another folder.
        fixes.append(f"if the site refuses jobs in {attached.folder}: {ANOTHER_FOLDER}")
    fix = with_cluster("; ".join(filter(None, fixes)), f"--cluster {name}", name)
    code = "slurm-refused" if proof.state == "refused" else "not-ready"
    return Failure(code, proof.why, name, "prove", fix, about="proof")
