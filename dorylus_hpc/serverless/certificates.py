"""Certificates of one run: an authority, one certificate for its tensor servers, one for its workers.

The authority's private key never leaves `make_credentials`: when that returns, nobody can issue another
certificate of this run. Needs `cryptography`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lambda_pkg import tls

_SKEW = timedelta(hours=1)  # how far a worker's clock may be behind


@dataclass(frozen=True)
class Credentials:
    """What the servers and workers of a run show each other. Plain text, to be broadcast to all ranks.

    Attributes
    ----------
    authority
        PEM of the run's authority.
    server_certificate, server_key
        PEM, of all tensor servers of the run.
    client_certificate, client_key
        PEM, of all workers of the run; these travel in the descriptor of each task.
    """

    authority: str
    server_certificate: str
    server_key: str = field(repr=False)
    client_certificate: str
    client_key: str = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        """Return the settings of a tensor server: TLS 1.3, only workers of this run."""
        return tls.server_context(self.authority, self.server_certificate, self.server_key)

    def descriptor(self) -> dict[str, str]:
        """Return what a worker needs, as a task's descriptor has it under ``tls``."""
        return {"ca": self.authority, "certificate": self.client_certificate, "key": self.client_key}


def make_credentials(run: str, valid: timedelta = timedelta(days=30)) -> Credentials:
    """Make the credentials of a run.

    Parameters
    ----------
    run
        The run's id, for the names in the certificates.
    valid
        How long they are valid; a run that lasts longer loses its workers.
    """
    start = datetime.now(UTC) - _SKEW
    end = datetime.now(UTC) + valid
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name(f"dorylus {run} authority")

    def builder(name: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )

    def issue(role: str, purpose: x509.ObjectIdentifier, names: list[x509.GeneralName]) -> tuple[str, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            builder(_name(f"dorylus {run} {role}"), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )
        if names:
            certificate = certificate.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return _pem(certificate.sign(authority_key, hashes.SHA256())), _key_pem(key)

    authority = (
        builder(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    server = issue("server", ExtendedKeyUsageOID.SERVER_AUTH, [x509.DNSName(tls.NAME)])
    worker = issue("worker", ExtendedKeyUsageOID.CLIENT_AUTH, [])
    return Credentials(_pem(authority), *server, *worker)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
