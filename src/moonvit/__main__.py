"""``python -m moonvit``."""

from moonvit.cli import main

main()
