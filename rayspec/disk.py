"""Recognises errors that mean a full disk."""

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether the error says that no space was left, which may be freed while we wait."""
    return isinstance(error, OSError) and (error.errno in FULL or os.strerror(errno.ENOSPC) in str(error))
