"""Text as windows of tokens, to predict the next token or masked tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from payload.data.base import Pair
from payload.data.tokenizer import Tokenizer
from payload.device.base import Array
from payload.errors import UsageError
from payload.nn.module import RandomState
from payload.nn.random import random_bits, sample_keys

# The last 1/20 of a text is held out.
_HELD_OUT = 20
_MASKED = 0.15
# Share of the target tokens that are not masked: half are unchanged, half are random.
_UNCHANGED_OR_RANDOM = 0.2


def parts(text: bytes) -> tuple[bytes, bytes]:
    """Return the training part of a text, and the held-out part: the last twentieth."""
    boundary = len(text) - len(text) // _HELD_OUT
    return text[:boundary], text[boundary:]


class Text:
    """A ``Dataset`` of text: the target of each token is the next token, (B, T) → (B, T).

    Windows of T tokens follow each other without gaps. Each epoch starts at a random token of the
    first T.
    """

    def __init__(
        self, name: str, text: bytes, tokenizer: Tokenizer, *, length: int, seed: int
    ) -> None:
        """length: tokens in a window. name: for messages. Raises UsageError if the text is too
        short.
        """
        training, held_out = parts(text)
        self._tokens = tokenizer.encode(training)
        self._held_out_tokens = tokenizer.encode(held_out)
        self._length = length
        self._seed = seed
        # A window needs T + 1 tokens, and an epoch's offset is at most T - 1.
        numbers = f"{len(self._tokens)} + {len(self._held_out_tokens)} tokens"
        self.training = len(self._tokens) // length - 1
        self.held_out = (len(self._held_out_tokens) - 1) // length
        if self.training < 1 or self.held_out < 1:
            raise UsageError(
                f"--data: {name} has {numbers} for training and evaluation, "
                f"too few for --sequence-length {length}",
                code="text-too-short",
            )
        self.vocabulary = tokenizer.size
        self.data_state = tokenizer.data_state
        self.targets = float(length)
        self.bytes_per_target: float | None = len(held_out) / len(self._held_out_tokens)
        self.about = (
            f"{name}: {numbers} of {tokenizer.name}, {self.bytes_per_target:.2f} bytes each"
        )
        self.facts = text_facts(self.vocabulary, length)
        self.input: Mapping[str, Any] = {"kind": "text", "length": length}
        self.tokenizer: Mapping[str, Any] | None = {"kind": tokenizer.kind, **tokenizer.data_state}

    def training_batch(self, indices: Array, epoch: int, draw: RandomState) -> Pair:  # noqa: ARG002
        return self._windows(self._tokens, indices, epoch)

    def held_out_batch(self, indices: Array) -> Pair:
        return self._windows(self._held_out_tokens, indices, 0)

    def _windows(self, tokens: Array, indices: Array, epoch: int) -> Pair:
        first = (
            int(np.random.default_rng((self._seed, epoch)).integers(self._length)) if epoch else 0
        )
        positions = (indices * self._length + first)[:, None] + np.arange(self._length + 1)
        windows = tokens[positions].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


class MaskedText(Text):
    """Windows of text in which a model predicts masked tokens (Devlin et al., "BERT", 2019, part
    3.1).

    15 % of the tokens are targets, also in a short sample. 80 % of the targets become a mask, 10 %
    become random tokens, 10 % stay.
    """

    def __init__(
        self, name: str, text: bytes, tokenizer: Tokenizer, *, length: int, seed: int
    ) -> None:
        """Take the arguments of ``Text``."""
        super().__init__(name, text, tokenizer, length=length, seed=seed)
        # The mask is an additional token, after those of the tokenizer.
        self._mask = self.vocabulary
        self.targets = _MASKED * length
        self.bytes_per_target = None
        self.facts = text_facts(self.vocabulary + 1, length)
        self.input = {"kind": "masked text", "length": length, "mask": self._mask}

    def training_batch(self, indices: Array, epoch: int, draw: RandomState) -> Pair:
        tokens, _ = self._windows(self._tokens, indices, epoch)
        return self._masked(tokens, draw)

    def held_out_batch(self, indices: Array) -> Pair:
        tokens, _ = self._windows(self._held_out_tokens, indices, 0)
        return self._masked(tokens, RandomState(0, 0, indices.astype("uint32")))

    def _masked(self, tokens: Array, draw: RandomState) -> Pair:
        positions = np.arange(tokens.shape[1], dtype="uint32")
        chosen, kind, random_token = (
            random_bits(sample_keys(draw, stream), positions)
            for stream in ("mask", "mask.kind", "mask.token")
        )
        masked = chosen <= np.maximum(round(_MASKED * 2**32) - 1, chosen.min(axis=1, keepdims=True))
        targets = np.where(masked, tokens, -1)
        inputs = np.where(masked, self._mask, tokens)
        is_exception = masked & (kind < round(_UNCHANGED_OR_RANDOM * 2**32))
        is_unchanged = is_exception & (kind & 1 == 1)
        inputs = np.where(is_exception, random_token % self.vocabulary, inputs)
        return np.where(is_unchanged, tokens, inputs).astype(tokens.dtype), targets


def text_facts(vocabulary: int, length: int) -> Mapping[str, int]:
    """Return the sizes of text by name, see ``Dataset.facts``."""
    return {"vocabulary": vocabulary, "classes": vocabulary, "length": length, "tokens": length}
