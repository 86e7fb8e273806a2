"""Streaming sessions through real services, with a plain gRPC client."""

from __future__ import annotations

import queue
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import pd_cluster
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=250", "--max-model-len=3500")
DECODE = ("--max-sessions=2", "--session-idle-timeout-s=2", f"--drain-s={2 * HANG_S}")


class Session:
    """A client's side of one: `ask` a turn, `close` when done."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[inference_pb2.GenerateRequest | None] = queue.SimpleQueue()
        self._responses = inference_pb2_grpc.InferenceServiceStub(channel).Session(
            iter(self._requests.get, None), timeout=HANG_S
        )

    def send(self, token_ids: list[int], max_tokens: int, **params: Any) -> None:
        sampling = request_pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, **params)
        tokens = inference_pb2.TokenPrompt(token_ids=token_ids)
        self._requests.put(inference_pb2.GenerateRequest(tokens=tokens, sampling=sampling, stream=True))

    def receive(self) -> Iterator[inference_pb2.GenerateResponse]:
        """To the end of the turn. Raises: grpc.RpcError."""
        for response in self._responses:
            yield response
            if response.finish_reason:
                return

    def ask(self, token_ids: list[int], max_tokens: int) -> list[int]:
        self.send(token_ids, max_tokens)
        return [token for response in self.receive() for token in response.token_ids]

    def turn(self, token_ids: list[int], max_tokens: int, **params: Any) -> tuple[str, list[int]]:
        """(text, token ids) of a turn."""
        self.send(token_ids, max_tokens, **params)
        responses = list(self.receive())
        text = "".join(response.text for response in responses)
        return text, [token for response in responses for token in response.token_ids]

    def close(self) -> grpc.StatusCode:
        self._requests.put(None)
        return self._responses.code()

    def ending(self) -> tuple[grpc.StatusCode, str]:
        """The call's status and message."""
        with pytest.raises(grpc.RpcError):
            next(self._responses)
        return self._responses.code(), self._responses.details()


def test_a_session_from_its_first_turn_to_every_end(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with (
        pd_cluster(tmp_path, model, both=FLAGS, decode=DECODE) as cluster,
        grpc.insecure_channel(cluster.router.address) as channel,
    ):
        session, history = Session(channel), []
        for length in (40, 3, 70):
            history += [(31 * place + 7 * length) % 300 for place in range(length)]
            answer = session.ask(history[-length:], 12)
            oracle.check(history, answer)
            history += answer

        # a stop string, whose last tokens the worker has and the client has not, then a form, then log-probabilities
        history += [7, 8, 9]
        whole = Tokenizer.from_folder(model).decode(oracle.greedy(history, 40), skip_special_tokens=True)
        stop = whole[len(whole) // 2 :][:3]
        stopped, kept = session.turn([7, 8, 9], 40, stop=[stop])
        assert stopped == whole[: whole.index(stop)]
        history += kept
        answer = session.ask([4, 5], 12)
        oracle.check([*history, 4, 5], answer)
        history += [4, 5, *answer]
        form = request_pb2.StructuredOutputs(regex="[ab]{3}")
        text, tokens = session.turn([6], 12, structured_outputs=form)
        assert re.fullmatch("[ab]{3}", text)
        history += [6, *tokens]
        session.send([3, 4, 5], 2, prompt_logprobs=0)
        responses = list(session.receive())
        history += [3, 4, 5]
        entries = [each.sampled for response in responses for each in response.prompt_logprobs]
        assert [each.token_id for each in entries] == [3, 4, 5]
        expected = oracle.logits(history).log_softmax(-1)
        for place, each in enumerate(entries, len(history) - 3):
            assert each.logprob == pytest.approx(float(expected[place - 1][history[place]]), abs=1e-3)

        second, third = Session(channel), Session(channel)
        assert len(second.ask([5, 6, 7], 2)) == 2
        third.send([5], 2)
        assert third.ending()[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert second.close() is grpc.StatusCode.OK

        since = time.monotonic()
        code, details = session.ending()
        assert (code, "session_idle_timeout_s" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        assert time.monotonic() - since < 10
        cluster.check_pools()

        dying = Session(channel)
        dying.send([9] * 10, 3000)  # not done before the worker is
        next(dying.receive())
        cluster.services["decode"].signal(signal.SIGKILL)
        cluster.services["decode"].process.wait(HANG_S)
        with pytest.raises(grpc.RpcError) as lost:
            list(dying.receive())
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE

        worker = cluster.restart("decode")
        drained = Session(channel)
        assert len(drained.ask([8] * 10, 3)) == 3
        worker.signal(signal.SIGTERM)
        status, told = drained.ending()
        assert status is grpc.StatusCode.UNAVAILABLE
        assert told.startswith("the service is leaving")
        worker.process.wait(HANG_S)  # an idle session would hold it up for `drain_s`
        cluster.check_logs()
