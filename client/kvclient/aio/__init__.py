"""The asyncio client: the calls of ``kvclient``, awaited. One event loop a process."""

from kvclient.aio.attachment import Attachment
from kvclient.aio.client import Client
from kvclient.aio.event_stream import Stream
from kvclient.aio.session import Session
from kvclient.aio.stream import StepStream

__all__ = ["Attachment", "Client", "Session", "StepStream", "Stream"]
