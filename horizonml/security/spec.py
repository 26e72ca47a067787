"""The part of a job that says how links between machines are protected."""

from __future__ import annotations

from pydantic import Field

from horizonml.spec.base import Spec


class SecuritySpec(Spec):
    """How links between machines are protected; the token itself never stands in a job."""

    encrypt: bool = Field(
        True,
        description="Encrypt what ranks on different machines send each other. With false the token still guards each "
        "connection, but activations and gradients then travel readable, and somebody on the way could change them.",
    )
    port: int = Field(
        29401,
        ge=1,
        le=65535,
        description="Port on which each machine takes the other machines' data ($HORIZONML_LINK_PORT overrides it for "
        "one machine).",
    )
