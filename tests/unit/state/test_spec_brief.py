"""What is noted of the applied spec for jobs says what the spec itself says, as long as that is unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.script import partition_of, with_gpus
from clusterctl.scheduler.session import applied, script_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.brief import SpecBrief, note_spec, spec_brief_of
from clusterctl.state.workspace import Workspace

TEXT = """\
version: 1
name: demo
provider: {type: gcp, project: my-project, zone: us-central1-a}
partitions:
  - {name: cpu, nodes: 3, max_time: 90m}
  - {name: gpu, nodes: 2, gpus: {type: l4, count: 4}}
users: [{name: hpc, uid: 10000}]
monitoring: {interval: 30s}
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    found = Workspace.of("demo")
    found.create()
    found.spec.write_text(TEXT)
    return found


def noted(workspace: Workspace) -> tuple[ClusterSpec, SpecBrief | None]:
    spec = applied(workspace)
    note_spec(workspace, spec)
    return spec, spec_brief_of(workspace)


JOBS = [
    JobSpec(name="j", bundled="train"),
    JobSpec(name="j", bundled="train", partition="gpu"),
    JobSpec(name="j", bundled="train", partition="gpu", nodes=2, gpus=1),
    JobSpec(name="j", bundled="sample", partition="gpu"),
    JobSpec(name="j", bundled="train", nodes=4),
    JobSpec(name="j", bundled="train", partition="none"),
    JobSpec(name="j", bundled="train", time="2h"),
    JobSpec(name="j", bundled="train", time="90m"),
]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_the_same_by_the_brief(workspace: Workspace, job: JobSpec) -> None:
    spec, brief = noted(workspace)
    assert brief is not None
    found = []
    for one in (spec, brief):
        try:
            asked = with_gpus(one, job)
            found.append(
                (asked, asked.model_fields_set, partition_of(one, asked).name, script_of(one, asked))
            )
        except UsageError as exc:
            found.append((exc.what, exc.why, exc.fix))  # type: ignore[arg-type]
    assert found[0] == found[1]


def test_the_brief_holds_the_whole_text_and_the_user(workspace: Workspace) -> None:
    spec, brief = noted(workspace)
    assert brief is not None
    assert (brief.text, brief.job_user.name) == (dump_spec(spec), "hpc")


@pytest.mark.parametrize("damage", ["spec", "brief", "key", "gone"])
def test_what_is_changed_or_damaged_is_read_anew(workspace: Workspace, damage: str) -> None:
    assert noted(workspace)[1] is not None
    if damage == "spec":
        workspace.spec.write_text(TEXT.replace("nodes: 3", "nodes: 2"))
    elif damage == "brief":
        workspace.spec_brief.write_bytes(b"\xff")
    elif damage == "key":
        said = json.loads(workspace.spec_brief.read_text())
        workspace.spec_brief.write_text(json.dumps({**said, "partitions": [{"name": "cpu"}]}))
    else:
        workspace.spec.unlink()
    assert spec_brief_of(workspace) is None


@pytest.mark.parametrize("more", ["scheduler: none\n", "software: {python: {requirements: r.txt}}\n"])
def test_a_spec_that_jobs_need_more_of_is_not_noted(workspace: Workspace, more: str) -> None:
    text = TEXT.replace("provider: {type: gcp, project: my-project, zone: us-central1-a}\n", "")
    text = text.replace(", gpus: {type: l4, count: 4}", "") + more
    (workspace.root / "r.txt").write_text("numpy\n")
    workspace.spec.write_text(text)
    assert noted(workspace)[1] is None
    assert not workspace.spec_brief.exists()


def test_nothing_is_noted_while_the_cluster_is_being_removed(workspace: Workspace) -> None:
    workspace.removing.write_text("")
    assert noted(workspace)[1] is None
