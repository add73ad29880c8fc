#!/usr/bin/env bash
# Make the parity tests' oracle: the real vLLM 0.25.1 core, on the CPU, in a venv of its own.
#
#   tests/oracle/setup.sh [VENV]     default: $KVDEPOT_ORACLE_VENV, else .oracle-venv
#
# Takes about three minutes and 2 GB where pip finds the CPU build of torch (a build for CUDA
# works too). A venv that is ready is left alone, whoever made it, but for what kvclient needs
# there: that is added if it is missing. One that this script left half made is made anew;
# anything else in the way is an error.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${1:-${KVDEPOT_ORACLE_VENV:-$root/.oracle-venv}}
ready=$venv/.ready
making=$venv/.making

imports() {
  PYTHONHASHSEED=0 VLLM_LOGGING_LEVEL=CRITICAL "$venv/bin/python" -c '
import vllm.v1.core.kv_cache_manager
import vllm.v1.core.sched.scheduler
from importlib.metadata import version
assert version("vllm") == "0.25.1", version("vllm")'
}

# Most of what is installed is never imported: Python compiles what is, once.
unset PYTHONDONTWRITEBYTECODE
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)

# The Scheduler there is a client of ours, too: its protobuf is the one that vLLM installs.
add_wire() {
  "$venv/bin/python" -c 'import google.protobuf, google.rpc.status_pb2, grpc' >/dev/null 2>&1 ||
    "${pip[@]}" install --no-compile --no-deps googleapis-common-protos==1.76.0 grpcio==1.78.0 \
      protobuf==6.33.5
}

# What the venv has all of: raised when something is added above or below.
edition=2
if [[ -e $ready && $(<"$ready") == "$edition" ]]; then
  touch "$ready"
  exit 0
fi
if [[ -e $making ]]; then
  rm -rf "$venv"
elif [[ -e $ready ]] || { [[ -x $venv/bin/python ]] && imports >/dev/null 2>&1; }; then
  add_wire
  echo "$edition" >"$ready"
  exit 0
elif [[ -d $venv && -n $(ls -A "$venv") ]]; then
  echo "$venv is in the way: it is no oracle, nor did this script make it" >&2
  exit 1
fi

python=
for candidate in python3.11 python3 python3.13 python3.12; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
    >/dev/null 2>&1; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  echo "the oracle needs Python 3.11 to 3.13" >&2
  exit 1
fi

echo "making the oracle in $venv (some minutes)" >&2
mkdir -p "$venv"
touch "$making"
"$python" -m venv "$venv"

# torch brings its own requirements, which depend on its build.
"${pip[@]}" install --no-compile torch==2.13.0 numpy==2.3.5 setuptools==84.2.1
# What vLLM's core imports, and no more: its own requirements would bring another torch.
"${pip[@]}" install --no-compile --no-deps -r /dev/stdin <<'PINS'
aiohappyeyeballs==2.7.1
aiohttp==3.14.5
aiosignal==1.4.0
annotated-types==0.8.0
anyio==4.16.0
apache-tvm-ffi==0.1.15.post2
attrs==26.1.0
cachetools==8.0.2
cbor2==6.3.0
certifi==2026.10.19.post1
charset-normalizer==3.5.3
click==8.5.1
cloudpickle==3.1.3
frozenlist==1.8.0
h11==0.16.0
hf-xet==1.8.0
httpcore2==2.16.2
httpcore==1.0.9
httpx2==2.16.2
httpx==0.28.1
huggingface_hub==1.33.0
idna==3.20
jiter==0.19.0
llguidance==1.7.6
markdown-it-py==4.3.0
mdurl==0.1.2
msgspec==0.23.0
multidict==7.2.1
openai-harmony==0.0.8
openai==3.57.0
opencv-python-headless==5.0.0.93
packaging==26.4
pillow==13.0.0
prometheus_client==0.26.0
propcache==0.5.4
psutil==7.2.2
py-cpuinfo==9.0.0
pybase64==1.5.1
pydantic==2.14.4
pydantic_core==2.50.5
Pygments==2.21.0
PyYAML==6.0.4
pyzmq==27.3.0
regex==2026.11.19
requests==2.34.2
rich==15.0.0
safetensors==0.8.0
sniffio==1.3.1
tiktoken==0.14.0
tokenizers==0.22.2
tqdm==4.70.1
transformers==5.5.3
truststore==0.10.5
typing-inspection==0.4.5
typing_extensions==4.16.0
urllib3==2.8.0
uvloop==0.23.0
vllm==0.25.1
xgrammar==0.2.9
xxhash==4.1.0
yarl==1.25.1
PINS

imports
add_wire
rm "$making"
echo "$edition" >"$ready"
