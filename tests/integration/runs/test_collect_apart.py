"""Runs whose nodes share no folder: what each wrote becomes one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from clusterctl.runs.fetch import RunManifest, RunSource, fetch_from_hosts, sender
from tests.support.local_transport import LocalTransport

FOLDER = "/home/ada/clusterctl/jobs/mine"  # the same path on every host


class OneHost(LocalTransport):
    """This machine in place of a host: what lies below FOLDER there lies in a folder of its own
    here.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def _local_command(self, argv: Sequence[str]) -> list[str]:
        return [word.replace(FOLDER, str(self._root)) for word in argv]

    def _local_request(self, data: bytes) -> bytes:
        return data.replace(FOLDER.encode(), bytes(self._root))


def fetched(tmp_path: Path, *hosts: Mapping[str, str]) -> tuple[dict[str, str], RunManifest]:
    """Collect from hosts with these files. Return (path -> content, the manifest)."""
    holders = []
    for number, files in enumerate(hosts, 1):
        root = tmp_path / f"node{number}"
        root.mkdir()
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        holders.append((f"node{number}", sender(OneHost(root))))
    manifest = fetch_from_hosts(holders, RunSource(FOLDER), tmp_path / "work")
    tree = tmp_path / "work" / "tree"
    found = {str(p.relative_to(tree)): p.read_text() for p in tree.rglob("*") if p.is_file()}
    assert {local.decode() for local in manifest.files} == set(found)
    assert set(manifest.sha256) == set(manifest.files)
    return found, manifest


def test_collect_joins_the_folders_of_all_hosts(tmp_path: Path) -> None:
    given = {"job.sbatch": "#!/bin/bash\n"}
    found, manifest = fetched(
        tmp_path,
        {**given, "stdout.log": "hello\n", "telemetry/node1.jsonl": "{}\n"},
        {**given, "telemetry/node2.jsonl": "{}\n", "part-1.txt": "one\n"},
    )
    assert set(found) == {
        "job.sbatch.from-job",  # ours is written later
        "stdout.log",
        "part-1.txt",
        "telemetry/node1.jsonl",
        "telemetry/node2.jsonl",
    }
    assert sum(manifest.files.values()) == sum(map(len, found.values()))


def test_collect_keeps_both_files_of_a_name(tmp_path: Path) -> None:
    found, _ = fetched(
        tmp_path, {"result.txt": "rank 0"}, {"result.txt": "rank 1"}, {"result.txt": "rank 1"}
    )
    assert found == {
        "result.txt": "rank 0",
        "nodes/node2/result.txt": "rank 1",
        "nodes/node3/result.txt": "rank 1",
    }


@pytest.mark.parametrize("first", [{"out": "a file"}, {"out/deep": "in a folder"}])
def test_collect_of_a_file_and_a_folder_of_the_same_name(
    tmp_path: Path, first: Mapping[str, str]
) -> None:
    other = {"out/deep": "in a folder"} if "out" in first else {"out": "a file"}
    found, _ = fetched(tmp_path, first, other)
    (name, content) = next(iter(other.items()))
    assert found == {**first, f"nodes/node2/{name}": content}


def test_collect_renames_job_files_named_like_ours(tmp_path: Path) -> None:
    found, _ = fetched(tmp_path, {"a": "1", "nodes/node2/a": "mine"}, {"a": "2"})
    assert found == {"a": "1", "nodes/node2/a": "mine", "nodes/node2_/a": "2"}


def test_collect_after_an_interruption_has_no_earlier_files(tmp_path: Path) -> None:
    (tmp_path / "work" / "tree").mkdir(parents=True)
    (tmp_path / "work" / "tree" / "old").write_text("of a collect that was cut off")
    found, _ = fetched(tmp_path, {"a": "1"}, {"b": "2"})
    assert found == {"a": "1", "b": "2"}
