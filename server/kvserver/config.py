"""The server's configuration: one frozen value, and every option's help.

Where the options come from is in ``sources.py``.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace

from kvcore.errors import KVDepotError
from kvcore.hashing import SCHEMES
from kvcore.memory import Device
from kvcore.spec import DTYPE_BYTES, DepotConfig, KVCacheConfig, KVCacheGroup, num_blocks_for
from kvserver.groups import groups_of
from kvserver.option import (
    boolean,
    choice,
    devices,
    flag_of,
    integer,
    num_bytes,
    num_tokens,
    one_of,
    option,
    real,
    text,
)
from kvserver.presets import MODELS

_DEFAULT_CAPACITY_TOKENS = 65_536
_DEFAULT_MODEL = "tiny"
_DEFAULT_BLOCK_SIZE = 16


class ConfigError(ValueError):
    """An option that cannot be used; the message names it."""


_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every option of the server; see each one's help."""

    listen: str = option(
        "127.0.0.1:50051", text, "serve there; port 0 takes a free one", "HOST:PORT"
    )
    uds: str = option("", text, "serve on this Unix socket as well", "PATH")
    metrics_port: int = option(
        9464, integer(0, 65535), "port of /metrics; 0 takes a free one", "PORT"
    )
    metrics_host: str = option(
        "", text, "address of /metrics (default: the host of --listen)", "HOST"
    )
    no_metrics: bool = option(False, boolean, "serve no /metrics")
    insecure_bind: bool = option(
        False, boolean, "allow an address that is not loopback, without encryption"
    )
    model: str | None = option(
        None,
        text,
        f"shape preset: {', '.join(MODELS)} (default {_DEFAULT_MODEL}); with --groups any name",
        "NAME",
    )
    groups: tuple[KVCacheGroup, ...] | None = option(
        None, groups_of, "KV cache groups, instead of a preset's: a list of mappings", "YAML"
    )
    weights_revision: str = option(
        "", text, "revision of the weights, part of the fingerprint", "NAME"
    )
    num_layers: int | None = option(None, integer(1, 4096), "layers, instead of the preset's", "N")
    num_kv_heads: int | None = option(
        None, integer(1, 4096), "KV heads, instead of the preset's", "N"
    )
    head_size: int | None = option(
        None, integer(1, 65536), "head size, instead of the preset's", "N"
    )
    dtype: str | None = option(
        None, choice(*DTYPE_BYTES), "dtype, instead of the preset's", one_of(*DTYPE_BYTES)
    )
    block_size: int | None = option(
        None,
        integer(1, 65536),
        f"tokens a block of a preset (default {_DEFAULT_BLOCK_SIZE})",
        "TOKENS",
    )
    num_blocks: int | None = option(
        None, integer(2, _INT32_MAX), "size of the pool in blocks, the null block among them", "N"
    )
    capacity_tokens: int | None = option(
        None,
        num_tokens(1, 1 << 50),
        f"size of the pool in tokens (default {_DEFAULT_CAPACITY_TOKENS})",
        "TOKENS",
    )
    memory_bytes: int | None = option(
        None, num_bytes(1, 1 << 62), "size of the pool in bytes, on each device", "BYTES"
    )
    max_books_bytes: int | None = option(
        None,
        num_bytes(1, 1 << 62),
        "most memory that the books of a full pool may take, by an estimate "
        "(default: what the machine has available)",
        "BYTES",
    )
    layout: str = option(
        "block",
        choice("block", "layer"),
        "what lies together: the layers of a block, or the blocks of a layer",
        one_of("block", "layer"),
    )
    device: tuple[Device, ...] = option(
        (Device(),),
        devices,
        "where the bytes are: cpu (the default), cuda:N, or cuda:N,M for several tensor-parallel "
        "ranks, each of which holds its own heads of the same blocks",
        "DEVICE",
    )
    tensor_parallel_size: int | None = option(
        None,
        integer(1, 4096),
        "ranks over which the model's heads are split; the groups are those of one (default: "
        "as many as --device names)",
        "N",
    )
    tensor_parallel_rank: int = option(
        0, integer(0, 4095), "the first rank that the pool holds, one a device", "RANK"
    )
    mapping_dir: str = option(
        "", text, "directory of the pool's file on the CPU (default: /dev/shm)", "DIR"
    )
    no_huge_pages: bool = option(
        False, boolean, "take no huge pages, also where the file's directory has them"
    )
    no_memory: bool = option(False, boolean, "keep the books only, no bytes")
    poison: bool = option(
        False,
        boolean,
        "debugging: fill every block with NaN before it is handed out, so that reading what was "
        "never written shows; costs a write of the block",
    )
    no_prefix_caching: bool = option(False, boolean, "never hit")
    hash_scheme: str = option(
        SCHEMES[0], choice(*SCHEMES), "how blocks are hashed", one_of(*SCHEMES)
    )
    hash_seed: str = option("0", text, "seed of the block hashes", "TEXT")
    watermark: float = option(
        0.0, real(0.0, 0.99), "share of blocks kept free of admissions", "SHARE"
    )
    max_model_len: int = option(
        131_072, num_tokens(1, _INT32_MAX), "longest sequence, in tokens", "TOKENS"
    )
    max_num_batched_tokens: int | None = option(
        None,
        num_tokens(1, _INT32_MAX),
        "most tokens of a step (default: --max-model-len)",
        "TOKENS",
    )
    use_eagle: bool = option(
        False, boolean, "a draft model reads the cache: hits leave out their last block"
    )
    hash_block_size: int | None = option(
        None,
        integer(1, 1 << 20),
        "tokens a hash (default: what all groups' block sizes are multiples of)",
        "TOKENS",
    )
    prefix_cache_retention_interval: int | None = option(
        None,
        integer(0, _INT32_MAX),
        "keep windows and states at every so many tokens; 0: at the prompt's end only "
        "(default: at every boundary)",
        "TOKENS",
    )
    dcp_world_size: int = option(1, integer(1, 4096), "ranks of decode context parallelism", "N")
    pcp_world_size: int = option(1, integer(1, 4096), "ranks of prefill context parallelism", "N")
    max_sessions: int = option(1024, integer(1, 1 << 20), "sessions that are open at a time", "N")
    max_requests_per_session: int = option(
        65_536, integer(1, 1 << 24), "requests that a session has at a time", "N"
    )
    max_request_tokens: int = option(
        1 << 22, num_tokens(1, 1 << 30), "tokens that one request holds", "TOKENS"
    )
    max_tokens_per_session: int = option(
        1 << 26, num_tokens(1, 1 << 40), "tokens of all requests of a session together", "TOKENS"
    )
    max_step_operations: int = option(
        65_536, integer(1, 1 << 24), "operations of a Step, for which others wait", "N"
    )
    max_step_blocks: int = option(
        1 << 20,
        integer(1, 1 << 40),
        "blocks of all requests that a Step admits or grows; what is beyond answers NO_BUDGET",
        "N",
    )
    max_workers_per_session: int = option(
        256, integer(1, 65_536), "workers attached under a session", "N"
    )
    max_concurrent_streams: int = option(
        4096,
        integer(1, 1 << 20),
        "open streams of all methods together: StepStream, StreamEvents, AttachWorker, "
        "ImportBlocks, health's Watch; of PullBlocks as many beside them",
        "N",
    )
    lease_ttl_seconds: float = option(
        30.0,
        real(0.01, 86_400),
        "how long a session lives after its last call, unless it asks for another time",
        "SECONDS",
    )
    lease_ttl_seconds_max: float = option(
        600.0, real(0.01, 86_400), "the longest lease that a session may ask for", "SECONDS"
    )
    quarantine_seconds: float = option(
        60.0,
        real(0.0, 86_400),
        "how long the blocks of an ended session are held back, at most, while workers attached "
        "under it remain",
        "SECONDS",
    )
    worker_heartbeat_seconds: float = option(
        5.0, real(0.01, 3600), "time between the messages of AttachWorker", "SECONDS"
    )
    reset_deadline_seconds: float = option(
        300.0,
        real(0.01, 86_400),
        "how long a draining reset waits before it is abandoned; callers may ask for less",
        "SECONDS",
    )
    residency_sample_rate: float = option(
        0.01, real(0.0, 1.0), "share of blocks whose lifetimes are sampled", "SHARE"
    )
    max_message_bytes: int = option(
        64 << 20,
        num_bytes(1 << 16, _INT32_MAX),
        "largest message received or sent; a larger one is RESOURCE_EXHAUSTED",
        "BYTES",
    )
    max_connections: int = option(
        4096, integer(1, 1 << 20), "connections of clients; more are closed at once", "N"
    )
    max_data_connections: int = option(
        1024,
        integer(1, 1 << 20),
        "connections of peers to the data address; more are closed at once",
        "N",
    )
    # Short: each keeps a place that imports need, and connecting anew takes milliseconds.
    data_connection_idle_seconds: float = option(
        20.0,
        real(1.0, 86_400),
        "a connection to the data address without calls is closed after so long",
        "SECONDS",
    )
    connection_idle_seconds: float = option(
        600.0,
        real(1.0, 86_400),
        "a connection without calls is closed after so long; clients connect again by themselves",
        "SECONDS",
    )
    max_calls_per_connection: int = option(
        8192,
        integer(1, 1 << 20),
        "calls and streams that are open on one connection; clients wait with more, unheard: so "
        "it is above --max-concurrent-streams",
        "N",
    )
    max_unread_bytes: int = option(
        256 << 20,
        num_bytes(0, 1 << 40),
        "bytes of replies that clients have not taken; beyond, whose connection has some gets "
        "no more large ones",
        "BYTES",
    )
    reply_window: int = option(
        64, integer(1, 65_536), "replies a session can replay by op_seq", "N"
    )
    reply_window_bytes: int = option(
        16 << 20,
        num_bytes(0, 1 << 40),
        "bytes of replies kept for a session's replay; the last one is kept whatever its size",
        "BYTES",
    )
    reply_windows_bytes: int = option(
        256 << 20,
        num_bytes(1 << 16, 1 << 40),
        "bytes of replies kept for all sessions together; not less than the largest message",
        "BYTES",
    )
    ended_sessions_kept: int = option(
        4096,
        integer(1, 1 << 20),
        "closed and expired sessions remembered, so that late calls are told what happened",
        "N",
    )
    # More than a full queue holds, so that who is cut off as too slow can mostly resume.
    event_history: int = option(1 << 19, integer(0, 1 << 24), "events kept for resuming", "N")
    event_history_bytes: int = option(
        256 << 20, num_bytes(0, 1 << 40), "bytes of events kept for resuming, about", "BYTES"
    )
    event_queue: int = option(1024, integer(1, 1 << 20), "batches a subscriber may lag", "N")
    event_queue_bytes: int = option(
        64 << 20, num_bytes(1 << 21, 1 << 40), "bytes a subscriber may lag", "BYTES"
    )
    event_heartbeat_seconds: float = option(
        5.0, real(0.01, 3600), "idle time before a heartbeat", "SECONDS"
    )
    max_subscribers: int = option(1024, integer(0, 1 << 20), "event subscribers", "N")
    max_pulls: int = option(64, integer(1, 1 << 16), "PullBlocks at a time", "N")
    pull_stall_seconds: float = option(
        30.0, real(0.01, 3600), "how long a pull waits for a peer that reads nothing", "SECONDS"
    )
    pull_heartbeat_seconds: float = option(
        5.0,
        real(0.1, 3600),
        "time between the heartbeats of the process that serves PullBlocks; one that is silent "
        "for three of them is killed, and another started",
        "SECONDS",
    )
    pull_start_seconds: float = option(
        300.0,
        real(1.0, 86_400),
        "how long that process may load NIXL, which registers the pool's memory, before the first "
        "heartbeat",
        "SECONDS",
    )
    max_transfers: int = option(
        1024, integer(1, 1 << 20), "transfers that peers have open at a time", "N"
    )
    max_transfer_blocks: int = option(
        65_536, integer(1, 1 << 24), "blocks of a transfer or an import", "N"
    )
    max_transfer_contents: int = option(
        8192,
        integer(1, 1 << 24),
        "blocks of a transfer that asks for their contents, for which others wait",
        "N",
    )
    max_imports: int = option(16, integer(1, 65_536), "imports that run at a time", "N")
    transfer_ttl_seconds: float = option(
        30.0,
        real(0.01, 86_400),
        "how long a transfer lives after it was opened or renewed, unless it asks for another time",
        "SECONDS",
    )
    transfer_ttl_seconds_max: float = option(
        600.0, real(0.01, 86_400), "the longest lease that a transfer may ask for", "SECONDS"
    )
    import_seconds_max: float = option(
        300.0,
        real(0.01, 86_400),
        "how long an import may take; callers may ask for less",
        "SECONDS",
    )
    data_listen: str = option(
        "",
        text,
        "serve PullBlocks there (default: the host of --listen, a free port)",
        "HOST:PORT",
    )
    advertise_data_address: str = option(
        "",
        text,
        "tell peers this address of PullBlocks (default: the one of --data-listen)",
        "HOST:PORT",
    )
    pull_bandwidth_bytes: int = option(
        0, num_bytes(0, 1 << 50), "most bytes a second sent by PullBlocks; 0: no limit", "BYTES"
    )
    import_part_blocks: int = option(
        4096, integer(1, 1 << 24), "blocks that an import asks its peer for at a time", "N"
    )
    import_copy_threads: int = option(
        2,
        integer(1, 64),
        "threads that copy what peers on this host have, of all imports together",
        "N",
    )
    import_bandwidth_bytes: int = option(
        0, num_bytes(0, 1 << 50), "most bytes a second imported from peers; 0: no limit", "BYTES"
    )
    nixl_devices: str = option(
        "",
        text,
        "network devices by which peers may read with NIXL, as in UCX_NET_DEVICES, or none "
        "(default: lo if --data-listen is loopback, else none)",
        "NAMES",
    )
    drain_grace_seconds: float = option(
        10.0, real(0.0, 3600), "how long a stop waits for sessions", "SECONDS"
    )

    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """The groups given, or the preset's with what options override. Raises ConfigError."""
        names = ("num_layers", "num_kv_heads", "head_size", "dtype")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.groups is not None:
            given |= {} if self.block_size is None else {"block_size": self.block_size}
            if given:
                flags = " and ".join(map(flag_of, given))
                raise ConfigError(f"{flags} cannot override groups: change them")
            return self.groups
        name = _DEFAULT_MODEL if self.model is None else self.model
        shape = MODELS.get(name)
        if shape is None:
            raise ConfigError(
                f"--model: must be one of {', '.join(MODELS)}, or come with --groups; got {name!r}"
            )
        try:
            return replace(shape, **given).groups(self.block_size or _DEFAULT_BLOCK_SIZE)  # type: ignore[type-var]
        except KVDepotError as error:
            raise ConfigError(f"--model {name}: {error.field}: {error.message}") from error

    def depot_config(self) -> DepotConfig:
        """What the core is built from. Raises ConfigError."""
        groups = self.kv_cache_groups()
        try:
            num_blocks = self.num_blocks
            if self.memory_bytes is not None:
                num_blocks = num_blocks_for(self.memory_bytes, groups)
            elif num_blocks is None:
                tokens = self.capacity_tokens or _DEFAULT_CAPACITY_TOKENS
                num_blocks = 1 + _num_blocks_of(tokens, groups)
            return DepotConfig(
                KVCacheConfig(num_blocks, groups),
                max_model_len=self.max_model_len,
                enable_caching=not self.no_prefix_caching,
                hash_scheme=self.hash_scheme,
                hash_seed=self.hash_seed,
                watermark=self.watermark,
                model=self.model or ("" if self.groups is not None else _DEFAULT_MODEL),
                weights_revision=self.weights_revision,
                layout=self.layout,
                residency_sample_rate=self.residency_sample_rate,
                max_sessions=self.max_sessions,
                max_requests_per_session=self.max_requests_per_session,
                max_request_tokens=self.max_request_tokens,
                max_tokens_per_session=self.max_tokens_per_session,
                max_workers_per_session=self.max_workers_per_session,
                max_step_blocks=self.max_step_blocks,
                max_transfers=self.max_transfers,
                max_transfer_blocks=self.max_transfer_blocks,
                max_imports=self.max_imports,
                max_num_batched_tokens=self.max_num_batched_tokens,  # type: ignore[arg-type]
                hash_block_size=self.hash_block_size,  # type: ignore[arg-type]
                use_eagle=self.use_eagle,
                prefix_cache_retention_interval=self.prefix_cache_retention_interval,
                dcp_world_size=self.dcp_world_size,
                pcp_world_size=self.pcp_world_size,
                tensor_parallel_size=self.tensor_parallel_size or len(self.device),
                tensor_parallel_rank=self.tensor_parallel_rank,
                num_ranks=len(self.device),
                medium="CPU" if self.device[0].index is None else "GPU",
            )
        except KVDepotError as error:
            raise ConfigError(error.message) from error

    def mapping_directory(self) -> str:
        """Where the pool's file goes: the option, else /dev/shm, else the temporary directory."""
        if self.mapping_dir:
            return self.mapping_dir
        return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def _num_blocks_of(num_tokens: int, groups: tuple[KVCacheGroup, ...]) -> int:
    """Blocks that hold so many tokens, were every group to keep them all. Or ConfigError."""
    sizes = [group.spec.block_size for group in groups if group.holds_blocks]
    if not sizes:
        return 1
    if num_tokens < min(sizes):
        raise ConfigError(
            f"{num_tokens} tokens are less than one block: give at least {min(sizes)}"
        )
    return num_tokens // min(sizes) * len(sizes)
