"""Recognises folders of PEFT adapters (LoRA and its kin), which are no targets."""

import json
import os
from pathlib import Path

MARK = "adapter_config.json"  # what PEFT's save_pretrained writes beside the adapter's weights


def check_no_adapter(folder: str | Path) -> None:
    """Raise ValueError for a folder that holds an adapter, also beside a whole model: transformers, with which training
    reads a target, would put it on, and SGLang, which serves the target, would not."""
    file = Path(folder) / MARK
    if not os.path.isfile(file):
        return
    try:
        config = json.loads(file.read_text())
        base, kind = config.get("base_model_name_or_path"), config.get("peft_type")
    except (OSError, ValueError, AttributeError):
        base = kind = None
    named = f"a {kind or 'PEFT'} adapter of {base or 'an unnamed model'}"
    raise ValueError(
        f"target {folder} holds {named} ({MARK}): a drafter learns and is measured on one set of weights, which "
        "training and SGLang must read alike; merge the adapter into its model first, with peft: "
        f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(MERGED), put "
        f"the tokenizer there, and name MERGED as the target. If it is merged already, take {MARK} out of the folder"
    )
