"""Plans of the real cuDNN for an H200 that is not here, for every graph that the payload's models
build.

The models run on the double of CuPy, where the graphs compute nothing. Arguments: the precision, and
"deterministic" or "any". Standard output: a JSON object with the operations, how many graphs have a
plan, and the reason of each that has none.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import cudnn
import numpy as np

from payload.comm.base import Solo
from payload.device import graphs
from payload.models import bert, gpt, resnet, vit
from payload.nn.module import LayerContext
from payload.optim.precision import PRECISIONS, loss_scale
from payload.parallel.mesh import alone
from tests.support.doubles.layers import batch_of, engine_of
from tests.support.doubles.strict import Strict

H200 = {
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536,
    "multiProcessorCount": 132,
    "smCountOrigin": 0,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "l2CacheSize": 62914560,
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "totalGlobalMem": 150000000000,
}
_TEXT: dict[str, Any] = {"vocabulary": 64, "layers": 1}


def _text(length: int, count: int = 2) -> tuple[Any, Any]:
    tokens = np.random.default_rng(1).integers(0, 64, (count, length))
    return tokens, tokens


def _images(side: int, count: int = 2) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((count, side, side, 3)), rng.integers(0, 8, count)


CASES: list[tuple[Any, dict[str, Any], tuple[Any, Any]]] = [
    (resnet, {"side": 224, "classes": 8, "depth": 50}, _images(224)),
    (resnet, {"side": 32, "classes": 8, "depth": 18}, _images(32)),
    (vit, {"classes": 8, "layers": 1}, _images(224)),
    (gpt, {"length": 1024, **_TEXT}, _text(1024)),
    (gpt, {"length": 17, **_TEXT, "heads": 25, "width": 1600}, _text(17)),
    (gpt, {"length": 64, "dropout": 0.1, **_TEXT}, _text(64)),
    (bert, {"length": 128, "dropout": 0.1, **_TEXT}, _text(128)),
    (bert, {"length": 512, "dropout": 0.0, **_TEXT}, _text(512)),
]


class _Two(Solo):
    """The first of two data-parallel ranks: batch norm then sums statistics over both."""

    size = 2


class Untouched(graphs.CudnnGraphs):
    """Remembers what was asked for, and computes nothing."""

    def run(
        self, build: Any, inputs: Any, outputs: Any, *, scalars: Any = (), **parameters: Any
    ) -> None:
        layouts = (tuple(map(graphs.ArrayLayout.of, arrays)) for arrays in (inputs, outputs))
        key = graphs.PlanKey(build, tuple(parameters.items()), *layouts, tuple(scalars))
        self.plans[key] = graphs.CudnnPlan(None, (), (), 0)
        for one in outputs:
            one[...] = 0


def asked(precision: str, *, deterministic: bool) -> list[graphs.PlanKey]:
    """Return the graphs of a training step of all models, and of an evaluation; and of a training
    step whose batch norm sums over two ranks.
    """
    keys: dict[graphs.PlanKey, None] = {}
    cases = [(*case, Solo()) for case in CASES]
    for module, sizes, (x, targets), dp in [*cases, (*CASES[1], _Two())]:
        device = Strict.fused(deterministic=deterministic)
        fused: Any = device.fused_for(device.xp.ones(1, "float16"))
        fused.graphs.__class__ = Untouched
        engine = engine_of(
            device,
            alone(),
            module.build(LayerContext(device, dp=dp), **sizes),
            precision=PRECISIONS[precision],
            loss_scale=loss_scale(precision, 1.0),
        )
        images = None if x.dtype.kind == "i" else x.astype(PRECISIONS[precision].compute)
        batch = batch_of(device, x if images is None else images, targets)
        engine.step([batch], targets=targets.size, iteration=1, lr=0.1)
        engine.evaluate([batch])
        keys |= dict.fromkeys(fused.graphs.plans)
    return list(keys)


def main() -> None:
    properties = cudnn.create_device_properties(json.dumps(H200))
    planned: Counter[str] = Counter()
    refused = []
    largest = 0
    precision = sys.argv[1]
    deterministic = sys.argv[2] == "deterministic"
    for key in asked(precision, deterministic=deterministic):
        name = key.build.__name__.strip("_")
        try:
            made = graphs.plan(
                cudnn, key, deterministic=deterministic, place={"device_property": properties}
            )
            planned[name] += 1
            largest = max(largest, made.workspace_bytes)
        # Any refusal is reported, whatever cuDNN raises.
        except Exception as exc:
            refused.append(f"{name} {key.inputs}: {type(exc).__name__} {exc}")
    version = cudnn.backend_version()
    result = {"cudnn": version, "planned": planned, "refused": refused, "workspace": largest}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
