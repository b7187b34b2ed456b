"""Each model beside the same one in PyTorch: loss, every gradient, and some iterations of
training.
"""

from __future__ import annotations

import numpy as np
import pytest

from payload.device.base import Device
from payload.models import MODELS, gpt, module_of, resnet, vit
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, Unit
from payload.optim.adamw import AdamW
from payload.parallel.pipeline import Pipeline, Stage
from tests.support.doubles.layers import batch_of, cut, stored
from tests.support.doubles.models import CASES, Case
from tests.support.doubles.oracle import (
    EACH_DTYPE,
    TOLERANCE,
    Tensors,
    assert_same_gradients,
    functional,
    tensors,
    torch,
)


def _adamw(units: list[Unit], torch_weights: Tensors) -> torch.optim.Optimizer:
    decayed = {p.name: p.decay for unit in units for p in unit.layer.parameters}
    groups = [
        {
            "params": [torch_weights[name] for name in decayed if decayed[name] is decay],
            "weight_decay": 0.1 * decay,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=0.01)


@EACH_DTYPE
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_model_trains_as_pytorchs(case: Case, dtype: str, device: Device) -> None:
    rng = np.random.default_rng(4)
    units = case.units(LayerContext(device))
    storage = stored(units, device, dtype)
    storage.master_weights += device.asarray(
        0.05 * rng.standard_normal(storage.master_weights.shape), dtype
    )
    torch_weights = tensors(units, device)
    schedule = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(LayerContext(device)))
    adamw = AdamW(device, storage.master_weights, storage.segments, weight_decay=0.1)
    optimizer = _adamw(units, torch_weights)
    x, targets = case.batch(rng, samples=6)
    x = x.astype(dtype) if x.dtype == "float64" else x
    count = int((targets >= 0).sum())
    batches = cut(batch_of(device, x, targets), 4)
    for iteration in range(4):
        storage.begin()
        sums = schedule.train(batches, scale=1 / count, seed=0, iteration=iteration)
        logits = case.torch_forward(torch_weights, torch.tensor(x))
        loss = functional.cross_entropy(
            logits.flatten(0, -2), torch.tensor(targets).ravel(), ignore_index=-1
        )
        assert float(sums.count) == count
        assert float(sums.loss) / count == pytest.approx(loss.item(), rel=TOLERANCE[dtype] / 10)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert_same_gradients(units, torch_weights, device)
        optimizer.step()
        adamw.step(storage.master_weights, storage.grads, lr=0.01)


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        *(("gpt-124m", 124.48), ("gpt-350m", 354.87), ("gpt-774m", 774.09), ("gpt-1.5b", 1557.69)),
        *(("bert-base", 109.52), ("vit-b16", 86.57), ("resnet18", 11.69), ("resnet50", 25.56)),
    ],
)
def test_sizes_are_those_of_the_papers(model: str, millions: float, device: Device) -> None:
    sizes = {**MODELS[model].sizes, **({"side": 224, "classes": 1000} if "resnet" in model else {})}
    units = module_of(model).build(LayerContext(device), **sizes)
    parameters = {id(p): p.size for unit in units for p in unit.layer.parameters}
    assert sum(parameters.values()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_operations_are_counted(device: Device) -> None:
    """Papers give multiply-adds of ViT and ResNets; llm.c counts 2 N + 2 L T C for a token of
    GPT-2.
    """
    large = {"side": 224, "classes": 1000}
    for units, multiply_adds, rel in (
        (vit.build(LayerContext(device)), 17.58e9, 0.002),
        (resnet.build(LayerContext(device), depth=18, **large), 1.814e9, 0.001),
        (resnet.build(LayerContext(device), depth=50, **large), 4.089e9, 0.001),
        (gpt.build(LayerContext(device)), 1024 * (124.48e6 + 12 * 1024 * 768), 0.01),
    ):
        assert sum(unit.flops for unit in units) == pytest.approx(2 * multiply_adds, rel=rel)
