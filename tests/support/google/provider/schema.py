"""Google's real schema, as Terraform prints it, and functions that traverse values by a schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tf.gen import tfplugin_pb2 as pb
from tf.types import Unknown

SCHEMAS = Path(__file__).with_name("schemas")
# The release of Google's provider that terraform/gcp pins.
VERSION = "8.7.0"
SOURCE = "registry.terraform.io/hashicorp/google"

Block = Mapping[str, Any]
Trail = tuple[str | int, ...]


@cache
def load() -> Mapping[str, Any]:
    """The schemas of the provider, but for its custom endpoints, and of the resources that the
    module has.

    provider.json: what the dump lacks of the provider's own settings (its documentation since 7.19).
    """
    known: dict[str, Any] = json.loads((SCHEMAS / f"google-{VERSION}.json").read_text())[
        "provider_schemas"
    ][SOURCE]
    known["resource_schemas"].update(json.loads((SCHEMAS / "bucket_iam_member.json").read_text()))
    settings = json.loads((SCHEMAS / "provider.json").read_text())
    known["provider"]["block"]["attributes"] |= settings["attributes"]
    known["provider"]["block"]["block_types"] = settings["block_types"]
    return known


@cache
def answer() -> pb.GetProviderSchema.Response:
    """All that Terraform asks of the schemas."""
    known = load()
    return pb.GetProviderSchema.Response(
        provider=_message(known["provider"]),
        resource_schemas={name: _message(each) for name, each in known["resource_schemas"].items()},
        # As Google's: a Terraform asks once, and not again in each of its walks.
        server_capabilities=pb.ServerCapabilities(get_provider_schema_optional=True),
    )


def _message(schema: Mapping[str, Any]) -> pb.Schema:
    return pb.Schema(version=schema.get("version", 0), block=_block(schema["block"]))


def _block(block: Block) -> pb.Schema.Block:
    attributes = [
        pb.Schema.Attribute(
            name=name,
            type=json.dumps(attribute["type"]).encode(),
            **{
                flag: attribute.get(flag, False)
                for flag in ("required", "optional", "computed", "sensitive")
            },
        )
        for name, attribute in sorted(block.get("attributes", {}).items())
    ]
    nested = [
        pb.Schema.NestedBlock(
            type_name=name,
            block=_block(inner["block"]),
            nesting=getattr(pb.Schema.NestedBlock, inner["nesting_mode"].upper()),
            min_items=inner.get("min_items", 0),
            max_items=inner.get("max_items", 0),
        )
        for name, inner in sorted(block.get("block_types", {}).items())
    ]
    return pb.Schema.Block(attributes=attributes, block_types=nested)


def with_unknowns(
    block: Block, proposed: Mapping[str, Any], prior: Mapping[str, Any] | None
) -> Any:
    """What is planned: what Google will compute is unknown, unless it was computed before."""

    def plan(attribute: Any, value: Any, _: str, *, fresh: bool) -> Any:
        return Unknown if value is None and fresh and attribute.get("computed") else value

    return _walked(block, proposed, plan, prior)


def filled(block: Block, value: Mapping[str, Any], compute: Callable[[str, Any], Any]) -> Any:
    """The same value with every unknown computed from its name and type."""

    def fill(attribute: Any, given: Any, name: str, *, fresh: bool) -> Any:
        return compute(name, attribute["type"]) if given is Unknown else given

    return _walked(block, value, fill)


def _walked(
    block: Block, value: Mapping[str, Any], leaf: Any, prior: Any = None, below: str = ""
) -> Any:
    """The value with what ``leaf`` makes of each attribute; ``fresh``: its block was not there
    before.
    """
    done = dict(value)
    for name, attribute in block.get("attributes", {}).items():
        done[name] = leaf(attribute, done[name], below + name, fresh=prior is None)
    for name, inner in block.get("block_types", {}).items():
        items = done[name]
        before = (prior or {}).get(name)
        if items is None or items is Unknown:
            continue
        done[name] = [
            item
            if item is Unknown
            else _walked(
                inner["block"], item, leaf, _like(inner, before, item, at), f"{below}{name}."
            )
            for at, item in enumerate(items)
        ]
    return done


def differences(before: Any, after: Any, at: Trail = ()) -> Iterator[Trail]:
    """Where two values differ, as trails of names and indexes. A list that grew or shrank does as a
    whole, and so does all that its blocks more or less have.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name), after.get(name), (*at, name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, (*at, index))
    elif before != after:
        yield at
        shorter, longer = sorted((_blocks(before), _blocks(after)), key=len)
        for index, block in enumerate(longer[len(shorter) :], start=len(shorter)):
            yield from differences(dict.fromkeys(block), block, (*at, index))


def _blocks(value: Any) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, Mapping)]


def path(trail: Trail) -> pb.AttributePath:
    """A trail as the protocol has it."""
    named = (
        ("attribute_name" if isinstance(step, str) else "element_key_int", step) for step in trail
    )
    steps = [pb.AttributePath.Step(**{kind: step}) for kind, step in named]
    return pb.AttributePath(steps=steps)


def _like(inner: Mapping[str, Any], before: Any, item: Any, at: int) -> Any:
    """The block of before that this one was, if there was one."""
    if not before or before is Unknown:
        return None
    if inner["nesting_mode"] == "set":
        return item if item in before else None
    return before[at] if at < len(before) else None
