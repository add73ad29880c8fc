"""The network between a prefill and a decode server swallows every packet, and comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvclient import Client
from kvclient.errors import Unavailable
from kvclient.imports import TransferPath
from kvclient.replay.handover import Decoder, Prefiller
from networks import Cable, cable
from pd_load import prompt
from processes import SLACK_SECONDS, Processes, wait_for
from test_pd import (
    DEADLINE_SECONDS,
    LARGE,
    NUM_FULL_BLOCKS,
    NUM_TOKENS,
    SLOW,
    TRANSFER_SECONDS,
    Running,
    assert_nothing_is_held,
    num_hit_tokens,
    start_importing,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def can_import(client: Client, peer: str) -> bool:
    """Whether the peer can be reached again."""
    try:
        start_importing(client, peer)
    except Unavailable:
        return False
    return True


@pytest.fixture
def wire() -> Iterator[Cable]:
    """Two namespaces and a cable."""
    with cable() as made:
        yield made


def test_the_cable_is_pulled_out(processes: Processes, wire: Cable, tmp_path: Path) -> None:
    """In the middle of an import; then before one; then it is plugged in again.

    The servers are reached here by Unix sockets, which no network carries.
    """
    targets = [f"unix:{tmp_path}/{side}" for side in range(2)]

    def serve(side: int) -> str:
        server = processes.serve(
            within=wire.within(side),
            listen=f"{wire.addresses[side]}:0",
            insecure_bind=True,
            uds=f"{tmp_path}/{side}",
            transfer_ttl_seconds=TRANSFER_SECONDS,
            **(LARGE | (SLOW if side else {})),
        )
        return server.target

    with ThreadPoolExecutor(2) as pool:
        peer, _ = pool.map(serve, range(2))
    with Client(targets[0]) as client_a, Client(targets[1]) as client_b:
        start_importing(client_b, peer)
        prefiller = Prefiller(client_a, peer=peer)
        prefiller.prefill(prompt(NUM_TOKENS))
        decoder = Decoder(client_b, paths=[TransferPath.GRPC], deadline_s=DEADLINE_SECONDS)
        running = Running(decoder, peer, prompt(NUM_TOKENS))
        wait_for(lambda: any(info.num_blocks_done for info in client_b.list_transfers()))
        wire.pull_out()
        done = running.decoded()
        assert running.seconds < DEADLINE_SECONDS + SLACK_SECONDS
        # Nobody vouches for what had come: all was computed.
        assert done.num_imported_tokens == 0
        assert done.result is not None and done.result.failures
        # Nobody closed the transfer: its lease ends it.
        wait_for(lambda: client_a.stats().num_transfers == 0)
        assert prefiller.release("trace-0")

        # The next one does not get as far.
        prefiller.prefill(prompt(NUM_TOKENS, 1))
        began = time.monotonic()
        done = Running(decoder, peer, prompt(NUM_TOKENS, 1)).decoded()
        assert time.monotonic() - began < DEADLINE_SECONDS + SLACK_SECONDS
        assert done.num_imported_tokens == 0
        assert done.error is not None or (done.result is not None and done.result.failures)
        assert prefiller.release("trace-1")
        assert client_b.stats().blocks.in_transfer == 0

        wire.plug_in()
        # Between two attempts to connect there is a pause.
        wait_for(lambda: can_import(client_b, peer))
        prefilled = prefiller.prefill(prompt(NUM_TOKENS, 2))
        patient = Decoder(client_b, paths=[TransferPath.GRPC], deadline_s=60.0)
        done = patient.decode(prompt(NUM_TOKENS, 2), prefilled)
        assert (done.num_hit_tokens, done.error) == (512, None)
        assert done.num_imported_tokens == 16 * NUM_FULL_BLOCKS - 512
        for engine in (prefiller.engine, decoder.engine, patient.engine):
            engine.close()
        for client in (client_a, client_b):
            assert_nothing_is_held(client)
            for number in range(3):
                assert num_hit_tokens(client, prompt(NUM_TOKENS, number)) == 16 * NUM_FULL_BLOCKS
