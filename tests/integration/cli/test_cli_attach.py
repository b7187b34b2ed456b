"""The answer of `attach`: how each fact was learned, and which outcomes of the proof are
failures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from clusterctl.cli.attach import attach, proof_failure, summary
from clusterctl.cli.output import Screen
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.providers.attached import AttachedCluster, AttachRequest, MpiProof
from clusterctl.providers.existing.facts import placed_facts, proof_facts, site_facts
from clusterctl.providers.existing.place import PreparedFolder
from clusterctl.providers.existing.probe import Choices, parse
from clusterctl.providers.existing.provider import ExistingProvider
from clusterctl.spec.load import parse_spec
from clusterctl.spec.names import Launcher
from clusterctl.state.workspace import Workspace
from tests.support.manual import ROOT, assert_shown
from tests.support.messages import codes
from tests.support.verbs import Clusterctl

CAPTURES = Path(__file__).parents[2] / "unit/existing/captures"
CAPTURE = CAPTURES / "slurm-22.05-no-accounting.txt"
NATIONAL = CAPTURES / "slurm-24.11-associations.txt"
PAGE = ROOT / "docs/howto/attach.md"
SPEC = (
    "{version: 1, name: campus, provider: {type: existing, login: f1}, partitions: [{name: "
    "short, nodes: 2}]}"
)
PROOF = MpiProof("proven", Launcher.SRUN, "33", ("c1", "c2"), "2.36")
PENDING = MpiProof("pending", Launcher.SRUN, "33", why="33 is PENDING")


def attached(**more: object) -> AttachedCluster:
    probed = parse(CAPTURE.read_text(), Choices(), "login")
    values = {
        "workspace": Workspace(Path("/w")),
        "spec": parse_spec(SPEC, "spec"),
        "folder": "/home/stud/clusterctl",
        "account": "",
        "partitions": ("short",),
        "proof_nodes": 2,
        "minutes": "",
        "needs_time": False,
        "launchers": (Launcher.SRUN,),
        "modules": ("openmpi/4.1.4",),
        "other_modules": (),
        "waiting": "",
        "has_launcher": False,
        "site_python": "",
        "facts": tuple(site_facts(probed)),
        "site": {},
    }
    return AttachedCluster(**{**values, **more})  # type: ignore[arg-type]


def test_proof_is_shown_with_its_nodes() -> None:
    assert proof_failure(attached(), PROOF) is None
    facts = {fact.fact: fact for fact in proof_facts(PROOF, ("openmpi/4.1.4",))}
    assert "openmpi/4.1.4" in facts["MPI"].value
    assert "job 33 on c1, c2" in facts["MPI"].learned
    refused = {fact.fact: fact for fact in attached().facts}["partition gpuq"]
    assert "say your project with --account" in refused.value


def test_attach_is_shown_as_in_the_manual() -> None:
    probed = parse(NATIONAL.read_text(), Choices(), "login")
    probed = replace(probed, site=replace(probed.site, host="login1"))
    folder = PreparedFolder(
        *("/home/stud/clusterctl", "a1b2c3", "/usr/bin/python3.13", "3.13.5"),
        NodePlatform("3.13", 41),
        modules=(),
        built=True,
    )
    proof = MpiProof("proven", Launcher.SRUN, "12", ("c1", "c2"), "2.41")
    facts = (*site_facts(probed), *placed_facts(folder), *proof_facts(proof, ("openmpi/5.0",)))
    spec = parse_spec(SPEC.replace("campus", "national"), "spec")
    lines = summary(attached(spec=spec, facts=facts), proof, None)
    assert_shown(PAGE, "clusterctl attach national", "\n".join(lines), {})


def test_long_queue_is_no_failure() -> None:
    assert proof_failure(attached(), PENDING) is None
    for has_launcher in (False, True):
        lines = summary(attached(has_launcher=has_launcher), PENDING, None)
        assert any("`clusterctl attach --cluster campus`" in line for line in lines)


def test_last_line_has_the_time_limit_that_the_site_demands() -> None:
    assert "--time" not in summary(attached(), PROOF, None)[-1]
    answer = attached(needs_time=True, minutes="5")
    assert "--cluster campus train --nodes 2 --time 5m --follow" in summary(answer, PROOF, None)[-1]


@pytest.mark.parametrize(("state", "names"), [("failed", True), ("refused", False)])
def test_failed_proof_has_a_fix(state: Literal["failed", "refused"], names: bool) -> None:
    proof = MpiProof(state, Launcher.SRUN, "33", why="the words of the site", fix="look")
    assert [fact.is_problem for fact in proof_facts(proof, ())] == [True]
    failure = proof_failure(attached(other_modules=("openmpi/5.0",)), proof)
    assert failure is not None
    assert (failure.code, failure.cause) == (
        "not-ready" if state == "failed" else "slurm-refused",
        "the words of the site",
    )
    assert failure.fix is not None
    assert ("openmpi/5.0" in failure.fix) == names
    # Lmod lists no module that needs another one.
    unlisted = proof_failure(attached(), proof)
    assert unlisted is not None
    assert ("module spider" in unlisted.fix) == names
    # The site's words may be about the folder, in which `sbatch --test-only` does not look.
    assert ("--folder" in failure.fix) != names


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
    assert codes(cli(*words, *choice, "-o", "json", rc=2)) == ["unsupported/cluster-of-others"]


class _AskedError(Exception):
    """Ends the command once the provider has its request."""


def test_words_that_are_not_given_are_kept_and_empty_ones_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command line passes an empty list for an option that the user has not given."""
    requests: list[AttachRequest] = []

    def ask(_: object, request: AttachRequest) -> AttachedCluster:
        requests.append(request)
        raise _AskedError

    monkeypatch.setattr(ExistingProvider, "attach", ask)
    for words in ([], [""], ["a", "b"]):
        with pytest.raises(_AskedError):
            attach(Screen(json=True, color=False), "campus", module=words, slurm=words)
    assert [request.modules for request in requests] == [None, (), ("a", "b")]
    assert [request.slurm for request in requests] == [None, (), ("a", "b")]
