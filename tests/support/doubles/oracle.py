"""The comparison of the payload's layers with PyTorch: results and gradients from equal weights."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from payload.device.base import Array, Device
from payload.nn.module import Layer, Parameter, Tape, Unit
from tests.support.doubles.layers import stored

if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:

    class Lazy:
        """A module that is imported when it is first used: PyTorch takes seconds, and few workers
        need it.

        Collecting tests is no use: pytest asks whatever a module holds for private names.
        """

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("_"):
                raise AttributeError(attribute)
            return getattr(_imported(self._name), attribute)

    torch = Lazy("torch")
    functional = Lazy("torch.nn.functional")

__all__ = [
    "EACH_DTYPE",
    "TOLERANCE",
    "Tensors",
    "assert_close",
    "assert_same_gradients",
    "compare",
    "functional",
    "gradients",
    "tensors",
    "torch",
]
Tensors = dict[str, "torch.Tensor"]
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
EACH_DTYPE = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("real", "float64"),
        ("strict", "float32"),
    ],
    indirect=["device"],
)


@functools.cache
def _imported(name: str) -> Any:
    imported = importlib.import_module(name)
    if name == "torch":
        imported.set_num_threads(1)  # the models are tiny, and the machine is shared
        _without_compiler(imported.optim.Optimizer, imported.no_grad())
    return imported


def _without_compiler(optimizer: Any, no_grad: Any) -> None:
    """Else optimizers import PyTorch's whole compiler, for 6 seconds, only to tell it to leave them
    alone.
    """
    for method in vars(optimizer).values():
        if plain := getattr(method, "__wrapped__", None):
            setattr(plain, "__dynamo_disable", plain)
    for kind in optimizer.__subclasses__():
        if plain := getattr(vars(kind).get("step"), "__wrapped__", None):
            kind.step = no_grad(plain)


def tensors(units: Sequence[Unit], device: Device) -> Tensors:
    """The parameters as PyTorch's leaves, by name."""
    parameters = {p.name: p for unit in units for p in unit.layer.parameters}
    return {
        name: torch.tensor(_in_torch(p, p.value, device), requires_grad=True)
        for name, p in parameters.items()
    }


def _in_torch(parameter: Parameter, actual: Array, device: Device) -> Array:
    """Without what is padding."""
    return np.ascontiguousarray(parameter.form.to_torch(device.to_host(actual)[: parameter.rows]))


def assert_close(actual: Array, reference: torch.Tensor | Array | None, what: str) -> None:
    """To the tolerance of the type, relative to the largest number."""
    assert reference is not None, what
    expected = reference.detach().numpy() if isinstance(reference, torch.Tensor) else reference
    bound = TOLERANCE[str(actual.dtype)]
    atol = bound * float(np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=bound, atol=atol, err_msg=what)


def gradients(units: Sequence[Unit], device: Device) -> dict[str, Array]:
    """Of every parameter, by name, shaped as PyTorch's."""
    parameters = [parameter for unit in units for parameter in unit.layer.parameters]
    for parameter in parameters:
        parameter.zero_unset_grad()
    return {p.name: _in_torch(p, p.grad, device).copy() for p in parameters}


def assert_same_gradients(units: Sequence[Unit], torch_weights: Tensors, device: Device) -> None:
    for name, actual in gradients(units, device).items():
        assert_close(actual, torch_weights[name].grad, name)


def compare(
    layer: Layer,
    x: Array,
    device: Device,
    torch_forward: Callable[[Tensors, torch.Tensor], torch.Tensor],
    tape: Tape | None = None,
) -> None:
    """Run a layer on ``x`` of the host, with random weights, in both, forward and backward."""
    rng = np.random.default_rng(11)
    real = np.issubdtype(x.dtype, np.floating)
    dtype = str(x.dtype) if real else "float64"
    units = [Unit("unit", layer)]
    storage = stored(units, device, dtype)
    storage.master_weights += device.asarray(
        rng.standard_normal(storage.master_weights.shape), dtype
    )
    weights = tensors(units, device)
    tensor = torch.tensor(x, requires_grad=real)

    tape = tape or Tape()
    y = layer.forward(device.asarray(x.copy()), tape)
    expected = torch_forward(weights, tensor)
    assert_close(device.to_host(y).copy(), expected, "y")
    dy = rng.standard_normal(y.shape).astype(dtype)
    dx = layer.backward(device.asarray(dy.copy()), tape)
    expected.backward(torch.tensor(dy))
    if real:
        assert_close(device.to_host(dx).copy(), tensor.grad, "dx")
    assert_same_gradients(units, weights, device)
