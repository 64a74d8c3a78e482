"""The plugin inside vLLM: Kimi models of any vLLM that is installed beside this package get the bounded tower.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). It names classes and imports none:
they are in ``model.py``, which only a process that loads a model opens.
"""

from __future__ import annotations

import logging
import os

SWITCH = "MOONVIT_VLLM"
"""Environment variable; ``off`` leaves vLLM as it is."""
VERSIONS = ((0, 30), (0, 32))
"""First and last release that the classes were held against."""
CLASSES = {
    "KimiVLForConditionalGeneration": "BoundedKimiVL",
    "KimiK25ForConditionalGeneration": "BoundedKimiK25",
    "KimiK3ForConditionalGeneration": "BoundedKimiK3",
}
"""Architecture in vLLM's registry -> our class."""
log = logging.getLogger("vllm.moonvit")


def register() -> None:
    """Put our classes in the place of vLLM's, under the same names; where that cannot be done, say why and leave them."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        log.info("moonvit is switched off by %s; vLLM's own vision towers run", SWITCH)
        return
    from vllm import ModelRegistry

    for architecture, name in CLASSES.items():
        ModelRegistry.register_model(architecture, f"{__name__}.model:{name}")
