"""The arena: a bounded number of slots on the device, each of which holds the weights of one expert.

Who may be in it is the Residency's business; where each one lies is kept here. It is made once, whole, so
that it can never take more than it was given: a key that finds no free slot is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from real.device import Device
from real.errors import RealError
from real.experts import ExpertFormat, ExpertWeights


class Arena:
    """Slots by format: experts of one format lie in one block of memory, [slots, slot_bytes].

    Parameters
    ----------
    device
        Whose memory it is.
    formats, num_slots
        The formats, and how many experts of each there is room for, >= 1.
    format_of_key
        Which of them each key has, [num_keys].
    """

    def __init__(
        self,
        device: Device,
        formats: Sequence[ExpertFormat],
        num_slots: Sequence[int],
        format_of_key: Sequence[int],
    ) -> None:
        self._device = device
        self._format_of_key = format_of_key
        self.num_bytes = sum(
            count * form.slot_bytes for form, count in zip(formats, num_slots, strict=True)
        )
        for form, count in zip(formats, num_slots, strict=True):
            if count < 1:
                raise RealError(
                    f"an arena of {count} slots of {form.slot_bytes} bytes: must be >= 1"
                )
        self._blocks: list[Tensor] = []
        for form, count in zip(formats, num_slots, strict=True):
            block = device.buffer(
                count * form.slot_bytes
            ).zero_()  # else first copies wait for pages
            self._blocks.append(block.view(count, form.slot_bytes))
        self._views = [
            [form.view(row) for row in block]
            for form, block in zip(formats, self._blocks, strict=True)
        ]
        self._stacked = [
            form.view(block) for form, block in zip(formats, self._blocks, strict=True)
        ]
        self._free = [list(range(count - 1, -1, -1)) for count in num_slots]
        self._slot_of: dict[int, int] = {}

    def take(self, key: int) -> Tensor:
        """Give an expert a slot and return its bytes; RuntimeError if it has one, or none is free."""
        if key in self._slot_of:
            raise RuntimeError(f"key {key} has a slot already")
        kind = self._format_of_key[key]
        if not self._free[kind]:
            raise RuntimeError(
                f"key {key} finds no free slot: all {len(self._views[kind])} are taken"
            )
        slot = self._slot_of[key] = self._free[kind].pop()
        return self._blocks[kind][slot]

    def free(self, key: int) -> None:
        """Take an expert's slot back; RuntimeError if it has none."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            raise RuntimeError(f"key {key} has no slot")
        self._free[self._format_of_key[key]].append(slot)

    def slot_of(self, key: int) -> int:
        """Return the number of an expert's slot in its block."""
        return self._slot_of[key]

    def weights(self, key: int) -> ExpertWeights:
        """Return an expert's weights where they lie."""
        return self._views[self._format_of_key[key]][self._slot_of[key]]

    def stacked(self, kind: int) -> ExpertWeights:
        """Return all slots of one format as weights with a leading [slots]."""
        return self._stacked[kind]

    def format_index(self, key: int) -> int:
        """Return which format a key has."""
        return self._format_of_key[key]

    def keys(self) -> set[int]:
        """Return who has a slot."""
        return set(self._slot_of)

    @property
    def num_free(self) -> list[int]:
        """Free slots by format."""
        return [len(free) for free in self._free]

    def close(self) -> None:
        """Give the memory back; harmless twice."""
        if self._blocks:
            self._device.give_back(self.num_bytes)
        self._blocks, self._views, self._stacked = [], [], []
