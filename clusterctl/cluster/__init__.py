"""The life of a cluster: up, down, plan, converge, verify, its nodes."""
