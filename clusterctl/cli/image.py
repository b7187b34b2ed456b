"""image bake: the image that new nodes start from, made ahead of `up`."""

from __future__ import annotations

import sys

from clusterctl.cli.options import Options, spec_of
from clusterctl.cli.output import Phases, Screen, shown_phase
from clusterctl.cli.up import NoWait, Yes, phase_dicts
from clusterctl.cluster.session import ClusterSession, provider_of
from clusterctl.cluster.up import bake_ahead
from clusterctl.errors import UsageError
from clusterctl.state.workspace import WAIT_S, Workspace


def bake(screen: Screen, options: Options, no_wait: NoWait = False, yes: Yes = False) -> None:
    """Make the image that new nodes start from, unless there is one of this configuration.

    `up` does it by itself, and uses it, with `provider: {image: {bake: true}}`. It takes a machine for some
    minutes, which is billed: shows which and its price, and on a terminal prompts first.
    """
    spec = spec_of(screen, options)
    settings = spec.provider.baking()
    if settings is None:
        raise UsageError(
            f"there is no image to make: the provider is {spec.provider.type}",
            code="no-image-to-bake",
            fix="run `clusterctl up`, which makes whatever its nodes need",
        )
    if spec.provider != settings:
        screen.note("note: `up` uses it once the spec says `provider: {image: {bake: true}}`")
    phases = Phases(screen, verbose=options.verbose)

    def approve(images: tuple[str, ...]) -> None:
        with screen.still():
            screen.note(*images)
            if sys.stdin.isatty() and sys.stderr.isatty():
                screen.confirm("make this at that price?", yes=yes)

    session = ClusterSession(
        spec=spec.model_copy(update={"provider": settings}),
        workspace=Workspace.of(spec.name),
        provider=provider_of(settings),
        reporter=phases,
        wait_s=0 if no_wait else WAIT_S,
    )
    with phases.shown("`clusterctl image bake` begins anew, and removes what is left"):
        became = bake_ahead(session, approve)
    for line in session.notes:
        screen.note(f"note: {line}")
    rows: list[list[object]] = [[shown_phase(p.name), p.seconds, p.note] for p in session.phases]
    done = "the image is made" if became == "made" else "the image was there"
    screen.result(
        {"cluster": spec.name, "made": became == "made", "phases": phase_dicts(tuple(session.phases))},
        *screen.table(["PHASE", "SECONDS", ""], rows),
        "",
        f"{done}; `clusterctl cache list` shows it with its cost, `cache prune --images` removes it",
    )
