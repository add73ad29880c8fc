"""The process: it announces itself, is found healthy, and stops gracefully."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvdepot.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from kvserver.config import ConfigError
from own_process import environment
from serving import Scheduler, Serve, refused, tokens

READY = re.compile(
    r"kvdepot ready grpc=(\S+) uds=(\S+) metrics=(\S+) epoch=(\S+) blocks=(\d+) "
    r"bytes=(\d+) device=cpu model=tiny groups=1 fingerprint=[0-9a-f]{32}"
)

Start = Callable[..., "Process"]


class Process:
    """``python -m kvserver``, announced."""

    def __init__(self, *flags: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "kvserver", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.popen.stdout is not None
        self.line = self.popen.stdout.readline()
        match = READY.fullmatch(self.line.strip())
        if match is None:
            self.kill()
            raise AssertionError(f"not ready: {self.line!r} {self.stderr()}")
        self.target, self.uds, self.metrics, self.epoch, _, num_bytes = match.groups()
        assert int(num_bytes) == 65 * 2048

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(60)

    def stderr(self) -> str:
        """What it logged; it must have ended."""
        assert self.popen.stderr is not None
        return self.popen.stderr.read()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes; all end with the test."""
    running: list[Process] = []

    def begin(*flags: str) -> Process:
        process = Process(
            *("--listen", "127.0.0.1:0", "--metrics-port", "0", "--num-blocks", "65"),
            *("--mapping-dir", str(tmp_path), "--uds", str(tmp_path / "kvdepot.sock")),
            *flags,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        for pipe in (process.popen.stdout, process.popen.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_day_of_the_process(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start("--drain-grace-seconds", "20")
    with grpc.insecure_channel(f"unix:{process.uds}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(2)]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        scheduler = Scheduler(cache_pb2_grpc.KVCacheServiceStub(channel))
        assert Path(scheduler.opened.pool.mappings[0].file.path).parent == tmp_path
        assert scheduler.opened.epoch == process.epoch
        follower = event_pb2_grpc.KVEventServiceStub(channel).StreamEvents(
            event_pb2.StreamEventsRequest(), timeout=60
        )
        follower.initial_metadata()
        with urlopen(f"http://{process.metrics}/metrics") as page:
            assert b'kvdepot_blocks{state="free"} 64.0' in page.read()

        process.popen.send_signal(number)
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # Who is here may finish; nobody new comes in.
        refused(lambda: Scheduler(scheduler.stub), grpc.StatusCode.UNAVAILABLE)
        assert scheduler.admit("last", tokens(1, 2, 3)).handle
        assert scheduler.close().num_requests_freed == 1
        refused(lambda: list(follower), grpc.StatusCode.UNAVAILABLE)
        assert process.popen.wait(60) == 0
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in process.stderr()


@pytest.mark.parametrize("by", ["SIGTERM", "Drain"])
def test_a_stop_tells_every_stream_why(start: Start, by: str) -> None:
    """Who is there when the grace ends is told why, and the process exits with 0."""
    process = start("--drain-grace-seconds", "600")
    with grpc.insecure_channel(process.target) as channel:
        scheduler = Scheduler(cache_pb2_grpc.KVCacheServiceStub(channel))
        requests: Queue[cache_pb2.StepRequest | None] = Queue()
        requests.put(cache_pb2.StepRequest(context=scheduler.context()))
        steps = scheduler.stub.StepStream(iter(requests.get, None), timeout=60)
        next(steps)
        worker = transfer_pb2_grpc.KVTransferServiceStub(channel).AttachWorker(
            transfer_pb2.AttachWorkerRequest(session_id=scheduler.opened.session_id), timeout=60
        )
        next(worker)
        follower = event_pb2_grpc.KVEventServiceStub(channel).StreamEvents(
            event_pb2.StreamEventsRequest(), timeout=60
        )
        follower.initial_metadata()
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        next(watch)

        if by == "Drain":
            admin = admin_pb2_grpc.KVAdminServiceStub(channel)
            assert admin.Drain(admin_pb2.DrainRequest(), timeout=60).num_sessions == 1
        else:
            process.popen.send_signal(signal.SIGTERM)
        # Not serving comes first; the session's calls are answered in the grace.
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        requests.put(cache_pb2.StepRequest(context=scheduler.context()))
        next(steps)
        process.popen.send_signal(signal.SIGTERM)  # no more grace
        for stream in (steps, worker, follower):
            detail = refused(lambda stream=stream: list(stream), grpc.StatusCode.UNAVAILABLE)
            assert (detail.reason, detail.retryable) == ("DRAINING", True)
        requests.put(None)
        assert process.popen.wait(60) == 0
    assert "Traceback" not in process.stderr()


def test_the_grace_ends(start: Start) -> None:
    process = start("--drain-grace-seconds", "0.2")
    with grpc.insecure_channel(process.target) as channel:
        scheduler = Scheduler(cache_pb2_grpc.KVCacheServiceStub(channel))
        scheduler.admit("a", tokens(*range(33)))
        scheduler.cache("a", 33)
        opened = transfer_pb2_grpc.KVTransferServiceStub(channel).OpenTransfer(
            transfer_pb2.OpenTransferRequest(
                name="decode-7",
                request=transfer_pb2.SessionRequest(
                    session_id=scheduler.opened.session_id, request_id="a"
                ),
            )
        )
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 0
    log = process.stderr()
    named = (
        f"session scheduler (1 requests); transfer {opened.transfer_id[:8]} of decode-7 (2 blocks)"
    )
    assert f"these get 0.2 s to end, another signal skips that: {named}" in log
    assert f"ended with the grace: {named}" in log


def test_a_second_signal_skips_the_grace(start: Start) -> None:
    process = start("--drain-grace-seconds", "600")
    with grpc.insecure_channel(process.target) as channel:
        Scheduler(cache_pb2_grpc.KVCacheServiceStub(channel))
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        process.popen.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        time.sleep(0.3)
        assert process.popen.poll() is None
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        pytest.param(["--listen", "0.0.0.0:0"], "--insecure-bind", id="not loopback"),
        pytest.param(["--num-blocks", "one"], "--num-blocks", id="not a number"),
        pytest.param(
            ["--mapping-dir", "/nonexistent"],
            "--mapping-dir: cannot keep the pool in /nonexistent: there is no such directory",
            id="no directory",
        ),
        pytest.param(["--nope"], "--nope is no option", id="unknown flag"),
        pytest.param(["--uds", "/nonexistent/s"], "no directory /nonexistent", id="no socket dir"),
        pytest.param(["--uds", "/tmp/" + "s" * 120], "path too long", id="socket path too long"),
        pytest.param(["--listen", "192.0.2.1:9", "--insecure-bind"], "192.0.2.1:9", id="not ours"),
        pytest.param(
            ["--no-memory", "--num-blocks", "2000000000"], "--max-books-bytes", id="endless books"
        ),
        pytest.param(
            ["--num-layers", "4096", "--num-kv-heads", "4096"], "--mapping-dir", id="no room"
        ),
        pytest.param(
            ["--device", "cuda:99"],
            "--device: cuda:99 cannot be had: ",
            id="no device",
        ),
    ],
)
def test_a_configuration_error_is_one_line(flags: list[str], named: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kvserver", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        # Whatever else listens here, and whoever died here and left a pool.
        env=environment()
        | {"KVDEPOT_LISTEN": "127.0.0.1:0", "KVDEPOT_NO_METRICS": "true"}
        | {"KVDEPOT_MAPPING_DIR": str(tmp_path)},
    )
    assert ended.returncode == 2
    assert named in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_books_may_be_limited(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="--max-books-bytes allows 1000"):
        serve(max_books_bytes=1000)


def test_a_busy_port_is_named(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    first = serve(no_metrics=False, metrics_port=0)
    port = first.server.metrics_port
    with pytest.raises(ConfigError, match=f"--metrics-port: 127.0.0.1:{port} is in use"):
        serve(no_metrics=False, metrics_port=port)
    with pytest.raises(ConfigError, match=f"--listen: 127.0.0.1:{first.server.port} is in use"):
        serve(listen=first.target)
    # gRPC, which would write lines of its own, was not asked.
    assert "bind" not in capfd.readouterr().err


def test_an_address_is_served_once(serve: Serve, tmp_path: Path) -> None:
    socket = str(tmp_path / "kvdepot.sock")
    first = serve(uds=socket)
    with pytest.raises(ConfigError, match="is served already: stop"):
        serve(uds=socket)
    first.open()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a socket"):
        serve(uds=str(tmp_path / "file"))


def test_services_are_listed_and_described(serve: Serve) -> None:
    served = serve()
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvdepot.v1.KVCacheService"),
    ]
    listed, described = stub.ServerReflectionInfo(iter(asked), timeout=60)
    names = {service.name for service in listed.list_services_response.service}
    assert {f"kvdepot.v1.KV{kind}Service" for kind in ("Cache", "Event", "Transfer", "Admin")} <= (
        names
    )
    assert "grpc.health.v1.Health" in names
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(raw).name
        for raw in described.file_descriptor_response.file_descriptor_proto
    ]
    assert "kvdepot/v1/cache.proto" in files


@pytest.mark.parametrize("raw", [b"", b"\xff\xff\xff"], ids=["empty", "malformed"])
def test_reflection_answers_nonsense(serve: Serve, raw: bytes) -> None:
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    (answer,) = serve().channel.stream_stream(path)(iter([raw]), timeout=60)
    error = reflection_pb2.ServerReflectionResponse.FromString(answer).error_response
    assert error.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_health_knows_the_services(serve: Serve) -> None:
    served = serve()
    stub = health_pb2_grpc.HealthStub(served.channel)
    for service in ("", "kvdepot.v1.KVCacheService"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    unknown = health_pb2.HealthCheckRequest(service="other")
    refused(lambda: stub.Check(unknown, timeout=60), grpc.StatusCode.NOT_FOUND)
    first = next(stub.Watch(unknown, timeout=60))
    assert first.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_the_next_server_clears_what_a_killed_one_left(start: Start, tmp_path: Path) -> None:
    killed = start()
    (left,) = tmp_path.glob("*.pool")
    killed.kill()
    assert left.exists()
    start()
    (own,) = tmp_path.glob("*.pool")
    assert own != left
