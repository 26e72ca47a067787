from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Five processes, shared by all tests."""
    processes = Pool(5)
    yield processes
    processes.close()
