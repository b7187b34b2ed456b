"""The GPT in one file learns what the engine learns."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from payload import minimal
from payload.device.base import Array, CpuDevice
from payload.models import gpt
from payload.nn.module import LayerContext
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS
from payload.parallel.engine import Engine
from payload.parallel.mesh import alone
from tests.support.doubles.layers import batch_of, engine_of

SIZES = minimal.Config(vocabulary=64, length=12, layers=2, heads=2, width=16)
STEPS = 6
SAMPLES = 3
RATE = 0.01


def _engine() -> Engine:
    units = gpt.build(LayerContext(CpuDevice()), **asdict(SIZES))
    options = {"seed": 7, "precision": PRECISIONS["fp64"]}
    return engine_of(CpuDevice(), alone(), units, AdamW, split=gpt.SPLIT_LOGITS, **options)


def _weights(engine: Engine) -> dict[str, Array]:
    flat = engine.storage.master_weights
    return {
        s.parameter.name: flat[s.start : s.stop].reshape(s.parameter.shape).copy()
        for s in engine.storage.segments
    }


def test_minimal_begins_with_the_weights_of_the_engine() -> None:
    minimal_weights = minimal.init(SIZES, 7, "float64")
    engine_weights = _weights(_engine())
    assert minimal_weights.keys() == engine_weights.keys()
    for name, weight in minimal_weights.items():
        np.testing.assert_array_equal(weight, engine_weights[name], name)


def test_minimal_and_the_engine_end_with_the_same_weights() -> None:
    """But for rounding: the engine adds up in other orders, such as block by block of queries and
    rows.
    """
    engine = _engine()
    minimal_weights = minimal.init(SIZES, 7, "float64")
    optimizer = minimal.AdamW(minimal_weights)
    rng = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        tokens, targets = rng.integers(SIZES.vocabulary, size=(2, SAMPLES, SIZES.length))
        loss, grads = minimal.loss_and_grads(minimal_weights, SIZES, tokens, targets)
        optimizer.step(minimal_weights, grads, RATE)
        batch = batch_of(engine.device, tokens, targets)
        result = engine.step([batch], targets=targets.size, iteration=step, lr=RATE)
        assert loss == pytest.approx(result.loss, rel=1e-12)
    for name, weight in _weights(engine).items():
        np.testing.assert_allclose(minimal_weights[name], weight, rtol=0, atol=1e-11, err_msg=name)
        assert np.abs(weight - minimal.init(SIZES, 7, "float64")[name]).max() > RATE / 10, name


def test_minimal_trains_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, " * 20)
    minimal.main([str(text), "--steps", "2", "--batch", "2", "--lr", "0.003"])
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2
    assert losses[-1] < losses[0] < 6
