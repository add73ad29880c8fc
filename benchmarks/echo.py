"""The empty server that RPCs are measured against: ``python -m benchmarks.echo``.

Serves on a free port of 127.0.0.1 and prints it. Answers what it was sent.
"""

from __future__ import annotations

from typing import Any

import grpc
import uvloop

SERVICE = "benchmarks.Echo"


async def unary(raw: bytes, _: Any) -> bytes:
    """One message."""
    return raw


async def stream(_: Any, context: Any) -> None:
    """Message by message."""
    while (raw := await context.read()) is not grpc.aio.EOF:
        await context.write(raw)


async def serve() -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve())
