from __future__ import annotations

import os
import shlex

import pytest

from tests.e2e.tools import run


@pytest.fixture(scope="session")
def image() -> None:
    """The worker's image, built as `make images` does."""
    run("make", "images", f"DOCKER_BUILD={os.environ.get('DOCKER_BUILD', 'docker build')}", timeout=900)


@pytest.fixture(scope="session")
def compose(image: None) -> list[str]:
    """The command for `docker compose`."""
    run("make", "token")
    return shlex.split(os.environ.get("COMPOSE", "docker compose"))
