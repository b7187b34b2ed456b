"""The commands of ``python -m payload``. Each is the function ``run`` of the module with its name."""
