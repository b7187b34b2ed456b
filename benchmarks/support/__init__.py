"""What the benchmarks share: clusters of their own, rounds of two sides in turn, and how these are
shown.
"""
