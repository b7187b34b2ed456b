"""A job on its nodes: processes that start and watch the job and its ranks, and sensors of the
nodes.
"""
