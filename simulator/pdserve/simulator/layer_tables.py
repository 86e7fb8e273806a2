"""`profile_of_layers`: a profile out of tables of a model's layers, as LLMServingSim's profiler writes them.

A folder has `dense.csv` (`layer,tokens,time_us`), `attention.csv` (`prefill_chunk,kv_prefill,n_decode,kv_decode,time_us`), and
maybe `per_sequence.csv` (`layer,sequences,time_us`) for the output head and the sampler. Layers that a model has several times
have the time of one. Without the last file, the head's time is that of the widest product of a layer, for as many rows, times the
ratio of their outputs: both read their weights once and compute each output in the same way.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdserve.common.errors import ConfigError
from pdserve.models.config.model_config import ModelConfig
from pdserve.simulator.profile import AttentionTime, CountTime, Profile, Spread

DENSE_COLUMNS = ("layer", "tokens", "time_us")
OUTPUT_COLUMNS = ("layer", "sequences", "time_us")
ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
ONCE = ("embedding", "final_layernorm")
"""Layers that a model has once; it has all others in each of its layers."""
TWICE = ("layernorm",)
"""Before attention and before the feed-forward part."""
WIDEST = "gate_up_proj"
MAX_ROWS = 1 << 20
US = 1e-6
Times = dict[int, float]
"""Count -> seconds."""


def profile_of_layers(folder: Path, model: str, config: ModelConfig, device: str, overhead_s: float = 0.0) -> Profile:
    """model, device: names. overhead_s: of each step, in which the device computes nothing.

    Raises: ConfigError for tables that cannot be read, or that are not of this kind of model.
    """
    num_layers = config.num_layers
    dense = _layers(folder / "dense.csv", DENSE_COLUMNS)
    for layer in (*ONCE, *TWICE, WIDEST):
        if layer not in dense:
            raise ConfigError(f"{folder / 'dense.csv'} has no layer {layer!r}")
    weights = {layer: 1 if layer in ONCE else num_layers * (1 + (layer in TWICE)) for layer in dense}
    if (path := folder / "per_sequence.csv").exists():
        of_outputs = _layers(path, OUTPUT_COLUMNS)
        outputs = _added_up(path, of_outputs, dict.fromkeys(of_outputs, 1.0))
    else:
        outputs = _added_up(
            folder, {WIDEST: dense[WIDEST]}, {WIDEST: config.vocab_size / (2 * config.intermediate_size)}
        )
    attention = tuple(
        AttentionTime(int(chunk), int(before), int(sequences), int(context), _exactly(float(time_us) * US * num_layers))
        for chunk, before, sequences, context, time_us in _rows(folder / "attention.csv", ATTENTION_COLUMNS)
    )
    tokens = _added_up(folder / "dense.csv", dense, weights)
    profile = Profile(
        model=model,
        device=device,
        settings={"dtype": config.dtype},
        conditions="added up from times of single layers",
        tokens=tuple(CountTime(count, _exactly(overhead_s + seconds)) for count, seconds in tokens.items()),
        outputs=tuple(CountTime(count, _exactly(seconds)) for count, seconds in outputs.items()),
        attention=attention,
    )
    profile.verify()
    return profile


def _exactly(seconds: float) -> Spread:
    return Spread(seconds, seconds, seconds)


def _added_up(path: Path, layers: Mapping[str, Times], weights: Mapping[str, float]) -> Times:
    """For the counts that all layers have. Raises: ConfigError if there are none."""
    counts = sorted(set.intersection(*(set(times) for times in layers.values())))
    if not counts:
        raise ConfigError(f"{path} has no count of tokens for which all layers have a time")
    return {count: sum(times[count] * weights[layer] for layer, times in layers.items()) for count in counts}


def _layers(path: Path, columns: tuple[str, ...]) -> dict[str, Times]:
    """Raises: ConfigError."""
    layers: dict[str, Times] = {}
    for layer, count, time_us in _rows(path, columns):
        layers.setdefault(layer, {})[int(count)] = float(time_us) * US
    if not layers:
        raise ConfigError(f"{path} has no rows")
    return layers


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """Raises: ConfigError naming the file, the line and the field."""
    try:
        with path.open(newline="") as file:
            rows = csv.reader(file)
            if tuple(header := next(rows, [])) != columns:
                raise ConfigError(f"{path} begins with {','.join(header)!r}, {','.join(columns)!r} is needed")
            for number, row in enumerate(rows, start=2):
                if number > MAX_ROWS:
                    raise ConfigError(f"{path} has more than {MAX_ROWS} lines")
                if len(row) != len(columns):
                    raise ConfigError(f"{path}, line {number}: {len(row)} fields, {len(columns)} are needed")
                for column, text in zip(columns, row, strict=True):
                    _verify(f"{path}, line {number}", column, text)
                yield row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from error


def _verify(label: str, column: str, text: str) -> None:
    """Raises: ConfigError."""
    if column == "layer":
        return
    try:
        value = float(text) if column == "time_us" else int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 40:
        word = "a number" if column == "time_us" else "an integer"
        raise ConfigError(f"{label}: {column} is {text!r}, {word} of at least 0 is needed")
