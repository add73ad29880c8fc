"""How the tests share a machine of few cores, which others may be using too."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Before anything loads them, and for every process that a test starts: their threads wait for
# each other by spinning, on tensors that are too small to share out.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` one worker runs all that ask the real vLLM: it is started once."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "tests/oracle" if file.startswith("tests/oracle/") else file

    return Files(config, log)
