"""Machines that the user has: their owner's access, host keys, our account on them, and back again."""
