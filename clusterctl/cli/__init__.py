"""The command line. Each command parses its options, calls another package, and shows the result.

Only this package prints or exits. ``main``, ``verbs``, ``refusals``, ``options`` and ``output``
import little, so that ``clusterctl --help`` starts quickly. The other modules are imported when a
command in them is called.
"""
