"""The table of verifiers. A new one is a file with a `check` function and a line here, or a plug-in."""

from __future__ import annotations

from regretless.core.plugins import Registry
from regretless.labeling import math_verifier
from regretless.labeling.check import Verifier

VERIFIERS: Registry[Verifier] = Registry(
    "verifiers",
    {
        "math": Verifier(check=math_verifier.check, quick=math_verifier.quick_check),
        "math_any": Verifier(check=math_verifier.check_any, quick=math_verifier.quick_check_any),
    },
    lambda _, part: None if isinstance(part, Verifier) else f"expected a Verifier, got {part!r}",
)
"""What `verify.verifier` may name."""
