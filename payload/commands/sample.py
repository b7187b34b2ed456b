"""Writes text by a trained model: token by token, each drawn by the probabilities that the model gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from payload.cli.config import SampleConfig
from payload.cli.jsonl import answer
from payload.data.datasets import tokenizer_of
from payload.device import choose
from payload.device.base import Array
from payload.errors import UsageError
from payload.saved_model.folder import TrainedModel, load


def run(config: SampleConfig) -> int:
    """Print the prompt and what follows, as it comes, and give the exit code.

    Raises:
        UsageError: the model is of another kind.
    """
    model = load(config.model_folder, config.weights, choose(config.device, 0), takes="text")
    if model.record.tokenizer is None:
        raise UsageError(
            f"{config.model_folder} was trained on synthetic tokens, which have no text",
            code="model-without-text",
        )
    tokenizer = tokenizer_of(model.record.tokenizer)
    prompt = [
        int(token) for token in tokenizer.encode((config.prompt or "\n").encode(errors="surrogateescape"))
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


def tokens(model: TrainedModel, prompt: Sequence[int], config: SampleConfig, *, limit: int) -> Iterator[int]:
    """What follows the prompt. The model sees as many tokens as it was trained on, the last ones.

    Args:
        limit: how many tokens have a text.
    """
    rng = np.random.default_rng(config.seed)
    length = int(model.record.input.get("length", len(prompt)))
    seen = list(prompt)
    for _ in range(config.tokens):
        window = np.array([seen[-length:]], "int64")
        logits = model.forward(model.device.asarray(window))[0, -1, :limit]
        seen.append(chosen(np.array(model.device.to_host(logits), float), config, rng))
        yield seen[-1]


def chosen(logits: Array, config: SampleConfig, rng: np.random.Generator) -> int:
    """One of the tokens: the likeliest at a temperature of 0, else drawn, by Gumbel's noise, among the
    ``top_k`` likeliest (Fan et al., arXiv:1805.04833)."""
    if config.top_k is not None and config.top_k < len(logits):
        least = np.partition(logits, -config.top_k)[-config.top_k]
        logits = np.where(logits < least, -np.inf, logits)
    if config.temperature:
        logits = logits / config.temperature + rng.gumbel(size=len(logits))
    return int(logits.argmax())
