"""The command line: each verb parses, makes one call, and shows. The only place that prints or exits.

What a verb needs is imported inside it, so that ``clusterctl --help`` starts at once.
"""
