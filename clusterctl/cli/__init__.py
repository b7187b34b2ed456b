"""The command line: each verb parses, makes one call, and shows. The only place that prints or exits.

``run``, ``options`` and ``output`` import little, so that ``clusterctl --help`` starts soon.
The other modules are those of the verbs, and are imported when one of theirs is called.
"""
