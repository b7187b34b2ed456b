"""The one Jinja environment. Templates only place values: logic lives in Python."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from clusterctl.util.assets import asset

if TYPE_CHECKING:
    from jinja2 import Environment


@lru_cache(maxsize=1)
def _environment() -> Environment:
    import jinja2  # noqa: PLC0415 - most verbs render nothing

    # The output is configuration and shell text, never HTML, hence no autoescape; `q` quotes for the shell.
    environment = jinja2.Environment(  # noqa: S701
        loader=jinja2.FileSystemLoader(asset("templates")),
        undefined=jinja2.StrictUndefined,
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
