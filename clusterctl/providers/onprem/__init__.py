"""Machines that the user has: the user's own way in, their keys, our account on them, and back again."""
