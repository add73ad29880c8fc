"""The ``kvdepot`` command."""

from __future__ import annotations

from kvclient.cli.command import main

__all__ = ["main"]
