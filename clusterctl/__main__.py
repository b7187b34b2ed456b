"""The entry point of ``clusterctl`` and ``python -m clusterctl``."""

import gc
import os
import sys

INTERRUPTED = 130
# The number of allocations after which the interpreter collects garbage.
_ALLOCATIONS = 200_000


def _open_closed_streams() -> None:
    """Open /dev/null in place of the standard streams that the caller has closed (``>&-``)."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # This has the lowest free number, which is that of the closed stream.
            stream = open(os.devnull, "w" if fd else "r", errors="replace")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def main() -> None:
    """Run the command line, and exit with the command's exit status."""
    # Imported modules are never garbage. Searching them repeatedly would take 15 ms of each
    # command.
    gc.set_threshold(_ALLOCATIONS)
    _open_closed_streams()
    # pydantic would look for plugins in all installed packages.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        # Ctrl-C may come during this import.
        from clusterctl.cli.main import run  # noqa: PLC0415 - slow import

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as exc:
        # Modules are also imported before a command handles its own errors.
        from clusterctl.errors import foreign_package_error  # noqa: PLC0415 - rarely needed

        if (error := foreign_package_error(exc)) is None:
            raise
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
