"""The cache directory: compiled code, measured costs and converted models of this machine."""

import os
from pathlib import Path

HOMELESS = Path("/nonexistent")  # home of users without one, by Debian's convention: nothing can be created there


def directory() -> Path:
    """Directory of specctl's caches, which need not exist, and which this user may be unable to write."""
    try:
        home = Path.home()
    except RuntimeError:  # HOME is unset, and the user has no account, as in many containers
        home = HOMELESS
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "specctl"
