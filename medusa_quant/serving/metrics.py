"""`/metrics`: the engine's counts in Prometheus' format, under vLLM's names so that its dashboards fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..runtime.engine import Engine

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ServerMetrics:
    """finished: requests by the reason they ended. first_token, between_tokens: seconds."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self.finished: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first_token = self._histogram("time_to_first_token", "From a request's arrival.")
        self.between_tokens = self._histogram("inter_token_latency", "Mean of each request.")

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        batch, counts = self._engine.batch, self._engine.metrics
        yield self._gauge("num_requests_running", "In a slot.", batch.running)
        yield self._gauge("num_requests_waiting", "In the queue.", batch.waiting)
        for name, help_text, value in (
            ("prompt_tokens", "Tokens of prompts taken in.", counts.prompt_tokens),
            ("generation_tokens", "Tokens written.", counts.generation_tokens),
            ("num_preemptions", "Requests put back for want of cache.", counts.preemptions),
            ("spec_decode_num_drafts", "Trees verified.", counts.drafts),
            ("spec_decode_num_draft_tokens", "Nodes of those trees.", counts.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", counts.accepted_tokens),
        ):
            yield self._counter(name, help_text, [((), value)])
        positions = list(counts.accepted_per_position)
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted of each head.",
            [((str(position),), value) for position, value in enumerate(positions)],
            ("position",),
        )
        ended = [((reason,), value) for reason, value in sorted(self.finished.items())]
        yield self._counter("request_success", "Requests by how they ended.", ended, ("finished_reason",))
        length = counts.mean_acceptance_length
        yield self._gauge("mean_acceptance_length", "Tokens a draft yields.", length, "medusa_quant")

    def _histogram(self, name: str, help_text: str) -> Histogram:
        family = Histogram(
            f"vllm:{name}_seconds", help_text, ["model_name"], buckets=_SECONDS, registry=self._registry
        )
        return family.labels(self._model)

    def _gauge(self, name: str, help_text: str, value: float, space: str = "vllm") -> Metric:
        family = GaugeMetricFamily(f"{space}:{name}", help_text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(
        self,
        name: str,
        help_text: str,
        values: Iterable[tuple[tuple[str, ...], float]],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name", *labels])
        for label, value in values:
            family.add_metric([self._model, *label], value)
        return family
