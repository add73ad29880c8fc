"""The client of kvdepot: its calls as typed values, its pool as tensors.

``Client`` is synchronous, ``kvclient.aio.Client`` the same for asyncio.
"""

from kvclient.client import Client, Session, Stream
from kvclient.errors import KVDepotError
from kvclient.stream import StepStream

__all__ = ["Client", "KVDepotError", "Session", "StepStream", "Stream"]
