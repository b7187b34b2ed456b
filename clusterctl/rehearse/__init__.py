"""Rehearse failures of a user's job on a local cluster: cause faults, and judge whether the job
survives.
"""
