"""The algorithm that serves an independent drafter: SGLang's own, with `adapter/models/independent.py`."""

from sglang_ext.drafters.serving import Serving

SERVING = Serving(chain="STANDALONE", trees={None: "STANDALONE"})
