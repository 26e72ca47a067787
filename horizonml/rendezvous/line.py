"""Asks the rendezvous service questions, and waits for each answer for a limited time only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch.distributed import Store

T = TypeVar("T")


class Line:
    """A store's client behind a thread.

    Once it is connected, PyTorch's client waits for an answer for ever, even if the network is gone without a word. A
    line that has not answered is given up, together with its thread, and another one is made.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        """Use the client that `connect` makes, in the line's thread."""
        self._questions: SimpleQueue[tuple[Callable[[Store], Any], SimpleQueue[tuple[bool, Any]]] | None] = (
            SimpleQueue()
        )
        threading.Thread(target=self._answer, args=(connect,), name="rendezvous line", daemon=True).start()

    def ask(self, question: Callable[[Store], T], seconds: float) -> T:
        """Return what a question to the store returns.

        Raises RuntimeError if there is no answer within so many seconds, and whatever the question raises.
        """
        answer: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._questions.put((question, answer))
        try:
            answered, value = answer.get(timeout=max(0.0, seconds))
        except Empty:
            raise RuntimeError(f"no answer within {seconds:.1f} s") from None
        if not answered:
            raise value
        result: T = value
        return result

    def close(self) -> None:
        """End the thread, as soon as it waits for no answer."""
        self._questions.put(None)

    def _answer(self, connect: Callable[[], Store]) -> None:
        store: Store | None = None
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            try:
                store = connect() if store is None else store
                answer.put((True, question(store)))
            except (RuntimeError, ValueError) as error:
                answer.put((False, error))
