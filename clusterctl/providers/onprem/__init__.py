"""Existing machines: SSH access and sudo as their owner, host keys, and the way back."""
