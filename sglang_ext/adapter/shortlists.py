"""How many tokens draft heads score on an accelerator, counted without waiting for it.

A head notes in each pass what it has scored for each row (`DraftHead.note`); a replayed graph notes it anew. Of a step
that is counted, what the rows of its requests have is added up on the device; rows that a graph was padded with do not
count. P = draft positions, B = requests, R = rows of a request.
"""

import torch

MOST_REQUESTS = 1024  # of a larger batch so many are counted


class Shortlists:
    """`positions`, `rows`: the most of a draft, and of a request at one of them. Heads and their graphs keep where
    `noted_PBR` is, so that it is one for all drafters that a server hosts."""

    def __init__(self, positions: int, rows: int, device: str) -> None:
        with torch.inference_mode(False):  # passes in any mode write to these
            self.noted_PBR = torch.zeros(positions, MOST_REQUESTS, rows, dtype=torch.int32, device=device)
            self._rows_P, self._tokens_P = torch.zeros(2, positions, dtype=torch.int64, device=device)
            self._most = torch.zeros((), dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Before a step that is counted: the prefills and steps before it have noted, too."""
        self.noted_PBR.zero_()

    def add(self, requests: int) -> None:
        """Behind it: what the rows of its first so many requests have."""
        noted_PBR = self.noted_PBR[:, :requests]
        self._rows_P += (noted_PBR > 0).sum(dim=(1, 2))
        self._tokens_P += noted_PBR.sum(dim=(1, 2))
        torch.maximum(self._most, noted_PBR.amax(), out=self._most)

    def read(self) -> tuple[list[int], list[int], int]:
        """Rows, and tokens that were scored for them, at each position since the start; the most for one row since the
        reading before. Waits for all streams of the device."""
        torch.get_device_module(self._most.device).synchronize()
        most = int(self._most)
        self._most.zero_()
        return self._rows_P.tolist(), self._tokens_P.tolist(), most
