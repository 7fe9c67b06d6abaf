"""A naive model of a batch: a list of tokens per sequence, and pools that remember which token is in which slot.

Nothing here uses the closed form of the library; it checks what a forward pass would see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import numba_kv as kv


@dataclass
class NaiveSequence:
    """What is known of one sequence.

    Its tokens, how long it has been, how many tokens its last step appended, and what each window's table must map. Which
    full-group pages its tokens lie in, by names that mean nothing; the floor that a device count may not go below; and while
    it is swapped out, the tokens of its pages by group and logical page.
    """

    tokens: list[int] = field(default_factory=list)
    high_water: int = 0
    last: int = 0
    mapped: dict[int, set[int]] = field(default_factory=dict)
    pages: list[int] = field(default_factory=list)
    fence: int = 0
    saved: dict[tuple[int, int], list[int | None]] = field(default_factory=dict)


class NaiveBatch:
    """Mirrors a Batch by replaying each step on plain lists and dictionaries, and compares after each call."""

    def __init__(self, batch: kv.Batch) -> None:
        self.batch = batch
        self.plan = batch.plan
        self.config = batch.plan.config
        self.sequences: dict[kv.Sequence, NaiveSequence] = {}
        self.pools: list[dict[int, int]] = [{} for _ in self.plan.groups]
        self.next_token = 0
        self.next_page = 0

    def lowest(self, g: int, query: int) -> int:
        """Return the lowest key that a query sees."""
        window = self.plan.groups[g].window
        if window.kind == "sliding":
            return max(0, query - window.tokens + 1)
        return query - query % window.tokens if window.kind == "chunked" else 0

    def admitted(self, sequences: list[kv.Sequence]) -> None:
        """Note new sequences."""
        for sequence in sequences:
            assert sequence.length == 0
            self.sequences[sequence] = NaiveSequence(mapped={g.index: set() for g in self.plan.groups})

    def forked(self, parent: kv.Sequence, children: list[kv.Sequence]) -> None:
        """Note forks: full pages are the parent's, everything else is copied."""
        naive, full = self.sequences[parent], self.plan.groups[0]
        shared = 0 if full.is_empty else len(naive.tokens) // full.page_tokens
        naive.fence = max(naive.fence, shared * full.page_tokens)
        blocks = [t.to_host() for t in self.batch.resources.cache_managers[0].step_buffers.block_tables]
        for child in children:
            assert (child.length, child.pending_tokens) == (parent.length, parent.pending_tokens)
            mapped = {g: set(pages) for g, pages in naive.mapped.items()}
            copy = NaiveSequence(list(naive.tokens), naive.high_water, 0, mapped, naive.pages[:shared], naive.fence)
            self._grow(copy)
            self.sequences[child] = copy
            for group in self.plan.groups:
                pages = range(group.ring) if group.ring else range(shared, len(copy.pages))
                for page in pages:
                    source, target = int(blocks[group.index][parent.row, page]), int(blocks[group.index][child.row, page])
                    self._copy_page(group.index, source, target)

    def _copy_page(self, g: int, source: int, target: int) -> None:
        size, pool = self.plan.groups[g].page_tokens, self.pools[g]
        for offset in range(size):
            token = pool.get(source * size + offset)
            if token is not None:
                pool[target * size + offset] = token

    def swapped_out(self, sequence: kv.Sequence) -> NaiveSequence:
        """Note that a sequence is to be moved to the host; return what is known of it. Call it before."""
        naive = self.sequences[sequence]
        naive.saved = self._contents(sequence)
        return naive

    def swapped_in(self, sequence: kv.Sequence, naive: NaiveSequence) -> None:
        """Note that it is back, with pages of its own."""
        assert sequence.length == len(naive.tokens)
        self._fill(sequence, naive.saved)
        naive.saved.clear()
        naive.pages.clear()
        naive.last = naive.fence = 0
        self._grow(naive)
        self.sequences[sequence] = naive

    def reordering(self) -> dict[kv.Sequence, dict[tuple[int, int], list[int | None]]]:
        """Return what the pages of every sequence hold, before they are reordered."""
        return {sequence: self._contents(sequence) for sequence in self.sequences}

    def reordered(
        self,
        parents: dict[kv.Sequence, kv.Sequence],
        contents: dict[kv.Sequence, dict[tuple[int, int], list[int | None]]],
    ) -> None:
        """Note that every sequence has the tokens of its parent; its own pages go to one child, the others share full ones."""
        before, full, heirs = dict(self.sequences), self.plan.groups[0], {}
        for sequence, parent in sorted(parents.items(), key=lambda pair: (pair[0] is not pair[1], pair[0].row)):
            heirs.setdefault(parent, sequence)
        for sequence, parent in parents.items():
            naive = before[parent]
            shared = 0 if full.is_empty else len(naive.tokens) // full.page_tokens
            several = list(parents.values()).count(parent) > 1
            fence = max(naive.fence, shared * full.page_tokens) if several else naive.fence
            is_heir = heirs[parent] is sequence
            pages = list(naive.pages) if is_heir else naive.pages[:shared]
            mapped = {g: set(pages) for g, pages in naive.mapped.items()}
            last = naive.last if is_heir else 0
            self.sequences[sequence] = NaiveSequence(list(naive.tokens), naive.high_water, last, mapped, pages, fence)
            self._grow(self.sequences[sequence])
            assert sequence.length == len(naive.tokens)
        for sequence, parent in parents.items():
            self._fill(sequence, contents[parent])

    def _contents(self, sequence: kv.Sequence) -> dict[tuple[int, int], list[int | None]]:
        """Return the tokens in a sequence's pages by group and logical page, as far as a ring can hold them."""
        found = {}
        blocks = [t.to_host() for t in self.batch.resources.cache_managers[0].step_buffers.block_tables]
        for group in self.plan.groups:
            size, end = group.page_tokens, -(-len(self.sequences[sequence].tokens) // group.page_tokens)
            for page in range(0 if group.is_empty else max(0, end - (group.ring or end)), 0 if group.is_empty else end):
                first = int(blocks[group.index][sequence.row, page]) * size
                found[group.index, page] = [self.pools[group.index].get(first + i) for i in range(size)]
        return found

    def _fill(self, sequence: kv.Sequence, contents: dict[tuple[int, int], list[int | None]]) -> None:
        """Put tokens into a sequence's pages."""
        blocks = [t.to_host() for t in self.batch.resources.cache_managers[0].step_buffers.block_tables]
        for (g, page), tokens in contents.items():
            first = int(blocks[g][sequence.row, page]) * self.plan.groups[g].page_tokens
            self.pools[g].update({first + i: token for i, token in enumerate(tokens) if token is not None})

    def floor(self, sequence: kv.Sequence) -> int:
        """Return the tokens of a sequence that lie in pages which others hold too."""
        pages = self.sequences[sequence].pages
        others = {page for other, naive in self.sequences.items() if other is not sequence for page in naive.pages}
        held = [i for i, page in enumerate(pages) if page in others]
        assert held == list(range(len(held)))
        return len(held) * self.plan.groups[0].page_tokens

    def pages_saved(self) -> int:
        """Return how many more pages the sequences would hold if they shared none."""
        names = [page for naive in self.sequences.values() for page in naive.pages]
        return len(names) - len(set(names))

    def retired(self, sequence: kv.Sequence) -> None:
        """Forget a sequence."""
        del self.sequences[sequence]
        assert sequence.state == "retired"

    def stepped(
        self,
        view: kv.StepView,
        room: dict[kv.Sequence, int],
        counts: dict[kv.Sequence, int] | None = None,
        back: dict[kv.Sequence, int] | None = None,
    ) -> None:
        """Check a step's tensors, write its tokens, and check that every key of a short step is where the tables say.

        `room` is the layout, `counts` what each sequence appended of it, `back` what was taken back first.
        """
        counts = room if counts is None else counts
        for sequence, taken in (back or {}).items():
            self.rewound(sequence, taken)
        contexts, lengths = view.context_lens.to_host(), view.seq_lens.to_host()
        starts, positions = view.cu_seqlens_q.to_host(), view.positions.to_host()
        slots = [t.to_host() for t in view.slot_mapping]
        tables = [t.to_host() for t in view.page_tables]
        blocks = [t.to_host() for t in view.block_tables]
        assert view.num_tokens == sum(room.values()) == starts[-1]
        assert view.max_query_tokens == max(room.values())
        assert view.num_rows == max(s.row for s in self.sequences) + 1
        self._check_carry(view, room, counts)
        written: list[set[int]] = [set() for _ in self.plan.groups]
        for sequence, naive in self.sequences.items():
            row, count, before = sequence.row, counts.get(sequence, 0), len(naive.tokens)
            first = int(starts[row])
            surplus = slice(first + count, first + room.get(sequence, 0))
            assert starts[row + 1] == surplus.stop
            assert not positions[surplus].any()
            assert contexts[row] == before
            assert lengths[row] == before + count
            assert positions[first : first + count].tolist() == list(range(before, before + count))
            assert not count or before >= self.floor(sequence)
            fresh = self._append(naive, count)
            for group in self.plan.groups:
                g, page = group.index, group.page_tokens
                assert (slots[g][surplus] == -1).all()
                if group.is_empty:
                    assert (slots[g] == -1).all()
                    continue
                self._remap(naive, g, before, count)
                for i, token in enumerate(fresh):
                    logical, slot = (before + i) // page, int(slots[g][first + i])
                    mapped = group.window.is_full or logical in naive.mapped[g]
                    assert mapped == (slot >= 0)
                    if mapped:
                        assert slot == blocks[g][row, logical] * page + (before + i) % page
                        assert slot not in written[g]
                        written[g].add(slot)
                        self.pools[g][slot] = token
                if 0 < count <= self.config.max_step_tokens:
                    self._check_keys(naive, g, row, before, count, tables[g], blocks[g])
        longest = max(len(n.tokens) for n in self.sequences.values())
        assert view.kv_len_upper >= longest
        assert view.kv_len_upper == longest or not view.kv_len_is_exact

    def replayed(self, tokens: int, steps: int) -> None:
        """Note steps of `tokens` tokens a sequence that ran without the host, and check what the last of them left.

        Where the tokens of earlier steps went is read from the block tables: they were complete before.
        """
        buffers = self.batch.resources.cache_managers[0].step_buffers
        blocks, tables = ([t.to_host() for t in kind] for kind in (buffers.block_tables, buffers.page_tables))
        slots = [t.to_host() for t in buffers.slot_mapping]
        lengths, contexts, starts = (t.to_host() for t in (buffers.seq_lens, buffers.context_lens, buffers.cu_seqlens_q))
        positions = buffers.positions.to_host()
        assert np.array_equal(np.diff(starts), [tokens * (r in self._by_row()) for r in range(len(lengths))])
        for row, naive in self._by_row().items():
            for _ in range(steps):
                before, fresh = len(naive.tokens), self._append(naive, tokens)
                for group in self.plan.groups:
                    g, page = group.index, group.page_tokens
                    self._remap(naive, g, before, tokens)
                    for position, token in enumerate(fresh, before):
                        if not group.is_empty:
                            self.pools[g][int(blocks[g][row, position // page]) * page + position % page] = token
            assert (contexts[row], lengths[row]) == (before, before + tokens)
            of_row = slice(starts[row], starts[row + 1])
            assert positions[of_row].tolist() == list(range(before, before + tokens))
            for group in self.plan.groups:
                if group.is_empty:
                    assert (slots[group.index][of_row] == -1).all()
                    continue
                assert [self.pools[group.index].get(int(slot)) for slot in slots[group.index][of_row]] == fresh
                self._check_keys(naive, group.index, row, before, tokens, tables[group.index], blocks[group.index])

    def rewound(self, sequence: kv.Sequence, count: int) -> None:
        """Take tokens back. No later step can take back what an earlier one appended."""
        for other in self.sequences.values():
            other.last = 0
        naive = self.sequences[sequence]
        target, floor = len(naive.tokens) - count, self.floor(sequence)
        assert not count or not target or target >= floor
        del naive.tokens[target:]
        if count and target < naive.fence:
            naive.fence = floor if target else 0
        if target == 0:
            naive.high_water = 0
        del naive.pages[-(-target // self.plan.groups[0].page_tokens) :]
        for group in self.plan.groups:
            end = -(-target // group.page_tokens)
            naive.mapped[group.index] = {p for p in naive.mapped[group.index] if p < end}

    def check_tables(self) -> None:
        """Compare both device tables with the model, and run the audit."""
        report = self.batch.audit()
        assert report.rows == len(self.sequences)
        assert report.tokens == sum(len(n.tokens) for n in self.sequences.values())
        buffers = self.batch.resources.cache_managers[0].step_buffers
        by_row = self._by_row()
        for group in self.plan.groups:
            g, page = group.index, group.page_tokens
            table, blocks = buffers.page_tables[g].to_host(), buffers.block_tables[g].to_host()
            assert np.array_equal(table[:, 1], np.where(table[:, 0] < 0, -1, table[:, 0] + group.num_pages))
            assert table[:, 0].max(initial=-1) < group.usable_pages
            live_pages: list[int] = []
            places: dict[int, int] = {}  # of the pages that tokens lie in, by name
            for row in range(self.config.max_batch_size):
                naive = by_row.get(row)
                mapped = np.flatnonzero(table[row, 0] >= 0).tolist()
                if naive is None or group.is_empty:
                    assert not mapped
                    assert (blocks[row] == group.null_page).all()
                    continue
                if group.window.is_full:
                    assert mapped == list(range(len(mapped)))
                    assert len(mapped) >= -(-len(naive.tokens) // page)
                    assert np.array_equal(blocks[row, : len(mapped)], table[row, 0, : len(mapped)])
                    assert (blocks[row, len(mapped) :] == group.null_page).all()
                    named = len(naive.pages)
                    assert named == -(-len(naive.tokens) // page)
                    for name, place in zip(naive.pages, blocks[row, :named].tolist(), strict=True):
                        assert places.setdefault(name, place) == place
                    live_pages += blocks[row, named : len(mapped)].tolist()
                else:
                    assert mapped == sorted(naive.mapped[g])
                    assert len(mapped) <= group.ring
                    assert np.array_equal(table[row, 0, mapped], blocks[row, mapped])
                    ring = blocks[row, : group.ring].tolist()
                    assert blocks[row].tolist() == [ring[j % group.ring] for j in range(group.table_width)]
                    live_pages += ring
            live_pages += places.values()
            assert len(set(live_pages)) == len(live_pages)
            shared = len([n for n in places if sum(n in naive.pages for naive in self.sequences.values()) > 1])
            assert report.pools[g].shared == shared

    def _by_row(self) -> dict[int, NaiveSequence]:
        return {s.row: n for s, n in self.sequences.items()}

    def _append(self, naive: NaiveSequence, count: int) -> list[int]:
        """Append new tokens to a sequence and return them."""
        fresh = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        naive.tokens += fresh
        naive.high_water = max(naive.high_water, len(naive.tokens))
        naive.last = count
        self._grow(naive)
        return fresh

    def _grow(self, naive: NaiveSequence) -> None:
        """Name the pages that a sequence's tokens have reached."""
        full = self.plan.groups[0]
        while not full.is_empty and len(naive.pages) * full.page_tokens < len(naive.tokens):
            naive.pages.append(self.next_page)
            self.next_page += 1

    def _remap(self, naive: NaiveSequence, g: int, before: int, count: int) -> None:
        """Apply what a step does to the mapped pages of a window: newest R pages, none below the first query's window."""
        group = self.plan.groups[g]
        if group.window.is_full or not count:
            return
        end = -(-(before + count) // group.page_tokens)
        wanted = set(range(self.lowest(g, before) // group.page_tokens, end))
        naive.mapped[g] = set(sorted(wanted)[-group.ring :])
        if count <= self.config.max_step_tokens:
            assert naive.mapped[g] == wanted, "a short step must not lose pages"

    def _check_keys(self, naive, g, row, before, count, table, blocks) -> None:
        """Check that every key which the step's queries see is found through both tables."""
        group = self.plan.groups[g]
        for position in range(self.lowest(g, before), before + count):
            logical, offset = divmod(position, group.page_tokens)
            assert table[row, 0, logical] == blocks[row, logical] >= 0
            slot = int(blocks[row, logical]) * group.page_tokens + offset
            assert self.pools[g].get(slot) == naive.tokens[position]

    def _check_carry(self, view: kv.StepView, room: dict[kv.Sequence, int], counts: dict[kv.Sequence, int]) -> None:
        """Check that carry slots hold, before the step writes, the window's tokens before it."""
        limit = self.config.max_step_tokens
        for group, carry in zip(self.plan.groups, view.carry_slots, strict=True):
            if group.window.is_full or not any(n > limit for n in room.values()):
                assert carry is None
                continue
            found, width = carry.to_host(), group.window.tokens - 1
            for row in range(self.config.max_batch_size):
                sequence = next((s for s in self.sequences if s.row == row), None)
                expected = [-1] * width
                if sequence is not None and counts.get(sequence, 0) > limit:
                    tokens = self.sequences[sequence].tokens
                    for position in range(self.lowest(group.index, len(tokens)), len(tokens)):
                        expected[position - len(tokens) + width] = tokens[position]
                pool = self.pools[group.index]
                assert [-1 if slot < 0 else pool[int(slot)] for slot in found[row]] == expected
