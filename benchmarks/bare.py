"""The bytes without kvdepot: ``python -m benchmarks.bare KIND``, for each a process of its own.

Sources print where they are, as a line of JSON, and last until their input ends. Sinks take
that line as their argument, move all bytes once for every line of input, and print the seconds.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import threading
import time
from typing import Any

MESSAGE_BYTES = 1 << 20
METHOD = "/benchmarks.Bare/Pull"


def end_with_input() -> None:
    """Ends the process when its input does."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


async def stream_source(num_bytes: int, _: int) -> None:
    """Messages of fresh bytes, as often as asked for."""
    import grpc

    # Written: what only was allocated is one page of zeros, in the cache, for all addresses.
    source = memoryview(bytearray(b"\1") * num_bytes)

    async def pull(_: bytes, context: Any) -> None:
        for begin in range(0, num_bytes, MESSAGE_BYTES):
            await context.write(bytes(source[begin : begin + MESSAGE_BYTES]))

    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handler = grpc.unary_stream_rpc_method_handler(pull)
    handlers = grpc.method_handlers_generic_handler("benchmarks.Bare", {"Pull": handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    end_with_input()
    print(json.dumps({"port": port, "num_bytes": num_bytes}), flush=True)
    await server.wait_for_termination()


def stream_sink(where: Any) -> Any:
    """Copies what comes to where it is kept."""
    import grpc

    channel = grpc.insecure_channel(
        f"127.0.0.1:{where['port']}", [("grpc.max_receive_message_length", -1)]
    )
    kept = memoryview(mmap.mmap(-1, where["num_bytes"]))

    def move() -> None:
        begin = 0
        for message in channel.unary_stream(METHOD)(b""):
            kept[begin : begin + len(message)] = message
            begin += len(message)

    return move


def nixl_agent(name: str, num_bytes: int, *, progress: bool) -> tuple[Any, int]:
    """An agent with so much memory, and where that is."""
    import nixl_cu12 as nixl
    import numpy as np

    memory = np.zeros(num_bytes, "u1")
    memory[:] = 1
    config = nixl.nixl_agent_config(enable_prog_thread=progress)
    agent = nixl.nixl_agent(f"{name}-{os.getpid()}", config)
    address = int(memory.ctypes.data)
    agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
    agent.memory = memory
    return agent, address


def nixl_source(num_bytes: int, block_bytes: int) -> None:
    """Memory to be read, with NIXL's own progress thread."""
    agent, address = nixl_agent("source", num_bytes, progress=True)
    where = {
        "metadata": agent.get_agent_metadata().hex(),
        "address": address,
        "num_bytes": num_bytes,
        "block_bytes": block_bytes,
    }
    print(json.dumps(where), flush=True)
    sys.stdin.read()
    os._exit(0)


def nixl_sink(where: Any) -> Any:
    """Reads all blocks in one transfer, and spins until it is done."""
    import numpy as np

    agent, ours = nixl_agent("sink", where["num_bytes"], progress=False)
    name = agent.add_remote_agent(bytes.fromhex(where["metadata"]))
    size = where["block_bytes"]
    rows = np.arange(where["num_bytes"] // size)
    order = np.random.default_rng(1).permutation(rows)

    def descriptors(address: int, blocks: Any) -> Any:
        columns = [address + blocks * size, np.full(len(blocks), size), np.zeros(len(blocks))]
        return np.stack(columns, 1).astype(np.uint64)

    def move() -> None:
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors(ours, rows), "DRAM")
        remote = agent.prep_xfer_dlist(name, descriptors(where["address"], order), "DRAM")
        indices = rows.astype(np.int32)
        reading = agent.make_prepped_xfer("READ", local, indices, remote, indices)
        state = agent.transfer(reading)
        while state == "PROC":
            state = agent.check_xfer_state(reading)
        assert state == "DONE", state
        for handle in (reading, local, remote):
            handle.release()

    return move


def memcpy_sink(where: Any) -> Any:
    """One copy of all bytes between two shared mappings."""
    mappings = [mmap.mmap(-1, where["num_bytes"]) for _ in range(2)]
    source, kept = (memoryview(mapping) for mapping in mappings)

    def move() -> None:
        kept[:] = source

    return move


SINKS = {"stream": stream_sink, "nixl": nixl_sink, "memcpy": memcpy_sink}


def main() -> None:
    """Be one of them."""
    kind, side, *rest = sys.argv[1:]
    if side == "source":
        num_bytes, block_bytes = map(int, rest)
        if kind == "stream":
            asyncio.run(stream_source(num_bytes, block_bytes))
        else:
            nixl_source(num_bytes, block_bytes)
        return
    move = SINKS[kind](json.loads(rest[0]))
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        move()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
