# Build with the CPU build of torch by naming its package index (see PyTorch's install page):
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t kvdepot .
FROM python:3.11-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/kvdepot
COPY . .
RUN /opt/kvdepot/bin/pip install --no-cache-dir -c constraints.txt ".[server]"

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="kvdepot" \
      org.opencontainers.image.description="A standalone KV-cache service for LLM inference" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --system --gid 10001 kvdepot \
 && useradd --system --uid 10001 --gid kvdepot --no-create-home --shell /usr/sbin/nologin kvdepot \
 && install -d -o kvdepot -g kvdepot -m 0750 /run/kvdepot
COPY --from=build /opt/kvdepot /opt/kvdepot
ENV PATH=/opt/kvdepot/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    KVDEPOT_UDS=/run/kvdepot/kvdepot.sock
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
EXPOSE 50051 9464
# SERVING, asked over the Unix socket, so that it holds whatever --listen says.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import os, grpc; from grpc_health.v1 import health_pb2 as pb, health_pb2_grpc as rpc; channel = grpc.insecure_channel('unix:' + os.environ['KVDEPOT_UDS']); raise SystemExit(rpc.HealthStub(channel).Check(pb.HealthCheckRequest(), timeout=4).status != pb.HealthCheckResponse.SERVING)"]
# The server listens on loopback: run with --network host, or say
# KVDEPOT_LISTEN=0.0.0.0:50051 and KVDEPOT_INSECURE_BIND=true. The pool's file goes to
# /dev/shm, which is 64 MB in a container unless --shm-size says more.
ENTRYPOINT ["kvdepot"]
CMD ["serve"]
