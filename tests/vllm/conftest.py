"""The launch of the CPU build in this process, for engines that run in it, and in every process that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCH = str(Path(__file__).with_name("launch"))
sys.path.append(LAUNCH)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [LAUNCH, os.environ.get("PYTHONPATH")]))
