"""Training steps of the payload and of PyTorch DDP, in turn, in the same processes. Started by
training.py.

Arguments: WHAT (a function below), the number of rounds.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support import gloo, torch_models
from benchmarks.support.rounds import Measured
from payload.comm import mpi
from payload.comm.base import Solo
from payload.device.base import Array, CpuDevice
from payload.models import gpt as our_gpt
from payload.models import mlp as our_mlp
from payload.models import resnet as our_resnet
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, Unit
from payload.node.host import keep_freed_memory
from payload.optim.adamw import AdamW
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import make_mesh
from payload.parallel.pipeline import MicroBatch

LR = 1e-4
NORMS = (nn.LayerNorm, nn.BatchNorm2d)
STEPS = 10  # in one round
# Rounding in float32 shifts a loss by less than this share in each step of the first round.
# Measured with the kernels for AVX2 and for AVX-512: about one rounding (1.2e-7) after ten steps.
ROUNDING = 4 * np.finfo(np.float32).eps
# Later, rounding sets no bound: at times the training on one batch is unstable, and AdamW
# multiplies a difference by up to five in each step. With the kernels for AVX2, GPT's losses differ
# by 2e-6 of the first loss at step 73 and by 2e-4 at step 77. So later losses may differ by this
# share of their fall so far.
FALL = 0.05
Step = Callable[[], float]  # trains on one global batch and gives the loss of this rank's share


@dataclass(frozen=True)
class Match:
    """One model on both sides."""

    title: str
    ours: Step
    theirs: Step
    samples: int  # in a global batch
    aim: str


def play(match: Match, world: mpi.MpiCommunicator, rounds: int) -> None:
    """Rounds of ``STEPS`` steps in turn, after one not counted; the losses of both sides must
    agree.
    """
    taken: dict[str, list[float]] = {"payload": [], "PyTorch DDP": []}
    used: dict[str, list[float]] = {side: [] for side in taken}
    losses: dict[str, list[float]] = {side: [] for side in taken}
    load = []
    for _ in range(rounds + 1):
        load.append(f"{os.getloadavg()[0]:.1f}")
        for side, step in zip(taken, (match.ours, match.theirs), strict=True):
            world.barrier()
            start = time.perf_counter()
            processor = time.process_time()
            losses[side] += [step() for _ in range(STEPS)]
            used[side].append(time.process_time() - processor)
            world.barrier()
            taken[side].append(time.perf_counter() - start)
    reject_disagreement(*losses.values())
    if world.rank == 0:
        measured = Measured(
            match.title, {side: seconds[1:] for side, seconds in taken.items()}, aim=match.aim
        )
        for side in taken:
            speed = match.samples * STEPS / measured.median(side)
            measured.notes.append(f"{side}: {speed:,.0f} samples/s")
        ours, theirs = (seconds[1:] for seconds in used.values())
        rates = " ".join(f"{their / our:.2f}" for our, their in zip(ours, theirs, strict=True))
        ratio = statistics.median(theirs) / statistics.median(ours)
        measured.notes.append(
            f"processor time of rank 0, medians: {statistics.median(ours):.2f} and "
            f"{statistics.median(theirs):.2f} s, ratio {ratio:.2f}; of each round {rates}"
        )
        measured.notes.append(f"load average before each round: {' '.join(load[1:])}")
        measured.notes.extend(kernels())
        ours = losses["payload"]
        measured.notes.append(
            f"loss {ours[0]:.4f} → {ours[-1]:.4f}; PyTorch's {losses['PyTorch DDP'][-1]:.4f}"
        )
        measured.show()


def reject_disagreement(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Reject losses of the two sides that differ by more than float32 explains.

    Raises:
        AssertionError: they do. It names the first such step.
    """
    for step, (our, their) in enumerate(zip(ours, theirs, strict=True), 1):
        allowed = step * ROUNDING * ours[0] if step <= STEPS else FALL * (ours[0] - our)
        difference = abs(our - their)
        # A loss that is not a number is within no bound.
        assert difference <= allowed, (
            f"step {step}: the losses differ by {difference:.2g} (payload {our:.8g}, PyTorch "
            f"{their:.8g}), allowed are {allowed:.2g}"
        )


