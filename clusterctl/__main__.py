"""``clusterctl`` and ``python -m clusterctl``."""

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line. Ctrl-C may come while its modules are still being read."""
    try:
        from clusterctl.cli.run import run  # noqa: PLC0415 - reading it takes a while

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
