"""The facts of a host, and what is checked of them."""
