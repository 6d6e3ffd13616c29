"""Keys and certificates for a deployment on this machine: TLS for the SuperLink, keys for nodes.

The server's certificate signs itself, so it is also what clients trust. It is for loopback alone
and valid for a week: for demos and tests, not for production.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Keys:
    """A private key, and what others may know: the certificate or the public key."""

    private: Path
    public: Path


def make_server_credentials(folder: Path) -> Keys:
    """Make a key, and a certificate for 127.0.0.1 and localhost that is its own authority."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of the processes are one; an hour is for those who read the files elsewhere.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=7))
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return _written(folder / "server.key", folder / "server.pem", key, form, certificate)


def make_node_keys(folder: Path, name: str) -> Keys:
    """Make a pair of keys as Flower wants them: ECDSA on P-384, in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    return _written(folder / name, folder / f"{name}.pub", key, serialization.PrivateFormat.OpenSSH)


def _written(
    private: Path,
    public: Path,
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat,
    certificate: x509.Certificate | None = None,
) -> Keys:
    private.parent.mkdir(parents=True, exist_ok=True)
    # No other user may read it, not even for the moment before a chmod.
    private.touch(mode=0o600)
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    ssh = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    shown = certificate.public_bytes(pem) if certificate else key.public_key().public_bytes(*ssh)
    public.write_bytes(shown)
    return Keys(private, public)
