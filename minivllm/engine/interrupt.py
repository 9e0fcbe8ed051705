"""Delays KeyboardInterrupt until the engine's state is consistent."""

# Generated from nbs/engine/interrupt.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred_interrupts"]


# %% nbs/engine/interrupt.ipynb #deferred_interrupts
@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C waits for a call of the yielded function, which then raises KeyboardInterrupt.

    A second press does not wait: then the program hangs, and whoever presses knows it. Nothing changes outside of the main thread (Python
    delivers signals there only) or where somebody else handles the signal.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
