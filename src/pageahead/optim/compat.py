"""Which bitsandbytes this package was tested with."""

from __future__ import annotations

import os

from packaging.specifiers import SpecifierSet

__all__ = ["TESTED", "check_bitsandbytes", "is_tested"]

TESTED = ">=0.50.2,<0.51"
OVERRIDE = "PAGEAHEAD_UNTESTED_BITSANDBYTES"


def is_tested(version: str) -> bool:
    """Whether `version` of bitsandbytes is one we tested."""
    return SpecifierSet(TESTED).contains(version, prereleases=True)


def check_bitsandbytes(version: str) -> None:
    """Raise `ImportError` unless `version` of bitsandbytes is one we tested.

    Updates go through bitsandbytes' operators and its classes' attributes, which other versions may
    have changed without an error showing: wrong moments, not an exception.
    """
    if is_tested(version) or os.environ.get(OVERRIDE) == "1":
        return
    raise ImportError(
        f"pageahead is tested with bitsandbytes {TESTED}; this is {version}. Install a tested "
        f"version (pip install 'bitsandbytes{TESTED}'), or set {OVERRIDE}=1 after "
        f"checking that your results are right."
    )
