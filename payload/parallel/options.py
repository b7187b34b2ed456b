"""How a model is laid out, and in what it is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from payload.precision import PRECISIONS, Precision


@dataclass(frozen=True, slots=True)
class Options:
    """What the mesh does not say."""

    seed: int = 0  # of first values and of dropout
    precision: Precision = PRECISIONS["fp32"]
    clip: float = math.inf  # the norm above which gradients are scaled down to it
    recompute: bool = False  # keep no activations but those between units
    zero: int = 0  # the stage, 0 to 3: see ``storage``
    offload: bool = False  # what the optimizer works on is in the memory of the host
    bucket_bytes: int = 25 << 20  # of gradients, at least, that are summed in one call; as PyTorch's DDP
    overlap: bool = True  # at stages 0 and 1 sum while the backward pass goes on, not after it
