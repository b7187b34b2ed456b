"""The entry point of ``clusterctl`` and ``python -m clusterctl``."""

import gc
import os
import sys

INTERRUPTED = 130
# The number of allocations after which the interpreter collects garbage.
_ALLOCATIONS = 200_000


def main() -> None:
    """Run the command line, and exit with the command's exit status."""
    # Imported modules are never garbage. Searching them repeatedly would take 15 ms of each
    # command.
    gc.set_threshold(_ALLOCATIONS)
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
