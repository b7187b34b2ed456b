"""The certificate of the connection to Terraform: drawn once, since its library takes long to import."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import grpc

FILE = Path(".cache/tf-python-provider/ssl_cert.json")  # where tf.runner keeps it, in the home


@dataclass(frozen=True)
class Certificate:
    """What the server proves itself with; ``chain`` is what Terraform is told to expect, in DER."""

    chain: bytes
    credentials: grpc.ServerCredentials


def certificate(home: Path) -> Certificate:
    """The one that is kept in ``home``; drawn and kept there if there is none."""
    if not (home / FILE).exists():
        from tf.runner import _self_signed_cert  # noqa: PLC0415  (100 ms)

        return Certificate(*_self_signed_cert())
    kept = json.loads((home / FILE).read_text())
    pair = (kept["key_pem"].encode(), kept["cert_pem"].encode())
    return Certificate(base64.b64decode(kept["cert_chain"]), grpc.ssl_server_credentials([pair]))
