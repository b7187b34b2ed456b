"""From text to tokens: bytes, or a byte-pair encoding learned of the text (Sennrich et al., "Neural Machine
Translation of Rare Words with Subword Units", 2016), within words as GPT-2 does it."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np

from payload.device.base import Array

Merge = tuple[int, int]
W = TypeVar("W", bytes, str)

_BYTES = 256
_WORDS = re.compile(rb" ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+(?=\s)|\s+|.", re.DOTALL)
"""A word, a number or a run of signs, each with the blank before it; other blanks."""


class Tokenizer(Protocol):
    """Makes numbers of text. All bytes can be told, so no text is unknown."""

    kind: str
    """Of what sort it is: ``bytes``, ``bpe`` or ``gpt2``."""
    name: str
    size: int
    """How many tokens there are."""
    data_state: Mapping[str, Any]
    """Of a text, for JSON."""

    def encode(self, text: bytes) -> Array:
        """(bytes,) → (tokens,) of the smallest unsigned dtype that tells all tokens: a text may be large"""

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The text of tokens; of one alone, bytes that need not be whole characters."""


class Bytes:
    """Each byte is a token."""

    kind = name = "bytes"
    size = _BYTES
    data_state: Mapping[str, Any] = MappingProxyType({})

    def encode(self, text: bytes) -> Array:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Iterable[int]) -> bytes:
        return bytes(tokens)


class BytePairs:
    """Each merge is a token of its own, for two that are next to each other."""

    kind = "bpe"

    def __init__(self, merges: Sequence[Merge]) -> None:
        self.merges = tuple(merges)
        self.size = _BYTES + len(self.merges)
        self.name = f"bpe:{self.size}"
        self.data_state: Mapping[str, Any] = {"merges": self.merges}
        self._merges = {pair: (rank, _BYTES + rank) for rank, pair in enumerate(self.merges)}
        self._texts = [bytes([value]) for value in range(_BYTES)]
        for left, right in self.merges:
            if not 0 <= min(left, right) <= max(left, right) < len(self._texts):
                raise ValueError(f"a merge of {left} and {right}, which are no tokens yet")
            self._texts.append(self._texts[left] + self._texts[right])

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> BytePairs:
        """Of what ``data_state`` was.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        return cls([(int(left), int(right)) for left, right in record["merges"]])

    def encode(self, text: bytes) -> Array:
        return encoded(_WORDS.findall(text), lambda word: merged([*word], self._merges), self.size)

    def decode(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self._texts[token] for token in tokens)


def encoded(words: Iterable[W], tokens_of: Callable[[W], Sequence[int]], size: int) -> Array:
    """The tokens of words, each of which is looked at once. ``size``: how many tokens there are."""
    dtype = np.min_scalar_type(size - 1)
    known: dict[W, Array] = {}
    parts = []
    for word in words:
        if word not in known:
            known[word] = np.array(tokens_of(word), dtype)
        parts.append(known[word])
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def merged(tokens: list[int], merges: Mapping[Merge, tuple[int, int]]) -> list[int]:
    """Merge the pair that comes first in the order of merges, again and again.

    Args:
        merges: of each pair its place in the order, and the token that it makes.
    """
    last = len(merges), -1
    while len(tokens) > 1:
        pair = min(pairwise(tokens), key=lambda pair: merges.get(pair, last))
        if pair not in merges:
            break
        tokens = replace(tokens, pair, merges[pair][1])
    return tokens


def learn(text: bytes, size: int) -> BytePairs:
    """Merge the most frequent pair, of equals the smallest, until there are ``size`` tokens.

    There are fewer where no pair repeats. Counts are brought up to date for the words that change alone.
    """
    words = [(list(word), count) for word, count in sorted(Counter(_WORDS.findall(text)).items())]
    pairs: Counter[Merge] = Counter()
    places: defaultdict[Merge, set[int]] = defaultdict(set)
    for place, (word, count) in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += count
            places[pair].add(place)
    merges: list[Merge] = []
    heap = [(-count, pair) for pair, count in pairs.items()]  # the most frequent first; some counts are old
    heapq.heapify(heap)
    while _BYTES + len(merges) < size and heap:
        count, best = heapq.heappop(heap)
        if -count != pairs[best]:
            continue
        if -count < 2:  # noqa: PLR2004
            break
        changed: set[Merge] = set()
        for place in places.pop(best):
            word, count = words[place]
            for pair in pairwise(word):
                pairs[pair] -= count
                changed.add(pair)
            word = replace(word, best, _BYTES + len(merges))
            words[place] = word, count
            for pair in pairwise(word):
                pairs[pair] += count
                changed.add(pair)
                places[pair].add(place)
        merges.append(best)
        for pair in changed - {best}:
            heapq.heappush(heap, (-pairs[pair], pair))
    return BytePairs(merges)


def replace(word: list[int], pair: Merge, token: int) -> list[int]:
    """Put a token where a pair is, from left to right."""
    result: list[int] = []
    for number in word:
        # The last number may be a token that was just put there, which is no part of the pair: it is newer.
        if result and (result[-1], number) == pair:
            result[-1] = token
        else:
            result.append(number)
    return result
