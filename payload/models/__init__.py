"""One file a model, each with ``build(context, **sizes)``, which gives its units in order.

A model knows nothing of ranks beyond the layers it is built of.
"""
