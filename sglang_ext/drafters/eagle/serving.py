"""The algorithm that serves EAGLE-1 and 2: SGLang's own, with `adapter/models/eagle.py`."""

from sglang_ext.drafters.serving import Serving

SERVING = Serving(chain="EAGLE", trees={None: "EAGLE", "slim": "EAGLE"}, is_adaptive=True)
