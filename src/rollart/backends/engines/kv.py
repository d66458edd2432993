"""The KV cache of an engine: one arena of fixed size, in which every session owns one contiguous block.

Contiguous, because on a CPU gathering scattered pages would double the memory traffic of a decoding step. Blocks come
in few sizes, and blocks of one size are adjacent in groups, so that one batched matrix product reads many sessions.

Invariants: blocks never overlap; free and used parts add up to the arena; freed parts merge with their free neighbours,
so an arena without blocks has room for the largest one.
"""

from bisect import bisect_left, insort
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch

from rollart.backends.engines.checkpoint_config import ModelShape
from rollart.backends.native.kernels import Heads, native_kernels
from rollart.types.errors import InvariantBroken

UNIT_TOKENS = 32
"""Size of the smallest block; all sizes are multiples of it."""
GROUP_ORDER = 4
"""A group has room for up to `2 ** GROUP_ORDER` blocks…"""
SMALL_SHARE_ORDER = 3
"""…but a group of several blocks takes at most about 1 / `2 ** SMALL_SHARE_ORDER` of the arena."""


Layers = tuple[torch.Tensor, ...]
"""One tensor per layer."""


@dataclass(frozen=True, slots=True)
class Block:
    """Space for the KV of `capacity` tokens, starting at token `offset` of the arena."""

    offset: int
    capacity: int


class _Group:
    """Adjacent blocks of one size; `spare` lists the unused ones, lowest first."""

    __slots__ = ("order", "size", "spare", "start", "used")

    def __init__(self, start: int, order: int, size: int) -> None:
        self.start = start
        self.order = order
        self.size = size
        self.spare = list(range(start, start + (1 << order) - size + 1, size))
        self.used = 0


