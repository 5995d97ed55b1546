"""The table of measured regret that `rollout` writes, and the methods whose models it is compared with."""

from __future__ import annotations

REGRET = "regret.parquet"
"""Name of the table: a row for each response, unit and α."""
READINGS = {"dpo": "DPO", "repo": "RePO", "repo_det": "RePO_det"}
"""Methods whose implicit reward is an implicit regret of units, with their names in the report."""
