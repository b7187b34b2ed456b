"""OS packages, Python wheels, and the offline bundle."""
