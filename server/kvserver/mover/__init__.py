"""The processes that move a pool's bytes, and the node's handle on them.

``handle.py`` is the node's side. ``serving.py`` is the process that serves PullBlocks and
keeps the NIXL agent that peers read from; ``importing.py`` is the one that pulls from
peers. Killing the second, which is how a hung copy is ended, cuts nobody off.
"""
