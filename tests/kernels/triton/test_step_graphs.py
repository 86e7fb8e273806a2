"""Decode steps of one size are the same operations over the same memory, so a captured one can be replayed for all of them.

A CPU has no graphs. Here a capture keeps the calls of one step, and a replay makes them again: with the tensors and the plan
of the step that was captured, as a graph does. Each replay must be the same operations, shapes, numbers and addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.jit import JITFunction

from pdserve.engine.runner.device.device_runtime import ProcessorRuntime
from pdserve.engine.runner.device.step_graphs import graph_shapes
from pdserve.engine.runner.inputs.step_inputs import StepShape
from tests.support.engine.engine_harness import Harness, harnesses, make_real_engine  # noqa: F401
from tests.support.models.family_checkpoints import make_latent_model
from tests.support.models.lora_adapters import make_adapter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has graphs of its own")
PROMPTS = [[(7 * i + n) % 300 for i in range(n)] for n in (3, 15, 18)]
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 5},
    {"temperature": 0.8, "seed": 7, "max_tokens": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2, "max_tokens": 4},
]


class Trace(TorchDispatchMode):
    """Operations and kernels of one thread, with everything that a graph keeps of them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[object] = []
        self.is_in_kernel = False
        """True while a kernel is interpreted: operations within it are not traced."""
        self._made: dict[int, Tensor] = {}
        """Tensors that the traced work allocated, by address; they stay alive, so that no other gets their address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_in_kernel:
            return func(*args, **(kwargs or {}))
        given = tree_flatten((args, kwargs or {}))[0]
        known = {_memory(value) for value in given if isinstance(value, Tensor)}
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            if isinstance(value, Tensor) and _memory(value) not in known:
                self._made[_memory(value)] = value
        self.note(func._schema.name, [*given, *tree_flatten(result)[0]])
        return result

    def note(self, name: str, values: list[Any]) -> None:
        self.steps.append((name, [self._seen(value) for value in values]))

    def _seen(self, value: Any) -> object:
        if not isinstance(value, Tensor):
            return repr(value)
        address = "made here" if _memory(value) in self._made else value.data_ptr()
        return address, tuple(value.shape), value.stride(), value.dtype


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def traced() -> Iterator[list[object]]:
    run = JITFunction.run

    def noted(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        trace.note(self.__name__, [*args, grid, *(value for _, value in sorted(kwargs.items()))])
        trace.is_in_kernel = True
        run(self, *args, grid=grid, **kwargs)
        trace.is_in_kernel = False

    with pytest.MonkeyPatch.context() as patch, Trace() as trace:
        patch.setattr(JITFunction, "run", noted)
        yield trace.steps


class ReplayRuntime(ProcessorRuntime):
    has_graphs = True

    def __init__(self) -> None:
        self.num_replays = 0
        self.num_steps: list[int] = []
        """Operations and kernels of each capture."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with traced() as captured:
            work()
        self.num_steps.append(len(captured))

        def replay() -> None:
            with traced() as again:
                work()
            assert again == captured
            self.num_replays += 1

        return replay


