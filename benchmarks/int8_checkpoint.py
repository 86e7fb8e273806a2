"""Write a model's checkpoint with int8 matrices in compressed-tensors' format, which vLLM and pdserve read.

The matrices of all linear layers but the output matrix are rounded as by `quantization="int8"`: one scale per output channel, and
activations per token while they are computed.

Usage: python benchmarks/int8_checkpoint.py MODEL-FOLDER NEW-FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from pdserve.kernels.cpu.int8_linear import Int8Matrix

_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIG = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "kv_cache_scheme": None, "sparsity_config": {},
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
        "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    shutil.copytree(options.model, options.folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {name: tensor for path in options.model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    written = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            matrix = Int8Matrix.quantized(tensor)
            written[name] = matrix.values
            written[f"{name}_scale"] = matrix.scales[:, None].contiguous()
        else:
            written[name] = tensor
    save_file(written, options.folder / "model.safetensors", {"format": "pt"})
    config = json.loads((options.model / "config.json").read_text())
    (options.folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}, indent=2))


if __name__ == "__main__":
    main()
