"""GPU nodes on Google Cloud."""
