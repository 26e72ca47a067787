"""Chooses the cipher that this machine's processor computes fastest."""

from __future__ import annotations

import time
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

AES, CHACHA = "TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"
_RECORD, _TIMES = bytes(16 << 10), 8  # as TLS encrypts: some milliseconds without support of the processor


def measure() -> dict[str, float]:
    """Return the seconds that each cipher takes for a byte here, by its name in TLS 1.3."""
    nonce = bytes(12)
    ciphers: dict[str, Callable[[bytes, bytes, None], bytes]] = {
        AES: AESGCM(bytes(16)).encrypt,
        CHACHA: ChaCha20Poly1305(bytes(32)).encrypt,
    }
    found = {}
    for name, encrypt in ciphers.items():
        best = float("inf")
        for _ in range(_TIMES):
            start = time.perf_counter()
            encrypt(nonce, _RECORD, None)
            best = min(best, time.perf_counter() - start)
        found[name] = best / len(_RECORD)
    return found


def offered(seconds: dict[str, float]) -> list[str]:
    """Return the ciphers that a machine offers to others, the best first, by what each costs it.

    A processor without instructions for AES offers ChaCha20 alone, so that its stronger peers use that, too: the weaker
    one of two machines decides how fast they are together.
    """
    return [AES, CHACHA] if seconds[AES] <= seconds[CHACHA] else [CHACHA]


def configuration(ciphers: list[str]) -> str:
    """Return OpenSSL's configuration for a process that offers these; Python's ssl cannot choose those of TLS 1.3."""
    return (
        "openssl_conf = init\n[init]\nssl_conf = ssl\n[ssl]\nsystem_default = tls\n"
        f"[tls]\nCiphersuites = {':'.join(ciphers)}\n"
    )
