"""What if somebody presses Ctrl-C?

Python raises `KeyboardInterrupt` between any two bytecodes: also in the middle of the scheduler,
with a block taken from the free list and not yet in a table.
"""

# Generated from nbs/engine/interrupt.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=e570a7da5737 module=a53daed2c9eb

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
