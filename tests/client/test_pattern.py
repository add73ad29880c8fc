"""The bytes that belong in a slot."""

from __future__ import annotations

import numpy as np
import pytest

from kvclient.replay.pattern import mix, page_words, prefix_sums, prefix_values, salts

TOKENS = np.arange(100, 164, dtype=np.uint32)


@pytest.mark.parametrize("cuts", [(), (1,), (16, 32), (5, 5, 63)], ids=str)
def test_values_do_not_depend_on_how_the_tokens_came(cuts: tuple[int, ...]) -> None:
    parts, position, before = [], 0, 0
    for part in np.split(TOKENS, cuts):
        sums = prefix_sums(part, position, before)
        parts.append(sums)
        position += len(part)
        before = int(sums[-1]) if len(sums) else before
    assert (mix(np.concatenate(parts)) == prefix_values(TOKENS)).all()


@pytest.mark.parametrize(
    ("other", "first_different"),
    [
        pytest.param(np.concatenate([[7], TOKENS[1:]]), 0, id="first-token"),
        pytest.param(np.concatenate([TOKENS[:40], [7], TOKENS[41:]]), 40, id="a-token-inside"),
        pytest.param(TOKENS[[1, 0, *range(2, 64)]], 0, id="two-swapped"),
        pytest.param(np.roll(TOKENS, 16), 0, id="a-block-moved"),
    ],
)
def test_a_value_tells_its_whole_prefix(other: np.ndarray, first_different: int) -> None:
    ours, theirs = prefix_values(TOKENS), prefix_values(other.astype(np.uint32))
    assert (ours[:first_different] == theirs[:first_different]).all()
    # A transposition is the same set of tokens; where each stands is told apart too.
    assert (ours[first_different:] != theirs[first_different:]).all()


def test_words_tell_layer_half_and_place() -> None:
    layers = [salts(2, 32), salts(2, 32, first=8), salts(1, 48, first=16)]
    assert [layer.shape for layer in layers] == [(2, 4), (2, 4), (1, 6)]
    assert len(np.unique(np.concatenate([layer.ravel() for layer in layers]))) == 22
    values = prefix_values(TOKENS[:16])
    pages = [page_words(values, layer) for layer in layers]
    assert [page.shape for page in pages] == [(2, 16, 4), (2, 16, 4), (1, 16, 6)]
    assert len(np.unique(np.concatenate([page.ravel() for page in pages]))) == 22 * 16
    assert pages[1][1, 5, 3] == values[5] ^ layers[1][1, 3]
