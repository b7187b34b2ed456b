"""A Terraform provider that stands in for Google's: the real schema, and a cloud in a JSON file.

See ``tests.support.google.cloud`` for how tests use it.
"""
