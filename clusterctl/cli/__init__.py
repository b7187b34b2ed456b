"""The command line: each verb parses, makes one call, and shows. The only place that prints or exits.

What a verb needs is imported inside it, so that ``clusterctl --help`` starts at once.
"""

import typer

from clusterctl.cli import (
    bundle,
    cluster,
    completion,
    data,
    doctor,
    job,
    listing,
    login,
    node,
    options,
    plan,
    spec,
    submit,
)

app = typer.Typer(
    name="clusterctl",
    help="One typed file raises a Slurm cluster, trains on it, and brings the results home.",
    no_args_is_help=True,
    add_completion=False,  # there is a verb for it
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(options.root)

for module in (spec, doctor, plan, cluster, node, listing, submit, job, data, login, bundle, completion):
    module.register(app)
