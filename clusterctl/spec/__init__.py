"""The typed description of a cluster and of a job: models, loading, messages, schema."""
