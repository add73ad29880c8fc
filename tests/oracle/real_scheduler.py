"""vLLM's real Scheduler in a process of its own, in the oracle's venv."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness import HASH_SEED, HERE, ROOT, STOP_TIMEOUT_S, OracleError


class RealScheduler:
    """The process, from the moment it is ready until ``close``; see scheduler_worker.py."""

    def __init__(self) -> None:
        venv = Path(os.environ.get("KVDEPOT_ORACLE_VENV") or ROOT / ".oracle-venv")
        python = venv / "bin" / "python"
        if not python.exists():
            raise OracleError(f"no oracle at {venv}: make it with tests/oracle/setup.sh {venv}")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._process = subprocess.Popen(
            [str(python), str(HERE / "scheduler_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "client", "proto")),
                "PYTHONHASHSEED": HASH_SEED,
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RealScheduler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, **options: Any) -> dict[str, Any]:
        """One run; options are the fields of ``Run``."""
        assert self._process.stdin is not None
        print(json.dumps(options), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise OracleError(self._errors.read().decode(errors="replace")[-4000:])
        return json.loads(line)
