"""The commands of ``python -m payload``: each is the ``run`` of the module of its name."""
