"""What UCX says of an endpoint: which transport its blocks travel on.

From ucp_ep_print_info, the only place where UCX tells. Knows nothing of ucxx; the caller makes sure that UCX
is loaded and the endpoint alive.
"""

import ctypes
import re

_SHARED_MEMORY = ("posix", "sysv", "cma", "xpmem", "knem", "self", "memory")
_TAG_SEND = re.compile(r"\| +tagged message by ucp_tag_send\* from host memory +\|\n(.*?)\n#\s*\n", re.DOTALL)
_LANE = re.compile(r"lane\[\d+\]:\s+\d+:(\w+)/\S+ .*?seg \d+ (.*)")


def transport_of(handle: int) -> str:
    """As `named`, of the ucp_ep_h `handle`."""
    return named(_print_info(handle))


def named(info: str) -> str:
    """ "sm", "tcp", "rc_mlx5", "cuda_ipc" ... from what UCX printed; "" if it does not say.

    A lane over CUDA is there for blocks in GPU memory. Else what UCX has chosen for its largest messages, and
    where it has no table of its choices, the lane for bulk transfers (rma_bw, am_bw) or active messages.
    """
    lanes = _LANE.findall(info)
    for transport, _ in lanes:
        if transport.startswith("cuda"):
            return str(transport)
    if table := _TAG_SEND.search(info):
        sizes = re.findall(r"\| +\S+\.\.\S+ \|.*\|([^|\n]*)\|", table[1])
        if sizes and (how := re.search(r"(\w+)/", sizes[-1])):
            return _short(how[1])
    for use in ("rma_bw", "am_bw", "am"):
        for transport, uses in lanes:
            if use in uses:
                return _short(transport)
    return ""


def _short(transport: str) -> str:
    return "sm" if transport in _SHARED_MEMORY else transport


def _print_info(handle: int) -> str:
    libc, libucp = ctypes.CDLL(None), ctypes.CDLL("libucp.so.0")
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libucp.ucp_ep_print_info(ctypes.c_void_p(handle), stream)
    libc.fclose(stream)
    try:
        return ctypes.string_at(text.value or 0, size.value).decode(errors="replace")
    finally:
        libc.free(text)
