"""``KVDEPOT_*`` variables: which are options, which Kubernetes sets, which are misspelt."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from kvserver.spelling import did_you_mean

logger = logging.getLogger(__name__)

PREFIX = "KVDEPOT_"

# The file of options, and the server that the client's commands ask.
_NO_OPTIONS = (PREFIX + "CONFIG", PREFIX + "SERVER")
# Of the builds and tests of kvdepot itself.
_OF_TESTS = tuple(
    PREFIX + name
    for name in ("ORACLE_VENV", "ORACLE_SEEDS", "ORACLE_FIRST_SEED", "SOAK_SECONDS", "TRACE")
)
# What Kubernetes sets in every pod of a namespace for a Service called kvdepot or
# kvdepot-ANYTHING ("service links").
_SERVICE_LINK = re.compile(
    PREFIX
    + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def variable_of(name: str) -> str:
    """The variable of the option ``name``."""
    return PREFIX + name.upper()


def read(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The values of those of the options ``names`` that have a variable set.

    A service link is never an option. One that has an option's name is told in the log,
    and so is what is unknown.
    """
    options = {variable_of(name): name for name in names}
    given = {}
    for variable, value in environ.items():
        if variable in options:
            if _SERVICE_LINK.fullmatch(variable) and _SERVICE_ADDRESS.match(value):
                service = variable.removesuffix("_PORT").lower().replace("_", "-")
                logger.warning(
                    "%s=%s is ignored: Kubernetes set it for the Service %s; set "
                    "enableServiceLinks: false in the pod, and give --%s to choose the port",
                    *(variable, value, service, options[variable].replace("_", "-")),
                )
            else:
                given[options[variable]] = value
    for message in unknown(environ, options.values()):
        logger.warning(message)
    return given


def unknown(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """What is to be said of variables that neither an option of ``names`` nor a command has."""
    known = [*map(variable_of, names), *_NO_OPTIONS]
    return [
        f"{variable} is no variable of kvdepot and is ignored"
        + did_you_mean(variable.upper(), known)
        for variable in environ
        if variable.startswith(PREFIX)
        and variable not in known
        and variable not in _OF_TESTS
        and not _SERVICE_LINK.fullmatch(variable)
    ]
