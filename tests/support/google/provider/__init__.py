"""A Terraform provider that stands in for Google's: the real schema, and a cloud that is one JSON
file.

See ``tests.support.google.cloud`` for how tests use it.
"""
