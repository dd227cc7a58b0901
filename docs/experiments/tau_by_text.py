"""Where a drafter's tau is lost: along answers to prompts that it was trained on, to held-out ones, and to benchmarks.

python docs/experiments/tau_by_text.py --drafter FOLDER --work-dir WORK_DIR --out FILE [--target smollm2-135m]
    [--sequences 64] [--new-tokens 128] [--workloads mt_bench humaneval gsm8k spec_bench chat]

WORK_DIR is where rayspec train left its answers, to train on and held out. A plain engine answers the first prompts of
conversations of both, and first turns of the workloads, greedily and in one precision, so that only the prompts differ.
tau(K) counts every position of an answer as a start, by teacher forcing; intervals are percentile bootstraps over
conversations. Beside it stands how sure the target is of what it writes: sure texts are easier to draft.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rayspec.farm.chat import turn_request
from rayspec.provenance import provenance
from rayspec.shipped import target_path
from rayspec.training.acceptance import measure
from rayspec.training.data.answers import AnswerSet, read_answers
from rayspec.training.frozen_target import FrozenTarget
from rayspec.workloads import load_workload
from sglang_ext.adapter.engine import start_engine
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.whole import write_whole

STEPS, DRAWS = 4, 4000
MAX_PROMPT_TOKENS = 512
CHAINS = "chains_and_those_with_1_to_K_right"
Named = tuple[list[str], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drafter", required=True, type=Path)
    parser.add_argument("--work-dir", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--workloads", nargs="*", default=["mt_bench", "humaneval", "gsm8k", "spec_bench", "chat"])
    options = parser.parse_args()
    folder = str(target_path(options.target))
    target, (drafter, _) = FrozenTarget.load(folder, torch.float32), load_drafter(options.drafter)
    asked: dict[str, Named] = {  # names of prompts, and their tokens
        "trained on": own_prompts(read_answers(options.work_dir / "answers"), options.sequences),
        "held out": own_prompts(read_answers(options.work_dir / "held_out"), options.sequences),
    }
    for name in options.workloads:
        asked[name] = first_turns(target.tokenizer, name, options.sequences)
    engine = start_engine(folder, None, max_running_requests=16, context_length=1024, max_total_tokens=16384)
    found: dict[str, Any] = {}
    for name, (ids, prompts) in asked.items():
        sampling = {"temperature": 0.0, "max_new_tokens": options.new_tokens}
        outputs = [a["output_ids"] for a in engine.generate(input_ids=prompts, sampling_params=sampling)]
        found[name] = {**report(drafter, target, ids, prompts, outputs), **certainty(target, prompts, outputs)}
        head = {"command": " ".join(["python", *sys.argv]), **provenance(), "drafter": options.drafter.name}
        write_whole(options.out, json.dumps({**head, "by_text": found}, indent=1) + "\n")
        print(name, {k: v for k, v in found[name].items() if k not in ("prompts", CHAINS)}, flush=True)
    engine.shutdown()


def own_prompts(answers: AnswerSet, count: int) -> Named:
    """First prompts of conversations, drawn without repetition; called by their numbers."""
    chosen = [str(n) for n in np.random.default_rng(0).permutation(len(answers))[:count]]
    ids = answers.token_ids_NL
    return chosen, [ids[int(n), : int(answers.prompt_length_N[int(n)])].tolist() for n in chosen]


def first_turns(tokenizer: Any, workload: str, count: int) -> Named:
    """As a sweep asks them, drawn without repetition among those that are short enough; called by their ids."""
    conversations, found = load_workload(workload, 0), dict[str, list[int]]()
    for n in np.random.default_rng(0).permutation(len(conversations)):
        asked = turn_request(conversations[n], [], tokenizer)
        ids = asked["input_ids"] if "input_ids" in asked else tokenizer.encode(asked["prompt"])
        if len(ids) <= MAX_PROMPT_TOKENS:
            found[conversations[n].id] = ids
    return [*found][:count], [*found.values()][:count]


def report(
    drafter: Any, target: FrozenTarget, ids: Sequence[str], prompts: Sequence[Any], outputs: Sequence[Any]
) -> dict[str, Any]:
    """tau(1) .. tau(K) with intervals."""
    rows, mean_length = [], float(np.mean([len(o) for o in outputs]))
    asked = [(n, p, o) for n, p, o in zip(ids, prompts, outputs, strict=True) if len(o) > STEPS + 1]
    for _, prompt, output in tqdm(asked, leave=False):
        accepted = measure(drafter, target, one(prompt, output), num_steps=STEPS, batch_size=1, chunk_rows=256)
        rows.append([accepted.chains, *(u * accepted.chains for u in accepted.u)])
    sums = np.array(rows)  # of each conversation: chains, and those whose first 1 .. K drafts are right
    drawn = sums[np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))].sum(axis=1)
    tau = 1 + (drawn[:, 1:] / drawn[:, :1]).cumsum(axis=1)
    total = sums.sum(axis=0)
    point = 1 + (total[1:] / total[0]).cumsum()
    low, high = np.percentile(tau, [2.5, 97.5], axis=0)
    return {
        "conversations": len(sums),
        "prompts": [n for n, _, _ in asked],
        "mean_answer_tokens": round(mean_length, 1),
        "tau": [[round(float(x), 4) for x in found] for found in zip(point, low, high, strict=True)],
        CHAINS: [[round(x) for x in row] for row in rows],
    }


@torch.no_grad()
def certainty(target: FrozenTarget, prompts: Sequence[Any], outputs: Sequence[Any]) -> dict[str, float]:
    """How sure the target is of its own answers, by token: probability of the one that it takes, entropy in nats."""
    sure = entropy = tokens = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        hidden_LH = target.last_hidden(torch.tensor([prompt + output]))[0, len(prompt) - 1 : -1]
        probs_LV = target.distribution(hidden_LH, torch.float32)
        sure += float(probs_LV.amax(dim=1).sum())
        entropy += float(-(probs_LV * probs_LV.clamp_min(1e-30).log()).sum())
        tokens += len(output)
    return {"target_takes_with": round(sure / tokens, 4), "target_entropy": round(entropy / tokens, 4)}


def one(prompt: list[int], output: list[int]) -> AnswerSet:
    ids = torch.tensor([prompt + output], dtype=torch.int32)
    return AnswerSet(
        name="answered anew",
        sha256="",
        token_ids_NL=ids,
        loss_mask_NL=torch.arange(ids.shape[1])[None] >= len(prompt),
        prompt_length_N=torch.tensor([len(prompt)], dtype=torch.int32),
        length_N=torch.tensor([ids.shape[1]], dtype=torch.int32),
        temperature_N=torch.zeros(1),
    )


if __name__ == "__main__":
    main()
