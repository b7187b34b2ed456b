"""The bundled training program against PyTorch on one GPU: ResNet-50, BERT-base, GPT-2 and ViT-B/16.

Sides of each model: the payload with plain kernels, with fused kernels, and with these as CUDA
graphs, PyTorch with AMP (bfloat16, channels last) and with torch.compile. All live in this process,
start from the same weights, train on the same batch in bfloat16 with float32 masters, and take
turns. First each trains for 50 iterations, whose losses are compared.

Usage: python benchmarks/gpu.py [--out DIR] [--rounds N] [--turn S] [--budget S] [--sides A,B]
                                [--precision bf16] [--deterministic] [WHAT...]
WHAT: products, resnet50, gpt, bert-128, vit, bert-512, checkpoint. Default: all. --turn: seconds of
a side's turn (1.2; what the GPU did is measured in turns of 1 s or more). --budget: parts that would
begin after so many seconds are left out, and named. A side that fails is named, and the others go
on. DIR gets gpu.json, rewritten after each part. Needs PyTorch and CuPy in the same Python, and
payload/requirements-fused.in.

On a machine without a GPU it tests itself on CPUs, with tiny models and in float32: its figures mean
nothing there, and are labelled so.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.support import torch_named
from benchmarks.support.rounds import machine
from payload.device import choose, fuse
from payload.device.base import Array, Device
from payload.models import bert, gpt, resnet, vit
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, Unit
from payload.node.host import keep_freed_memory
from payload.node.nvml import Card, open_card
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS, loss_scale
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import EngineOptions, alone
from payload.parallel.pipeline import MicroBatch
from payload.training.gpu_use import GpuMeter, figures_of
from payload.training.peak import find_peak

LR = 1e-4
ITERATIONS = 50
"""Before the rounds, to compare losses."""
MASKED = 0.15
"""Share of BERT's tokens that it predicts."""
SIDES = ("payload plain", "payload fused", "payload captured", "PyTorch eager", "PyTorch compile")
GPU_FIGURES: Mapping[str, Callable[[float], str]] = {
    "gpu_idle_percent": lambda value: f"{value:.1f} % idle",
    "gpu_tensor_percent": lambda value: f"tensor cores {value:.1f} %",
    "gpu_bandwidth_percent": lambda value: f"memory {value:.1f} %",
    "samples_per_joule": lambda value: f"{value:.3g} per J",
}
"""What is shown of the GPU's work, of samples or tokens."""
FALL = 0.05
"""Losses may differ by this share of the first loss: bfloat16 rounds in other places on each side."""


@dataclass(frozen=True)
class Model:
    """A model on both sides: sizes for a GPU, and tiny ones."""

    title: str
    ours: Callable[..., list[Unit]]
    theirs: Callable[..., nn.Module]
    sizes: Mapping[str, int]
    tiny: Mapping[str, int]
    batch: int
    # Sizes that only the payload's function takes.
    extra: Mapping[str, Any] = field(default_factory=dict)
    # Floor on an H100 or H200, in samples or tokens per second.
    floor: float = 0.0
    masked: bool = False
    adam: bool = True


_BASE = {"layers": 12, "heads": 12, "width": 768}
_TINY = {"layers": 2, "heads": 2, "width": 16}
_BERT = {"dropout": 0.0}


def _text(title: str, ours: Any, theirs: Any, length: int, batch: int, **more: Any) -> Model:
    vocabulary = 30522 if theirs is torch_named.BERT else 50257
    sizes = {"vocabulary": vocabulary, "length": length, **_BASE}
    return Model(
        title, ours.build, theirs, sizes, {"vocabulary": 64, "length": 16, **_TINY}, batch, **more
    )


MODELS: dict[str, Model] = {
    "resnet50": Model(
        "ResNet-50, 224 x 224, SGD",
        resnet.build,
        torch_named.ResNet50,
        {"classes": 1000, "side": 224},
        {"classes": 4, "side": 65, "width": 8},
        256,
        {"depth": 50},
        floor=2000,
        adam=False,
    ),
    "gpt": _text("GPT-2 124M, 1024 tokens, AdamW", gpt, torch_named.GPT, 1024, 16, floor=468_000),
    "bert-128": _text(
        "BERT-base, 128 tokens, AdamW",
        bert,
        torch_named.BERT,
        128,
        128,
        extra=_BERT,
        floor=1200,
        masked=True,
    ),
    "vit": Model(
        "ViT-B/16, 224 x 224, AdamW",
        vit.build,
        torch_named.ViT,
        {"side": 224, "patch": 16, "classes": 1000, **_BASE},
        {"side": 16, "patch": 8, "classes": 4, **_TINY},
        128,
    ),
    "bert-512": _text(
        "BERT-base, 512 tokens, AdamW", bert, torch_named.BERT, 512, 32, extra=_BERT, masked=True
    ),
}


