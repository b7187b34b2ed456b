"""``clusterctl`` and ``python -m clusterctl``."""

from clusterctl.cli import app


def main() -> None:
    """Run the command line."""
    app(prog_name="clusterctl")


if __name__ == "__main__":
    main()
