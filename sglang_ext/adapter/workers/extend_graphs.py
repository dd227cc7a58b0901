"""CUDA graphs of the extend after a verification, with the head's own answer at their end."""

from contextlib import nullcontext
from typing import Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
from torch import Tensor

from sglang_ext.adapter.models.hosted_head import Answer, HeadRequest, HostsHead


class HeadExtendGraphs(EAGLEDraftExtendCudaGraphRunner):
    """SGLang's graphs, in which a head of ours is asked for its k best tokens, as in the draft loop, instead of for
    logits of the whole vocabulary: at draft position 0, too, a head costs what it costs.

    Under rejection sampling they are SGLang's: a distribution over the whole vocabulary is wanted there. That a replay
    writes its answer where the capture left it is what CUDA graphs promise; it has not been run on a GPU yet.
    """

    def __init__(self, worker: Any, **options: Any) -> None:
        self._captured: dict[int, Answer] = {}  # by the requests that a graph is for; its replay writes there
        self._answer: Answer | None = None  # of the last replay
        super().__init__(worker, **options)  # which captures

    def capture_one_shape(self, size: int, *args: Any, **kwargs: Any) -> None:
        model = self.eagle_worker.draft_runner.model
        is_asked = isinstance(model, HostsHead) and not get_spec().speculative_use_rejection_sampling
        request = HeadRequest(0, self.eagle_worker.topk)
        with model.logits_processor.answering(request) if is_asked else nullcontext():
            super().capture_one_shape(size, *args, **kwargs)
        if is_asked:
            assert request.best is not None, "the pass that was captured comes last"
            self._captured[size] = request.best

    def execute(self, forward_batch: Any, select_index: Tensor) -> Any:
        if len(select_index) not in self.capture_bs:
            self._blank_padding(len(forward_batch.input_ids), len(select_index))
        output = super().execute(forward_batch, select_index)
        captured = self._captured.get(self.bs)
        # the next replay writes over it, while a step may still be to come that reads it
        self._answer = None if captured is None else Answer(*(x[: self.raw_bs].clone() for x in captured))
        return output

    def _blank_padding(self, tokens: int, requests: int) -> None:
        """SGLang leaves what a batch before had in the rows behind these. A head whose rows share what they choose
        (DynaSpec's union) would let those requests choose, too."""
        for static in (self.buffers.input_ids, self.buffers.hidden_states):
            if static is not None:  # an independent drafter reads no hidden state
                static[tokens:].zero_()
        self.buffers.select_index[requests:] = tokens

    def take_answer(self) -> Answer | None:
        """The head's answer of the replay since the last call; None where nothing was replayed, or nothing asked."""
        answer, self._answer = self._answer, None
        return answer
