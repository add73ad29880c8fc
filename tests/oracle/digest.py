"""Runs a sequence to a digest per operation, or to the whole records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from backend import Backend
from interpreter import Interpreter

SKIPPED = "-"
RAISED = "!"


def digest(record: dict[str, Any] | None) -> str:
    """Equal for equal records: sixteen hex digits, ``SKIPPED``, or ``RAISED`` and the error."""
    if record is None:
        return SKIPPED
    if "raised" in record:
        return f"{RAISED} {record['raised']}"
    return hashlib.blake2b(json.dumps(record).encode(), digest_size=8).hexdigest()


def run_all(
    make_backend: Callable[[dict[str, Any]], Backend],
    config: dict[str, Any],
    ops: list[dict[str, Any]],
    full: bool,
) -> dict[str, Any]:
    """What the operations answered: {"digests"} of all, or {"records"} in full.

    Stops after ``config["ops_max"]`` operations that were not skipped, or the first that raised. A
    configuration that no manager takes answers as one operation that raised.
    """
    try:
        interpreter = Interpreter(make_backend(config), config)
    except Exception as error:
        refusal = {"raised": f"{type(error).__name__}: {error}"}
        return {"records": [refusal]} if full else {"digests": [digest(refusal)]}
    results: list[Any] = []
    for operation in ops:
        _, record = interpreter.run(operation)
        results.append(record if full else digest(record))
        if interpreter.count == config["ops_max"] or (record and "raised" in record):
            break
    return {"records" if full else "digests": results}
