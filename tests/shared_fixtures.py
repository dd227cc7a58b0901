"""What a process has that runs tests: a target small enough to train drafters for in seconds (random weights, a byte
tokenizer, some text to cut from), kernels that can be interpreted, and stores of MLflow that are made at once."""

import importlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import mlflow.store.db.utils
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no model is one without asking the hub, some seconds a name

if not torch.cuda.is_available():
    # Triton decides at a kernel's definition whether it is interpreted, and looks again at each launch (the fixture
    # `interpreter`); engines that tests start must not inherit it
    os.environ["TRITON_INTERPRET"] = "1"
    # not __init__ by that name: it would run twice, and the second registration of an operator frees the first
    for _file in sorted((Path(__file__).parents[1] / "kernels" / "rayspec_kernels").glob("*/[!_]*.py")):
        importlib.import_module(f"rayspec_kernels.{_file.parent.name}.{_file.stem}")
    del os.environ["TRITON_INTERPRET"]

import triton.language as tl
from sqlalchemy import Engine, event, inspect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from triton.runtime import interpreter as triton_interpreter

from rayspec.training.frozen_target import FrozenTarget


@event.listens_for(Engine, "connect")
def _without_waiting_for_the_disk(connection: Any, record: Any) -> None:
    """MLflow's stores of this process need not outlive a power cut; of 7 s to make one, 5 were waits for the disk."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


_migrated = sqlite3.connect(":memory:", check_same_thread=False)  # empty until the first store is made
_migrate = mlflow.store.db.utils._initialize_tables


def _tables_as_migrated_before(engine: Engine) -> None:
    """The tables of a new store of MLflow: by its own migrations once a process, a second of work, and copied then."""
    if engine.dialect.name != "sqlite" or inspect(engine).get_table_names():
        return _migrate(engine)  # which also finds what is half made
    is_first = not _migrated.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if is_first:
        _migrate(engine)
    with engine.connect() as connection:
        store = connection.connection.driver_connection
        assert isinstance(store, sqlite3.Connection), "the dialect says so"
        source, copy = (store, _migrated) if is_first else (_migrated, store)
        source.backup(copy)


mlflow.store.db.utils._initialize_tables = _tables_as_migrated_before


_put_in_place, _look_up = triton_interpreter._patch_lang, triton_interpreter._get_np_dtype
_numpy_types: dict[str, Any] = {}


def _put_in_place_once(function: Any) -> Any:
    """Triton's interpreter puts its functions in place of the language's at a launch, and again at each call of a
    function within it, where they are in place: a quarter of all of its time."""
    languages = [module for module in function.__globals__.values() if module is tl or module is tl.core]
    found = (member for module in languages for member in (module.load, module.tensor.__add__))
    return _put_in_place(function) if any(map(tl.core.is_builtin, found)) else triton_interpreter._LangPatchScope()


def _numpy_type(of: Any) -> Any:
    """Looked up once; the interpreter makes its table of all types at every step."""
    name = of.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _look_up(of)
    return _numpy_types[name]


triton_interpreter._patch_lang, triton_interpreter._get_np_dtype = _put_in_place_once, _numpy_type


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of the kernels run in Triton's interpreter, where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def save_tiny_target(folder: Path, seed: int = 0) -> Path:
    """A Llama of 8 layers (the fewest with three default taps), 32 wide, 257 byte tokens, tied head."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{symbol: i for i, symbol in enumerate(alphabet, start=1)}}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,  # the default's near-uniform logits would make every greedy token a coin toss
        bos_token_id=0,
        eos_token_id=0,
        rms_norm_eps=1e-5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_target(tiny_target_folder: Path) -> FrozenTarget:
    return FrozenTarget.load(tiny_target_folder, torch.float32)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source-like files, enough lines for a few dozen short prompts."""
    folder = tmp_path_factory.mktemp("texts")
    for n in range(4):
        lines = [f"def f{n}_{i}(a, b):\n    return a * {i} + b\n" for i in range(30)]
        (folder / f"module_{n}.py").write_text("\n".join(lines))
    return folder
