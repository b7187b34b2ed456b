"""A certificate for the hosts on the web that a lab plays, and the authority that vouches for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAYS = 365


def make(folder: Path, hosts: Sequence[str]) -> None:
    """Write ``ca.crt``, which machines are to trust, and ``server.pem``, a key with its certificate."""
    folder.mkdir()
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "clusterctl test lab")])
    ca = _certificate(name, name, authority.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    alternatives = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
    server = _certificate(own, name, key.public_key()).add_extension(alternatives, critical=False)
    (folder / "ca.crt").write_bytes(_pem(ca.sign(authority, hashes.SHA256())))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(private + _pem(server.sign(authority, hashes.SHA256())))


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_DAYS))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
