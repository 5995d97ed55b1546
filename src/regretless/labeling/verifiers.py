"""The table of verifiers. A new one is a file with a `check` function and a line here."""

from __future__ import annotations

from regretless.labeling import math_verifier as math
from regretless.labeling.check import Verifier

VERIFIERS: dict[str, Verifier] = {
    "math": Verifier(check=math.check, quick=math.quick_check),
    "math_any": Verifier(check=math.check_any, quick=math.quick_check_any),
}
