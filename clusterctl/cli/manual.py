"""The command manual, which prints the installed pages."""

from __future__ import annotations

from typing import Annotated

from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError
from clusterctl.spec.names import did_you_mean
from clusterctl.util.assets import data_folder


def manual(
    screen: Screen,
    page: Annotated[
        str | None, argument("Page, such as runs or howto/attach.", metavar="[PAGE]")
    ] = None,
) -> None:
    """Print a page of the manual. Without PAGE, list the pages.

    PAGE may also be the last part of a name, or a link in a page.
    """
    folder = data_folder("docs")
    pages = {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for file in sorted(folder.rglob("*.md"))
    }
    if page is None:
        rows = []
        for name, file in pages.items():
            with file.open(encoding="utf-8") as lines:
                rows.append((name, next(lines, "").strip("# \n")))
        answer = {"pages": [{"page": name, "title": title} for name, title in rows]}
        screen.result(answer, *screen.table(["PAGE", "TITLE"], rows))
        return
    wanted = page.partition("#")[0].removesuffix(".md").removeprefix("../")
    found = [name for name in pages if wanted == name.rpartition("/")[2]]
    name = wanted if wanted in pages else (found[0] if len(found) == 1 else "")
    if not name:
        last_parts = {name.rpartition("/")[2] for name in pages}
        raise UsageError(
            f"the manual has no page {page!r}",
            code="not-found",
            about="page",
            fix=did_you_mean(wanted, [*pages, *last_parts])
            or "`clusterctl manual` lists the pages",
        )
    text = pages[name].read_text(encoding="utf-8")
    screen.document({"page": name, "text": text}, text)
