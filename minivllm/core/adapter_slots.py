"""Slots for LoRA adapters: the least recently used is evicted, running and pinned ones stay."""

# Generated from nbs/core/adapter_slots.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections import OrderedDict
from collections.abc import Collection


class AdapterSlots:
    """Which adapter lies in which slot.

    Args:
        count: slots; 0 if adapters are not limited (a simulation that does not ask for it).

    Attributes:
        slot_of: slot of each adapter that has one, the least recently used first.
        pinned: adapters that are never evicted.
        loading: adapters whose load is planned or in flight.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.slot_of: OrderedDict[str, int] = OrderedDict()
        self.pinned: set[str] = set()
        self.loading: set[str] = set()

    def can_take(self, name: str, in_use: Collection[str]) -> bool:
        """Whether the adapter has a slot or could get one. in_use: adapters of running requests."""
        return name in self.slot_of or len(self.slot_of) < self.count or self._victim(in_use) is not None

    def _victim(self, in_use: Collection[str]) -> str | None:
        return next((name for name in self.slot_of if name not in in_use and name not in self.pinned), None)

    def take(self, name: str, in_use: Collection[str]) -> tuple[int, str | None]:
        """The adapter's slot, and the adapter that was evicted from it, if one was. Call `can_take` first."""
        evicted = None
        if name not in self.slot_of:
            free = set(range(self.count)) - set(self.slot_of.values())
            if not free:
                evicted = self._victim(in_use)
                assert evicted is not None, "can_take was not asked"
                free = {self.release(evicted)}
            self.slot_of[name] = min(free)
            self.loading.add(name)
        self.touch(name)
        return self.slot_of[name], evicted

    def release(self, name: str) -> int:
        """Take the adapter out of its slot, and return the slot."""
        self.loading.discard(name)
        return self.slot_of.pop(name)

    def touch(self, name: str) -> None:
        """The adapter is used now."""
        if name in self.slot_of:
            self.slot_of.move_to_end(name)

    def pin(self, name: str) -> None:
        """Keep the adapter in its slot from when it gets one.

        Raises:
            ValueError: no slot would be left for adapters that are not pinned.
        """
        if len(self.pinned | {name}) >= self.count:
            raise ValueError(
                f"adapter {name!r} cannot be pinned: {len(self.pinned)} of max_loras={self.count} are pinned, and one"
                " slot must be left for the others"
            )
        self.pinned.add(name)

    @property
    def in_slots(self) -> list[str | None]:
        """The adapter of each slot."""
        names = {slot: name for name, slot in self.slot_of.items()}
        return [names.get(slot) for slot in range(self.count)]
