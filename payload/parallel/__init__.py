"""Distribution of a model and its training over ranks."""
