"""The table of a run has all that its programs wrote, so that readers need not parse it again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs.compare import compare_losses
from clusterctl.runs.curve import Column
from clusterctl.runs.find import Row
from clusterctl.runs.metric_files import Block, MetricFiles
from clusterctl.runs.report import report_of
from clusterctl.runs.series import summarize
from clusterctl.runs.table import TableWriter, stored
from clusterctl.runs.telemetry_files import NodeFile
from clusterctl.state.ledger import TABLE_FILE
from tests.unit.runs.made import TIME, made_run

NAN = math.nan
INF = math.inf


def kept(blocks: Sequence[Block]) -> list[Any]:
    return [
        (
            block.axis,
            block.kind,
            [*(block.place.xs or ())],
            [
                (
                    name,
                    [*(column.xs or ())],
                    repr([*column.ys]),
                    column.times,
                    column.rises,
                )
                for name, column in block.columns.items()
            ],
        )
        for block in blocks
    ]


def in_epochs(count: int) -> list[dict[str, Any]]:
    return [{"epoch": n // 10, "step": n % 10, "loss": 1 / (n + 1)} for n in range(count)]


CASES: dict[str, list[dict[str, Any]]] = {
    "steps": [{"step": n, "loss": 1 / (n + 1), "time": TIME + n} for n in range(3000)],
    "restart": [{"step": n, "loss": float(n)} for n in (*range(50), *range(30, 80))],
    "epochs": in_epochs(95),
    "ranks": [{"step": n // 2, "loss": float(n), "rank": n % 2} for n in range(60)],
    "not finite": [{"step": n, "loss": y} for n, y in enumerate((1.0, NAN, INF, -INF, 10**400))],
    "holes": [{"step": n, "loss": None if n % 3 else float(n)} for n in range(30)],
    "nanoseconds": [{"step": 1_764_500_000_123_456_789 + n, "loss": 1.0} for n in range(3)],
    "no integers": [{"step": n * 10**18, "loss": 1.0} for n in range(20)],
    "fractions": [{"epoch": n / 4, "loss": 1.0} for n in range(9)],
    "rows": [{"a": 1.5}, {"b": 2}, {"a": 3, "b": "x"}],
    "times": [{"step": 1, "loss": 1.0, "time": TIME}, {"step": 2, "loss": 0.5, "time": None}],
    "first line": [{"data": {"sha256": "a" * 64, "name": "x"}, "step": 0, "loss": 1.0}],
}


@pytest.mark.parametrize("name", CASES)
def test_table_has_the_blocks_of_the_files(tmp_path: Path, name: str) -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in CASES[name])
    (tmp_path / "metrics.jsonl").write_text(f"{text}torn")
    with TableWriter(tmp_path) as table:
        summary = summarize(tmp_path, table=table)
    parsed = MetricFiles(tmp_path)
    expected = [*parsed.blocks()]
    (tmp_path / "metrics.jsonl").unlink()
    read = MetricFiles(tmp_path)
    assert kept([*stored(read)]) == kept(expected)
    assert [*summary.left_out] == read.left_out == parsed.left_out != []


def telemetry(folder: Path, node: str = "n1", *, torn: str = "torn") -> None:
    """Two nodes of two attempts: gaps, a clock that steps back, and a GPU that comes later."""
    (folder / "telemetry").mkdir(exist_ok=True)
    host = {"kind": "host", "time": TIME, "cpus": [0, 1]}
    gpu = {"index": 0, "util": 50, "energy_mj": 9000, "power_w": 200.5}
    samples: list[dict[str, Any]] = [
        {"cpu_percent": 10.0, "memory_used_mib": 300},
        {"cpu_percent": NAN, "net_rx_bytes_per_s": {"eth0": 5, "lo": "x"}, "job_gpus": 1},
        {"cpu_percent": 0.1, "gpus": [gpu, {"index": 1}], "job_memory_mib": 10**400},
        {},
    ]
    lines = [
        {"kind": "sample", "time": TIME + at, **sample}
        for at, sample in zip((2, 4, 3, 100), samples, strict=True)
    ]
    written = [host, *lines, {**host, "time": TIME + 200}, {**lines[0], "time": TIME + 202}]
    text = "".join(f"{json.dumps(line)}\n" for line in written)
    (folder / "telemetry" / f"{node}.jsonl").write_text(f"{text}{torn}")


def test_table_has_the_samples_of_the_nodes(tmp_path: Path) -> None:
    for folder, node in ((tmp_path, "n1"), (tmp_path / "task-3", "n1")):
        folder.mkdir(exist_ok=True)
        telemetry(folder, node)
        with TableWriter(tmp_path) as table:
            expected = [*table.blocks(parsed := NodeFile(folder, node))]
        (folder / "telemetry" / f"{node}.jsonl").unlink()
        read = NodeFile(folder, node)
        assert kept([*stored(read)]) == kept(expected)
        assert sum(len(block.place.ys) for block in expected) == 5
        assert read.left_out == parsed.left_out != []


def test_report_and_comparison_by_the_table_are_those_by_the_files(tmp_path: Path) -> None:
    rows = [
        Row(
            made_run(
                tmp_path,
                number,
                metrics=CASES["steps"],
                args=[f"--x={number}"],
                tasks=[{"id": str(number), "state": "COMPLETED", "time_use": {"useful": 60.0}}],
            )
        )
        for number in (1, 2)
    ]
    before = [report_of([row]).as_dict() for row in rows], report_of(rows).as_dict()
    losses = compare_losses(*rows)
    for row in rows:
        with TableWriter(row.folder) as table:
            summarize(row.folder, table=table)
        (row.folder / "metrics.jsonl").unlink()
    assert ([report_of([row]).as_dict() for row in rows], report_of(rows).as_dict()) == before
    assert losses == compare_losses(*rows) is not None


def test_tasks_share_a_table(tmp_path: Path) -> None:
    for task in ("task-0", "task-1"):
        (tmp_path / task).mkdir()
        (tmp_path / task / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {task[-1]}.5}}\n')
    with TableWriter(tmp_path) as table:
        for task in ("task-0", "task-1"):
            summarize(tmp_path / task, table=table)
    # The job's own file of this name is no table of ours.
    (tmp_path / "task-1" / TABLE_FILE).write_bytes(b"PK")
    for number in (0, 1):
        (block,) = stored(MetricFiles(tmp_path / f"task-{number}"))
        assert [*block.columns["loss"].ys] == [number + 0.5]


@pytest.mark.parametrize("place", [0.2, 0.5, 0.9, 0.999])
def test_damaged_table_yields_nothing_and_the_files_are_read(tmp_path: Path, place: float) -> None:
    """Blocks before the damage can be read, but whether their numbers are right is not known."""
    lines = [{"step": n, "loss": 1 / (n + 1)} for n in range(40_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with TableWriter(tmp_path) as table:
        summarize(tmp_path, table=table)
    path = tmp_path / TABLE_FILE
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at : at + 64] = bytes(byte ^ 0xFF for byte in data[at : at + 64])
    path.write_bytes(data)
    read = MetricFiles(tmp_path)
    values = [y for block in stored(read) for y in block.columns["loss"].ys]
    assert values == [line["loss"] for line in lines]
    assert read.left_out == []


def column(*ys: float) -> Column:
    places = [TIME + at + 1.0 for at in range(len(ys))]
    return Column(places, ys, rises=True)


OF_A_NODE = {"before": column(INF, TIME), "cores": column(8, 8), "gpus": column(0, 1)}
FOREIGN: dict[str, Block] = {
    "no columns": Block({}, "time", column(1, 2)),
    "not finite": Block({**OF_A_NODE, "gpus": column(NAN, NAN)}, "time", column(1, 2)),
    "too large": Block({**OF_A_NODE, "CPU": column(5, 1e308)}, "time", column(1, 2)),
    "unknown time before": Block({**OF_A_NODE, "before": column(NAN, NAN)}, "time", column(1, 2)),
    "short": Block({**OF_A_NODE, "CPU": column(5)}, "time", column(1, 2)),
    "empty": Block(OF_A_NODE, "time", Column([], [])),
    "places that are not finite": Block(OF_A_NODE, "time", Column([NAN, INF], [NAN, INF])),
    "no text": Block(OF_A_NODE, ["time"], column(1, 2)),  # type: ignore[arg-type]
    "a line too few": Block(OF_A_NODE, "time", column(1, 2), "result", [{}]),
}


OF_ANY_FILES = ("empty", "places that are not finite", "no text", "a line too few")


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((NodeFile, name) for name in FOREIGN), *((MetricFiles, name) for name in OF_ANY_FILES)],
)
def test_table_that_collect_can_t_have_written_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str
) -> None:
    """Whoever sends a run may have written it, and its readers need whole columns."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    telemetry(tmp_path)
    of_run = (tmp_path, "n1") if kind is NodeFile else (tmp_path,)
    expected = kept([*kind(*of_run).blocks()])
    with monkeypatch.context() as patch, TableWriter(tmp_path) as table:
        patch.setattr(kind, "blocks", lambda _: iter([FOREIGN[name]]))
        assert len([*table.blocks(kind(*of_run))]) == 1
    assert kept([*stored(kind(*of_run))]) == expected


def test_damaged_table_is_named_if_there_are_no_files(tmp_path: Path) -> None:
    (tmp_path / TABLE_FILE).write_bytes(b"PK")
    read = MetricFiles(tmp_path)
    assert [*stored(read)] == []
    (text,) = read.left_out
    assert TABLE_FILE in text