@dataclass(frozen=True)
class Bench:
    """What all parts need. tiny: there is no GPU. card: None: NVML does not know the GPU."""

    options: argparse.Namespace
    tiny: bool
    sides: Sequence[str]
    devices: Mapping[str, Device]
    where: torch.device
    precision: str
    card: Card | None

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()
            self.devices["payload plain"].synchronize()


# Trains, and gives the loss: a number, or a tensor that is not waited for.
Step = Callable[[], Any]


@dataclass
class Side:
    """One side's training."""

    step: Step
    meter: GpuMeter | None
    memory_bytes: int = 0
    # In one turn.
    steps: int = 1
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def turn(self, bench: Bench, samples: int, *, counts: bool) -> None:
        """Train for a turn, with so many samples in an iteration. counts: whether it is measured."""
        meter = self.meter if counts else None
        bench.wait()
        if meter:
            meter.begin()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        bench.wait()
        if counts:
            self.seconds.append(time.perf_counter() - start)
        if meter:
            meter.end(samples * self.steps)

    def gpu_figures(self) -> dict[str, float]:
        """Return what the GPU did in all turns. CuPy and PyTorch are one process."""
        return figures_of([(self.meter.use(), 1)]) if self.meter else {}


def batch_of(model: Model, sizes: Mapping[str, int], count: int) -> tuple[Array, Array]:
    """Return inputs as the payload takes them, and targets."""
    rng = np.random.default_rng(1)
    if "vocabulary" not in sizes:
        side = sizes["side"]
        images = rng.standard_normal((count, side, side, 3), dtype=np.float32)
        return images, rng.integers(0, sizes["classes"], count)
    tokens = rng.integers(0, sizes["vocabulary"], (count, sizes["length"] + 1))
    if not model.masked:
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    targets = np.where(rng.random(tokens[:, 1:].shape) < MASKED, tokens[:, 1:], -1)
    targets[0, 0] = tokens[0, 1]
    return tokens[:, :-1].copy(), targets


def our_engine(bench: Bench, model: Model, side: str, sizes: Mapping[str, int]) -> Engine:
    device = bench.devices[side]
    context = LayerContext(device)
    return Engine(
        device,
        alone(),
        model.ours(context, **sizes, **model.extra),
        SoftmaxCrossEntropy(context),
        lambda storage: (AdamW if model.adam else SGD)(
            device, storage.master_weights, storage.segments, weight_decay=0.0
        ),
        options=EngineOptions(
            seed=1, precision=PRECISIONS[bench.precision], capture=side == "payload captured"
        ),
        loss_scale=loss_scale(bench.precision, None),
    )


def our_step(bench: Bench, engine: Engine, x: Array, targets: Array) -> Step:
    device = engine.device
    kind = PRECISIONS[bench.precision].compute if x.dtype.kind == "f" else x.dtype
    places = device.asarray(np.arange(len(x), dtype=np.uint32))
    batch = MicroBatch(device.asarray(x.astype(kind)), device.asarray(targets), places)
    counted = int((targets >= 0).sum())
    iteration = 0

    def step() -> float:
        nonlocal iteration
        iteration += 1
        loss = engine.step([batch], targets=counted, iteration=iteration, lr=LR).loss
        if failure := engine.take_capture_failure():
            raise RuntimeError(f"not captured: {failure}")
        return loss

    return step


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the weights before the first step, by name and in PyTorch's layout."""
    host = engine.device.to_host(engine.storage.master_weights)
    weights = {}
    for segment in engine.storage.segments:
        one = segment.parameter
        value = host[segment.start : segment.stop].reshape(one.shape)[: one.rows]
        theirs = np.ascontiguousarray(one.form.to_torch(value)).copy()
        weights[one.name] = torch.from_numpy(theirs.reshape(one.form.shape))
    return weights


