"""report: a run, a sweep or several runs as one HTML file, as Markdown, or as JSON; no cluster is needed."""

from __future__ import annotations

import webbrowser
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from clusterctl.cli.options import Options, folder_path, run_names
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.runs.find import named_run
from clusterctl.runs.page import REPORT_FILE, write_report
from clusterctl.runs.report import report_of, report_path


class Form(StrEnum):
    TEXT = "text"
    JSON = "json"
    MD = "md"


def report(
    screen: Screen,
    options: Options,
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs, as in `runs show`.", autocompletion=run_names),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=folder_path,
            metavar="FILE",
            help=f"The file to write. Default: {REPORT_FILE} in the run's folder, of several runs here.",
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve it on this machine's loopback address until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of --serve. Default: a free one.", metavar="PORT")
    ] = 0,
    output: Annotated[
        Form | None,
        typer.Option("--output", "-o", help="Show the same facts as JSON or Markdown; write no file."),
    ] = None,
) -> None:
    """Write the report of a run, a sweep, or several runs.

    It is one HTML file that needs no network: the verdict, then metrics, time per step, ranks, nodes, the
    scheduler, configuration and environment. Of several runs, what differs comes first.
    """
    shows = options.markdown or screen.json
    if (shows and (out or open_ or serve)) or (serve and (out or open_)) or (port and not serve):
        raise UsageError(
            "-o json, -o md and --serve write no file, and --port is about --serve",
            code="options-exclusive",
            fix="leave out one of them",
        )
    rows = list({row.folder: row for row in map(named_run, run)}.values())
    found = report_of(rows)
    if options.markdown:
        screen.document({}, found.as_markdown())
        return
    if screen.json:
        screen.result({"report": found.as_dict()})
        return
    if serve:
        _serve(screen, found.as_html().encode(), port)
        return
    path = out or (report_path(rows[0]) if len(rows) == 1 else Path(REPORT_FILE))
    write_report(found, path)
    facts = found.as_dict()
    screen.result(
        {}, *facts["verdict"], *(f"missing: {one}" for one in facts["missing"]), "", f"report: {path}"
    )
    if open_ and not webbrowser.open(path.absolute().as_uri()):
        raise UsageError(
            "there is no browser here", code="no-browser", fix="say --serve, and open the address elsewhere"
        )


def _serve(screen: Screen, page: bytes, port: int) -> None:
    """Answer every question with the page, until Ctrl-C."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as exc:
        raise ClusterctlError(
            f"port {port} can't be used",
            code="port-unusable",
            why=exc.strerror or str(exc),
            fix="say another --port",
        ) from exc
    with server:
        at = server.server_port
        screen.note(
            f"http://127.0.0.1:{at}/ until Ctrl-C; from another machine first: ssh -N -L {at}:127.0.0.1:{at} "
            "and this machine's name"
        )
        server.serve_forever()
