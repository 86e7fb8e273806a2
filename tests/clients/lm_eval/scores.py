"""Scores of the tasks next to this file, as JSON: `python scores.py KIND ARGUMENTS`, a name of `TASKS`.

ARGUMENTS are JSON, those of the harness's model. For `transformers` the harness calls the model's code in this process:
the interpreter is the product's own, and the environment variable LM_EVAL_SITE says where the harness is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(os.environ.get("LM_EVAL_SITE", ""))

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

TASKS = {
    "local-completions": ["pdserve_capitals", "pdserve_answers"],
    "local-chat-completions": ["pdserve_answers"],
    "transformers": ["pdserve_capitals", "pdserve_answers"],
    "transformers chat": ["pdserve_answers"],
}


class InProcess(LM):  # type: ignore[misc]
    """The model's own code, one text at a time."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__()
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @property
    def tokenizer_name(self) -> str:
        return "own"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        found = []
        for request in requests:
            context, continuation = request.args
            before = self.tokenizer.encode(context)
            tokens = self.tokenizer.encode(context + continuation)
            with self.torch.inference_mode():
                logits = self.model(self.torch.tensor([tokens])).logits[0].log_softmax(-1)
            places = range(len(before), len(tokens))
            score = sum(float(logits[place - 1, tokens[place]]) for place in places)
            found.append((score, all(int(logits[place - 1].argmax()) == tokens[place] for place in places)))
        return found

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any]) -> list[str]:
        found = []
        for request in requests:
            context, options = request.args
            tokens = self.tokenizer.encode(context, return_tensors="pt")
            with self.torch.inference_mode():
                output = self.model.generate(tokens, max_new_tokens=options["max_gen_toks"], do_sample=False)
            text: str = self.tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
            for stop in options["until"]:
                text = text.split(stop)[0]
            found.append(text)
        return found


def main() -> None:
    kind, arguments = sys.argv[1], json.loads(sys.argv[2])
    is_own = kind.startswith("transformers")
    result = lm_eval.simple_evaluate(
        model=InProcess(**arguments) if is_own else kind,
        model_args=None if is_own else arguments,
        tasks=TASKS[kind],
        task_manager=TaskManager(include_path=str(Path(__file__).with_name("tasks")), include_defaults=False),
        apply_chat_template="chat" in kind,
        bootstrap_iters=0,
        log_samples=True,
    )
    scores = {
        task: {
            name.partition(",")[0]: value for name, value in values.items() if "stderr" not in name and name != "alias"
        }
        for task, values in result["results"].items()
    }
    answers = {task: [sample["resps"] for sample in samples] for task, samples in result["samples"].items()}
    print(json.dumps({"scores": scores, "answers": answers}))


if __name__ == "__main__":
    main()
