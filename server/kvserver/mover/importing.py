"""``python -m kvserver.mover.importing FD``: pulls blocks from peers into the pool's bytes."""

from __future__ import annotations

import logging
import sys
import threading

from kvdepot.v1 import types_pb2
from kvserver.mover.channel import Channel
from kvserver.mover.importer import Importer
from kvserver.mover.job import Job
from kvserver.mover.pages import PoolFile
from kvserver.mover.store import open_store


def main() -> None:
    """Run imports until the node is gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    channel = Channel(int(sys.argv[1]))
    start = channel.receive()
    pool = types_pb2.PoolDescription.FromString(start["pool"])
    importer = Importer(start, pool, store := open_store(pool))
    if isinstance(store, PoolFile):
        threading.Thread(target=store.touch, daemon=True, name="kvdepot-touch").start()
    channel.send(op="ready")
    jobs: dict[int, Job] = {}
    while True:
        message = channel.receive()
        number: int = message["job"]
        if message["op"] == "stop":
            if (job := jobs.get(number)) is not None:
                job.stop()
            continue
        if message["op"] == "blocks":
            if (job := jobs.get(number)) is not None:
                job.give(message["ids"])
            continue
        jobs[number] = job = Job(importer, message, channel.send)

        def run(job: Job = job, number: int = number) -> None:
            try:
                job.run()
            finally:
                del jobs[number]

        threading.Thread(target=run, daemon=True, name=f"kvdepot-import-{number}").start()


if __name__ == "__main__":
    main()
