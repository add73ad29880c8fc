"""Random sequences: a pool's configuration and a scheduler's day on it, from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from families import FAMILIES, draw_config
from interpreter import FIRST_OUTPUT_TOKEN, LOOKAHEAD_MAX

Operation = dict[str, Any]

NUM_PREFIXES = 3
LORAS = [["adapter-a", 1], ["adapter-b", 2]]
SALTS = ["salt", "grain"]
ANY = 1 << 16
"""Picks are drawn below this and taken modulo the number of candidates."""

ADDED_MAX = 6
"""Requests that may come again."""

DRAWN_PER_DONE = 10
"""Operations drawn for each to be done: many apply to nothing when their turn comes."""

WEIGHTS: dict[str, float] = {
    "add": 8,
    "twins": 1,
    "revive": 0.7,
    "lookup": 2,
    "admit": 20,
    "loaded": 2,
    "grow": 28,
    "output": 18,
    "cache": 3,
    "preempt": 3,
    "finish": 5,
    "free_again": 0.5,
    "detach": 1.5,
    "give_back": 1.5,
    "evict": 1.5,
    "invalidate": 0.7,
    "reset": 0.6,
    "skip": 2,
    "partial": 4,
    "new_step": 8,
    "allocate_nothing": 0.3,
    "query": 2,
}


@dataclass
class Sequence:
    """What both sides run. ``config`` holds plain JSON values, as ``ops`` do."""

    seed: int
    config: dict[str, Any]
    ops: list[Operation] = field(default_factory=list)


def make_sequence(seed: int, num_ops: int) -> Sequence:
    """The sequence of that seed, of which both sides do the first ``num_ops`` that apply.

    Seeds take the families in turn. Each seed also draws its own mix of operations, so that
    some sequences are nearly all decode, some nearly all admission under pressure, and so on.
    """
    rng = random.Random(seed)
    families = list(FAMILIES)
    config = draw_config(rng, families[seed % len(families)])
    config["ops_max"] = num_ops
    maker = _Maker(rng, config)
    names = list(WEIGHTS)
    weights = [WEIGHTS[name] * rng.choice((0.5, 1, 1, 2.5)) for name in names]
    sequence = Sequence(seed, config, [{"op": "describe"}])
    for name in rng.choices(names, weights, k=num_ops * DRAWN_PER_DONE):
        sequence.ops += maker.make(name)
    return sequence


def _admission(who: str, reserved: int = 0) -> Operation:
    return {"op": "admit", "who": who, "chunk": ANY, "reserved": reserved, "scheduled": False}


class _Maker:
    def __init__(self, rng: random.Random, config: dict[str, Any]) -> None:
        self.rng = rng
        self.config = config
        self.num_requests = 0
        self.lookahead = rng.choice((0, 0, 2, LOOKAHEAD_MAX))
        self.drafts_max: int = config["drafts_max"]
        self.encoder_max: int = config["encoder_max"]
        self.external = rng.choice((0.0, 0.15, 0.4))
        self.again = rng.choice((0.1, 0.4))
        self.added: list[Operation] = []
        self.per_group = rng.choice((0.0, 0.0, 0.6))
        self.shared = rng.choice((0.3, 0.8))
        self.special = rng.choice((0.0, 0.3))

    def make(self, name: str) -> list[Operation]:
        maker: Callable[[], list[Operation]] = getattr(self, name, lambda: [self._who(name)])
        return maker()

    def _who(self, name: str, **arguments: Any) -> Operation:
        return {"op": name, "who": self.rng.randrange(ANY), **arguments}

    def _length(self) -> int:
        """A token count: often a whole number of blocks, or one beside it."""
        unit: int = self.config["unit"]
        rng = self.rng
        if rng.random() < 0.5:
            return max(1, rng.randint(1, 8) * unit + rng.choice((-1, 0, 0, 1)))
        return rng.randint(1, 8 * unit)

    def _chunk(self) -> int:
        return self.rng.choice((1, self._length(), ANY, ANY))

    # --- operations; those not named here take ``who`` alone ---------------------------

    def add(self) -> list[Operation]:
        rng = self.rng
        if self.added and rng.random() < self.again:  # a repeat, or the next turn
            operation = {**rng.choice(self.added), "who": f"r{self.num_requests}"}
            self.num_requests += 1
            if rng.random() < 0.3:
                first = 200_000 + 1000 * rng.randrange(20)
                operation["tokens"] = [*operation["tokens"], [first, self._length()]]
            return [operation]
        tokens = []
        if rng.random() < self.shared:
            length = self._length()
            tokens.append([1000 * rng.randrange(NUM_PREFIXES), length])
            if rng.random() < 0.2:  # an earlier request's output, continued: a second turn
                tokens.append([FIRST_OUTPUT_TOKEN + length, rng.randint(1, 20)])
        if not tokens or rng.random() < 0.7:
            tokens.append([100_000 + 1000 * rng.randrange(20), self._length()])
        operation: Operation = {"op": "add", "who": f"r{self.num_requests}", "tokens": tokens}
        self.num_requests += 1
        if rng.random() < self.special:
            operation["lora"] = rng.choice(LORAS)
        if rng.random() < self.special:
            operation["salt"] = rng.choice(SALTS)
        if rng.random() < 0.05:
            operation["skip_reading"] = True
        if self.encoder_max:
            operation["encoder"] = rng.randint(0, self.encoder_max)
        self.added = [*self.added[1 - ADDED_MAX :], operation]
        return [operation]

    def twins(self) -> list[Operation]:
        """Two equal requests, admitted one after the other without looking at each other."""
        first = self.add()[0]
        second = {**first, "who": f"r{self.num_requests}"}
        self.num_requests += 1
        admissions = [{**self.admit()[0], "who": one["who"]} for one in (first, second)]
        admissions[1]["use_hit"] = self.rng.random() < 0.5
        return [first, second, *admissions]

    def revive(self) -> list[Operation]:
        """A request comes again when its blocks are the next to be evicted, and brings external
        tokens with it: one group must not take the blocks that another one hits.
        """
        rng, unit = self.rng, self.config["unit"]
        first = self._revivable(500_000, rng.randint(3, 6) * unit)
        length = first["tokens"][0][1]
        sizes = [group["spec"]["block_size"] for group in self.config["groups"]]
        spared = sum(-(-length // size) for size in sizes) + rng.choice((0, 0, 1, len(sizes)))
        story: list[Operation] = [first, _admission(first["who"])]
        story += [{"op": "finish", "who": first["who"]}, {"op": "new_step"}]
        for num_tokens in (16 * unit, 8 * unit, 4 * unit, 2 * unit, unit, 1):  # what fits stays
            filler = self._revivable(400_000, num_tokens)
            story += [filler, _admission(filler["who"], reserved=spared)]
        again = self._revivable(500_000, 0)
        again["tokens"] = [*first["tokens"], [300_000, 2 * unit]]
        chunk, external = rng.choice((1, unit)), rng.choice((unit, unit + 1))
        return [*story, again, {**_admission(again["who"]), "chunk": chunk, "external": external}]

    def _revivable(self, first: int, num_tokens: int) -> Operation:
        self.num_requests += 1
        tokens = [[first + 1000 * self.rng.randrange(20), num_tokens]]
        return {"op": "add", "who": f"r{self.num_requests - 1}", "tokens": tokens}

    def admit(self) -> list[Operation]:
        rng = self.rng
        operation = self._who("admit", chunk=self._chunk(), lookahead=self.lookahead)
        if rng.random() < 0.1:
            operation["use_hit"] = False
        if rng.random() < self.per_group:
            operation["per_group"] = True
        if rng.random() < self.external:
            operation["external"] = self._length()
            operation["load"] = rng.random() < 0.6
        if rng.random() < 0.05:
            operation["delay"] = True
        if rng.random() < 0.3:
            operation["whole"] = True
        if rng.random() < 0.2:
            operation["reserved"] = rng.randint(1, 8)
        if rng.random() < 0.5:
            operation["scheduled"] = False
        return [operation]

    def lookup(self) -> list[Operation]:
        return [self._who("lookup", per_group=self.rng.random() < 0.3)]

    def skip(self) -> list[Operation]:
        return [self._who("skip", prompt=self.rng.random() < 0.8)]

    def partial(self) -> list[Operation]:
        if not self.config["partial"]:
            return []
        return [
            self._who("partial", group=self.rng.randrange(ANY), back=self.rng.choice((0, 0, 1)))
        ]

    def loaded(self) -> list[Operation]:
        return [self._who("loaded", percent=self.rng.choice((100, 100, 100, 60, 20, 0)))]

    def grow(self) -> list[Operation]:
        return [
            self._who(
                "grow",
                chunk=self._chunk(),
                drafts=self.rng.randint(0, self.drafts_max),
                lookahead=self.lookahead,
            )
        ]

    def output(self) -> list[Operation]:
        accepted = self.rng.randint(0, self.drafts_max)
        return [self._who("output", accepted=accepted, variant=self.rng.choice((0, 0, 0, 1)))]

    def cache(self) -> list[Operation]:
        return [self._who("cache", back=self.rng.choice((0, 0, 1, 5)))]

    def detach(self) -> list[Operation]:
        return [self._who("detach", keep=self.rng.random() < 0.5)]

    def evict(self) -> list[Operation]:
        count = self.rng.choice((1, 2, 8))
        return [{"op": "evict", "blocks": [self.rng.randrange(ANY) for _ in range(count)]}]

    def invalidate(self) -> list[Operation]:
        return [self._who("invalidate", percent=self.rng.choice((0, 50, 80, 100)))]

    def reset(self) -> list[Operation]:
        return [{"op": "reset", "idle": self.rng.random() < 0.3}]

    def new_step(self) -> list[Operation]:
        return [{"op": "new_step"}]

    def query(self) -> list[Operation]:
        return [self._who("query", num_tokens=self.rng.choice((0, 1, self._length())))]
