"""The help of a command: with many options the usual ones first, and all of them by topic."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

import click
from typer.core import TyperArgument, TyperCommand, TyperOption

from clusterctl.spec.names import LocalValue, Topic

# Returns completions of the typed text.
Completer = Callable[[click.Context, str], list[Any]]


class _Parameter(click.Parameter):
    """The common base of options and arguments. local: see ``JobOption``."""

    local: LocalValue | None
    completer: Completer | None = None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        if self.completer is None:
            return super().shell_complete(ctx, incomplete)
        return self.completer(ctx, incomplete)


class HelpOption(_Parameter, TyperOption):
    """An option of a command, with its place in the help."""

    topic: str
    is_usual: bool


class HelpArgument(_Parameter, TyperArgument):
    """An argument of a command."""


# With more options than this, a command has a short help, and --help-all.
_MANY: Final = 40
_WHOLE_HELP: Final = "clusterctl.whole_help"


class HelpCommand(TyperCommand):
    """A command whose help has many options by topics."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        options = [p for p in params if isinstance(p, click.Option) and not p.hidden]
        if len(options) <= _MANY:
            super().format_options(ctx, formatter)
            return
        arguments = [p.get_help_record(ctx) for p in params if isinstance(p, HelpArgument)]
        with formatter.section("Arguments"):
            formatter.write_dl([record for record in arguments if record])
        if ctx.meta.get(_WHOLE_HELP):
            for topic, of_topic in _by_topic(options):
                with formatter.section(topic or "Common to several commands"):
                    formatter.write_dl([p.get_help_record(ctx) or ("", "") for p in of_topic])
        else:
            _write_usual_options(ctx, formatter, options)


def _by_topic(options: Sequence[click.Option]) -> list[tuple[str, list[click.Option]]]:
    """Return the options by topic, those of each command at the end."""
    found: dict[str, list[click.Option]] = {topic: [] for topic in (*map(str, Topic), "")}
    for each in options:
        found[each.topic if isinstance(each, HelpOption) else ""].append(each)
    return [(topic, of_topic) for topic, of_topic in found.items() if of_topic]


def _write_usual_options(
    ctx: click.Context, formatter: click.HelpFormatter, options: Sequence[click.Option]
) -> None:
    """Write the usual options, a line each with the first sentence of its help."""
    rows = []
    for topic, of_topic in _by_topic(options):
        usual = [each for each in of_topic if isinstance(each, HelpOption) and each.is_usual]
        for index, each in enumerate(usual):
            flags, text = each.get_help_record(ctx) or ("", "")
            rows.append(("" if index else topic, flags, f"{text.partition('. ')[0]}".rstrip(".")))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    formatter.write_paragraph()
    for topic, flags, text in rows:
        head = f"{topic:{widths[0]}}  {flags:{widths[1]}}  "
        wrapped = textwrap.wrap(text, max(20, formatter.width - len(head)))
        formatter.write(f"\n{' ' * len(head)}".join([f"{head}{wrapped[0]}", *wrapped[1:]]) + "\n")
    formatter.write_paragraph()
    formatter.write_text(f"`{ctx.command_path} --help-all` has all {len(options)} options.")


def _show_whole_help(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        ctx.meta[_WHOLE_HELP] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def with_whole_help(params: Sequence[click.Parameter]) -> list[click.Parameter]:
    """Return the parameters of a command, with --help-all if they are many."""
    if len(params) <= _MANY:
        return [*params]
    return [*params, showing_option("--help-all", _show_whole_help, "Show all options.")]


def showing_option(name: str, show: Callable[..., None], text: str) -> TyperOption:
    """Return an option that shows something in place of the command's work, such as --version.

    show: called as a callback of click.
    """
    return TyperOption(
        param_decls=[name],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help=text,
    )
