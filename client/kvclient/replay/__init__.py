"""Replays a trace of requests as real schedulers would, and proves the bytes right."""
