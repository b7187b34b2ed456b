"""Text generation with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from payload.cli.config import SampleConfig
from payload.cli.jsonl import answer
from payload.data.datasets import tokenizer_of
from payload.device import choose
from payload.device.base import Array
from payload.saved_model.folder import TrainedModel, load


def run(config: SampleConfig) -> int:
    """Print the prompt and each generated token, and return the exit code."""
    model = load(config.model_folder, config.weights, choose(config.device, 0), takes=config.takes)
    tokenizer = tokenizer_of(model.record.tokenizer or {})
    prompt = [
        int(token)
        for token in tokenizer.encode((config.prompt or "\n").encode(errors="surrogateescape"))
    ]
    written = []
    if config.output == "text":
        _write(config.prompt.encode(errors="surrogateescape"))
    for token in tokens(model, prompt, config, limit=tokenizer.size):
        written.append(token)
        if config.output == "text":
            _write(tokenizer.decode([token]))
    if config.output == "json":
        text = tokenizer.decode(written).decode(errors="replace")
        answer(prompt=config.prompt, text=text, tokens=len(written))
    else:
        _write(b"\n")
    return 0


def _write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.flush()


def tokens(
    model: TrainedModel, prompt: Sequence[int], config: SampleConfig, *, limit: int
) -> Iterator[int]:
    """Generate and yield tokens after the prompt. The model sees as many of the last tokens as in
    training.

    limit: choose only tokens with a lower number, because higher numbers have no text.
    """
    rng = np.random.default_rng(config.seed)
    length = int(model.record.input.get("length", len(prompt)))
    context = list(prompt)
    for _ in range(config.tokens):
        window = np.array([context[-length:]], "int64")
        logits = model.forward(model.device.asarray(window))[0, -1, :limit]
        context.append(choose_token(np.array(model.device.to_host(logits), float), config, rng))
        yield context[-1]


def choose_token(logits: Array, config: SampleConfig, rng: np.random.Generator) -> int:
    """Draw a token from the ``top_k`` most likely tokens (Fan et al., arXiv:1805.04833)."""
    if config.top_k is not None and config.top_k < len(logits):
        threshold = np.partition(logits, -config.top_k)[-config.top_k]
        logits = np.where(logits < threshold, -np.inf, logits)
    if config.temperature:
        logits = logits / config.temperature + rng.gumbel(size=len(logits))
    return int(logits.argmax())
