"""``clusterctl`` and ``python -m clusterctl``."""

import gc
import sys

INTERRUPTED = 130
_ALLOCATIONS = 50_000  # after which the interpreter looks for garbage


def main() -> None:
    """Run the command line. Ctrl-C may come while its modules are still being read."""
    # What is imported stays: to look for garbage in it, again and again and at the end, takes a verb 15 ms.
    gc.set_threshold(_ALLOCATIONS)
    try:
        from clusterctl.cli.run import run  # noqa: PLC0415 - reading it takes a while

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
