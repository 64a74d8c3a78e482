"""What ``/metrics`` counts."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moonvit.engines import Usage
from moonvit.server.queue import Admission, PendingBytes

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        admission: Its queue.
        pending: Its request bodies.
    """

    def __init__(self, admission: Admission, pending: PendingBytes) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "moonvit_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self.errors = Counter("moonvit_errors", "Refused and failed requests by code.", ["code"], registry=registry)
        self.images = Counter("moonvit_images", "Pictures in answered chat requests.", registry=registry)
        self.tokens = Counter("moonvit_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self.seconds = Histogram(
            "moonvit_request_seconds",
            "Seconds from the first byte of a request to the last of its answer.",
            ["route"],
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
            registry=registry,
        )
        self.first_token = Histogram(
            "moonvit_first_token_seconds",
            "Seconds from a chat request to the first piece of its answer.",
            buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
            registry=registry,
        )
        gauges = (
            ("moonvit_in_flight", "Chat requests inside, waiting ones included.", lambda: admission.inside),
            ("moonvit_running", "Chat requests the engine works on.", lambda: admission.running),
            ("moonvit_pending_body_bytes", "Bytes of request bodies held.", lambda: pending.held),
        )
        for name, text, read in gauges:
            Gauge(name, text, registry=registry).set_function(read)

    def count(self, usage: Usage, images: int) -> None:
        """Count an answered chat request.

        Args:
            usage: Its tokens.
            images: Its pictures.
        """
        self.images.inc(images)
        for kind, value in (
            ("prompt", usage.prompt_tokens),
            ("image", usage.image_tokens),
            ("completion", usage.completion_tokens),
            ("reasoning", usage.reasoning_tokens),
            ("cached", usage.cached_tokens),
        ):
            self.tokens.labels(kind).inc(value)

    def render(self) -> bytes:
        """The page Prometheus reads.

        Returns:
            Text in the exposition format.
        """
        return generate_latest(self._registry)
