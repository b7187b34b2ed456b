"""The typed description of clusters and jobs: models, loading, messages, JSON Schema."""
