"""cuDNN's graphs, through nvidia-cudnn-frontend: each is built and planned once, and then kept.

A graph is planned for an operation, its parameters, and the shapes, layouts and number formats of
its arrays. cuDNN sees 4-d tensors in the order (B, channels, height, width) or (B, heads, positions,
numbers); the strides say how they lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from payload.device.base import FLOAT32, Array, pointer
from payload.errors import RankError

_WORKSPACE_BYTES = 1 << 30
"""Plans that need a larger workspace are not used."""
_ALIGNMENT = 16
"""Bytes. Default alignment of a tensor in a graph: kernels read 16 bytes at once."""
_TYPES = {"bfloat16": "BFLOAT16", "float16": "HALF", "float32": "FLOAT"}

Build = Callable[..., Sequence[Any]]
"""Adds an operation to a graph, and returns its outputs. Arguments: the module cudnn, the graph, the
input tensors, and the parameters by name."""


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Shape of an array, its strides in elements, and its number format."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Array) -> ArrayLayout:
        # NumPy and CuPy give an axis of length 1 any stride.
        strides = tuple(max(step // array.itemsize, 1) for step in array.strides)
        return cls(tuple(array.shape), strides, array.dtype.name)


@dataclass(frozen=True, slots=True)
class PlanKey:
    """All that a plan depends on. scalars: inputs that cuDNN reads from host memory."""

    build: Build
    parameters: tuple[tuple[str, Any], ...]
    inputs: tuple[ArrayLayout, ...]
    outputs: tuple[ArrayLayout, ...]
    scalars: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CudnnPlan:
    graph: Any
    # Tensors of the inputs, then of the outputs.
    tensors: tuple[Any, ...]
    # Tensors of the scalars, with the host memory that holds each.
    scalars: tuple[tuple[Any, Array], ...]
    workspace_bytes: int


def plan(
    cudnn: ModuleType, key: PlanKey, *, deterministic: bool, place: Mapping[str, Any]
) -> CudnnPlan:
    """Build a graph and choose its execution plan.

    Args:
        deterministic: whether to use only engines whose results are bit-identical in each run.
        place: for ``cudnn.pygraph``: ``handle``, or ``device_property`` of a GPU that is not here.

    Raises:
        RankError: cuDNN has no engine for this graph.
    """
    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **place,
    )
    inputs = [
        graph.tensor(dim=list(one.shape), stride=list(one.strides), data_type=_type(cudnn, one))
        for one in key.inputs
    ]
    scalars = [
        graph.tensor(
            dim=[1, 1, 1, 1],
            stride=[1, 1, 1, 1],
            is_pass_by_value=True,
            data_type=cudnn.data_type.FLOAT,
        )
        for _ in key.scalars
    ]
    parameters = dict(key.parameters)
    try:
        outputs = key.build(cudnn, graph, *inputs, *scalars, **parameters)
        for tensor, layout in zip(outputs, key.outputs, strict=True):
            tensor.set_output(True).set_data_type(_type(cudnn, layout))
            tensor.set_dim(list(layout.shape)).set_stride(list(layout.strides))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_workspace_greater_than(_WORKSPACE_BYTES)
        if deterministic:
            graph.deselect_numeric_notes([cudnn.numerical_note.NONDETERMINISTIC])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as exc:
        shapes = " and ".join(f"{one.dtype} {one.shape}" for one in key.inputs)
        name = key.build.__name__.strip("_")
        reason = str(exc).splitlines()[0]
        raise RankError(
            f"--kernels fused: cuDNN has no plan for {name} of {shapes}: {reason}; use "
            "--kernels plain",
            code="kernels-unsupported",
        ) from exc
    values = [np.array([value], FLOAT32) for value in key.scalars]
    return CudnnPlan(
        graph,
        (*inputs, *outputs),
        tuple(zip(scalars, values, strict=True)),
        graph.get_workspace_size(),
    )


def _type(cudnn: ModuleType, layout: ArrayLayout) -> Any:
    return getattr(cudnn.data_type, _TYPES[layout.dtype])


class CudnnGraphs:
    """Plans of one GPU, and their execution on CuPy's current stream."""

    def __init__(self, cudnn: ModuleType, xp: ModuleType, *, deterministic: bool) -> None:
        self._cudnn = cudnn
        self._xp = xp
        self.deterministic = deterministic
        self._handle = cudnn.create_handle()
        self.plans: dict[PlanKey, CudnnPlan] = {}

    def run(
        self,
        build: Build,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        *,
        scalars: Sequence[float] = (),
        **parameters: Any,
    ) -> None:
        """Compute an operation on 4-d views of arrays, and write its results to ``outputs``."""
        inputs = [aligned(one) for one in inputs]
        key = PlanKey(
            build,
            tuple(parameters.items()),
            tuple(map(ArrayLayout.of, inputs)),
            tuple(map(ArrayLayout.of, outputs)),
            tuple(scalars),
        )
        if key not in self.plans:
            self.plans[key] = plan(
                self._cudnn, key, deterministic=self.deterministic, place={"handle": self._handle}
            )
        planned = self.plans[key]
        addresses = dict(zip(planned.tensors, map(pointer, (*inputs, *outputs)), strict=True))
        addresses |= {tensor: value.ctypes.data for tensor, value in planned.scalars}
        # CuPy's pool gives this memory to later work of the same stream only.
        workspace = self._xp.empty(max(planned.workspace_bytes, 1), "uint8")
        self._cudnn.set_stream(self._handle, self._xp.cuda.get_current_stream().ptr)
        planned.graph.execute(addresses, pointer(workspace), handle=self._handle)


def aligned(array: Array) -> Array:
    """Return the array, or a copy if its address suits no load of 16 bytes."""
    return array if pointer(array) % _ALIGNMENT == 0 else array.copy()
