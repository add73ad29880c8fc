"""A model whose K and V lie in a server's pool says what it says without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvclient.imports import TransferPath
from kvclient.pool import map_pool

torch = pytest.importorskip("torch")

from paged_model import (  # noqa: E402  (needs torch)
    FULL,
    HYBRID,
    Engine,
    Model,
    PagedKeeper,
    assert_same,
    dense_logits,
    random_tokens,
)

BLOCK_SIZE = 4
SHAPES = {"full": FULL, "hybrid": HYBRID}


@contextmanager
def engine_on(server: Any, model: Model) -> Iterator[Engine]:
    with server.client() as client, client.open_session() as session:
        yield Engine(session, map_pool(session.pool), model)


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("name", SHAPES)
def test_paged_attention_is_attention(serve: Any, name: str, layout: str) -> None:
    shape = SHAPES[name]
    server = serve(
        model="mine", groups=shape.groups(BLOCK_SIZE), layout=layout, num_blocks=65, poison=True
    )
    model = Model(shape)
    prompt = random_tokens(30, seed=1)
    with engine_on(server, model) as engine:
        # The prompt at once, the prompt in chunks that end within blocks; then decode.
        for request_id, chunk in (("at once", None), ("in chunks", 7)):
            logits = engine.prefill(request_id, prompt, chunk)
            assert engine.hits[request_id] == 0
            assert_same(logits, dense_logits(model, prompt))
            rows = [logits[-1], *engine.generate(request_id, logits[-1], 12)]
            tokens = engine.tokens(request_id)
            assert len(tokens) == 42
            assert_same(torch.stack(rows), dense_logits(model, tokens)[29:])
            for group, table in zip(
                engine.session.pool.groups, engine.tables(request_id), strict=True
            ):
                # 41 tokens before the last one; of them 8 in the window with it.
                skipped = 8 if group.kind == "sliding_window" else 0
                assert [block_id == 0 for block_id in table] == [True] * skipped + [False] * (
                    11 - skipped
                )
            engine.finish(request_id)
            engine.session.reset_prefix_cache()
        engine.prefill("first", prompt)
        engine.finish("first")

    # Other sessions hit what that one left, and compute what is behind it only.
    suffix = random_tokens(9, seed=2)
    for num_hit in (28, 24, 12):
        continued = prompt[:num_hit] + suffix
        expected = dense_logits(model, continued)
        with engine_on(server, model) as engine:
            before = model.num_computed_tokens
            logits = engine.prefill("second", continued)
            assert engine.hits["second"] == num_hit
            assert model.num_computed_tokens - before == len(suffix)
            assert_same(logits, expected[num_hit:])
            rows = engine.generate("second", logits[-1], 5)
            assert_same(torch.stack(rows), dense_logits(model, engine.tokens("second"))[-5:])


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_what_nobody_wrote_shows_with_poison(serve: Any, layout: str) -> None:
    server = serve(
        model="mine", groups=FULL.groups(BLOCK_SIZE), layout=layout, num_blocks=9, poison=True
    )
    model = Model()
    for seed in range(3):  # the blocks come from the pool as it was made, and used again
        prompt = random_tokens(30, seed=seed)
        with engine_on(server, model) as engine:
            assert engine.prefill("a", prompt).isfinite().all()
            keeper = PagedKeeper(engine.pool, engine.tables("a"))
            key, value = keeper.read(0, 32)
            assert key[:30].isfinite().all() and value[:30].isfinite().all()
            assert key[30:].isnan().all() and value[30:].isnan().all()
            # Attention that looks beyond what was written, by one slot.
            assert model.forward([1], 31, keeper).isnan().all()


@pytest.mark.parametrize(
    ("layouts", "path"),
    [(("block", "block"), TransferPath.MAPPING), (("block", "layer"), TransferPath.GRPC)],
)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_over_blocks_of_a_peer(
    serve: Any, name: str, layouts: tuple[str, str], path: TransferPath
) -> None:
    """Prefilled on one server, imported into another, decoded there: as without a pool."""
    shape = SHAPES[name]
    options = {"model": "mine", "groups": shape.groups(BLOCK_SIZE), "num_blocks": 65}
    there, here = (serve(**options, layout=layout, poison=True) for layout in layouts)
    model = Model(shape)
    prompt = random_tokens(30, seed=1)
    expected = dense_logits(model, prompt)
    with engine_on(there, model) as prefill, engine_on(here, model) as decode:
        # Others' blocks lie where its own would have come to lie.
        decode.prefill("other", random_tokens(13, seed=3))
        prefill.prefill("a", prompt)
        before = model.num_computed_tokens
        logits = decode.prefill_elsewhere("a", prompt, 28, there.target, path)
        assert model.num_computed_tokens - before == 2
        assert_same(logits, expected[28:])
        rows = [logits[-1], *decode.generate("a", logits[-1], 12)]
        assert_same(torch.stack(rows), dense_logits(model, decode.tokens("a"))[29:])
