"""Who holds which KV block: reference counts, copy on write, and full blocks found again by their content."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence

# What an indexed block is found by: the content before it, and its own tokens. Contents are numbered, never reused, so
# that two equal keys are two equal prefixes and no collision can bring back another prompt's block.
ContentKey = tuple[int | tuple[int, int], tuple[int, ...]]


class BlockPool:
    """Fixed-size KV blocks by number. Knows nothing of tensors.

    A block with references is held; one without is free, and keeps its content for a later prefix hit until it is
    taken for something else, least recently freed first.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
        weights_version: of the weights that compute what is in the blocks; content of another version is never found.
    """

    def __init__(self, num_blocks: int, block_size: int, weights_version: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks=} and {block_size=} must be at least 1; give the KV cache more memory")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.weights_version = weights_version
        self.reset()

    def reset(self) -> None:
        """Every block free and empty, whoever held it."""
        self._references = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._key_of_block: dict[int, ContentKey] = {}
        self._block_of_key: dict[ContentKey, int] = {}
        self._content_of_block: dict[int, int] = {}
        self._next_content = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- holding ----------------------------------------------------------------------------------------------------

    def num_new_blocks(self, blocks: Sequence[int], start: int, stop: int) -> int:
        """Blocks that ``extend`` with the same arguments would take."""
        return self.num_blocks_for(stop) - len(blocks) + self._shares_tail(blocks, start)

    def extend(self, blocks: array[int], start: int, stop: int) -> tuple[int, int] | None:
        """Make tokens ``start`` to ``stop - 1`` of a sequence writable, by growing its ``blocks`` in place.

        Returns:
            ``(source, target)`` where the block that ``start`` falls into is shared and was replaced: its content
            must be copied before anything is written.
        """
        copy = None
        if self._shares_tail(blocks, start):
            source, target = blocks[-1], self._take()
            blocks[-1] = target
            self._references[source] -= 1
            copy = (source, target)
        for _ in range(self.num_blocks_for(stop) - len(blocks)):
            blocks.append(self._take())
        return copy

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more, free ones with content included."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks; those no one else holds are free."""
        # Last block first: of a freed prefix the end is reused before the beginning, which more prompts share.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._key_of_block:
                    self._free.move_to_end(block, last=False)

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of the blocks someone holds."""
        return sum(self._references[block] > 0 for block in blocks)

    def num_shared(self, blocks: Iterable[int], others: Container[int] = ()) -> int:
        """How many of the blocks more than one holds, or would if someone held ``others`` besides."""
        return sum(self._references[block] > 1 or block in others for block in blocks)

    def _shares_tail(self, blocks: Sequence[int], start: int) -> bool:
        return start % self.block_size != 0 and self._references[blocks[-1]] > 1

    def _take(self) -> int:
        if not self._free:
            raise RuntimeError(f"no free block among {self.num_blocks}: the caller must ask num_free first")
        block, _ = self._free.popitem(last=False)
        key = self._key_of_block.pop(block, None)
        if key is not None:
            del self._block_of_key[key], self._content_of_block[block]
        self._references[block] = 1
        return block

    # -- finding again ----------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], max_tokens: int, rotation: int = 0) -> list[int]:
        """The longest run of full blocks that hold the keys and values of ``token_ids``' first tokens.

        At most ``max_tokens`` tokens long. The blocks are not held yet: ``share`` them. Keys that were rotated
        otherwise (see `Sequence.rotation`) are another content.
        """
        found, content = [], self._root(rotation)
        for start in range(0, max_tokens - self.block_size + 1, self.block_size):
            block = self._block_of_key.get((content, tuple(token_ids[start : start + self.block_size])))
            if block is None:
                break
            found.append(block)
            content = self._content_of_block[block]
        return found

    def index(self, block: int, parent: int | None, tokens: tuple[int, ...], rotation: int = 0) -> int:
        """Make a full, computed block findable; ``parent`` is the content before it, None at the start.

        Returns:
            the content up to and including it, the parent of the next block.
        """
        key = (self._root(rotation) if parent is None else parent, tokens)
        known = self._block_of_key.get(key)
        if known is not None:
            return self._content_of_block[known]
        content = self._next_content
        self._next_content += 1
        self._key_of_block[block] = key
        self._block_of_key[key] = block
        self._content_of_block[block] = content
        return content

    def content_of(self, block: int) -> int:
        """The content up to and including a block that ``match`` returned."""
        return self._content_of_block[block]

    def _root(self, rotation: int) -> tuple[int, int]:
        # Contents are numbers; the empty prefixes, one for each weights version and rotation, are not.
        return self.weights_version, rotation

    # -- proof ------------------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Prove that every block is either free or held exactly as often as ``holders`` hold it.

        Raises:
            RuntimeError: a block is lost, held twice, free and held, or indexed wrongly.
        """
        counts = Counter(block for blocks in holders for block in blocks)
        for block in range(self.num_blocks):
            held, known, free = counts[block], self._references[block], block in self._free
            if held != known:
                raise RuntimeError(f"KV block {block} is held {held} times and counted {known} times")
            if free == (held > 0):
                raise RuntimeError(f"KV block {block} is held {held} times and {free=}")
        if len(self._free) + len(counts) != self.num_blocks:
            raise RuntimeError(f"{len(self._free)} free and {len(counts)} held KV blocks are not {self.num_blocks}")
        for key, block in self._block_of_key.items():
            if self._key_of_block.get(block) != key or block not in self._content_of_block:
                raise RuntimeError(f"KV block {block} is indexed under {key} and does not know it")
        if len(self._key_of_block) != len(self._block_of_key):
            raise RuntimeError(f"{len(self._key_of_block)} blocks know a key and {len(self._block_of_key)} are indexed")
