"""The answer of `attach`: how each fact was learned, and which outcomes of the proof are
failures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.cli.attach import attach, proof_failure, summary
from clusterctl.cli.output import Screen
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.providers.attached import Attached, AttachRequest
from clusterctl.providers.existing.attach import Attachment
from clusterctl.providers.existing.place import Placed
from clusterctl.providers.existing.probe import Choices, parse
from clusterctl.providers.existing.prove import Nodes, Proof, Unproven
from clusterctl.providers.existing.provider import ExistingProvider
from clusterctl.spec.load import parse_spec
from clusterctl.state.workspace import Workspace
from tests.support.messages import codes
from tests.support.verbs import Clusterctl

CAPTURE = Path(__file__).parents[2] / "unit/existing/captures/slurm-22.05-no-accounting.txt"
SPEC = (
    "{version: 1, name: campus, provider: {type: existing, login: f1}, partitions: [{name: "
    "short, nodes: 2}]}"
)
NODES = Nodes(names=("c1", "c2"), version="3.11.2", glibc="2.36")
PROOF = Proof("pmix", ("openmpi/4.1.4",), NODES, {"ok": True}, 0.5, ())


PENDING = Unproven("pending", "Resources")


def attached(outcome: Proof | Unproven, spec: str = SPEC) -> Attached:
    probed = parse(CAPTURE.read_text(), Choices(), "login", 0.0)
    node = NodePlatform("3.11", 36)
    placed = Placed(
        "/home/stud/clusterctl", "a12345", "/usr/bin/python3", "3.11.2", node, 1.0, built=True
    )
    parsed = parse_spec(spec, "spec")
    return Attachment(Workspace(Path("/w")), parsed, probed, placed, outcome).answer


def test_proof_is_shown_with_its_nodes() -> None:
    answer = attached(PROOF)
    assert proof_failure(answer) is None
    facts = {fact.fact: fact for fact in answer.facts}
    assert "openmpi/4.1.4" in facts["MPI"].value
    assert "c1, c2" in facts["MPI"].learned
    assert "say your project with --account" in facts["partition gpuq"].value


def test_long_queue_is_no_failure() -> None:
    answer = attached(PENDING)
    assert proof_failure(answer) is None
    assert "MPI" not in {fact.fact for fact in answer.facts}


def test_attach_summary_says_whether_the_first_job_runs_the_proof() -> None:
    proven = SPEC.replace("login: f1", "login: f1, launcher: mpirun")
    texts = ["\n".join(summary(attached(PENDING, spec), None)) for spec in (SPEC, proven)]
    assert ["runs the proof" in text for text in texts] == [True, False]
    assert ["not proven yet" in text for text in texts] == [True, False]


def test_last_line_has_the_time_limit_that_the_site_demands() -> None:
    answer = attached(PROOF)
    assert "--time" not in summary(answer, None)[-1]
    answer = replace(answer, needs_time=True, minutes="5")
    assert "--cluster campus train --nodes 2 --time 5m --follow" in summary(answer, None)[-1]


@pytest.mark.parametrize("reason", ["mpi", "python", "not-shared", "refused", "ended"])
def test_failed_proof_has_a_fix(reason: str) -> None:
    answer = attached(Unproven(reason, "the words of the site", NODES))
    assert [fact.fact for fact in answer.facts if fact.is_problem] == ["MPI"]
    failure = proof_failure(answer)
    assert failure is not None
    assert (failure.code, failure.cause) == (f"proof-{reason}", "the words of the site")
    assert failure.fix


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("plan",),
        ("down", "--yes"),
        ("image", "bake"),
        ("bundle",),
        ("node", "drain", "c1", "--reason", "test"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("choice", [("-f", "cluster.yaml"), ("--cluster", "campus")], ids=" ".join)
def test_commands_of_operators_are_refused(
    cli: Clusterctl, words: tuple[str, ...], choice: tuple[str, ...]
) -> None:
    (cli.home / "campus").mkdir(parents=True)
    for path in (cli.cwd / "cluster.yaml", cli.home / "campus/spec.yaml"):
        path.write_text(SPEC)
    assert codes(cli(*words, *choice, "-o", "json", rc=2)) == ["cluster-of-others"]


class _AskedError(Exception):
    """Ends the command once the provider has its request."""


def test_words_that_are_not_given_are_kept_and_empty_ones_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command line passes an empty list for an option that the user has not given."""
    requests: list[AttachRequest] = []

    def ask(_: object, request: AttachRequest) -> Attached:
        requests.append(request)
        raise _AskedError

    monkeypatch.setattr(ExistingProvider, "attach", ask)
    for words in ([], [""], ["a", "b"]):
        with pytest.raises(_AskedError):
            attach(Screen(json=True, color=False), "campus", module=words, slurm=words)
    assert [request.modules for request in requests] == [None, (), ("a", "b")]
    assert [request.slurm for request in requests] == [None, (), ("a", "b")]
