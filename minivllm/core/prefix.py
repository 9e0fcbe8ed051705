"""Block hashes and prefix indexes: hash table and radix tree."""

# Generated from nbs/core/prefix.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.encoder_cache import block_keys
from minivllm.core.request import Request


def hash_block(parent: bytes, token_ids: list[int], keys: Sequence[str] = ()) -> bytes:
    """The hash of a full block: 32 bytes that depend on the whole prefix, and on nothing else.

    SHA-256 and not Python's `hash`: hashes are the same in every process, whatever PYTHONHASHSEED is,
    and no one can craft a prompt that collides with another user's. keys: of the media in the block (`block_keys`).
    """
    return sha256(parent + array("q", token_ids).tobytes() + _as_bytes(keys)).digest()


def _as_bytes(keys: Sequence[str]) -> bytes:
    return repr(keys).encode() if keys else b""


def root_hash(request: Request) -> bytes:
    """The parent hash of a request's first block. It covers what else must be equal for blocks to be shared."""
    extra = (request.lora_name, request.cache_salt, *request.extra_keys)
    return sha256(repr(extra).encode()).digest() if any(key is not None for key in extra) else b"minivllm"


def extend_block_hashes(request: Request, block_size: int) -> list[bytes]:
    """Hash the blocks that have filled up since the last call. Returns `request.block_hashes`."""
    hashes, tokens = request.block_hashes, request.all_token_ids
    full = request.num_tokens // block_size
    if len(hashes) < full:
        parent = hashes[-1] if hashes else root_hash(request)
        media, first = request.mm_features, len(hashes) * block_size
        numbers = array("q", tokens[first : full * block_size])
        content, size = numbers.tobytes(), numbers.itemsize * block_size
        for at in range(0, len(content), size):
            block = parent + content[at : at + size]
            if media:
                start = first + at // numbers.itemsize
                block += _as_bytes(block_keys(media, start, start + block_size))
            parent = sha256(block).digest()
            hashes.append(parent)
    return hashes


_NONE: list[None] = [None]


class HashIndex:
    """A dictionary from block hash to the blocks that hold this content."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[bytes, list[KVCacheBlock]] = {}

    def walk(self, request: Request, num_blocks: int) -> Iterator[KVCacheBlock | None]:
        """The blocks that hold the request's first `num_blocks` full blocks, None for those that are not cached."""
        get = self._blocks.get
        return (get(name, _NONE)[0] for name in extend_block_hashes(request, self.block_size)[:num_blocks])

    def insert(self, request: Request, i: int, block: KVCacheBlock) -> None:
        """Make `block` findable as block `i` of the request's text. Of several equal ones the first inserted is found."""
        self._blocks.setdefault(request.block_hashes[i], []).append(block)

    def remove(self, block: KVCacheBlock) -> None:
        """Forget a block that was inserted."""
        assert block.block_hash is not None
        twins = self._blocks[block.block_hash]
        twins.remove(block)
        if not twins:
            del self._blocks[block.block_hash]

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))


class _Node:
    __slots__ = ("parent", "edge", "children", "blocks")

    def __init__(self, parent: _Node | None, edge: tuple[int | str, ...]) -> None:
        self.parent, self.edge = parent, edge
        self.children: dict[tuple[int | str, ...], _Node] = {}
        self.blocks: list[KVCacheBlock] = []


class RadixIndex:
    """A tree of prefixes; each edge is one block of tokens. One tree per set of extra keys. Methods as those of `HashIndex`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[bytes, _Node] = {}
        self._nodes: dict[int, _Node] = {}

    def _edge(self, request: Request, i: int) -> tuple[int | str, ...]:
        start, end = i * self.block_size, (i + 1) * self.block_size
        keys = block_keys(request.mm_features, start, end) if request.mm_features else ()
        return (*request.all_token_ids[start:end], *keys)

    def walk(self, request: Request, num_blocks: int) -> Iterator[KVCacheBlock | None]:
        extend_block_hashes(request, self.block_size)
        node = self._roots.get(root_hash(request))
        for i in range(num_blocks):
            node = node and node.children.get(self._edge(request, i))
            yield node.blocks[0] if node and node.blocks else None

    def insert(self, request: Request, i: int, block: KVCacheBlock) -> None:
        node = self._roots.setdefault(root_hash(request), _Node(None, ()))
        for j in range(i + 1):
            edge = self._edge(request, j)
            node = node.children.setdefault(edge, _Node(node, edge))
        node.blocks.append(block)
        self._nodes[block.block_id] = node

    def remove(self, block: KVCacheBlock) -> None:
        node = self._nodes.pop(block.block_id)
        node.blocks.remove(block)
        while node.parent is not None and not node.blocks and not node.children:
            del node.parent.children[node.edge]
            node = node.parent

    def clear(self) -> None:
        self._roots.clear()
        self._nodes.clear()

    def __len__(self) -> int:
        return len(self._nodes)


# by the names that `prefix_cache_index` has for them
PREFIX_INDEXES: dict[str, type[HashIndex | RadixIndex]] = {"hash": HashIndex, "radix": RadixIndex}
