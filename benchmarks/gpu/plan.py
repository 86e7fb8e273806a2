"""The stages of `make gpu` in order of worth, their time limits, and the goals of the measurements."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 570.0
"""All stages together: ten minutes, less what the table and the end of processes take."""

DRY_TOTAL_S, DRY_LIMIT_S = 3600.0, 600.0
"""All stages, and each stage, of a dry run: a hang, on a machine that others keep busy."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One module of `gpu.stages`."""

    name: str
    """Module's name."""
    limit_s: float
    """Seconds after which its process is ended. The sum may exceed `TOTAL_S`: most stages end earlier."""
    title: str
    launches: bool = True
    """False: kernels run only in processes that the stage starts, if at all."""


STAGES = (
    Stage("environment", 45, "versions, and the rates against which the rest is measured"),
    Stage("kernel_contract", 120, "tests of kernels and of devices, compiled", launches=False),
    Stage("equality", 75, "float32 tokens of engines with Triton kernels against transformers"),
    Stage("decode_attention", 75, "bytes per second against those of a copy"),
    Stage("prefill_attention", 50, "operations per second against cuDNN's and flash attention's"),
    Stage("layer_ops", 90, "bytes per second against those of a copy"),
    Stage("states", 45, "chunks of prompts through states in kernels, next to torch operations"),
    Stage("decode_step", 90, "a step of Llama 3.1 8B's shape against the time that its bytes take"),
    Stage("graphs", 45, "decode steps replayed from CUDA graphs against eager ones, bit for bit"),
    Stage("nixl_copies", 40, "device to device between two processes, against a copy", launches=False),
    Stage("serving", 150, "prefill and decode on one GPU beside one process", launches=False),
    Stage("tiles", 90, "tile shapes of attention around those of the table"),
)
BY_NAME = {stage.name: stage for stage in STAGES}


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the field `ratio` of a stage's rows that name it."""

    name: str
    bound: float
    at_least: bool
    text: str

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.at_least else ratio <= self.bound


GOALS = {
    goal.name: goal
    for goal in (
        Goal("decode_attention", 0.8, True, "decode attention, of the copy rate, where a layer reads 64 MB or more"),
        Goal(
            "latent_attention",
            0.8,
            True,
            "decode attention over latent rows, of the copy rate, 16 heads, 64 MB or more",
        ),
        Goal("prefill_attention", 0.9, True, "prefill attention, of the better of cuDNN and flash, full chunks"),
        Goal("decode_step", 1.25, False, "8B decode step, of bytes over bandwidth, 1 to 64 sequences"),
        Goal("graphs", 1.0, True, "decode steps of CUDA graphs that equal eager ones bit for bit"),
        Goal("nixl", 0.5, True, "NIXL between device memories of two processes, of the copy rate"),
    )
}
