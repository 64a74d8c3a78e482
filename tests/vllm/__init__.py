"""The real engine. Run by ``make test-vllm`` in an environment of its own."""