def their_step(
    bench: Bench,
    model: Model,
    sizes: Mapping[str, int],
    weights: Mapping[str, torch.Tensor],
    data: tuple[Array, Array],
    *,
    compiled: bool,
) -> Step:
    kept = {name: n for name, n in sizes.items() if "vocabulary" in sizes or name != "side"}
    network = model.theirs(**(sizes if model.theirs is torch_named.ViT else kept))
    network.load_state_dict(dict(weights), strict=False)
    names = {name for name, _ in network.named_parameters()}
    assert names == set(weights), names ^ set(weights)
    network = network.to(bench.where, memory_format=torch.channels_last)
    inputs, targets = (torch.from_numpy(one).to(bench.where) for one in data)
    if inputs.ndim == 4:  # noqa: PLR2004
        # A view of memory in which channels are last.
        inputs = inputs.permute(0, 3, 1, 2)
    fast = {"fused": True} if not bench.tiny else {}
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.0, **fast)
        if model.adam
        else torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9, **fast)
    )
    run = torch.compile(network) if compiled else network

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(bench.where.type, torch.bfloat16, enabled=bench.precision == "bf16"):
            logits = run(inputs)
            loss = functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1
            )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@dataclass
class Match:
    """The sides of a model, after the iterations whose losses are compared."""

    sides: dict[str, Side]
    # Reasons, by side.
    failed: dict[str, str]
    # In an iteration: FLOPs, and samples, or tokens of GPT-2.
    flops: float
    samples: int


def build_sides(bench: Bench, model: Model) -> Match:
    sizes = model.tiny if bench.tiny else model.sizes
    count = 4 if bench.tiny else (bench.options.batch or model.batch)
    data = batch_of(model, sizes, count)
    first = our_engine(bench, model, "payload plain", sizes)
    weights = weights_of(first)
    flops = 3 * count * sum(unit.flops for unit in first.units)
    del first
    per_sample = sizes["length"] if model.theirs is torch_named.GPT else 1
    match = Match({}, {}, flops, count * per_sample)
    for name in bench.sides:
        free_memory(bench)
        before = memory_bytes(bench, name, begin=True)
        try:
            if name.startswith("payload"):
                engine = our_engine(bench, model, name, sizes)
                step = our_step(bench, engine, *data)
            else:
                compiled = name.endswith("compile")
                step = their_step(bench, model, sizes, weights, data, compiled=compiled)
            match.sides[name] = warmed_up(bench, name, step)
        # The others shall still run: time on a GPU is short.
        except Exception as exc:
            traceback.print_exc()
            match.failed[name] = f"{type(exc).__name__}: {exc}"
            continue
        match.sides[name].memory_bytes = memory_bytes(bench, name) - before
    return match


def warmed_up(bench: Bench, name: str, step: Step) -> Side:
    """Train for the iterations whose losses are compared, and choose the length of a turn."""
    side = Side(step, GpuMeter(bench.card) if bench.card else None)
    started = time.perf_counter()
    side.losses.append(float(step()))
    compiled = time.perf_counter()
    side.losses += [float(step()) for _ in range(4 if bench.tiny else ITERATIONS - 1)]
    ended = time.perf_counter()
    each = (ended - compiled) / (len(side.losses) - 1)
    side.steps = 1 if bench.tiny else min(max(math.ceil(bench.options.turn / each), 2), 100)
    print(
        f"  {name}: first iteration {compiled - started:.1f} s, the next {len(side.losses) - 1} "
        f"{ended - compiled:.1f} s"
    )
    return side


def free_memory(bench: Bench) -> None:
    gc.collect()
    if not bench.tiny:
        torch.cuda.empty_cache()
        bench.devices["payload plain"].xp.get_default_memory_pool().free_all_blocks()


def memory_bytes(bench: Bench, side: str, *, begin: bool = False) -> int:
    """Return the GPU memory that CuPy's pool holds, or the most that PyTorch has allocated since the
    last call with ``begin``.
    """
    if bench.tiny:
        return 0
    if side.startswith("payload"):
        return bench.devices[side].memory_bytes()
    if begin:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def play(bench: Bench, model: Model, peaks: Mapping[str, float]) -> dict[str, Any]:
    """Measure all sides in turn, and return their figures."""
    match = build_sides(bench, model)
    sides = match.sides
    rounds = 1 if bench.tiny else bench.options.rounds
    for number in range(rounds + 1):
        # The first round is not counted.
        for side in sides.values():
            side.turn(bench, match.samples, counts=number > 0)
    figures: dict[str, Any] = {
        "title": model.title,
        "floor": model.floor,
        "sides": {},
        "failed": match.failed,
    }
    for name, side in sides.items():
        each = statistics.median(side.seconds) / side.steps
        tflops = match.flops / each / 1e12
        figures["sides"][name] = {
            "per_s": match.samples / each,
            "steps": side.steps,
            "rounds_s": side.seconds,
            "iteration_ms": each * 1e3,
            "tflops": tflops,
            "mfu": {what: tflops / peak for what, peak in peaks.items()},
            "memory_bytes": side.memory_bytes,
            **side.gpu_figures(),
            "losses": side.losses,
        }
    figures["largest_loss_difference"] = largest_difference(sides)
    figures["losses_agree"] = figures["largest_loss_difference"] <= FALL
    show(figures)
    return figures


