"""The algorithm that serves EAGLE-3: SGLang's own, with `adapter/models/eagle3.py`."""

from sglang_ext.drafters.serving import Serving

SERVING = Serving(chain="EAGLE3", trees={None: "EAGLE3", "slim": "EAGLE3"}, is_adaptive=True)
