"""The algorithm that serves Hydra."""

from sglang_ext.drafters.shared.last_hidden.serving import served_by

SERVING = served_by(chain="HYDRA", trees={"static": "HYDRA"})
