"""The process that Terraform starts: ``python -m tests.support.google.provider VERSION CLOUD-FILE``."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import grpc

from tests.support.google.provider.server import ADDRESS, Server

CERTIFICATE = Path(".cache/tf-python-provider/ssl_cert.json")  # where tf.runner keeps it, in the home


def certificate(home: Path) -> tuple[bytes, grpc.ServerCredentials]:
    """What the server proves itself with, in DER and as credentials; drawn once and kept in ``home``."""
    if not (home / CERTIFICATE).exists():
        from tf.runner import _self_signed_cert  # noqa: PLC0415  (100 ms)

        chain, credentials = _self_signed_cert()
        return chain, credentials
    kept = json.loads((home / CERTIFICATE).read_text())
    pair = (kept["key_pem"].encode(), kept["cert_pem"].encode())
    return base64.b64decode(kept["cert_chain"]), grpc.ssl_server_credentials([pair])


def main(version: str, cloud: Path) -> None:
    """Serve until Terraform says that it is enough."""
    chain, credentials = certificate(Path.home())
    server = Server(version, cloud, credentials)
    encoded = base64.b64encode(chain).decode().rstrip("=")
    print(f"1|6|tcp|{ADDRESS}:{server.port}|grpc|{encoded}", flush=True)  # noqa: T201 - the handshake
    server.serve()


main(sys.argv[1], Path(sys.argv[2]))
