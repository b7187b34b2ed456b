"""The training loop and its parts. Start reading at ``loop``."""
