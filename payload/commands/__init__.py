"""The commands of ``python -m payload``. The command ``eval`` is ``run`` in ``eval.py``, and so
on.
"""
