"""Which rank does what part of the work."""
