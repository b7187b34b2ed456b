"""OS packages, wheels, the offline bundle."""
