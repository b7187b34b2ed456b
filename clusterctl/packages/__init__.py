"""OS packages, wheels, the offline bundle, the payload's archive."""
