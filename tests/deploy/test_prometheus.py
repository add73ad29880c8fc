"""A real Prometheus scrapes a server under replay: every panel's query has an answer."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from dashboard import QUERIES, ROOT, Query
from kvdepot.v1 import cache_pb2, cache_pb2_grpc, transfer_pb2, transfer_pb2_grpc, types_pb2
from programs import Program, debian_program, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVALUATE_FOR_SECONDS = 600.0
SCRAPES = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: kvdepot
    static_configs: [{targets: ["%s"]}]
"""


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        text: str = response.read().decode()
    return text


def _replay(target: str) -> list[str]:
    argv = [sys.executable, "-m", "kvclient.cli", "replay", f"--server={target}"]
    return [*argv, "--requests=30000", "--verify-sample=0.1", "--json"]


@dataclass(frozen=True, slots=True)
class Stack:
    """A loaded server and the Prometheus that scrapes it."""

    grpc_target: str
    metrics_url: str
    prometheus_url: str
    replay: Program

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The samples of an instant query, now."""
        parameters = urllib.parse.urlencode({"query": promql})
        answer = json.loads(_get(f"{self.prometheus_url}/api/v1/query?{parameters}"))
        assert answer["status"] == "success", answer
        samples: list[dict[str, Any]] = answer["data"]["result"]
        return samples


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server of 60,000 tokens under replay, scraped each second."""
    prometheus = debian_program("prometheus")
    home = tmp_path_factory.mktemp("prometheus")
    argv = [sys.executable, "-m", "kvserver", "--listen=127.0.0.1:0", "--metrics-port=0"]
    argv += ["--capacity-tokens=60000", "--residency-sample-rate=1", "--drain-grace-seconds=0"]
    # What lingers is there for as long as it takes to ask for everything.
    argv += ["--lease-ttl-seconds=600", "--quarantine-seconds=600", "--reset-deadline-seconds=600"]
    with contextlib.ExitStack() as programs:
        server = programs.enter_context(running(argv, home / "server.log"))
        ready = server.wait_for(r"kvdepot ready grpc=(\S+) .*metrics=(\S+) .*\n", timeout_s=180)
        target, metrics = ready.groups()
        (home / "prometheus.yml").write_text(SCRAPES % metrics)
        argv = [prometheus, f"--config.file={home / 'prometheus.yml'}"]
        argv += [f"--storage.tsdb.path={home / 'data'}", "--web.listen-address=127.0.0.1:0"]
        scraper = programs.enter_context(running(argv, home / "prometheus.log"))
        listening = scraper.wait_for(r'msg="Listening on" address=(\S+)', timeout_s=180)
        scraper.wait_for(r"Server is ready to receive web requests", timeout_s=180)
        replay = programs.enter_context(running(_replay(target), home / "replay.log"))
        yield Stack(target, f"http://{metrics}/metrics", f"http://{listening[1]}", replay)


def _cause_error(channel: grpc.Channel) -> None:
    """A call of an unknown session."""
    context = types_pb2.CallContext(session_id="nobody")
    stub = cache_pb2_grpc.KVCacheServiceStub(channel)
    with pytest.raises(grpc.RpcError):
        stub.Free(cache_pb2.FreeRequest(context=context, request_id="r"), timeout=60)


@contextlib.contextmanager
def _lingering(channel: grpc.Channel) -> Iterator[None]:
    """A session that is over while its worker writes, and a reset that waits for a request."""
    cache = cache_pb2_grpc.KVCacheServiceStub(channel)
    departed, holder = (cache.OpenSession(cache_pb2.OpenSessionRequest()) for _ in range(2))
    worker = transfer_pb2_grpc.KVTransferServiceStub(channel).AttachWorker(
        transfer_pb2.AttachWorkerRequest(session_id=departed.session_id, epoch=departed.epoch)
    )
    next(worker)
    _close(cache, departed.session_id)
    context = types_pb2.CallContext(session_id=holder.session_id)
    content = cache_pb2.RequestContent(
        tokens=bytes(64), extra_keys=types_pb2.ExtraKeys(lora_name="lingering")
    )
    slots = cache_pb2.SlotRequest(request_id="r", content=content, lookup=True)
    _allocate(cache, cache_pb2.AllocateSlotsRequest(context=context, slots=slots))
    cache.ResetPrefixCache(
        cache_pb2.ResetPrefixCacheRequest(
            context=context,
            mode=cache_pb2.RESET_MODE_DRAIN,
            scope=cache_pb2.ResetScope(lora_name="lingering"),
        )
    )
    try:
        yield
    finally:
        worker.cancel()