def kernels() -> list[str]:
    """Which libraries multiply on each side, and for which processor they chose their kernels."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    found = [
        f"NumPy {np.__version__}: {config().decode()}"
        for path in sorted(path for path in mapped if "openblas" in path)
        if (config := _openblas_config(ctypes.CDLL(path)))
    ]
    shown = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    parts = [line for line in shown if line.startswith(("Intel", "CPU capability"))]
    return [
        *(found or [f"NumPy {np.__version__}: no OpenBLAS"]),
        f"PyTorch {torch.__version__}: {'; '.join(parts)}",
    ]


def _openblas_config(library: ctypes.CDLL) -> Callable[[], bytes] | None:
    """What tells the version and the kernels in use, whatever its name is: NumPy's wheels rename
    it.
    """
    for name in (
        "scipy_openblas_get_config64_",
        "scipy_openblas_get_config",
        "openblas_get_config",
    ):
        if config := getattr(library, name, None):
            config.restype = ctypes.c_char_p
            return config
    return None


class Pair:
    """An engine of ours and a DDP model of theirs that start alike and see the same batch again and
    again.
    """

    def __init__(
        self,
        world: mpi.MpiCommunicator,
        build: Callable[..., list[Unit]],
        sizes: dict[str, object],
        model: nn.Module,
        alike: Mapping[str, nn.Module],
        *,
        adam: bool,
    ) -> None:
        """``alike``: the layers of theirs by the beginning of the names of our parameters."""
        self._world = world
        device = CpuDevice()
        mesh = make_mesh(world)
        context = mesh.context(device)
        self._engine = Engine(
            device,
            mesh,
            build(context, **sizes),
            SoftmaxCrossEntropy(context),
            lambda storage: (AdamW if adam else SGD)(
                device, storage.master_weights, storage.segments, weight_decay=0.0
            ),
        )
        parameters = [segment.parameter for segment in self._engine.storage.segments]
        values = {one.name: one.form.to_torch(one.value[: one.rows]) for one in parameters}
        for name, layer in alike.items():
            _copy(name, layer, values)
        assert not values, f"not in PyTorch's model: {list(values)}"
        self._model = DistributedDataParallel(model)
        self._optimizer = (
            torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
            if adam
            else torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        )
        self._iteration = 0

    def match(
        self, title: str, aim: str, inputs: Array, targets: Array, theirs: Array | None = None
    ) -> Match:
        """This rank's share of the global batch; ``theirs``: the inputs as PyTorch's model wants
        them.
        """
        count = len(inputs)
        batch = MicroBatch(inputs, targets, np.arange(count, dtype=np.uint32))
        x = torch.from_numpy(inputs if theirs is None else theirs)
        y = torch.from_numpy(targets)
        everywhere = targets.size * self._world.size

        def our_step() -> float:
            self._iteration += 1
            step = self._engine.step([batch], targets=everywhere, iteration=self._iteration, lr=LR)
            return step.loss

        def their_step() -> float:
            self._optimizer.zero_grad()
            logits = self._model(x)
            loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
            loss.backward()
            self._optimizer.step()
            distributed.all_reduce(shared := loss.detach() / self._world.size)
            return float(shared)

        return Match(title, our_step, their_step, count * self._world.size, aim)


def _copy(name: str, layer: nn.Module, values: dict[str, Array]) -> None:
    """Our values of one layer, in PyTorch's form, into theirs."""
    with torch.no_grad():
        weight = next(found for found in (f"{name}.weight", f"{name}_weight") if found in values)
        layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(values.pop(weight))))
        if getattr(layer, "bias", None) is not None:
            bias = f"{weight.removesuffix('weight')}bias"
            layer.bias.copy_(torch.from_numpy(np.ascontiguousarray(values.pop(bias))))


