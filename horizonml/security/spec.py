"""The part of a job that says how links between machines are protected."""

from __future__ import annotations

from pydantic import Field

from horizonml.spec.base import Spec


class SecuritySpec(Spec):
    """How links between machines are protected. The token itself is never in a job."""

    encrypt: bool = Field(
        True,
        description="Encrypt what ranks on different machines send each other. With false, the token still guards each "
        "connection, but activations and gradients travel unencrypted: others on the way can read and change them.",
    )
    port: int = Field(
        29401,
        ge=1,
        le=65535,
        description="Port on which each machine receives data from other machines ($HORIZONML_LINK_PORT overrides it "
        "for one machine).",
    )
