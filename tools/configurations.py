"""Which models of a folder of configurations would load: `python tools/configurations.py FOLDER [--refused]`.

Each subfolder has a config.json, and perhaps a hf_quant_config.json. A configuration loads if it is read, and if a decoder of its
shape can be made without numbers; whether its weight files are whole is not asked.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path

from pdserve.common.errors import PdServeError
from pdserve.models.model_impl import load_model_decoder, read_model_config


def refusal(folder: Path) -> str | None:
    """The sentence with which it is refused; None: it loads."""
    with tempfile.TemporaryDirectory() as name:
        unquantized = Path(name)
        try:
            read_model_config(folder)
            config = json.loads((folder / "config.json").read_text())
            # weights in any form are read under the same names
            for part in (config, config.get("text_config") or {}):
                part.pop("quantization_config", None)
            (unquantized / "config.json").write_text(json.dumps(config))
            vision = config.get("vision_config") or {}
            pixels = {
                "image_processor_type": "Qwen2VLImageProcessor",
                "merge_size": vision.get("spatial_merge_size", 2),
            }
            pixels |= {size: vision[size] for size in ("patch_size", "temporal_patch_size") if size in vision}
            (unquantized / "preprocessor_config.json").write_text(json.dumps(pixels))
            load_model_decoder(unquantized, device="meta", load_format="dummy")
        except PdServeError as error:
            return error.message.replace(f"{folder}/", "").replace(f"{unquantized}/", "")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="of folders with a config.json each")
    parser.add_argument("--refused", action="store_true", help="print only what is refused")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    found = {path.parent.name: refusal(path.parent) for path in sorted(arguments.folder.glob("*/config.json"))}
    for name, why in found.items():
        if why is not None or not arguments.refused:
            print(f"{name:<56} {'loads' if why is None else why}")
    print(f"\n{sum(why is None for why in found.values())} of {len(found)} load")


if __name__ == "__main__":
    main()
