"""What agents did for the user, and what their jobs can use: the journal and the limits."""
