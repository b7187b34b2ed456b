"""Which checkpoints come home, what is said of the others, and how they come later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from clusterctl.runs.fetch import ALL, Outputs, RunManifest, RunSource, Selection
from tests.unit.runs.fetched import fetch_source

LATEST = Selection()
EVERY = Selection("all")
NONE = Selection("none")


def fetched(
    remote: Path, tree: Path, selection: Selection = LATEST
) -> tuple[set[str], RunManifest]:
    """The files that come, and the manifest."""
    source = RunSource(str(remote), "12", selection=selection)
    manifest = fetch_source(source, tree)
    return {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()}, manifest


def fill(remote: Path, *names: str) -> None:
    for name in names:
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        (remote / name).write_text(name)


# folder's content -> what of it stays there
LAYOUTS: Mapping[str, tuple[tuple[str, ...], set[str]]] = {
    "the payload's": (
        (
            "checkpoints/.lock",
            "checkpoints/iteration-00000009/rank-00000.safetensors",
            "checkpoints/iteration-00000010/rank-00000.safetensors",
            "checkpoints/iteration-00000010/manifest.json",
            "checkpoints/iteration-00000011.f00d.incomplete/rank-00000.safetensors",
        ),
        {"checkpoints/iteration-00000009", "checkpoints/iteration-00000011.f00d.incomplete"},
    ),
    "transformers'": (
        (
            "out/checkpoint-500/model",
            "out/checkpoint-1000/model",
            "out/tmp-checkpoint-1500/model",
            "out/x",
        ),
        {"out/checkpoint-500", "out/tmp-checkpoint-1500"},
    ),
    "Lightning's": (
        (
            "logs/version_0/checkpoints/epoch=9-step=900.ckpt",
            "logs/version_0/checkpoints/epoch=10-step=1000.ckpt",
            "logs/version_0/checkpoints/last.ckpt",
            "logs/version_1/checkpoints/epoch=1-step=100.ckpt",
            "out/epoch=1-val_loss=0.50.ckpt",
            "out/epoch=2-val_loss=0.25.ckpt",
        ),
        {"logs/version_0/checkpoints/epoch=9-step=900.ckpt", "out/epoch=1-val_loss=0.50.ckpt"},
    ),
    "one without a number, with shards": (
        (
            "checkpoint/model-00001-of-00002.safetensors",
            "checkpoint/model-00002-of-00002.safetensors",
        ),
        set(),
    ),
    "a checkpoint with numbered folders in it": (
        ("checkpoint-7/global_step6/a", "checkpoint-7/global_step7/a", "checkpoint-6/a"),
        {"checkpoint-6"},
    ),
    "by run, bare numbers": (
        (
            "ckpts/a/step100/x",
            "ckpts/a/step99/x",
            "ckpts/b/config.json",
            "checkpoints/9/x",
            "checkpoints/10/x",
        ),
        {"ckpts/a/step99", "checkpoints/9"},
    ),
    "a folder a rank": (("ckpt/0/x", "ckpt/1/x", "checkpoint-5/0/x", "checkpoint-5/1/x"), set()),
    "TensorFlow's": (
        (
            "checkpoint",
            *(f"ckpt-{n}.{kind}" for n in (4, 5) for kind in ("index", "data-00000-of-00001")),
        ),
        {"ckpt-4.index", "ckpt-4.data-00000-of-00001"},
    ),
    "what merely has such a name": (
        (
            "checkpoint_analysis/x",
            "checkpoint.txt",
            "checkpoints.csv",
            "my-checkpoint-1/a",
            "step_1/a",
            "step_2/a",
        ),
        set(),
    ),
    "tasks of an array": (
        (
            "task-1/checkpoints/step_1/a",
            "task-1/checkpoints/step_2/a",
            "task-2/checkpoints/step_1/a",
        ),
        {"task-1/checkpoints/step_1"},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latest_checkpoint_of_each_series_is_fetched(remote, tree, layout):
    names, stay = LAYOUTS[layout]
    fill(remote, *names)
    fetched_names, manifest = fetched(remote, tree)
    skipped = {one.path: one for one in manifest.skipped}
    assert set(skipped) == stay
    assert fetched_names == {
        name for name in names if not any(f"{name}/".startswith(f"{one}/") for one in stay)
    }
    for path, one in skipped.items():
        there = [p for p in (remote / path).rglob("*") if p.is_file()] or [remote / path]
        assert (one.files, one.bytes) == (len(there), sum(p.stat().st_size for p in there))
        assert one.only_there
        assert one.reason.endswith(": `clusterctl collect 12 --checkpoints all`")


def test_unfinished_checkpoint_is_not_the_latest(remote, tree):
    fill(remote, "checkpoint-1/a")
    (remote / "checkpoint-2").mkdir()
    fetched_names, manifest = fetched(remote, tree)
    assert fetched_names == {"checkpoint-1/a"}
    assert [(one.path, one.files) for one in manifest.skipped] == [("checkpoint-2", 0)]


@pytest.mark.parametrize("selection", [EVERY, ALL])
def test_checkpoints_all_fetches_all(remote, tree, selection):
    names = [name for layout in LAYOUTS.values() for name in layout[0] if name != "checkpoint"]
    fill(remote, *names)
    assert fetched(remote, tree, selection)[0] == set(names)


def test_checkpoints_none_fetches_none(remote, tree):
    fill(remote, "checkpoints/iteration-00000001/a", "checkpoint/b", "last.ckpt", "x")
    fetched_names, manifest = fetched(remote, tree, NONE)
    assert fetched_names == {"x"}
    assert {one.path for one in manifest.skipped} == {"checkpoints", "checkpoint", "last.ckpt"}


@pytest.mark.parametrize(
    "name", ["checkpoint-3/a", "checkpoints/step_3/a", "checkpoint/a", "a.ckpt"]
)
def test_large_checkpoint_is_skipped_with_the_command_to_fetch(remote, tree, name):
    fill(remote, name, "x")
    (remote / name).write_bytes(bytes(3 << 20))
    fetched_names, manifest = fetched(remote, tree, Selection(max_checkpoint=2 << 20))
    (one,) = manifest.skipped
    assert fetched_names == {"x"}
    assert one.bytes == 3 << 20
    sizes, command = one.reason.split(": ")
    assert re.findall(r"[\d.]+ MiB", sizes) == ["3 MiB", "2 MiB"]
    assert command == "`clusterctl collect 12 --max-checkpoint 1GiB`"
    assert fetched(remote, tree, Selection(max_checkpoint=1 << 30))[0] == {name, "x"}


def test_link_in_place_of_a_checkpoint_is_not_followed(remote, tree, tmp_path):
    fill(tmp_path / "elsewhere", "step_1/secret")
    (remote / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (remote / "checkpoint-2").mkdir()
    (remote / "checkpoint-2" / "a").symlink_to("/etc/passwd")
    fill(remote, "checkpoint-1/a")
    fetched_names, manifest = fetched(remote, tree)
    assert fetched_names == {"checkpoint-1/a"}
    assert {one.path: one.files for one in manifest.skipped} == {
        "checkpoints": 0,
        "checkpoint-2": 0,
    }


@pytest.mark.parametrize("selection", [LATEST, EVERY, NONE])
@pytest.mark.parametrize("name", ["last.ckpt", "checkpoint-9", "tmp-checkpoint-9"])
def test_link_named_like_a_checkpoint_has_its_target(remote, tree, selection, name):
    fill(remote, "checkpoint-1/a")
    (remote / name).symlink_to("/elsewhere")
    _, manifest = fetched(remote, tree, selection)
    assert {one.path: one.target for one in manifest.skipped if one.path == name} == {
        name: "/elsewhere"
    }


def test_collect_all_fetches_outputs_too(remote, tree):
    fill(remote, "results/a", "b", "checkpoint-1/c")
    outputs = Outputs(["results/**"])
    manifest = fetch_source(RunSource(str(remote), outputs=outputs), tree)
    assert set(manifest.files) == {b"results/a"}
    assert {one.path: (one.files, one.bytes) for one in manifest.skipped} == {
        "b": (1, 1),
        "checkpoint-1": (1, 14),
    }
    manifest = fetch_source(RunSource(str(remote), outputs=outputs, selection=ALL), tree)
    assert set(manifest.files) == {b"results/a", b"b", b"checkpoint-1/c"}
