"""Text as windows of tokens, to tell the next token or a masked one from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from payload.data.base import Pair
from payload.data.tokenizer import Tokenizer
from payload.device.base import Array
from payload.errors import UsageError
from payload.nn.module import Draw
from payload.nn.random import drawn, sample_keys

_HELD_OUT = 20  # the last 20th of a text is held out
_MASKED = 0.15
_UNCHANGED_OR_RANDOM = 0.2  # of the masked ones, in equal parts


def parts(text: bytes) -> tuple[bytes, bytes]:
    """What is trained on, and what is held out."""
    boundary = len(text) - len(text) // _HELD_OUT
    return text[:boundary], text[boundary:]


class Text:
    """A text, as ``Dataset``: each target is the token that follows (B, T) → (B, T).

    An epoch cuts the text into windows without gaps, at places that differ from epoch to epoch.
    """

    def __init__(self, name: str, text: bytes, tokenizer: Tokenizer, *, length: int, seed: int) -> None:
        """``length``: of a window, T.

        Raises:
            UsageError: the text is too short.
        """
        training, held_out = parts(text)
        self._tokens, self._held_out_tokens = tokenizer.encode(training), tokenizer.encode(held_out)
        self._length, self._seed = length, seed
        # A window of T tokens has T targets, one token more; and training windows begin up to T - 1 later.
        numbers = f"{len(self._tokens)} + {len(self._held_out_tokens)} tokens"
        self.training = len(self._tokens) // length - 1
        self.held_out = (len(self._held_out_tokens) - 1) // length
        if self.training < 1 or self.held_out < 1:
            raise UsageError(
                f"--data: {name} has {numbers} to train on and held out, "
                f"too few for --sequence-length {length}",
                code="text-too-short",
            )
        self.vocabulary, self.data_state = tokenizer.size, tokenizer.data_state
        self.targets = float(length)
        self.bytes_per_target: float | None = len(held_out) / len(self._held_out_tokens)
        self.about = f"{name}: {numbers} of {tokenizer.name}, {self.bytes_per_target:.2f} bytes each"
        self.facts = _facts(self.vocabulary, length)
        self.input: Mapping[str, Any] = {"kind": "text", "length": length}
        self.tokenizer: Mapping[str, Any] | None = {"kind": tokenizer.kind, **tokenizer.data_state}

    def training_batch(self, indices: Array, epoch: int, draw: Draw) -> Pair:  # noqa: ARG002
        return self._windows(self._tokens, indices, epoch)

    def held_out_batch(self, indices: Array) -> Pair:
        return self._windows(self._held_out_tokens, indices, 0)

    def _windows(self, tokens: Array, indices: Array, epoch: int) -> Pair:
        first = int(np.random.default_rng((self._seed, epoch)).integers(self._length)) if epoch else 0
        places = (indices * self._length + first)[:, None] + np.arange(self._length + 1)
        windows = tokens[places].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


class MaskedText(Text):
    """Of each window some tokens are to be told from the others (Devlin et al., "BERT", 2019, section 3.1):
    15 %, of which 80 % are replaced by a mask, 10 % by a random token, and 10 % stay."""

    def __init__(self, name: str, text: bytes, tokenizer: Tokenizer, *, length: int, seed: int) -> None:
        """As of ``Text``.

        Raises:
            UsageError: the text is too short, so that there is nothing to judge by.
        """
        super().__init__(name, text, tokenizer, length=length, seed=seed)
        self._mask = self.vocabulary  # one token more than the text has
        self.targets = _MASKED * length
        self.bytes_per_target = None
        self.facts = _facts(self.vocabulary + 1, length)
        self.input = {"kind": "masked text", "length": length, "mask": self._mask}
        batches = (self.held_out_batch(np.array([place])) for place in range(self.held_out))
        if not any((targets >= 0).any() for _, targets in batches):  # the first has some, or nearly always
            raise UsageError(
                f"--data: {name} is too short: of its {self.held_out * length} held-out tokens "
                "none is masked",
                code="text-too-short",
            )

    def training_batch(self, indices: Array, epoch: int, draw: Draw) -> Pair:
        tokens, _ = self._windows(self._tokens, indices, epoch)
        return self._masked(tokens, draw)

    def held_out_batch(self, indices: Array) -> Pair:
        tokens, _ = self._windows(self._held_out_tokens, indices, 0)
        return self._masked(tokens, Draw(0, 0, indices.astype("uint32")))

    def _masked(self, tokens: Array, draw: Draw) -> Pair:
        places = np.arange(tokens.shape[1], dtype="uint32")
        chosen, kind, other = (
            drawn(sample_keys(draw, stream), places) for stream in ("mask", "mask.kind", "mask.token")
        )
        masked = chosen < round(_MASKED * 2**32)
        targets = np.where(masked, tokens, -1)
        seen = np.where(masked, self._mask, tokens)
        odd = masked & (kind < round(_UNCHANGED_OR_RANDOM * 2**32))
        stays = odd & (kind & 1 == 1)
        seen = np.where(odd, other % self.vocabulary, seen)
        return np.where(stays, tokens, seen).astype(tokens.dtype), targets


def _facts(vocabulary: int, length: int) -> Mapping[str, int]:
    return {"vocabulary": vocabulary, "classes": vocabulary, "length": length, "tokens": length}
