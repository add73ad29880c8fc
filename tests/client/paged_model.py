"""A small decoder with random weights, that keeps its K and V in a pool or beside it.

``Model.forward`` is one computation over two keepers: ``DenseKeeper`` has K and V in tensors
of its own, ``PagedKeeper`` in a mapped pool, written through slot mappings and read through
block tables, as a paged-attention kernel does. ``Engine`` is a scheduler and its worker in
one: it drives a session and runs the model over what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from kvclient.imports import TransferPath
from kvclient.pool import Pool
from kvclient.session import Session
from kvclient.tables import RequestTables
from kvclient.values import Content, Outcome, SlotRequest, SlotResult


@dataclass(frozen=True)
class Shape:
    """``windows``: one a layer, in tokens, the present one included; None: all are seen."""

    windows: tuple[int | None, ...] = (None, None, None)
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    vocab_size: int = 97

    def groups(self, block_size: int) -> str:
        """KV cache groups for a server's ``--groups``: full attention, and every window."""
        sizes = list(dict.fromkeys(self.windows))
        common = {
            "block_size": block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": "float32",
        }
        return json.dumps(
            [
                common
                | {"layer_names": [f"l{i}" for i, own in enumerate(self.windows) if own == size]}
                | (
                    {"kind": "full_attention"}
                    if size is None
                    else {"kind": "sliding_window", "sliding_window": size}
                )
                for size in sizes
            ]
        )


FULL = Shape()
HYBRID = Shape(windows=(8, None, 8))


class Keeper(Protocol):
    """Keeps one sequence's K and V."""

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores ``(num_tokens, num_kv_heads, head_size)`` from position ``start`` on."""

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All before ``stop``; what no attention looks at may be anything finite."""


class DenseKeeper:
    """Tensors of its own."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer in self._kept:
            before = self._kept[layer]
            key = torch.cat((before[0][:start], key))
            value = torch.cat((before[1][:start], value))
        assert len(key) >= start
        self._kept[layer] = key, value

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._kept[layer]
        return key[:stop], value[:stop]


class PagedKeeper:
    """One request's block tables over a mapped pool, one table a group."""

    def __init__(self, pool: Pool, tables: Sequence[Sequence[int]]) -> None:
        self._pool = pool
        self._tables = tables
        self._groups = {layout.name: layout.group for layout in pool.description.layers}

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        name = f"l{layer}"
        group = self._groups[name]
        slots = self._pool.slot_mapping([self._tables[group]], [start], [len(key)], group=group)
        self._pool.write_slots(name, slots, key, value)

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"l{layer}"
        (row,) = self._pool.block_table([self._tables[self._groups[name]]])
        view = self._pool.layer(name)
        assert isinstance(view, torch.Tensor)
        pages = view[row.long()]  # (blocks, 2, block_size, num_kv_heads, head_size)
        return pages[:, 0].flatten(0, 1)[:stop], pages[:, 1].flatten(0, 1)[:stop]


class Model:
    """Rotary positions, grouped-query attention, a gated MLP; float32."""

    def __init__(self, shape: Shape = FULL, seed: int = 0, device: str = "cpu") -> None:
        self.shape = shape
        self.num_computed_tokens = 0
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.randn(rows, columns, generator=generator) / columns**0.5
            return made.to(device)

        size, heads, kv = shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.embedding = weight(shape.vocab_size, size) * size**0.5
        self.layers = [
            {
                "query": weight(heads * shape.head_size, size),
                "key": weight(kv * shape.head_size, size),
                "value": weight(kv * shape.head_size, size),
                "out": weight(size, heads * shape.head_size),
                "gate": weight(2 * size, size),
                "up": weight(2 * size, size),
                "down": weight(size, 2 * size),
            }
            for _ in shape.windows
        ]

    def forward(self, tokens: Sequence[int], start: int, keeper: Keeper) -> torch.Tensor:
        """Logits ``(len(tokens), vocab_size)`` of tokens at ``start`` and behind it.

        What lies before ``start`` is in ``keeper`` already.
        """
        self.num_computed_tokens += len(tokens)
        hidden = self.embedding[torch.as_tensor(tokens, device=self.embedding.device)]
        for number, weights in enumerate(self.layers):
            hidden = hidden + self._attend(number, _norm(hidden), start, keeper)
            inner = _norm(hidden)
            gated = functional.silu(inner @ weights["gate"].T) * (inner @ weights["up"].T)
            hidden = hidden + gated @ weights["down"].T
        return _norm(hidden) @ self.embedding.T

    def _attend(
        self, number: int, hidden: torch.Tensor, start: int, keeper: Keeper
    ) -> torch.Tensor:
        shape, weights = self.shape, self.layers[number]
        count, stop = len(hidden), start + len(hidden)
        positions = torch.arange(start, stop, device=hidden.device)
        query, key, value = (
            (hidden @ weights[name].T).view(count, -1, shape.head_size)
            for name in ("query", "key", "value")
        )
        keeper.write(number, start, _rotate(key, positions), value)
        all_keys, all_values = keeper.read(number, stop)
        repeat = shape.num_heads // shape.num_kv_heads
        behind = positions[:, None] - torch.arange(stop, device=hidden.device)
        visible = behind >= 0
        window = shape.windows[number]
        if window is not None:
            visible &= behind < window
        attended = functional.scaled_dot_product_attention(
            _rotate(query, positions).transpose(0, 1),
            all_keys.repeat_interleave(repeat, dim=1).transpose(0, 1),
            all_values.repeat_interleave(repeat, dim=1).transpose(0, 1),
            attn_mask=visible,
        )
        return attended.transpose(0, 1).flatten(1) @ weights["out"].T


