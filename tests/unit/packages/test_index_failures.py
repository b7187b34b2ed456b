"""What uv prints of an index that it could not read, and what only resembles it."""

from __future__ import annotations

import pytest

from clusterctl.packages.index_failures import index_error
from clusterctl.util.process import Result
from tests.support.messages import condition

# Of uv 0.13.
REFUSED = (
    "TRACE Received response for fresh request with status 401 Unauthorized for: https://x.org/a/\n"
)
DOWN = (
    "error: Failed to fetch: https://x.org/a/\n  cause: error sending request for url "
    "(https://x.org/a/)\n  cause: Connection refused (os error 111)\n"
)
LACKING = "TRACE Received response for fresh request with status 404 Not Found for: https://y/a/\n"
FAILED_BUILD = "error: Failed to download and build `a==1.0`\n"
UNMET = "error: No solution found when resolving dependencies\n"


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (REFUSED, "https://x.org/a/"),
        (LACKING + REFUSED + UNMET, "401"),
        (DOWN, "Connection refused"),
        (
            f"{UNMET}\nhint: An index URL (https://x.org/) could not be queried due to a lack of valid "
            "authentication credentials (401 Unauthorized)\n",
            "https://x.org/",
        ),
        ("An index URL (https://x.org/) could not be queried (403 Forbidden)\n", "403"),
        ("error: Failed to download `a-1.0.tar.gz`\n  cause: HTTP status 503\n", "503"),
    ],
)
def test_index_that_uv_can_not_read(output: str, why: str) -> None:
    error = index_error(Result(2, "", output), "", "requirements.txt")
    assert error is not None
    assert (condition(error), error.where) == ("unreachable/index", "requirements.txt")
    assert why in error.why


@pytest.mark.parametrize("output", [LACKING, LACKING + UNMET, FAILED_BUILD])
def test_index_that_lacks_a_package_can_be_read(output: str) -> None:
    assert index_error(Result(1, "", output), "", "requirements.txt") is None


def test_only_a_refused_login_is_an_error_of_what_uv_did() -> None:
    assert index_error(Result(0, "", ""), f"TRACE {DOWN}", "requirements.txt") is None
    assert index_error(Result(0, "", ""), REFUSED, "requirements.txt") is not None