class BlockAllocator:
    """Allocator of blocks within `units` units.

    The arena is split into parts of powers of two (buddies, so that freed ones merge again). A part is a group: as many
    blocks of one size as fit into it. A group is freed as soon as none of its blocks is in use.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self._orders = units.bit_length()
        self._free: list[list[int]] = [[] for _ in range(self._orders)]
        self._groups: dict[int, dict[int, _Group]] = {}
        """By block size and start."""
        self._used: dict[int, _Group] = {}
        start = 0
        for order in reversed(range(self._orders)):
            if units >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    @property
    def largest(self) -> int:
        """Units of the largest block that an empty arena can provide."""
        return 1 << (self._orders - 1)

    @property
    def used(self) -> int:
        return sum(group.size for group in self._used.values())

    def allocate(self, size: int) -> int | None:
        """Allocate the lowest free block of `size` units in a group of that size; None if there is none."""
        groups = self._groups.get(size, {})
        open_ones = [start for start, group in groups.items() if group.spare]
        group = groups[min(open_ones)] if open_ones else self._open_group(size)
        if group is None:
            return None
        place = group.spare.pop(0)
        group.used += 1
        self._used[place] = group
        return place

    def release(self, place: int) -> None:
        """Free a block."""
        group = self._used.pop(place)
        group.used -= 1
        insort(group.spare, place)
        if not group.used:
            del self._groups[group.size][group.start]
            self._give(group.start, group.order)

    def check(self) -> None:
        """Raise `InvariantBroken` unless free parts and groups cover every unit once and groups match their blocks."""
        covered = [(place, order) for order, places in enumerate(self._free) for place in places]
        groups = [group for of_size in self._groups.values() for group in of_size.values()]
        covered += [(group.start, group.order) for group in groups]
        at = 0
        for place, order in sorted(covered):
            if place != at or place % (1 << order):
                raise InvariantBroken(f"a part of the KV arena starts at unit {place}, but the one before ends at {at}")
            at += 1 << order
        if at != self._units:
            raise InvariantBroken(f"the parts cover {at} units of a KV arena of {self._units}")
        for group in groups:
            used = [place for place, owner in self._used.items() if owner is group]
            blocks = list(range(group.start, group.start + (1 << group.order) - group.size + 1, group.size))
            if sorted(used + group.spare) != blocks or len(used) != group.used or not used:
                raise InvariantBroken(f"of the KV blocks {blocks}, {used} are in use and {group.spare} are spare")

    def _open_group(self, size: int) -> _Group | None:
        """Open a group for blocks of this size, a smaller one if there is no room for a large one."""
        least = (size - 1).bit_length()
        extra = max(0, min(GROUP_ORDER, self._orders - 1 - SMALL_SHARE_ORDER - least))
        for order in range(least + extra, least - 1, -1):
            start = self._take(order)
            if start is not None:
                group = self._groups.setdefault(size, {})[start] = _Group(start, order, size)
                return group
        return None

    def _take(self, order: int) -> int | None:
        """Take the lowest free part of `2 ** order` units, split from the smallest one that is large enough."""
        for larger in range(order, self._orders):
            if self._free[larger]:
                place = self._free[larger].pop(0)
                for half in reversed(range(order, larger)):
                    insort(self._free[half], place + (1 << half))
                return place
        return None

    def _give(self, place: int, order: int) -> None:
        """Free a part and merge it with its free neighbours."""
        while order + 1 < self._orders:
            buddy = place ^ (1 << order)
            at = bisect_left(self._free[order], buddy)
            if at == len(self._free[order]) or self._free[order][at] != buddy:
                break
            del self._free[order][at]
            place = min(place, buddy)
            order += 1
        insort(self._free[order], place)


def block_units(units: int) -> int:
    """Block size for this many units: the next power of two, or three quarters of it.

    >>> [block_units(units) for units in range(1, 14)]
    [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    """
    size = 1 << (units - 1).bit_length()
    return size // 4 * 3 if size >= 4 and units <= size // 4 * 3 else size


class KvArena:
    """Keys and values of all layers. Sessions track how many positions of their block are filled.

    Keys are stored transposed, (kv head, dimension, position), values as (kv head, position, dimension), so both
    products of a decoding step read memory in order. Every number in the arena is finite, even where none was written.
    """

    def __init__(self, shape: ModelShape, *, budget_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._width = shape.kv_heads * shape.head_dim
        self.token_bytes = 2 * shape.layers * self._width * dtype.itemsize
        units = max(1, budget_bytes // (self.token_bytes * UNIT_TOKENS))
        self.tokens = units * UNIT_TOKENS
        self.allocator = BlockAllocator(units)
        self.keys = _zeros((shape.layers, self.tokens * self._width), dtype, device)
        self.values = _zeros((shape.layers, self.tokens * self._width), dtype, device)
        self.key_layers: Layers = self.keys.unbind(0)
        """Flat views."""
        self.value_layers: Layers = self.values.view(shape.layers, -1, shape.head_dim).unbind(0)
        """Views with one row per head and position."""
        self._kernels = native_kernels() if device.type == "cpu" and dtype is torch.float32 else None
        self._heads = byref(Heads(shape.kv_heads, shape.group, shape.head_dim))

    @property
    def largest_tokens(self) -> int:
        """Longest context that fits into the arena."""
        return self.allocator.largest * UNIT_TOKENS

    @property
    def used_tokens(self) -> int:
        return self.allocator.used * UNIT_TOKENS

    def allocate(self, tokens: int) -> Block | None:
        """Allocate a block for at least this many tokens; None if there is no room."""
        units = block_units(-(-tokens // UNIT_TOKENS))
        place = self.allocator.allocate(units)
        return None if place is None else Block(place * UNIT_TOKENS, units * UNIT_TOKENS)

    def release(self, block: Block) -> None:
        self.allocator.release(block.offset // UNIT_TOKENS)

    def copy(self, source: Block, target: Block, start: int, stop: int) -> None:
        """Copy these positions from one block to another."""
        if start >= stop:
            return
        if self._kernels is None:
            self._keys_of(target)[..., start:stop].copy_(self._keys_of(source)[..., start:stop])
            self._values_of(target)[:, :, start:stop].copy_(self._values_of(source)[:, :, start:stop])
            return
        layers, layer = self.keys.shape
        blocks = source.offset, source.capacity, target.offset, target.capacity
        memory = self.keys.data_ptr(), self.values.data_ptr()
        self._kernels.copy_block(self._heads, layers, layer, *blocks, start, stop, *memory)

    def run(self, offset: int, capacity: int, size: int, length: int) -> tuple[Layers, Layers]:
        """The first `length` positions of `size` adjacent blocks, by layer.

        Keys are (size * kv heads, dimension, length), values (size * kv heads, length, dimension).
        """
        start, stop = offset * self._width, (offset + size * capacity) * self._width
        matrices = size * self.shape.kv_heads
        keys = self.keys[:, start:stop].view(-1, matrices, self.shape.head_dim, capacity)[..., :length]
        values = self.values[:, start:stop].view(-1, matrices, capacity, self.shape.head_dim)[:, :, :length]
        return keys.unbind(0), values.unbind(0)

    def _keys_of(self, block: Block) -> torch.Tensor:
        start, stop = block.offset * self._width, (block.offset + block.capacity) * self._width
        return self.keys[:, start:stop].view(-1, self.shape.kv_heads, self.shape.head_dim, block.capacity)

    def _values_of(self, block: Block) -> torch.Tensor:
        start, stop = block.offset * self._width, (block.offset + block.capacity) * self._width
        return self.values[:, start:stop].view(-1, self.shape.kv_heads, block.capacity, self.shape.head_dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only once written to (on a CPU): a budget is a limit, not a cost."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    carrier = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, dtype=carrier)).view(dtype)
