"""The one Jinja environment. Templates only place values: logic lives in Python."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from clusterctl.assets import asset


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # The output is configuration and shell text, never HTML, hence no autoescape; `q` quotes for the shell.
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(asset("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment


def render(template: str, **values: Any) -> str:
    """The text of a file of templates/ with its values placed.

    Raises:
        jinja2.UndefinedError: the template names a value that was not given.
    """
    return _environment().get_template(template).render(**values)
