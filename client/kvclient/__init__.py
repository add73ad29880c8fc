"""The client of kvdepot: its calls as typed values, its pool as tensors.

``Client`` is synchronous, ``kvclient.aio.Client`` the same for asyncio.
"""

from kvclient.attachment import Attachment
from kvclient.client import Client
from kvclient.errors import CacheLost, KVDepotError
from kvclient.event_stream import Stream
from kvclient.session import Session
from kvclient.stream import StepStream

__all__ = [
    "Attachment",
    "CacheLost",
    "Client",
    "KVDepotError",
    "Session",
    "StepStream",
    "Stream",
]
