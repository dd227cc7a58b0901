"""Training of drafters on a target's own answers. Plain torch but for `ray_train` (its workers), `served` (the check in
SGLang) and `data.answer_engines` (the answers), which run on Ray."""