def mlp(world: mpi.MpiCommunicator) -> Match:
    """5.8 million parameters."""
    sizes = {"inputs": 784, "hidden": (2048, 2048), "classes": 10}
    theirs = torch_models.mlp(**sizes)
    linears = [layer for layer in theirs if isinstance(layer, nn.Linear)]
    alike = {f"linear{number}": layer for number, layer in enumerate(linears)}
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal((64, 784), dtype=np.float32)
    labels = rng.integers(0, 10, 64)
    pair = Pair(world, our_mlp.build, sizes, theirs, alike, adam=False)
    return pair.match("MLP 784-2048-2048-10, SGD, 64 samples a rank", "1.3x", x, labels)


def gpt(world: mpi.MpiCommunicator) -> Match:
    """4.8 million parameters."""
    sizes = {"vocabulary": 256, "length": 128, "layers": 6, "heads": 4, "width": 256}
    theirs = torch_models.GPT(**sizes)
    alike = {"embedding": theirs.tokens, "positions": theirs.positions, "norm": theirs.norm}
    for number, block in enumerate(theirs.blocks):
        layers = {
            "norm1": block.norm1,
            "self_attn.in_proj": block.qkv,
            "self_attn.out_proj": block.out,
        }
        layers |= {"norm2": block.norm2, "linear1": block.up, "linear2": block.down}
        alike |= {f"layers.{number}.{name}": layer for name, layer in layers.items()}
    tokens = np.random.default_rng(world.rank).integers(0, 256, (8, 129))
    x = np.ascontiguousarray(tokens[:, :-1])
    labels = np.ascontiguousarray(tokens[:, 1:])
    pair = Pair(world, our_gpt.build, sizes, theirs, alike, adam=True)
    return pair.match("GPT of 6 layers, 256 wide, AdamW, 8 x 128 tokens a rank", "1.1x", x, labels)


def resnet(world: mpi.MpiCommunicator) -> Match:
    """11.2 million parameters; as with PyTorch, each rank normalises by its own batch."""
    theirs = torch_models.ResNet18(classes=10)
    alike = {"conv1": theirs.stem[0], "bn1": theirs.stem[1], "fc": theirs.head}
    for number, block in enumerate(theirs.blocks):
        layers = {"conv1": block.conv1, "bn1": block.bn1, "conv2": block.conv2, "bn2": block.bn2}
        if block.short:
            layers |= {"downsample.0": block.short[0], "downsample.1": block.short[1]}
        name = f"layer{number // 2 + 1}.{number % 2}"
        alike |= {f"{name}.{part}": layer for part, layer in layers.items()}
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal((32, 32, 32, 3), dtype=np.float32)
    labels = rng.integers(0, 10, 32)
    channels_first = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    pair = Pair(world, _local_resnet, {"classes": 10}, theirs, alike, adam=False)
    return pair.match(
        "ResNet-18, 32 x 32, SGD, 32 images a rank", "1.0x", x, labels, theirs=channels_first
    )


def _local_resnet(context: LayerContext, **sizes: int) -> list[Unit]:
    return our_resnet.build(replace(context, dp=Solo()), **sizes)


def main() -> None:
    what = sys.argv[1]
    rounds = int(sys.argv[2])
    keep_freed_memory()
    mpi.start()
    world = mpi.MpiCommunicator(CpuDevice())
    torch.set_num_threads(1)
    gloo.join(world)
    play(CONTESTS[what](world), world, rounds)
    distributed.barrier()
    sys.stdout.flush()
    mpi.MPI.Finalize()
    os._exit(0)  # gloo may abort a process that takes its threads down in order


CONTESTS = {"mlp": mlp, "gpt": gpt, "resnet": resnet}


if __name__ == "__main__":
    main()
