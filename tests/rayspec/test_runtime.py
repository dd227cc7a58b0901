"""An engine that cannot start says why and leaves nothing; the load generator against a scripted engine."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayspec.farm.actor import RuntimeHandle, cluster
from rayspec.farm.load import Load, RequestFailed, closed_loop
from rayspec.farm.processes import environment, redirected_output
from rayspec.farm.runtime import EngineFailed, EngineSpec
from rayspec.shipped import ASSETS
from rayspec.workloads import Prompt


def test_a_failing_start_carries_the_cause_and_leaves_no_process(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(ASSETS / "drafters" / "full", drafter)
    (drafter / "model.safetensors").unlink()
    spec = EngineSpec(
        target=str(ASSETS / "target"), drafter=str(drafter), draft_steps=2, overrides={"max_total_tokens": 4096}
    )
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with cluster(None):
        handle = RuntimeHandle(spec, tmp_path / "engine.log", num_cpus=1, num_gpus=0, block_timeout_s=60)
        with pytest.raises(
            EngineFailed, match=r"drafter did not start: RuntimeError: Cannot find any model weights"
        ) as caught:
            handle.finish_start(handle.begin_start(), timeout_s=900)
        handle.stop()
    assert f"--- end of {tmp_path}/engine.log ---" in str(caught.value)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def test_output_of_children_goes_to_the_log_and_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with redirected_output(tmp_path / "log"):
        os.system("echo from a child")
    os.system("echo afterwards")
    assert (tmp_path / "log").read_text() == "from a child\n"
    assert capfd.readouterr().out == "afterwards\n"


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_A", "old")
    monkeypatch.delenv("RAYSPEC_B", raising=False)
    with environment({"RAYSPEC_A": "new", "RAYSPEC_B": "new"}):
        assert (os.environ["RAYSPEC_A"], os.environ["RAYSPEC_B"]) == ("new", "new")
    assert os.environ["RAYSPEC_A"] == "old"
    assert "RAYSPEC_B" not in os.environ


class ScriptedEngine:
    """Streams two chunks a request and remembers how many ran at once."""

    def __init__(self, reason: str = "length") -> None:
        self.reason = reason
        self.running = self.most = 0

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any], *, stream: bool
    ) -> AsyncIterator[dict[str, Any]]:
        async def chunks() -> AsyncIterator[dict[str, Any]]:
            self.running += 1
            self.most = max(self.most, self.running)
            meta: dict[str, Any] = {"finish_reason": None, "prompt_tokens": len(prompt)}
            yield {"output_ids": [1], "meta_info": meta}
            await asyncio.sleep(0.01)
            self.running -= 1
            spec = {"spec_verify_ct": 1, "spec_num_correct_drafts": 1, "spec_correct_drafts_histogram": [0, 1]}
            done = {"finish_reason": {"type": self.reason, "message": "too long"}}
            yield {"output_ids": [1, 2, 3], "meta_info": {**meta, **done, **spec}}

        return chunks()


def load(count: int, concurrency: int) -> Load:
    prompts = tuple(Prompt(id=str(i), category="c", text="x" * (i + 1)) for i in range(count))
    return Load(prompts=prompts, concurrency=concurrency, max_new_tokens=3, temperature=0.0, ignore_eos=False)


@pytest.mark.parametrize(("count", "concurrency", "most"), [(5, 1, 1), (5, 3, 3), (2, 4, 2)])
def test_closed_loop_keeps_as_many_streams_as_asked(count: int, concurrency: int, most: int) -> None:
    engine = ScriptedEngine()
    wall_s, records = asyncio.run(closed_loop(engine, load(count, concurrency)))
    assert engine.most == most
    assert [r.prompt_id for r in records] == [str(i) for i in range(count)]
    assert all(0 < r.ttft_s < r.e2e_s <= wall_s for r in records)
    assert [(r.output_ids, r.verify_steps, r.accepted_histogram) for r in records] == [((1, 2, 3), 1, (0, 1))] * count
    assert all(len(r.chunk_gaps_s) == 1 for r in records)


def test_an_aborted_request_fails_the_block_with_the_message() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(closed_loop(ScriptedEngine("abort"), load(2, 1)))
    assert caught.group_contains(RequestFailed, match="prompt 0: ended with abort: too long")
