"""The folder of a trained model."""
