"""What Slurm says to a scripted transport: fields with the separator that the command asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

CAPTURED = "\x1f"  # the separator in the captures


def separator_in(argv: Sequence[str]) -> str:
    """The separator that squeue, sacct or sinfo was asked for."""
    for word in argv:
        name, _, value = word.partition("=")
        if name == "--delimiter":
            return value
        if name == "--Format":
            return value.split(",")[0].partition(":")[2]
    raise AssertionError(f"{argv[0]} was asked for no separator")


def said(text: bytes) -> Callable[[Sequence[str]], bytes]:
    """A capture, said anew."""
    return lambda argv: text.replace(CAPTURED.encode(), separator_in(argv).encode())


def records(rows: Iterable[Iterable[str]]) -> Callable[[Sequence[str]], bytes]:
    """These rows, as Slurm says them."""
    return said("".join("".join(field + CAPTURED for field in row) + "\n" for row in rows).encode())