def answers(engine: Harness, adapters: Sequence[str] = ("", "", "")) -> list[tuple[list[int], list[int] | None]]:
    """adapters: fingerprint per prompt."""
    ids = []
    for prompt, params, adapter in zip(PROMPTS, PARAMETERS, adapters, strict=True):
        fields = {"lora_name": "x", "lora_fingerprint": adapter} if adapter else {}
        ids.append(engine.add(prompt, params=params, **fields))
        engine.step()
    found = engine.run()
    ranks = [found[name].logprobs for name in ids]
    return [
        (found[name].token_ids, None if rank is None else rank.sampled_token_ranks)
        for name, rank in zip(ids, ranks, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        pytest.param("mistral", {"sliding_window": 24}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_give_the_answers_of_launched_ones(
    tiny_checkpoints: Callable[..., Path],
    make_real_engine: Callable[..., Harness],  # noqa: F811
    tmp_path: Path,
    family: str,
    options: dict[str, int],
) -> None:
    """Steps of one to three rows, of which some are padded, over lengths on both sides of a block's end."""
    limits = {
        "kernels": "triton", "attention_backend": "triton", "num_blocks": 16, "max_model_len": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 48, "async_scheduling": True,
    }  # fmt: skip
    folder = make_latent_model(tmp_path) if family == "deepseek_v3" else tiny_checkpoints(family, **options)
    expected = answers(make_real_engine(folder, **limits | {"kernels": "torch", "attention_backend": "torch"}))
    engine, runtime = make_real_engine(folder, **limits), ReplayRuntime()
    engine.runner._runtime = runtime
    engine.core.executor.warm_up()
    assert not engine.kv_cache.any()
    # prompts of two sizes, decode rows of three
    assert [len(set(runtime.num_steps[:2])), len(set(runtime.num_steps[2:]))] == [1, 1]
    assert runtime.num_steps[0] > 20
    assert answers(engine) == expected
    assert runtime.num_replays >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        pytest.param("mistral", {"sliding_window": 24}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
    ],
)
def test_replayed_prompts_give_the_answers_of_launched_ones(
    tiny_checkpoints: Callable[..., Path],
    make_real_engine: Callable[..., Harness],  # noqa: F811
    tmp_path: Path,
    family: str,
    options: dict[str, int],
) -> None:
    """Steps of one to three chunks, padded and not, the first of a prompt and later ones, after steps with more chunks."""
    limits = {
        "kernels": "triton", "attention_backend": "triton", "num_blocks": 40, "max_model_len": 50, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "enable_prefix_caching": False,
    }  # fmt: skip
    folder = make_latent_model(tmp_path) if family == "deepseek_v3" else tiny_checkpoints(family, **options)
    groups = [[7, 9, 12], [16], [49], [2, 2]]

    def first_tokens(engine: Harness) -> list[list[int]]:
        found = []
        for group in groups:
            ids = [engine.add([(5 * i + n) % 300 for i in range(n)], params={"max_tokens": 1}) for n in group]
            outputs = engine.run()
            found.append([token for request_id in ids for token in outputs[request_id].token_ids])
        return found

    expected = first_tokens(make_real_engine(folder, **limits | {"kernels": "torch", "attention_backend": "torch"}))
    engine, runtime = make_real_engine(folder, **limits), ReplayRuntime()
    engine.runner._runtime = runtime
    engine.core.executor.warm_up()
    assert first_tokens(engine) == expected
    assert runtime.num_replays == len(groups)


def test_a_step_over_other_memory_is_no_replay() -> None:
    """A difference in shapes, numbers or addresses is seen, which the test above needs."""
    held, other = torch.zeros(4), torch.zeros(4)

    def steps(work: Callable[[], object]) -> list[object]:
        with traced() as found:
            work()
        return found

    first = steps(lambda: held + 1)
    assert first == steps(lambda: held + 1)
    for work in (lambda: other + 1, lambda: held + 2, lambda: held[:2] + 1, lambda: (held + 1) + 1):
        assert steps(work) != first


def test_eager_engines_and_back_ends_that_cannot_have_no_graphs(
    tiny_checkpoints: Callable[..., Path],
    make_real_engine: Callable[..., Harness],  # noqa: F811
) -> None:
    for options in ({"attention_backend": "triton", "enforce_eager": True}, {"attention_backend": "torch"}, {}):
        engine = make_real_engine(tiny_checkpoints("qwen3"), **options)
        runtime = engine.runner._runtime = ReplayRuntime()
        engine.core.executor.warm_up()
        assert not runtime.num_steps


def test_sizes_of_graphs() -> None:
    def rows(max_num_seqs: int) -> list[int]:
        return [shape.num_tokens for shape in graph_shapes(max_num_seqs, 8, 64)]

    assert rows(1) == [1]
    assert rows(3) == [1, 2, 3]
    assert rows(20) == [1, 2, 4, 8, 16, 20]
    assert rows(64) == [1, 2, 4, *range(8, 65, 8)]
    assert graph_shapes(1, 48, 64)[1:] == [StepShape(16, 1), StepShape(32, 1)]
    assert graph_shapes(2, 512, 20)[2:] == [StepShape(16, 2), StepShape(32, 2)]
    assert {shape.most_chunks for shape in graph_shapes(64, 2048, 4096)} == {None, 16}
    assert graph_shapes(64, 2048, 4096)[-1] == StepShape(512, 16)


@pytest.mark.slow
def test_steps_with_adapters_are_replayed_whatever_rows_have_which(
    tiny_checkpoints: Callable[..., Path],
    make_real_engine: Callable[..., Harness],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Each size has a graph with the products of adapters and one without: no adapter, two, and one beside none."""
    folder = tiny_checkpoints("llama")
    made = [make_adapter(tmp_path / str(seed), folder, seed=seed, spread=0.3) for seed in (1, 2)]
    limits = {
        "kernels": "triton", "attention_backend": "triton", "num_blocks": 24, "max_model_len": 64, "max_num_seqs": 3,
        "max_num_batched_tokens": 48, "async_scheduling": True, "max_loras": 2, "enable_prefix_caching": False,
    }  # fmt: skip
    plain = make_real_engine(
        folder, adapters=made, **limits | {"kernels": "torch", "attention_backend": "torch", "async_scheduling": False}
    )
    engine, runtime = make_real_engine(folder, adapters=made, **limits), ReplayRuntime()
    engine.runner._runtime = runtime
    engine.core.executor.warm_up()
    prompts, without, with_adapters = runtime.num_steps[:2], runtime.num_steps[2:5], runtime.num_steps[5:]
    assert len(set(prompts)) == 1
    assert len(set(without)) == len(set(with_adapters)) == 1
    assert with_adapters[0] > without[0]
    store = plain.core.adapters
    assert store is not None
    first, second = (store.add(adapter) for adapter in made)
    texts = []
    for adapters in (("", "", ""), (first, second, first), (second, "", "")):
        expected, before = answers(plain, adapters), runtime.num_replays
        assert answers(engine, adapters) == expected
        assert runtime.num_replays > before + 2
        texts.append(str(expected))
    assert len(set(texts)) == 3, "adapters without effect would prove nothing"
