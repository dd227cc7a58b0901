"""The target as draft training sees it: frozen, its taps and its own distribution from one forward pass.

B = sequences, T = positions, G = target hidden size, V = vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rayspec.messages import first_line
from rayspec.training.precision import fast_dtype
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.target import TargetInfo, default_taps, tokenizer_sha256
from sglang_ext.fingerprints import file_sha256

if TYPE_CHECKING:  # seconds, which commands and workers that load no target need not wait for
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerFast


def target_sha256(folder: str | Path) -> str:
    """Fingerprint of a target folder: its weights and its config. Raises ValueError if there are none."""
    files = sorted(Path(folder).glob("*.safetensors")) if os.path.isdir(folder) else []
    if not files or not os.path.isfile(Path(folder) / "config.json"):
        raise ValueError(
            f"target={folder} holds no config.json with *.safetensors; give the folder of a Hugging Face model, or "
            "fetch one: rayspec fetch"
        )
    digest = hashlib.sha256()
    for file in (Path(folder) / "config.json", *files):
        digest.update(bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()


def _unpacking(folder: str | Path) -> dict[str, Any]:
    """Options with which transformers unpacks experts in MXFP4 (GPT-OSS) on any device; left to itself it does so only
    where it finds no kernels for them."""
    from transformers import AutoConfig, Mxfp4Config

    packed = getattr(AutoConfig.from_pretrained(str(folder), local_files_only=True), "quantization_config", None)
    is_mxfp4 = packed is not None and packed.get("quant_method") == "mxfp4"
    return {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}


def _shard_layers(model: Any, workers: DeviceMesh) -> None:
    """Leave each worker its part of every layer (FSDP2). A layer is whole only while it computes, so all workers must
    make each forward pass. Embedding, last norm and LM head stay whole: training reads their weights themselves.
    A layer goes to the workers' device before it is cut, and no two of them are there whole at once.
    """
    from torch.distributed.fsdp import fully_shard

    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=workers, reshard_after_forward=True)


@dataclass(frozen=True)
class FrozenTarget:
    """A target in eval mode without gradients, and its tokenizer."""

    folder: str
    sha256: str
    model: Any
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | None = None,
        shards: DeviceMesh | None = None,
        sha256: str | None = None,
    ) -> FrozenTarget:
        """`device`: where it computes, None for the CPU; `dtype`: None for what is fast there; `shards`: the workers
        that hold its layers together; `sha256`: of the folder, where it is known. Raises ValueError for a folder that
        does not hold all of the model's weights."""
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        sha256 = sha256 or target_sha256(folder)
        dtype = dtype or fast_dtype(device or torch.device("cpu"))
        unpacking = _unpacking(folder)
        model, found = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, output_loading_info=True, **unpacking
        )
        for parameter in model.parameters() if unpacking else ():  # transformers unpacks into bfloat16
            parameter.data = parameter.data.to(dtype)
        missing = sorted(found["missing_keys"])
        if missing:  # transformers would draw them at random
            raise ValueError(f"the target {folder} has no tensor {missing[0]} ({len(missing)} missing); copy it again")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        model = model.eval().requires_grad_(False)
        if shards is not None:
            _shard_layers(model, shards)
        return cls(str(folder), sha256, model.to(device or "cpu"), tokenizer)

    @classmethod
    def without_weights(cls, folder: str | Path) -> FrozenTarget:
        """The target on the meta device: its sizes, its tokenizer and its stop tokens. Raises ValueError."""
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

        path = str(folder)
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            with suppress(OSError):  # then the config's
                model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises what it likes for a config that makes no model
            cause = first_line(error)
            raise ValueError(f"target={folder} is no model that can be read: {cause}") from error
        for size in ("hidden_size", "vocab_size", "num_hidden_layers"):
            if getattr(config, size, 0) < 1:
                raise ValueError(
                    f"target={folder} ({config.architectures}) has {size} {getattr(config, size, None)} in its "
                    "config.json; give a model of text alone"
                )
        return cls(path, "", model, tokenizer)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Leave the memory of a GPU to others meanwhile."""
        device = self.device
        self.model.to("cpu")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            yield
        finally:
            self.model.to(device)

    @property
    def num_layers(self) -> int:
        return self.model.config.num_hidden_layers

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """SGLang's default, EAGLE-3's."""
        return default_taps(self.num_layers)

    @property
    def head_VG(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def final_norm_G(self) -> Tensor:
        """What the norm before the LM head multiplies by: its weight, in Gemma one more."""
        weight_G = self.model.get_decoder().norm.weight
        return 1 + weight_G if self.model.config.model_type == "gemma3_text" else weight_G

    @property
    def eos_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding, which are what SGLang gives a drafter; Gemma's own layers read them times sqrt(G)."""
        return F.embedding(ids, self.model.get_input_embeddings().weight)

    @torch.no_grad()
    def features(self, ids_BT: Tensor, taps: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """(taps [B, T, taps * G], normed last hidden state [B, T, G]) of right-padded sequences; `taps` None for
        EAGLE-3's.

        No attention mask: under causal attention a pad on the right changes nothing to its left.
        """
        out = self.model.get_decoder()(input_ids=ids_BT, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[i] for i in taps or self.taps], dim=-1), out.last_hidden_state

    @torch.no_grad()
    def last_hidden(self, ids_BT: Tensor) -> Tensor:
        """`features` without taps, which a target of few layers does not have."""
        return self.model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state

    @torch.no_grad()
    def distribution(self, last_hidden_NG: Tensor, dtype: torch.dtype) -> Tensor:
        """P [N, V]: the target's next-token distribution at temperature 1."""
        logits_NV = F.linear(last_hidden_NG, self.head_VG).to(dtype)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return (logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)).softmax(dim=-1)

    def info(self, name: str | None = None, tap_layers: tuple[int, ...] | None = None) -> TargetInfo:
        """What a drafter's checkpoint says of its target; `name` defaults to the folder's, `tap_layers` to
        EAGLE-3's."""
        config = self.model.config
        return TargetInfo(
            name=name or Path(self.folder).resolve().name,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            tokenizer_sha256=tokenizer_sha256(self.tokenizer),
            tap_layers=self.taps if tap_layers is None else tap_layers,
        )

    def sizes(self) -> dict[str, Any]:
        """What a drafter that is shaped like the target has of it; a family's `Config.of_target` says which."""
        c = self.model.config
        return {
            "hidden_size": c.hidden_size,
            "target_hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "max_position_embeddings": c.max_position_embeddings,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            "rms_norm_eps": c.rms_norm_eps,
        }

    @property
    def rope(self) -> Rope:
        """The rotary embedding of the target's layers, in Gemma 3 of those that see the whole text. Raises ValueError
        for one that drafters do not have."""
        found = getattr(self.model.config, "rope_parameters", None) or {}
        found = found.get("full_attention", found)
        try:
            return Rope.from_json({"rope_theta": 10000.0, "rope_parameters": found})
        except ValueError as error:
            raise ValueError(
                f"the target's {error}; train a drafter without such a layer, of kind medusa, hydra or independent"
            ) from error
