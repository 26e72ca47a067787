from tests.distributed.conftest import folder, start

__all__ = ["folder", "start"]
