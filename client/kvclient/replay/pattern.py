"""The bytes that belong in a slot: a function of the token prefix that ends there.

Every token of a request has a 64-bit value that depends on all tokens up to it and on
their positions. A slot holds that value in every 8-byte word, each xored with a constant
of its layer, of K or V, and of its place. So a block that holds another prefix, or the
right one in the wrong layer or half, differs in every word, but for a chance of 2**-64.
A Mamba state holds the value of the last token that went into it, in the same way.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.uint64]
Mixed = TypeVar("Mixed", np.uint64, npt.NDArray[np.uint64])

WORD_BYTES = 8

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_SALT_STREAM = np.uint64(0xD6E8_FEB8_6659_FD93)


def mix(values: Mixed) -> Mixed:
    """SplitMix64's output function: a bijection of 64 bits that scatters them."""
    with np.errstate(over="ignore"):  # modulo 2**64 is what is meant
        mixed = values + np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        return mixed ^ (mixed >> np.uint64(31))


def prefix_sums(tokens: npt.NDArray[np.uint32], position: int = 0, before: int = 0) -> Values:
    """For each token the sum over all tokens up to it; ``mix`` of it is the token's value.

    ``position`` is that of the first token, ``before`` the sum of the token ahead of it.
    """
    if not len(tokens):
        return np.empty(0, np.uint64)
    positions = np.arange(position + 1, position + 1 + len(tokens), dtype=np.uint64)
    mixed = mix(tokens.astype(np.uint64) + positions * np.uint64(_GOLDEN))
    mixed[:1] += np.uint64(before)
    return np.add.accumulate(mixed)


def prefix_values(tokens: npt.NDArray[np.uint32]) -> Values:
    """The value of each token of a request, given all its tokens."""
    return mix(prefix_sums(tokens))


def salts(parts: int, row_bytes: int, first: int = 0) -> Values:
    """The constants ``(parts, words)`` of one layer's rows, ``row_bytes`` in each part.

    ``first`` is the number of constants that the layers before it have taken.
    """
    words = row_bytes // WORD_BYTES
    numbers = np.arange(first, first + parts * words, dtype=np.uint64)
    return mix(numbers ^ _SALT_STREAM).reshape(parts, words)


def page_words(values: Values, constants: Values) -> Values:
    """A page ``(parts, rows, words)`` that holds the values, one a row."""
    return values[None, :, None] ^ constants[:, None, :]
