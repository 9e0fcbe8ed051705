"""A model runner that remembers what stands in every slot of every block, and complains about a read of anything else.

A slot holds the number of a prefix: what a request's tokens and media were up to and including that position, with all that
keeps requests apart (salt, adapter). Two slots are equal just when keys and values there are. A block of a group
with states has one slot that counts: the prefix that the state was made of.
"""

from __future__ import annotations

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler

GARBAGE = -1


class Row:
    """A request as the runner holds it."""

    def __init__(self, tokens: list[int], root: int, computed: int, tables: list[list[int]], features=()) -> None:
        self.tokens, self.root, self.computed, self.tables, self.features = tokens, root, computed, tables, features
        # what stands at a place instead of a token
        self.media = {
            f.mm_position.offset + i: (f.identifier, i) for f in features for i in range(f.mm_position.length)
        }


class Memory:
    """Executes decisions on slots that hold prefixes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.size = scheduler, scheduler.cache.block_size
        self.specs = [group.spec for group in scheduler.kv_cache_manager.groups]
        self.numbers: dict[tuple[int, object], int] = {}
        self.device: dict[tuple[int, int], int] = {}
        self.cpu: dict[tuple[int, int], int] = {}
        self.rows: dict[str, Row] = {}
        self.encoded: set[str] = set()
        self.checked = 0

    def number(self, *key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers) + 1)  # type: ignore[arg-type]

    def root(self, request: Request) -> int:
        return self.number("root", request.cache_salt, request.lora_name)

    def prefixes(self, row: Row, end: int) -> list[int]:
        found, at = [], row.root
        for place, token in enumerate(row.tokens[:end]):
            at = self.number(at, row.media.get(place, token))
            found.append(at)
        return found

    def execute(self, output: SchedulerOutput, fails: bool = False) -> ModelRunnerOutput:
        """Runs one decision as a device would: rows, copies, all writes, then all reads."""
        requests = self.scheduler.requests
        for name in (*output.preempted, *output.finished):
            self.rows.pop(name, None)
        for new in output.new_requests:
            assert new.request_id not in self.rows, "a row was sent twice"
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            root = self.root(requests[new.request_id])
            tables = [list(t) for t in new.block_ids]
            self.rows[new.request_id] = Row(tokens, root, new.num_computed_tokens, tables, new.mm_features)
        self._encode(output)
        for name, new_ids in output.new_block_ids.items():
            for table, ids in zip(self.rows[name].tables, new_ids, strict=True):
                table.extend(ids)
        assert len({to for _, to in output.swap_out}) == len(output.swap_out), "two copies into one block"
        self._copy(self.device, self.cpu, output.swap_out)
        self._copy(self.cpu, self.device, output.swap_in)
        for name, n in output.num_scheduled_tokens.items():
            row = self.rows[name]
            known = [*row.tokens, *output.scheduled_spec_decode_tokens.get(name, ())]
            prefixes = self.prefixes(Row(known, row.root, 0, [], row.features), row.computed + n)
            assert len(prefixes) == row.computed + n, "more tokens are scheduled than are known"
            for spec, table in zip(self.specs, row.tables, strict=True):
                if spec.rules.is_state:
                    self._advance(name, table, prefixes, row.computed, fails, dict(spec.options).get("ring", 1))
                    continue
                for place in range(row.computed, row.computed + n):
                    self.device[table[place // self.size], place % self.size] = GARBAGE if fails else prefixes[place]
        result = ModelRunnerOutput()
        for name, n in output.num_scheduled_tokens.items() if not fails else ():
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            self._read(name, n, drafts)
            row = self.rows[name]
            row.computed += n
            if row.computed == len(row.tokens) + len(drafts):
                new = self._verify(row, drafts)
                row.computed -= len(drafts) + 1 - len(new)
                result.sampled_token_ids[name] = new
                if guesses := self.guess(row):
                    result.draft_token_ids[name] = guesses
        return result

    def _advance(self, name: str, table: list[int], prefixes: list[int], computed: int, fails: bool, ring: int) -> None:
        """Read the state after `computed` tokens, and write those at the end of each block and of the step.

        ring: of a table of that many blocks, the state of each token goes to the next, if a step has no more tokens.
        """

        def block(place: int) -> int:
            return table[place % ring if ring > 1 else min(place // self.size, len(table) - 1)]

        if computed and not fails:
            held = self.device.get((block(computed - 1), self.size), GARBAGE)
            assert held == prefixes[computed - 1], f"{name} reads a wrong state in block {block(computed - 1)}"
            self.checked += 1
        for place in range(computed, len(prefixes)):
            kept = (
                computed and len(prefixes) - computed <= ring if ring > 1 else block(place) not in (0, block(place + 1))
            )
            if kept or place == len(prefixes) - 1:
                assert block(place), f"{name} writes its state to the null block"
                self.device[block(place), self.size] = GARBAGE if fails else prefixes[place]

    def _verify(self, row: Row, drafts: list[int]) -> list[int]:
        """The drafts that are right, and one token more."""
        new: list[int] = []
        for draft in [*drafts, None]:
            new.append(sum(row.tokens) % 3)
            row.tokens.append(new[-1])
            if draft != new[-1]:
                break
        return new

    def guess(self, row: Row) -> list[int]:
        """Draft tokens for the next step; none, unless a test says otherwise."""
        return []

    def _encode(self, output: SchedulerOutput) -> None:
        """Drops and adds encoder outputs; what the step's tokens need is then there, and no range is split that must not be."""
        assert self.encoded >= set(output.free_encoder_mm_hashes), "an output is dropped that is not there"
        self.encoded -= set(output.free_encoder_mm_hashes)
        new = {f.identifier: f.mm_position.num_embeds for f in output.scheduled_encoder_inputs}
        assert not self.encoded & set(new), "an output that is there is computed again"
        size, most = self.scheduler.config.encoder_limits
        assert sum(new.values()) <= most
        self.encoded |= set(new)
        assert self.encoded == set(self.scheduler.encoder_cache.sizes)
        assert sum(self.scheduler.encoder_cache.sizes.values()) <= size
        for name, n in output.num_scheduled_tokens.items():
            row = self.rows[name]
            for f in row.features:
                place = f.mm_position
                if place.offset < row.computed + n and place.end > row.computed:
                    assert f.identifier in self.encoded, f"{name} needs {f.identifier}, which is not encoded"
                    assert not f.whole or place.end <= row.computed + n, "a range was split"

    def _copy(self, source, target, pairs) -> None:
        for one, other in pairs:
            for place in range(self.size + 1):
                target[other, place] = source.get((one, place), GARBAGE)

    def _read(self, name: str, n: int, drafts: list[int]) -> None:
        """Every key that a token of this step attends to is the key of the request's own prefix."""
        known = self.rows[name]
        row = Row([*known.tokens, *drafts], known.root, known.computed, known.tables, known.features)
        prefixes = self.prefixes(row, row.computed + n)
        for spec, table in zip(self.specs, row.tables, strict=True):
            for query in () if spec.rules.is_state else range(row.computed, row.computed + n):
                for key in range(query + 1):
                    if spec.rules.visible(spec, query, key):
                        held = self.device.get((table[key // self.size], key % self.size), GARBAGE)
                        assert held == prefixes[key], (
                            f"{name} at {query} reads position {key} in block {table[key // self.size]}: wrong content"
                        )
                        self.checked += 1

    def check_hashes(self, hashes: dict[bytes, list[int]]) -> None:
        """Every block with a hash holds what the hash says, once the decided steps have run."""
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                want, places = hashes[block.block_hash], range(self.size)
                if self.specs[block.group].rules.is_state:
                    want, places = want[-1:], range(self.size, self.size + 1)
                held = [self.device.get((block.block_id, place), GARBAGE) for place in places]
                assert held == want, f"{block} does not hold what its hash says"
