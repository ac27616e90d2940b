"""Gives memory-mapped pages back, so that reading a large file does not fill the memory."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_MADV_PAGEOUT = 21
"""Linux: reclaim these pages now. Unlike MADV_DONTNEED it never loses data: file-backed pages are
read again when touched, and anonymous memory without swap stays where it is."""


def release(tensor: Tensor) -> None:
    """Asks the system to drop a tensor's resident pages; a no-op where it cannot.

    Only whole pages inside the tensor are named. The values stay what they are.
    """
    if sys.platform != "linux":
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.nbytes
    length = (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(_MADV_PAGEOUT)
        )
