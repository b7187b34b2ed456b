"""Lines of pip that tell that it could not read an index, and lines that only resemble them."""

from __future__ import annotations

import pytest

from clusterctl.packages.index_failures import index_error

NONE = "ERROR: Could not find a version that satisfies the requirement a (from versions: none)\n"
SOME = NONE.replace("none", "1.0, 2.0")
PAGE = "Could not fetch URL https://x.org/a/: {} - skipping\n"
REFUSED = PAGE.format("connection error: [Errno 111] Connection refused")
FORBIDDEN = PAGE.format("403 Client Error: Forbidden for url: https://x.org/a/")
LACKING = PAGE.format("404 Client Error: Not Found for url: https://y.org/a/")


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (REFUSED + NONE, "Connection refused"),
        (REFUSED + SOME, "Connection refused"),
        (LACKING + REFUSED + NONE, "Connection refused"),
        ("  " + FORBIDDEN + NONE, "403"),
        ("ERROR: HTTP error 503 while getting https://x.org/a.whl\n", "503"),
        (
            "WARNING: Skipping page https://x/a because the GET request got Content-Type: a/b. T\n",
            "a/b",
        ),
        (
            "WARNING: The repository located at x.org is not a trusted or secure host and is being "
            "ignored. If this\n" + NONE,
            "not a trusted",
        ),
        (
            "ERROR: Exception:\nTraceback\n  File\npip._vendor.requests.exceptions.RetryError: too "
            "many 500 error responses\n",
            "too many 500",
        ),
        (
            "error: connection-timeout\n\n\N{MULTIPLICATION SIGN} Unable to fetch https://x.org/a.whl\n"
            "\u2570\u2500> x.org didn't respond within 15 seconds\n",
            "didn't respond",
        ),
    ],
)
def test_index_that_pip_can_not_read(output: str, why: str) -> None:
    error = index_error(output, "requirements.txt")
    assert error is not None
    assert (error.code, error.where) == ("index-unreadable", "requirements.txt")
    assert why in error.why


@pytest.mark.parametrize(
    "output",
    [
        NONE,
        LACKING + NONE,
        # PyTorch's index answers 403 for a package that it lacks.
        LACKING + FORBIDDEN + NONE,
        FORBIDDEN + SOME,
        "ERROR: HTTP error 404 while getting https://x.org/a.whl\n",
        "error: metadata-generation-failed\n",
    ],
)
def test_index_that_lacks_a_package_can_be_read(output: str) -> None:
    assert index_error(output, "requirements.txt") is None
