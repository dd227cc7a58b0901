"""The algorithms that serve Medusa; its heads in a chain are BPD."""

from sglang_ext.drafters.shared.last_hidden.serving import served_by

SERVING = served_by(chain="BPD", trees={"static": "MEDUSA", "slim": "SLIM"})