class Engine:
    """Runs requests one step at a time: slots from the session, the forward pass, the report.

    Greedy. ``hits`` are the tokens that each request did not have to compute.
    """

    def __init__(self, session: Session, pool: Pool, model: Model) -> None:
        self.session = session
        self.pool = pool
        self.model = model
        self.hits: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._tables: dict[str, RequestTables] = {}

    def prefill(
        self, request_id: str, tokens: Sequence[int], chunk: int | None = None
    ) -> torch.Tensor:
        """Logits of the tokens behind the hit, computed ``chunk`` at a time."""
        result = self._allocate(
            SlotRequest(request_id, Content(list(tokens)), lookup=True, max_new_tokens=chunk)
        )
        hit = result.num_new_computed_tokens
        self.hits[request_id] = self._computed[request_id] = hit
        self._tokens[request_id] = list(tokens)
        tables = self._tables[request_id] = RequestTables(self.session.pool, len(tokens))
        tables.admit(result.hit_blocks, result.new_blocks, hit)
        logits = [self._run(request_id, result.num_new_tokens)]
        while self._computed[request_id] < len(tokens):
            logits.append(self._grow(request_id, None, chunk))
        return torch.cat(logits)

    def prefill_elsewhere(
        self,
        request_id: str,
        tokens: Sequence[int],
        num_external: int,
        peer: str,
        path: TransferPath,
    ) -> torch.Tensor:
        """Logits of the tokens behind those that are imported from ``peer``, which are all."""
        self.session.get_computed_blocks(request_id, list(tokens))
        result = self._allocate(
            SlotRequest(
                request_id,
                num_new_tokens=0,
                num_external_computed_tokens=num_external,
                delay_cache_blocks=True,
            )
        )
        tables = self._tables[request_id] = RequestTables(self.session.pool, len(tokens))
        tables.admit(result.hit_blocks, result.new_blocks, num_external, num_external)
        brought = self.session.import_blocks(
            request_id, peer, paths=[path], deadline_s=120
        ).result()
        assert brought.num_tokens == num_external, brought
        self.session.cache_blocks(request_id, num_external)
        self.hits[request_id] = 0
        self._computed[request_id] = num_external
        self._tokens[request_id] = list(tokens)
        return self._grow(request_id, None, None)

    def decode(self, request_id: str, token: int) -> torch.Tensor:
        """Logits behind one more token."""
        content = Content([token], len(self._tokens[request_id]))
        self._tokens[request_id].append(token)
        return self._grow(request_id, content, 1)[-1]

    def generate(self, request_id: str, logits: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Logits of ``count`` steps, each of which appends the likeliest token."""
        rows = [logits]
        for _ in range(count):
            rows.append(self.decode(request_id, int(rows[-1].argmax())))
        return rows[1:]

    def tokens(self, request_id: str) -> list[int]:
        """All tokens so far."""
        return self._tokens[request_id]

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        """The block tables, one a group."""
        return self._tables[request_id].blocks

    def finish(self, request_id: str) -> None:
        """The request is over; what it computed stays cached."""
        del self._tables[request_id]
        self.session.free(request_id)

    def _grow(self, request_id: str, content: Content | None, limit: int | None) -> torch.Tensor:
        computed = self._computed[request_id]
        result = self._allocate(
            SlotRequest(request_id, content, num_computed_tokens=computed, max_new_tokens=limit)
        )
        tables = self._tables[request_id]
        tables.skip(computed)
        tables.grow(result.new_blocks)
        return self._run(request_id, result.num_new_tokens)

    def _run(self, request_id: str, count: int) -> torch.Tensor:
        start = self._computed[request_id]
        tokens = self._tokens[request_id][start : start + count]
        keeper = PagedKeeper(self.pool, self._tables[request_id].blocks)
        logits = self.model.forward(tokens, start, keeper)
        self._computed[request_id] = start + count
        self.session.cache_blocks(request_id, start + count)
        return logits

    def _allocate(self, slots: SlotRequest) -> SlotResult:
        result = self.session.allocate_slots(slots)
        assert result.outcome is Outcome.OK, result
        for group, block_ids in enumerate(result.new_blocks):
            if block_ids and self.session.pool.groups[group].needs_zeroing:
                self.pool.zero_blocks(group, block_ids)
        return result


def dense_logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """What the model says of all the tokens at once, without a pool."""
    return model.forward(tokens, 0, DenseKeeper())


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order in which sums were taken."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rotate(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``(num_tokens, num_heads, head_size)``."""
    half = heads.shape[-1] // 2
    steps = torch.arange(half, device=heads.device) / half
    angles = positions[:, None, None] * 10_000.0**-steps
    first, second = heads[..., :half], heads[..., half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def random_tokens(count: int, seed: int, shape: Shape = FULL) -> list[int]:
    """A prompt."""
    generator = torch.Generator().manual_seed(seed)
    made: Any = torch.randint(shape.vocab_size, (count,), generator=generator).tolist()
    return list(made)
