"""Imported last, and only, by the process that `workflow.children` forks from: what is there stays as it is.

The garbage collector of a child would otherwise go through everything that was imported, and by its marks copy the
memory that the processes share: several tenths of a second at every collection, in every child.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