def largest_difference(sides: Mapping[str, Side]) -> float:
    """Return the largest difference of losses at the same iteration, as a share of the first."""
    losses = np.array([side.losses for side in sides.values()])
    spread = float((losses.max(axis=0) - losses.min(axis=0)).max() / abs(losses[0, 0]))
    return spread if math.isfinite(spread) else math.inf


def show(figures: Mapping[str, Any]) -> None:
    print(f"\n{figures['title']}   (floor: {figures['floor'] or '-'})")
    sides = figures["sides"]
    for name, one in sides.items():
        rounds = " ".join(f"{seconds:.3f}" for seconds in one["rounds_s"])
        shares = ", ".join(f"{share:.1%} of {what}" for what, share in one["mfu"].items())
        did = "".join(f", {shown(one[key])}" for key, shown in GPU_FIGURES.items() if key in one)
        print(
            f"  {name:16} {one['per_s']:12,.1f}/s  {one['iteration_ms']:8.2f} ms  "
            f"{one['memory_bytes'] / 2**30:6.1f} GiB{did}  MFU {shares}  rounds, s: {rounds}"
        )
    for ours in (name for name in sides if name.startswith("payload")):
        for theirs in (name for name in sides if name.startswith("PyTorch")):
            ratio = sides[ours]["per_s"] / sides[theirs]["per_s"]
            print(f"  {ours} / {theirs} = {ratio:.2f}")
    print(
        f"  losses differ by up to {figures['largest_loss_difference']:.2%} of the first: "
        f"{'agree' if figures['losses_agree'] else 'DISAGREE'}"
    )


def products(bench: Bench) -> dict[str, Any]:
    """Measure products of square matrices, and copies, on both sides in turn."""
    size = 64 if bench.tiny else 8192
    kind = torch.float32 if bench.tiny else torch.bfloat16
    host = np.random.default_rng(1).standard_normal((2, size, size), dtype=np.float32)
    left, right = (torch.from_numpy(one).to(bench.where, kind) for one in host)
    runs: dict[str, Callable[[], Any]] = {"PyTorch": lambda: left @ right}
    # Both devices with fused kernels multiply alike.
    for name in bench.devices.keys() - {"payload captured"}:
        device = bench.devices[name]
        a, b = (device.asarray(one.astype(PRECISIONS[bench.precision].compute)) for one in host)
        runs[name] = lambda device=device, a=a, b=b: device.matmul(a, b)
    numbers = 1024 if bench.tiny else 1 << 30
    source = torch.ones(numbers, dtype=torch.uint8, device=bench.where)
    target = torch.empty_like(source)
    xp = bench.devices["payload plain"].xp
    ours = xp.ones(numbers, "uint8"), xp.empty(numbers, "uint8")
    copies: dict[str, Callable[[], Any]] = {
        "PyTorch": lambda: target.copy_(source),
        "payload plain": lambda: ours[1].__setitem__(..., ours[0]),
    }
    multiplied = {name: 2 * size**3 / one / 1e12 for name, one in timed(bench, runs).items()}
    copied = {name: 2 * numbers / one / 1e9 for name, one in timed(bench, copies).items()}
    for name, rate in multiplied.items():
        ratio = rate / multiplied["PyTorch"]
        print(f"  product {size}, {name:14} {rate:8.1f} TFLOP/s, {ratio:.2f} of PyTorch's")
    for name, rate in copied.items():
        print(f"  copy of {numbers >> 20} MiB, {name:14} {rate:8.1f} GB/s, read and written")
    return {"tflops": multiplied, "copy_gb_per_s": copied}


