"""The scripts of experiments/ as modules."""

from __future__ import annotations

import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))  # the scripts import each other as they do when one of them is run
