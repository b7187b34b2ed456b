"""Slurm's way to write many node names as one word."""

from __future__ import annotations


def expand_nodes(nodelist: str) -> tuple[str, ...]:
    """The node names of a Slurm hostlist such as ``a-[1-3,7]``; none for Slurm's words for "not yet".

    Raises:
        ValueError: it is no hostlist.
    """
    if nodelist in {"", "None assigned", "(null)", "N/A"}:
        return ()
    if not {",", "["} & set(nodelist):
        return (nodelist,)
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # noqa: PLC0415 - one name needs no parser

    try:
        return tuple(NodeSet(nodelist))
    except NodeSetException as exc:
        raise ValueError(f"{nodelist!r} is no hostlist") from exc
