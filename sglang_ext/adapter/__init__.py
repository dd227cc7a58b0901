"""The only package that imports SGLang. Everything here is written against the pinned version below.

What SGLang calls: `plugin` (entry point of its plugins: models, algorithms, hooks), `activation` (entry point of its
platforms: ours, only where no accelerator is present), `models/` (its external model package).
What rayspec calls: `engine` (engines, checks, live swap), `server_fields`, `algorithms` (which speculative algorithm
serves which drafter).

internals.py   every SGLang internal that we touch or import, by name
patches.py     every change of SGLang's own modules and classes, and nowhere else
cpu/           SGLang without an accelerator: platform, attention, and what stands in for CUDA operations
models/        SGLang model classes, and the head that they host
workers/       draft workers: draft loops, drawing, trees to verify, graphs, the policy
target_hosts.py  the targets that a drafter can read the states of
requests.py    what a request may ask, checked before it goes to the scheduler; stop_regex.py: what may be searched for
spec_algorithm.py, swap.py, step_clock.py, shortlists.py, metrics.py, side_stream.py, served_target.py, keys.py
               our algorithms as SGLang registers them; live swap; where the time of a step goes; what heads score on an
               accelerator; counters; routing beside the drafter's layer; what the server serves; keys kept out of what
               it shows
"""

SGLANG_VERSION = "0.5.23"
