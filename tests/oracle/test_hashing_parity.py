"""The cbor schemes make the very bytes that the real vLLM 0.25.1 makes.

A request goes to both sides as JSON: its prompt is hashed, then tokens are appended in
pieces. vLLM's side (vllm_hashing.py) runs once, in the oracle, for all cases.
"""

from __future__ import annotations

import hashlib
import random
import struct
from dataclasses import asdict, dataclass

import pytest

from harness import Oracle
from kvcore.hashing import ExtraKeys, HashChain, MultimodalItem, hashes_at, make_scheme

pytestmark = pytest.mark.oracle

SCHEME_NAMES = ("sha256_cbor", "xxhash_cbor")
COARSER = 3  # a group with blocks of three hash blocks


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    prompt: list[int]
    block_size: int = 4
    seed: str = "0"
    appended: tuple[list[int], ...] = ()
    salt: str | None = None
    lora: str | None = None
    images: tuple[tuple[str, int, int], ...] = ()  # identifier, offset, length
    embeds: tuple[tuple[float, ...], ...] = ()  # one row per prompt token, whose ids are 0

    def extra(self) -> ExtraKeys:
        size = self.block_size
        digests = []
        for start in range(0, len(self.embeds), size):
            values = [value for row in self.embeds[start : start + size] for value in row]
            digests.append(hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).digest())
        return ExtraKeys(
            lora_name=self.lora,
            cache_salt=self.salt,
            multimodal=tuple(MultimodalItem(*image) for image in self.images),
            prompt_embeds_digest=tuple(digests),
        )

    def chain(self, scheme_name: str) -> HashChain:
        chain = make_scheme(scheme_name, self.seed).chain(self.block_size, self.extra())
        buffer = bytearray()
        for tokens in (self.prompt, *self.appended):
            buffer += struct.pack(f"<{len(tokens)}I", *tokens)
            chain.extend(buffer, len(buffer) // 4)
        return chain


# Where CBOR changes the length of an integer, and the ends of the range.
EDGES = [n + d for n in (23, 255, 65535, 2**31, 2**32 - 2) for d in (0, 1)] + [0, 1]
IMAGES = (("cat", 2, 5), ("dog", 7, 2), ("ox", 9, 1), ("cat", 16, 12))
UP = list(range(40))

TABLE = [
    Case(name="no tokens", prompt=[]),
    Case(name="less than a block", prompt=[1, 2, 3]),
    Case(name="one block", prompt=[1, 2, 3, 4]),
    Case(name="edges of integers", prompt=EDGES),
    Case(name="block of one token", prompt=UP, block_size=1),
    Case(name="block of 16, 1000 tokens", prompt=list(range(1000)), block_size=16),
    Case(name="block of 300", prompt=list(range(700)), block_size=300),
    Case(name="another seed", prompt=UP, seed="4294967295"),
    Case(name="seed of text", prompt=UP, seed="random"),
    Case(name="long seed", prompt=UP, seed="Zürich " * 60),
    Case(name="salt", prompt=UP, salt="pepper"),
    Case(name="empty salt", prompt=UP, salt=""),
    Case(name="long salt in other letters", prompt=UP, salt="ключ🔑" * 50),
    Case(name="lora", prompt=UP, lora="french"),
    Case(name="lora and salt", prompt=UP, lora="french", salt="pepper"),
    Case(name="images", prompt=UP, images=IMAGES),
    Case(name="image over many blocks", prompt=UP, images=(("cat", 1, 38),)),
    Case(name="all", prompt=UP, images=IMAGES, lora="french", salt="pepper"),
    Case(name="images in one large block", prompt=UP, images=IMAGES, block_size=32),
    Case(name="embeds", prompt=[0] * 10, embeds=tuple((n / 7, -n) for n in range(10))),
    Case(
        name="embeds, then tokens beyond them",
        prompt=[0] * 10,
        embeds=tuple((n / 7, 1e9) for n in range(10)),
        appended=([5, 6, 7], [8, 9, 10], [11] * 9),
        salt="pepper",
    ),
    Case(name="appended", prompt=UP[:5], appended=([5], [6, 7, 8], UP[9:31]), salt="pepper"),
    Case(name="appended to less than a block", prompt=[1], appended=([2], UP[2:]), images=IMAGES),
    Case(name="appended after an image", prompt=UP[:30], appended=(UP[30:],), images=IMAGES),
]


def random_case(number: int) -> Case:
    rng = random.Random(number)
    images, end = [], rng.randrange(6)
    for _ in range(rng.choice([0, 0, 1, 3, 6])):
        length = rng.randint(1, 20)
        images.append((rng.choice(["cat", "dog", "ox"]), end, length))
        end += length + rng.choice([0, 0, 1, 7])
    size = rng.choice([1, 2, 4, 7, 16])
    # All images end within the prompt's full blocks; see test_difference below.
    num_tokens = -(-end // size) * size + rng.randrange(40)
    limit = rng.choice([30, 300, 151936, 2**32])
    return Case(
        name=f"random {number}",
        prompt=[rng.randrange(limit) for _ in range(num_tokens)],
        block_size=size,
        seed=str(rng.randrange(2**32)),
        appended=tuple(
            [rng.randrange(limit) for _ in range(rng.randint(1, 9))]
            for _ in range(rng.randrange(9))
        ),
        salt=rng.choice([None, None, "", "pepper"]),
        lora=rng.choice([None, None, "french"]),
        images=tuple(images),
    )


DIFFERENT = [
    Case(
        name="two images in a block that a generated token completes",
        prompt=UP[:7],
        appended=([7],),
        images=(("cat", 4, 1), ("dog", 5, 1)),
    ),
    Case(
        name="two images that overlap one another",
        prompt=UP[:8],
        images=(("cat", 4, 8), ("dog", 4, 8)),
    ),
]
EQUAL = [*TABLE, *map(random_case, range(200))]

Answers = dict[tuple[str, str], tuple[list[str], list[str]]]


@pytest.fixture(scope="module")
def vllm_hashes(oracle: Oracle) -> Answers:
    """By scheme and case: vLLM's hashes in hex, and those of blocks COARSER times as large."""
    cases = EQUAL + DIFFERENT
    answers = oracle.hash_cases(
        {
            "scheme_names": SCHEME_NAMES,
            "cases": [asdict(case) for case in cases],
            "coarser": COARSER,
        }
    )
    names = [(scheme_name, case.name) for scheme_name in SCHEME_NAMES for case in cases]
    return {name: (fine, coarse) for name, (fine, coarse) in zip(names, answers, strict=True)}


@pytest.mark.parametrize("scheme_name", SCHEME_NAMES)
@pytest.mark.parametrize("case", EQUAL, ids=lambda case: case.name)
def test_equal(vllm_hashes: Answers, scheme_name: str, case: Case) -> None:
    ours = case.chain(scheme_name).hashes
    coarse = hashes_at(ours, case.block_size, case.block_size * COARSER)
    theirs = vllm_hashes[scheme_name, case.name]
    assert ([digest.hex() for digest in ours], [digest.hex() for digest in coarse]) == theirs


@pytest.mark.parametrize("scheme_name", SCHEME_NAMES)
@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.name)
def test_difference(vllm_hashes: Answers, scheme_name: str, case: Case) -> None:
    """The two places, told in kvcore/hashing.py, where vLLM leaves an image out of a block."""
    ours = [digest.hex() for digest in case.chain(scheme_name).hashes]
    theirs = vllm_hashes[scheme_name, case.name][0]
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
