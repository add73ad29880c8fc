"""The standard reflection service, made to answer malformed bytes as it answers nonsense."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from kvserver.rpc import Handler

SERVICE = reflection.SERVICE_NAME


def _parse(raw: bytes) -> pb.ServerReflectionRequest:
    try:
        return pb.ServerReflectionRequest.FromString(raw)
    except DecodeError:
        # Asks for nothing, which is INVALID_ARGUMENT in reflection's own terms.
        return pb.ServerReflectionRequest()


def handlers(services: tuple[str, ...]) -> dict[str, Handler]:
    """The service's methods by name; it lists ``services``."""
    servicer = reflection.aio.ReflectionServicer(service_names=services)
    return {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=_parse,
            response_serializer=pb.ServerReflectionResponse.SerializeToString,
        )
    }