def timed(bench: Bench, runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median seconds of each, of 5 rounds of 10 in turn, after one not counted."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(6):
        for name, run in runs.items():
            bench.wait()
            start = time.perf_counter()
            for _ in range(10):
                run()
            bench.wait()
            taken[name].append((time.perf_counter() - start) / 10)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def checkpoint(bench: Bench) -> dict[str, Any]:
    """Measure for how long a checkpoint stops the payload's training, by how much it delays the next
    iteration, in which the GPU makes the copy, and what `torch.save` of the same takes.
    """
    model = "gpt-tiny" if bench.tiny else "gpt-124m"
    length = "16" if bench.tiny else "1024"
    with tempfile.TemporaryDirectory() as out:
        command = [
            *(sys.executable, "-m", "payload", "train", "--model", model, "--data", "synthetic"),
            *("--sequence-length", length, "--global-batch-size", "4", "--optimizer", "adamw"),
            *("--iterations", "12", "--save-interval", "4", "--keep", "1", "--no-save-model"),
            *("--eval-samples", "4", "--precision", bench.precision, "--out", out),
            *("--device", "cpu" if bench.tiny else "gpu"),
        ]
        root = Path(__file__).resolve().parents[1]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=root)
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
        every = list(map(json.loads, lines))
        records = [one for one in every if one["kind"] == "checkpoint"]
        # The run waits for its last one.
        stalls = [one["stall_s"] for one in records[:-1]]
        # The first iteration compiles kernels.
        seconds = {one["step"]: one["seconds"] for one in every if one["kind"] == "iteration"}
        usual = statistics.median(list(seconds.values())[1:])
        delays = [seconds[one["step"] + 1] - usual for one in records[:-1]]
        # Weights, and AdamW's two averages.
        numbers = records[0]["bytes"] // 4
        values = torch.zeros(numbers, device=bench.where)
        bench.wait()
        start = time.perf_counter()
        torch.save(values, Path(out) / "theirs.pt")
        saved = time.perf_counter() - start
    print(
        f"  {records[0]['bytes'] / 1e6:,.0f} MB: stall {max(stalls):.3f} s; delay of the next "
        f"iteration {max(delays):.3f} s; torch.save {saved:.3f} s"
    )
    return {
        "bytes": records[0]["bytes"],
        "stalls_s": stalls,
        "delays_s": delays,
        "torch_save_s": saved,
    }


def prepare(options: argparse.Namespace) -> Bench:
    """Find the GPU and the libraries. A side whose libraries are missing is left out, and named."""
    tiny = not torch.cuda.is_available()
    plain = choose("cpu" if tiny else "gpu", 0)
    devices = {"payload plain": plain}
    sides = [one for one in SIDES if not options.sides or one in options.sides.split(",")]
    if tiny:
        sides = [one for one in sides if one in ("payload plain", "PyTorch eager")]
        print("NO GPU: tiny models on CPUs. These figures mean nothing.")
    for name in ("payload fused", "payload captured") if not tiny else ():
        if name in sides:
            try:
                devices[name] = choose("gpu", 0)
                fuse(devices[name], deterministic=options.deterministic)
            except Exception:
                traceback.print_exc()
                sides.remove(name)
                print(f"{name} is left out")
    where = torch.device("cpu" if tiny else "cuda")
    card = open_card(plain.gpu["uuid"]) if plain.gpu else None
    precision = "fp32" if tiny else options.precision
    return Bench(options, tiny, sides, devices, where, precision, card)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("products", *MODELS, "checkpoint")
    parser.add_argument("what", nargs="*", choices=[*parts, []], default=[], metavar="WHAT")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=float, default=1.2)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--budget", type=float, default=math.inf)
    parser.add_argument("--sides", default="")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    keep_freed_memory()
    print(machine())
    bench = prepare(options)
    device = bench.devices["payload plain"]
    sheet = find_peak(device, alone().world, PRECISIONS[bench.precision].compute, None)
    peaks = {"the data sheet": sheet.tflops} if sheet.tflops and not bench.tiny else {}
    result: dict[str, Any] = {
        "meaningless": bench.tiny,
        "machine": machine(),
        "gpu": device.gpu,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "precision": bench.precision,
        "peak_tflops": peaks,
        "parts": {},
        "failed": {},
        "left_out": [],
    }
    for what in options.what or parts:
        if time.perf_counter() - started > options.budget:
            result["left_out"].append(what)
            print(f"left out, for lack of time: {what}")
            continue
        print(f"\n== {what}, after {time.perf_counter() - started:.0f} s")
        try:
            if what == "products":
                result["parts"][what] = products(bench)
                measured = max(result["parts"][what]["tflops"].values())
                peaks["the best product"] = measured
            elif what == "checkpoint":
                result["parts"][what] = checkpoint(bench)
            else:
                result["parts"][what] = play(bench, MODELS[what], peaks)
        # The other parts shall still run: time on a GPU is short.
        except Exception as exc:
            traceback.print_exc()
            result["failed"][what] = f"{type(exc).__name__}: {exc}"
        free_memory(bench)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "gpu.json").write_text(json.dumps(result, indent=1))
    done = result["parts"].values()
    agree = all(one.get("losses_agree", True) and not one.get("failed") for one in done)
    return 1 if result["failed"] or not agree else 0


if __name__ == "__main__":
    sys.exit(main())
