"""CUDA graphs of the extend after a verification, with the head's own answer at their end."""

from typing import Any

from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
from torch import Tensor

from sglang_ext.adapter.models.hosted_head import Answer, HeadRequest, HostsHead


class HeadExtendGraphs(EAGLEDraftExtendCudaGraphRunner):
    """SGLang's graphs, in which a head of ours is asked for its k best tokens, as in the draft loop, instead of for
    logits of the whole vocabulary: at draft position 0, too, a head costs what it costs.

    A batch that draws its drafts asks the head again, behind the replay and about the same rows, for its distribution:
    greedy batches of such a server then pay for none. That a replay writes its answer where the capture left it is what
    CUDA graphs promise.
    """

    def __init__(self, worker: Any, **options: Any) -> None:
        # by the requests that a graph is for: what a replay answers, and is asked about, is written there
        self._captured: dict[int, HeadRequest] = {}
        self._replayed: HeadRequest | None = None  # of the last replay
        super().__init__(worker, **options)  # which captures

    def capture_one_shape(self, size: int, *args: Any, **kwargs: Any) -> None:
        model = self.eagle_worker.draft_runner.model
        if not isinstance(model, HostsHead):
            super().capture_one_shape(size, *args, **kwargs)
            return
        request = HeadRequest(0, self.eagle_worker.topk)
        with model.logits_processor.answering(request):
            super().capture_one_shape(size, *args, **kwargs)
        assert request.best is not None, "the pass that was captured comes last"
        self._captured[size] = request

    def execute(self, forward_batch: Any, select_index: Tensor) -> Any:
        if len(select_index) not in self.capture_bs:
            self._blank_padding(len(forward_batch.input_ids), len(select_index))
        output = super().execute(forward_batch, select_index)
        self._replayed = self._captured.get(self.bs)
        return output

    def _blank_padding(self, tokens: int, requests: int) -> None:
        """SGLang leaves what a batch before had in the rows behind these. A head whose rows share what they choose
        (DynaSpec's union) would let those requests choose, too."""
        for static in (self.buffers.input_ids, self.buffers.hidden_states):
            if static is not None:  # an independent drafter reads no hidden state
                static[tokens:].zero_()
        self.buffers.select_index[requests:] = tokens

    def answer(self, request: HeadRequest) -> None:
        """Answer what is asked about the rows of the last replay; nothing where none was replayed since."""
        captured, self._replayed = self._replayed, None
        if captured is None:
            return
        assert captured.best is not None, "it was captured"
        assert captured.asked is not None, "it was captured"
        if request.temperature_T1 is None:
            # the next replay writes over it, while a step may still be to come that reads it
            request.best = Answer(*(x[: self.raw_bs].clone() for x in captured.best))
        else:
            request.answer_with(*captured.asked.first(self.raw_bs))
