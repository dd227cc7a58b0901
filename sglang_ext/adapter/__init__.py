"""The only package that imports SGLang. Everything here is written against the pinned version below.

plugin.py      entry point of SGLang's general plugins: models, algorithms, hooks
patches.py     every change of SGLang's own modules and classes, and nowhere else
activation.py  entry point of SGLang's platforms: ours, only where no accelerator is present
platform.py    the CPU platform
attention.py   attention of the CPU platform
spec_ops.py    tree, verification and cache operations of the CPU platform
fused_ops.py   norm and rotary embedding of the CPU platform
packing.py     projections of the CPU platform
requests.py    what a request may ask, checked before it goes to the scheduler
stock_weights.py  numbers in the weights of a stock drafter
internals.py   every SGLang internal that we touch or import, by name
target_hosts.py  the targets that a drafter can read the states of
algorithms.py  which speculative algorithm serves which drafter
spec_algorithm.py      our algorithms as SGLang registers them (MEDUSA, BPD, HYDRA, SLIM)
last_hidden_worker.py  their worker: drafts from the target's last hidden state, no draft model
draft_worker.py        EAGLE-3's worker with a draft loop that asks the head for its candidates
side_stream.py routing beside the drafter's layer, on a CUDA stream of its own
step_clock.py  where the time of a step goes
swap.py        live swap of the drafter in a running scheduler
models/        SGLang model classes (an external model package)
engine.py      what rayspec calls: engines, checks, live swap
"""

SGLANG_VERSION = "0.5.23"
