"""The folder of a trained model, and the names and formats of other libraries."""
