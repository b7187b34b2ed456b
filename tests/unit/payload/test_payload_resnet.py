"""Convolutional networks beside the same ones in PyTorch: loss, every gradient, and some
iterations.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from payload.device.base import Device
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, state_of
from payload.optim.sgd import SGD
from payload.parallel.pipeline import Pipeline, Stage
from tests.support.doubles.layers import batch_of, stored
from tests.support.doubles.models import NETWORKS, Convolutional
from tests.support.doubles.oracle import (
    TOLERANCE,
    assert_same_gradients,
    functional,
    tensors,
    torch,
)

SAMPLES = 5


@pytest.fixture(autouse=True)
def _without_onednn() -> Iterator[None]:
    """PyTorch's own convolutions: oneDNN's, in PyTorch 2.13, corrupt memory on some CPUs, going
    backward.
    """
    # `mkldnn.flags` also sets TF32, and warns on CPUs that it is for GPUs.
    was_enabled, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
    yield
    torch.backends.mkldnn.set_flags(_enabled=was_enabled)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_trains_as_pytorchs(name: str, device: Device) -> None:
    case = NETWORKS[name]
    rng = np.random.default_rng(6)
    units = case.units(LayerContext(device))
    storage = stored(units, device, "float64")
    storage.master_weights += device.asarray(
        0.1 * rng.standard_normal(storage.master_weights.shape)
    )
    x, labels = case.batch(rng, SAMPLES)
    batch = batch_of(device, x, labels)
    torch_x = torch.tensor(x).permute(0, 3, 1, 2)
    pipeline = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(LayerContext(device)))
    sgd = SGD(device, storage.master_weights, storage.segments, momentum=0.9)
    weights = tensors(units, device)
    state = state_of([unit.layer for unit in units])
    first = {
        part: torch.full(array.shape, float(part.endswith("running_var")))
        for part, array in state.items()
    }
    torch_weights = Convolutional(weights, first)
    optimizer = torch.optim.SGD(weights.values(), lr=0.01, momentum=0.9)
    for iteration in range(4):
        storage.begin()
        ours = pipeline.train([batch], scale=1 / SAMPLES, seed=0, iteration=iteration)
        loss = functional.cross_entropy(
            case.torch_forward(torch_weights, torch_x), torch.tensor(labels)
        )
        assert float(ours.loss) / SAMPLES == pytest.approx(loss.item(), rel=TOLERANCE["float64"])
        optimizer.zero_grad()
        loss.backward()
        assert_same_gradients(units, weights, device)
        optimizer.step()
        sgd.step(storage.master_weights, storage.grads, lr=0.01)
    for part, array in state.items():
        expected = torch_weights.state[part]
        bound = 10 * TOLERANCE["float64"] * float(expected.abs().max())
        np.testing.assert_allclose(device.to_host(array), expected, atol=bound, err_msg=part)
