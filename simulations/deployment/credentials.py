"""Keys and certificates for a federation on the loopback interface, made on the spot.

For trying things out and for tests: the authority's private key is thrown away after signing, and
everything is valid for a day.
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

_VALID = datetime.timedelta(days=1)
# Clocks of containers may be a little behind.
_LEEWAY = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class ServerCredentials:
    """Files by which a SuperLink proves who it is, and its clients check it."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKeys:
    """Files by which a SuperNode proves who it is; the public one is registered."""

    private: Path
    public: Path


def make_server_credentials(folder: Path) -> ServerCredentials:
    """Make an authority and a certificate for 127.0.0.1 and localhost that it signed."""
    authority_key, key = _new_key(), _new_key()
    authority_name = _name("gems-flwr demo authority")
    authority = (
        _certificate(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    addresses: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    certificate = (
        _certificate(_name("localhost"), authority_name, key)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    made = ServerCredentials(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    made.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_secret(made.key, key, serialization.PrivateFormat.TraditionalOpenSSL)
    return made


def make_node_keys(folder: Path, name: str) -> NodeKeys:
    """Make a pair of keys as Flower wants them: ECDSA on P-384, in OpenSSH's format."""
    key = _new_key()
    folder.mkdir(parents=True, exist_ok=True)
    keys = NodeKeys(folder / name, folder / f"{name}.pub")
    _write_secret(keys.private, key, serialization.PrivateFormat.OpenSSH)
    keys.public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return keys


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LEEWAY)
        .not_valid_after(now + _VALID)
    )


def _write_secret(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    # Nobody else may read it, not even for the moment before a chmod.
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
