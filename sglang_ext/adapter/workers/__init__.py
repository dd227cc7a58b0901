"""SGLang's draft workers with draft loops of ours.

`eagle` (EAGLE-3, and STANDALONE with `drawn_standalone`, `standalone_cache`), `last_hidden` (Medusa, Hydra, BPD and
SLiM), `context` (SpecFormer, Hydra with a prefix layer); all of them `timed`, and able to follow a `policy`. They share
`sampling` (what drafts are drawn from and verified with), `tree_verify` (what SGLang verifies) and `extend_graphs`.
"""
