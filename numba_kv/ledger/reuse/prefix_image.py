"""PrefixImage: what a store keeps, as plain arrays that a file can hold, and back as cargo. Moves no byte.

Runs come after those that they hang behind. Pages and snapshots are rows, numbered from 0 for each line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError, NumbaKVError, WeightError
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.cargo import Cargo, Moved, TailCargo, content_of, settled, spans_of, stow
from numba_kv.ledger.reuse.content import MediaPart, TokenContent
from numba_kv.ledger.reuse.groups import SNAPSHOTS, ReuseGroups
from numba_kv.ledger.reuse.host_picture import HOST
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.run import Run, Tail
from numba_kv.ledger.reuse.store import KeptStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PrefixImage", "gather"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrefixImage:
    """Kept prefixes.

    Attributes
    ----------
    identities : tuple of ContextIdentity
        Whose they are.
    runs : int32 [R, 4]
        Identity, run that it hangs behind (-1: none), how many blocks of that one, blocks.
    tokens, lines : int32 [N, P], int32 [lines, N]
        Tokens of the blocks, and the row of each one's page in each line (-1: none), run after run.
    media : dict of int to tuple
        Parts of items, of blocks that have any.
    tails : int32 [T, 5]
        Identity, run (-1: it begins a sequence), blocks of that one, tokens, row of the snapshot (-1: none).
    tail_lines : int32 [lines, T]
        Rows of their pages.
    keys : tuple of bytes
        Their tokens, as `Tail` has them.
    """

    identities: tuple[ContextIdentity, ...]
    runs: NDArray[np.int32]
    tokens: NDArray[np.int32]
    lines: NDArray[np.int32]
    media: dict[int, tuple[MediaPart, ...]] = field(default_factory=dict)
    tails: NDArray[np.int32]
    tail_lines: NDArray[np.int32]
    keys: tuple[bytes, ...] = ()

    def cargoes(self) -> Iterator[Cargo]:
        """Yield everything, what stands before something else first.

        Raises
        ------
        WeightError
            If the arrays contradict themselves.
        """
        starts = np.concatenate([[0], np.cumsum(self.runs[:, 3])]).tolist()
        contents: list[TokenContent] = []
        firsts: list[int] = []
        for i, (owner, parent, at, _) in enumerate(self.runs.tolist()):
            low, high = starts[i], starts[i + 1]
            before = self._before(contents, parent, at)
            firsts.append(before.num_blocks)
            content = self._content(before, low, high)
            contents.append(content)
            yield Cargo(
                identity=self.identities[owner], content=content, start=before.num_blocks, lines=self.lines[:, low:high]
            )
        none = np.full((len(self.lines), 0), -1, np.int32)
        for i, (owner, run, offset, tokens, snapshot) in enumerate(self.tails.tolist()):
            blocks = firsts[run] + offset if run >= 0 else 0
            content = self._before(contents, run, offset)
            tail = TailCargo(self.keys[i], tokens, self.tail_lines[:, i], snapshot)
            yield Cargo(identity=self.identities[owner], content=content, start=blocks, lines=none, tail=tail)

    def _before(self, contents: list[TokenContent], run: int, blocks: int) -> TokenContent:
        """Return the tokens up to `blocks` blocks of a run."""
        if run < 0:
            return TokenContent(self.tokens.shape[1])
        whole, page = contents[run], self.tokens.shape[1]
        own = int(self.runs[run, 3])
        stop = (whole.num_blocks - own + blocks) * page
        parts = whole.media_blocks(0, stop // page)
        return TokenContent(page, whole.tokens[:stop], spans_of(sorted(parts.items()), page))

    def _content(self, before: TokenContent, low: int, high: int) -> TokenContent:
        page = self.tokens.shape[1]
        first = before.num_blocks
        media = list(before.media_blocks(0, first).items())
        media += [(first + row - low, self.media[row]) for row in range(low, high) if row in self.media]
        tokens = np.concatenate([before.tokens, self.tokens[low:high].reshape(-1)])
        return TokenContent(page, tokens, spans_of(sorted(media), page))

    def check(self, groups: ReuseGroups, rows: dict[int, int]) -> None:
        """Check that the arrays fit each other and a model; `rows` are the pages of each line and the snapshots there are.

        Raises
        ------
        WeightError
            Naming what does not.
        """
        lines = 1 + len(groups.windows)
        runs, tails = self.runs, self.tails
        order = np.arange(len(runs))
        sizes = np.concatenate([runs[:, 3], [0]])
        fits = {
            "tokens": self.tokens.shape == (int(runs[:, 3].sum()), groups.page_tokens) and (self.tokens >= 0).all(),
            "lines": self.lines.shape == (lines, len(self.tokens)) and self.tail_lines.shape == (lines, len(tails)),
            "runs": (runs[:, 3] > 0).all() and (runs[:, 1] < order).all() and (runs[:, 1] >= -1).all(),
            "owners": all(((a[:, 0] >= 0) & (a[:, 0] < len(self.identities))).all() for a in (runs, tails)),
            "tails": ((tails[:, 1] >= -1) & (tails[:, 1] < len(runs)) & (tails[:, 3] >= 0)).all()
            and (tails[:, 3] < groups.page_tokens).all()
            and len(self.keys) == len(tails),
        }
        wrong = [name for name, is_right in fits.items() if not is_right]
        places = [(runs[:, 1], runs[:, 2])] if not wrong else []
        places += [(tails[:, 1], tails[:, 2])] if not wrong else []
        for parents, at in places:
            if ((at < 0) | (at > sizes[parents])).any():
                wrong.append("places")
        if not wrong and any((self.runs[i, 0] != runs[p, 0]) for i, p in enumerate(runs[:, 1].tolist()) if p >= 0):
            wrong.append("owners")
        if not wrong and groups.has_full and (self.lines[0] < 0).any():
            wrong.append("pages")
        for line in range(lines) if not wrong else ():
            held = np.concatenate([self.lines[line], self.tail_lines[line]])
            wrong += [f"rows of line {line}"] if not _is_each_once(held, rows[line]) else []
        if not wrong and not _is_each_once(tails[:, 4], rows[SNAPSHOTS]):
            wrong.append("rows of snapshots")
        if wrong:
            raise WeightError(f"kept prefixes: {', '.join(wrong)} contradict the rest; the file is damaged")
        try:
            for _ in self.cargoes():
                pass
        except WeightError:
            raise
        except (NumbaKVError, ValueError) as error:
            raise WeightError(f"kept prefixes: the file is damaged ({error})") from error


def _is_each_once(held: NDArray[np.int32], rows: int) -> bool:
    used = np.sort(held[held >= 0])
    return len(used) == rows and bool((used == np.arange(rows)).all())


def gather(groups: ReuseGroups, stores: list[KeptStore]) -> tuple[PrefixImage, dict[int, NDArray[np.int32]]]:
    """Return an image of all that is kept in stores, of the device and perhaps of the host, and where its rows are.

    For each line pairs of id and row, int32 [n, 2]; ids of the second store have `HOST` added.
    """
    full = sum(store.full.num_kept for store in stores if store.full is not None)
    merged = KeptStore(
        groups,
        pool=PageIdPool(full, 0) if groups.has_full else None,
        window_slots=[(0, sum(store.windows[w].num_kept for store in stores)) for w in range(len(groups.windows))],
        snapshot_slots=sum(store.snapshots.num_kept for store in stores),
        medium="host",
    )
    moved: list[Moved] = []
    for store, shift in zip(stores, (0, HOST), strict=False):
        for cargo in _cargoes(store, shift):
            moved += stow(merged, cargo)
    return _image(merged), settled(moved)


def _cargoes(store: KeptStore, shift: int) -> Iterator[Cargo]:
    """Yield what a store has, runs before those that hang behind them, as `KeptStore.tree` gives them."""

    def shifted(lines: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(lines >= 0, lines + np.int32(shift), -1).astype(np.int32)

    none = np.full((store.groups.num_lines, 0), -1, np.int32)
    for identity, run in _runs(store):
        if run.size:
            lines = shifted(run.lines[:, : run.size])
            yield Cargo(identity=identity, content=content_of(run, run.size), start=run.start, lines=lines)
        for offset, branch in run.branches.items():
            for node in branch.nodes:
                if isinstance(node, Tail):
                    snapshot = node.snapshot + shift if node.snapshot >= 0 else -1
                    tail = TailCargo(node.key, node.tokens, shifted(node.lines), snapshot)
                    content = content_of(run, offset)
                    yield Cargo(identity=identity, content=content, start=run.start + offset, lines=none, tail=tail)


def _runs(store: KeptStore) -> Iterator[tuple[ContextIdentity, Run]]:
    for identity, root in store.tree.roots.items():
        waiting = [root]
        while waiting:
            run = waiting.pop()
            yield identity, run
            for branch in run.branches.values():
                waiting += [node for node in branch.nodes if isinstance(node, Run)]


def _image(store: KeptStore) -> PrefixImage:
    lines = store.groups.num_lines
    identities = tuple(store.tree.roots)
    numbers: dict[Run, int] = {}
    runs, tails, keys = list[tuple[int, ...]](), list[tuple[int, ...]](), list[bytes]()
    tokens, entries, tail_lines = [np.zeros((0, store.groups.page_tokens), np.int32)], [np.zeros((lines, 0), np.int32)], []
    media: dict[int, tuple[MediaPart, ...]] = {}
    blocks = 0
    for identity, run in _runs(store):
        owner = identities.index(identity)
        if run.parent is not None:
            if store.full is not None and (run.lines[0, : run.size] < 0).any():
                raise InvariantError(f"{run}: a block that is to be saved has no page")
            numbers[run] = len(runs)
            runs.append((owner, numbers.get(run.parent, -1), run.at, run.size))
            tokens.append(run.tokens[: run.size])
            entries.append(run.lines[:, : run.size])
            media |= {blocks + block: parts for block, parts in run.media.items()}
            blocks += run.size
        for offset, branch in run.branches.items():
            for node in branch.nodes:
                if isinstance(node, Tail):
                    tails.append((owner, numbers.get(run, -1), offset, node.tokens, node.snapshot))
                    tail_lines.append(node.lines)
                    keys.append(node.key)
    return PrefixImage(
        identities=identities,
        runs=np.array(runs, np.int32).reshape(len(runs), 4),
        tokens=np.concatenate(tokens),
        lines=np.concatenate(entries, axis=1),
        media=media,
        tails=np.array(tails, np.int32).reshape(len(tails), 5),
        tail_lines=np.array(tail_lines, np.int32).reshape(len(tails), lines).T.copy(),
        keys=tuple(keys),
    )
