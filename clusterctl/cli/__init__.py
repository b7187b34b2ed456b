"""The command line. Each command parses its options, makes a single call, and shows the result.

Only this package prints or exits. ``run``, ``options`` and ``output`` import little, so that ``clusterctl
--help`` starts quickly. The other modules contain the commands and are imported when their command is called.
"""
