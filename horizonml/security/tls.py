"""Connections that only processes with the same token can make: TLS 1.3, with a certificate derived from the token.

The token's random bits are the seed of an Ed25519 key, and everyone who has the token derives the same key and the same
self-signed certificate from it. Both sides of a connection show that certificate and trust no other. It is valid from
1970 to 9999, because small boards often have no clock that runs while they are off. The keys of each connection are
drawn anew (as always in TLS 1.3), so that who finds the token later cannot read what was recorded before.

A device's own token has a key and a certificate of its own, which the key of the shared token has signed. Both sides
trust what that key has signed, unless its list of revoked certificates has it (see `devices`).
"""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from weakref import WeakKeyDictionary

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from horizonml.errors import SecurityError
from horizonml.security.token import Token, own_token

_INFO = b"horizonml certificate 1"  # another number makes other certificates from the same tokens
_PROTOCOL = "horizonml/1"  # so that no server of another protocol can stand in, should it ever have the certificate
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "horizonml")])
_OWN_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "horizonml device")])
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
        return x509.load_der_x509_certificate(certificate).issuer == _NAME
    except ValueError:
        return False


def issue(shared: Token, serial: int) -> Token:
    """Return the token of one device, whose certificate has this serial number. Raises SecurityError."""
    if shared.is_own:
        raise SecurityError("only a device that has the shared token can issue tokens, and this one was paired itself")
    secret = secrets.token_bytes(20)
    key, signer = _key(secret), _key(shared.secret)
    own = (
        x509.CertificateBuilder(_NAME, _OWN_NAME, key.public_key(), serial, _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(signer, None)
    )
    return own_token(secret, shared, own.public_bytes(serialization.Encoding.DER), certificate(shared))


def sign_revoked(shared: Token, serials: Collection[int], number: int) -> bytes:
    """Return the list of revoked certificates as PEM; of two lists, that with the larger number counts."""
    # OpenSSL takes the latest list. Its time is no real one, because a board may not know the time.
    builder = x509.CertificateRevocationListBuilder(_NAME, _FROM + datetime.timedelta(seconds=number), _UNTIL)
    builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    for serial in serials:
        builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(serial, _FROM).build())
    return builder.sign(_key(shared.secret), None).public_bytes(serialization.Encoding.PEM)


def read_revoked(token: Token, content: bytes) -> tuple[int, frozenset[int]]:
    """Return the number of a list of revoked certificates, and their serial numbers.

    Raises ValueError if the key of the shared token has not signed it.
    """
    found = x509.load_pem_x509_crl(content)
    signer = x509.load_der_x509_certificate(trusted(token)).public_key()
    if not isinstance(signer, Ed25519PublicKey) or not found.is_signature_valid(signer):
        raise ValueError("it is not signed by the shared token")
    number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    return number, frozenset(one.serial_number for one in found)


# The contexts of this process, each with its token and the list of revoked certificates that it has.
_contexts: WeakKeyDictionary[ssl.SSLContext, tuple[Token, bytes]] = WeakKeyDictionary()


def any_token() -> Token | None:
    """Return the token of this process's connections, if it has made any."""
    return next((token for token, _ in list(_contexts.values())), None)


def contexts_without(content: bytes) -> list[ssl.SSLContext]:
    """Return the contexts that do not have this list of revoked certificates yet."""
    return [context for context, (_, known) in list(_contexts.items()) if known != content]


def refuse_revoked(context: ssl.SSLContext, content: bytes) -> None:
    """Let a context refuse the certificates of a list from now on, instead of those of the list that it had."""
    with _file(content) as name:
        context.load_verify_locations(name)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    _contexts[context] = _contexts[context][0], content


def _context(protocol: int, token: Token) -> ssl.SSLContext:
    key, own = _pair(token)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([_PROTOCOL])
    context.load_verify_locations(cadata=ssl.DER_cert_to_PEM_cert(trusted(token)))
    with _file(key + own) as name:
        context.load_cert_chain(name)
    _contexts[context] = token, b""
    return context


def trusted(token: Token) -> bytes:
    """Return the certificate of the shared token, which all devices trust, as DER."""
    return token.certificates[1] if token.is_own else certificate(token)


def _key(secret: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(HKDF(hashes.SHA256(), 32, salt=None, info=_INFO).derive(secret))


@lru_cache(maxsize=4)
def _pair(token: Token) -> tuple[bytes, bytes]:
    """Return the key and the certificate of a token, as PEM; the same everywhere, because Ed25519 draws nothing."""
    key = _key(token.secret)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    if token.is_own:
        return private, ssl.DER_cert_to_PEM_cert(token.certificates[0]).encode()
    certificate = (
        x509.CertificateBuilder(_NAME, _NAME, key.public_key(), 1, _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return private, certificate.public_bytes(pem)


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
