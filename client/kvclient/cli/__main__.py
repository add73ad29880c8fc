"""``python -m kvclient.cli``: the same as ``kvdepot``."""

from kvclient.cli import main

main()
