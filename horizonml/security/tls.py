"""Connections that only processes with the same token can make: TLS 1.3, with a certificate derived from the token.

The token's random bits are the seed of an Ed25519 key, and everyone who has the token derives the same key and the same
self-signed certificate from it. Both sides of a connection show that certificate and trust no other. It is valid from
1970 to 9999, because small boards often have no clock that runs while they are off. The keys of each connection are
drawn anew (as always in TLS 1.3), so that who finds the token later cannot read what was recorded before.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from horizonml.security.token import Token

_INFO = b"horizonml certificate 1"  # another number makes other certificates from the same tokens
_PROTOCOL = "horizonml/1"  # so that no server of another protocol can stand in, should it ever have the certificate
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "horizonml")])
# Certificates are in UTC by definition.
_FROM = datetime.datetime(1970, 1, 1)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59)


def server_context(token: Token) -> ssl.SSLContext:
    """Return what accepts connections of processes that have this token."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, token)
    context.num_tickets = 0  # each connection proves the token anew
    return context


def client_context(token: Token) -> ssl.SSLContext:
    """Return what connects to processes that have this token."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, token)
    context.check_hostname = False  # who has the token is trusted at any address
    return context


def any_context() -> ssl.SSLContext:
    """Return what connects to a service with any token, of which it proves nothing: a pairing does that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([_PROTOCOL])
    return context


def certificate(token: Token) -> bytes:
    """Return the certificate that all who have a token show, as DER."""
    return ssl.PEM_cert_to_DER_cert(_pair(token)[1].decode())


def is_of_a_token(certificate: bytes) -> bool:
    """Return whether a certificate (as DER) looks like that of a token, whichever; it proves nothing."""
    try:
        return x509.load_der_x509_certificate(certificate).subject == _NAME
    except ValueError:
        return False


def _context(protocol: int, token: Token) -> ssl.SSLContext:
    key, certificate = _pair(token)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([_PROTOCOL])
    context.load_verify_locations(cadata=certificate.decode())
    with _file(key + certificate) as name:
        context.load_cert_chain(name)
    return context


@lru_cache(maxsize=4)
def _pair(token: Token) -> tuple[bytes, bytes]:
    """Return the key and the certificate of a token, as PEM; the same everywhere, because Ed25519 draws nothing."""
    seed = HKDF(hashes.SHA256(), 32, salt=None, info=_INFO).derive(token.secret)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    certificate = (
        x509.CertificateBuilder(_NAME, _NAME, key.public_key(), 1, _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), certificate.public_bytes(pem)


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    """Yield the name of a file with this content, as `ssl` takes keys from files only; Linux keeps it in memory."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("key", os.MFD_CLOEXEC), "wb") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:  # which only its owner may read
            file.write(content)
            file.flush()
            yield file.name
