"""Drafters that stay beside the running one, each a head with the graphs of its own, so that a swap back to one costs
nothing. All share the running body: a swap that changes it lets them go."""

from dataclasses import dataclass, replace
from typing import Any

from sglang_ext.adapter.models.hosted_head import Hosted


@dataclass(frozen=True, kw_only=True)
class GraphSet:
    """What a draft worker replays, and the attention backends whose buffers these graphs read: a later capture gives a
    backend new ones. As in SGLang's own states of adaptive draft lengths."""

    draft_attn_backend: Any
    draft_extend_attn_backend: Any
    cuda_graph_runner: Any
    cuda_graph_runner_for_draft_extend: Any

    @classmethod
    def of(cls, worker: Any) -> "GraphSet":
        return cls(**{name: getattr(worker, name) for name in cls.__dataclass_fields__})

    @property
    def runners(self) -> list[Any]:
        """None where this device has no graphs."""
        return [r for r in (self.cuda_graph_runner, self.cuda_graph_runner_for_draft_extend) if r is not None]

    def without_graphs(self) -> "GraphSet":
        return replace(self, cuda_graph_runner=None, cuda_graph_runner_for_draft_extend=None)

    def put_in(self, worker: Any) -> None:
        for name in self.__dataclass_fields__:
            setattr(worker, name, getattr(self, name))
        worker.draft_runner.draft_attn_backend = self.draft_attn_backend
        if self.draft_extend_attn_backend is not None:  # which the pass behind a verification reads there
            worker.draft_runner.attn_backend = self.draft_extend_attn_backend

    def free(self) -> None:
        for runner in self.runners:
            runner.backend.cleanup()


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A drafter that can run again as it is."""

    hosted: Hosted
    graphs: GraphSet