def _allocate(cache: Any, request: cache_pb2.AllocateSlotsRequest) -> None:
    """Ask until it fits: the replay keeps the pool full most of the time."""
    deadline = time.monotonic() + 60
    while cache.AllocateSlots(request).result.outcome != cache_pb2.OUTCOME_OK:
        assert time.monotonic() < deadline, "the pool stayed full"
        time.sleep(0.01)


def _end_session(channel: grpc.Channel) -> None:
    cache = cache_pb2_grpc.KVCacheServiceStub(channel)
    _close(cache, cache.OpenSession(cache_pb2.OpenSessionRequest()).session_id)


def _close(cache: Any, session_id: str) -> None:
    context = types_pb2.CallContext(session_id=session_id)
    cache.CloseSession(cache_pb2.CloseSessionRequest(context=context))


def _import_nothing(channel: grpc.Channel, peer: str) -> None:
    """An import of what the peer, the server itself, does not have."""
    request = transfer_pb2.ImportBlocksRequest(
        peer=peer, groups=[transfer_pb2.GroupHashes(block_hashes=[b"?" * 32])]
    )
    list(transfer_pb2_grpc.KVTransferServiceStub(channel).ImportBlocks(request, timeout=60))


def _drop_answered(stack: Stack, pending: dict[str, Query]) -> None:
    """Forget the queries that have an answer now, other than nothing.

    NaN is nothing: a share of what did not happen for a while.
    """
    for query in list(pending.values()):
        samples = stack.query(query.promql(rate_interval="10s"))
        values = [float(sample["value"][1]) for sample in samples]
        assert not any(map(math.isinf, values)), (query, samples)
        # It moved: the load causes everything that is shown.
        if any(value and not math.isnan(value) for value in values):
            del pending[query.name]
    time.sleep(0.5)


def test_every_query_of_the_dashboard_is_answered_under_load(stack: Stack) -> None:
    pending = {query.name: query for query in QUERIES}
    deadline = time.monotonic() + EVALUATE_FOR_SECONDS
    with grpc.insecure_channel(stack.grpc_target) as channel:
        # While a reset waits nothing is imported.
        while "Imports/A" in pending and time.monotonic() < deadline:
            _import_nothing(channel, stack.grpc_target)
            _drop_answered(stack, pending)
        with _lingering(channel):
            while pending and time.monotonic() < deadline:
                _cause_error(channel)
                _end_session(channel)
                _drop_answered(stack, pending)
    assert sorted(pending) == [], stack.replay.output()[-4000:] + _get(stack.metrics_url)


def test_block_states_sum_to_the_pool_at_every_scrape(stack: Stack) -> None:
    excess = "max_over_time(abs(sum(kvdepot_blocks) - sum(kvdepot_pool_blocks))[1m:1s])"
    (sample,) = stack.query(excess)
    assert float(sample["value"][1]) == 0


def test_promtool_finds_nothing_in_the_metrics(stack: Stack) -> None:
    text = _get(stack.metrics_url)
    assert "# TYPE kvdepot_blocks gauge" in text
    argv = [debian_program("promtool"), "check", "metrics"]
    result = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_promtool_accepts_the_scrape_configuration() -> None:
    path = ROOT / "deploy/prometheus/prometheus.yml"
    argv = [debian_program("promtool"), "check", "config", "--lint-fatal", str(path)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
