"""Throw-away certificates, made without the `openssl` program."""

import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Signs certificates; ``path`` is what those who trust it are given."""

    path: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def issue(self, name: str, place: str) -> tuple[Path, Path]:
        """Certificate and key, in files called ``name``, for a host name or an IP address."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            host: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(place))
        except ValueError:
            host = x509.DNSName(place)
        unsigned = _unsigned(name, self.certificate.subject, key).add_extension(
            x509.SubjectAlternativeName([host]), critical=False
        )
        certificate = unsigned.sign(self.key, hashes.SHA256())
        paths = self.path.with_name(f"{name}.crt"), self.path.with_name(f"{name}.key")
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths


def authority(directory: Path, name: str) -> Authority:
    """A new one, its certificate in ``directory``."""
    key = ec.generate_private_key(ec.SECP256R1())
    unsigned = _unsigned(name, None, key).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    certificate = unsigned.sign(key, hashes.SHA256())
    path = directory / f"{name}.crt"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(path, certificate, key)


def _unsigned(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )
