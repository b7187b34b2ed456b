"""Names of container images, as Docker reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.spec.remote_reference import _FORM, DOCKER_HUB, Reference

DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    {
        "python": (DOCKER_HUB, "library/python", "latest"),
        "python:3.12-slim": (DOCKER_HUB, "library/python", "3.12-slim"),
        "pytorch/pytorch": (DOCKER_HUB, "pytorch/pytorch", "latest"),
        "docker.io/python": (DOCKER_HUB, "library/python", "latest"),
        "index.docker.io/python": (DOCKER_HUB, "library/python", "latest"),
        "nvcr.io/nvidia/pytorch:25.01-py3": ("nvcr.io", "nvidia/pytorch", "25.01-py3"),
        "quay.io/x": ("quay.io", "x", "latest"),
        "registry/x": (DOCKER_HUB, "registry/x", "latest"),
        "registry:5000/x": ("registry:5000", "x", "latest"),
        "registry:5000": (DOCKER_HUB, "library/registry", "5000"),
        "localhost/x": ("localhost", "x", "latest"),
        "127.0.0.1:5000/a/b/c:v_1": ("127.0.0.1:5000", "a/b/c", "v_1"),
        "[::1]:5000/x": ("[::1]:5000", "x", "latest"),
        "Quay.io/x": ("Quay.io", "x", "latest"),
        "a__b/c-.d".replace("-.", "-"): (DOCKER_HUB, "a__b/c-d", "latest"),
    }.items(),
)
def test_reference_has_the_parts_that_docker_reads(text: str, wanted: tuple[str, str, str]) -> None:
    reference = Reference.parse(text)
    assert (reference.registry, reference.path, reference.tag) == wanted
    assert reference.digest == ""


@pytest.mark.parametrize(("text", "tag"), [(f"python@{DIGEST}", ""), (f"python:3@{DIGEST}", "3")])
def test_name_with_a_digest_has_no_usual_tag(text: str, tag: str) -> None:
    reference = Reference.parse(text)
    assert (reference.tag, reference.digest) == (tag, DIGEST)


@pytest.mark.parametrize(
    ("registry", "is_here"),
    [("localhost", True), ("127.0.0.1:5000", True), ("[::1]:5000", True), ("localhost.x", False)],
)
def test_registry_of_this_machine_needs_no_encryption(registry: str, is_here: bool) -> None:
    assert Reference(registry, "x", "1").is_of_this_machine == is_here


WRONG = ["", " ", "Python", "Foo/bar", "a-/b", "foo/Bar", "a//b", "/a", "a/", "a:", "a:b:c", "a b"]
WRONG += ["a\n", "a:b\n", "-a", "a-", "a___b", "python:.1", "python:-1", "a:" + "x" * 129, "é/b"]
WRONG += ["python:é", "python:3.١٢", "docker://a", "https://quay.io/a", "user:word@quay.io/a"]
WRONG += ["a@sha256:", f"a@{DIGEST}0", f"a@{DIGEST.upper()}", "a@md5:00", "a@", "quay.io:/x"]


@pytest.mark.parametrize("text", WRONG, ids=ascii)
def test_name_in_a_wrong_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not the name of an image"):
        Reference.parse(text)


@given(st.from_regex(_FORM, fullmatch=True))
def test_printed_name_is_the_same_image(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except ValueError:
        return
    assert Reference.parse(str(reference)) == reference
