"""The training loop and what it is made of: begin with ``loop``."""
