"""What agents did for the user, and may do: the journal, the limits and the tokens."""
