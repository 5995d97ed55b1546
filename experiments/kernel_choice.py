"""Why the quickstart's digits differ between machines: bytes of a short pretraining under each choice of kernels.

    python experiments/kernel_choice.py

Each line is a process with other environment variables, which make libraries choose kernels as on another processor.
Equal hashes are equal weights.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from theory_common import table

from regretless.core.text_cleaning import never_fail_to_print

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"
SHORT = (
    *("pretrain.base.max_steps=30", "pretrain.behavior.max_steps=1", "world.prompts=50", "world.test=50"),
    *("world.policies.base.demonstrations=600", "world.policies.behavior.demonstrations=100"),
)
FIXED = {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CHOICES: tuple[dict[str, str], ...] = (
    {},
    {"OMP_NUM_THREADS": "2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    FIXED,
    FIXED | {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
)


def weights(choice: dict[str, str], folder: Path) -> str:
    """Hash of the base model's weights after 30 steps."""
    command = [sys.executable, "-m", "regretless", "run", str(RECIPE), "--until", "pretrain", *SHORT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **choice}
    subprocess.run([*command, "--output-dir", str(folder)], env=environment, check=True, capture_output=True)
    return hashlib.sha256((folder / "pretrain" / "base" / "model.safetensors").read_bytes()).hexdigest()[:12]


def main() -> None:
    never_fail_to_print()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, choice in enumerate(CHOICES):
            name = ", ".join(f"{key}={value}" for key, value in choice.items()) or "as the libraries choose"
            rows.append([name, weights(choice, Path(folder) / str(number))])
    print(table(["environment", "hash of the weights"], rows))


if __name__ == "__main__":
    main()
