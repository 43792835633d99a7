"""The transport of an endpoint, from what UCX 1.21 printed of endpoints seen (shortened)."""

import pytest

from common.transport.ucx_lanes import named

TITLE = "# | ucp_context_0 intra-node cfg#3 | tagged message by ucp_tag_send* from host memory         |"
RULE = "# +--------------------------------+--------------------------------------------+-------------+"


def printed(lanes: str, *rows: str) -> str:
    table = "\n".join([RULE, TITLE, RULE, *rows, RULE, "# ", RULE, "# | something else |"]) if rows else ""
    return f"#\n# UCP endpoint \n#\n#               peer: <no debug data>\n{lanes}\n#\n{table}\n"


MEMORY = """\
#  lane[0]: cm tcp
#  lane[1]:  3:sysv/memory.0 md[2] -> md[2]/sysv/sysdev[255] seg 4294967295 am keepalive
#  lane[2]:  4:posix/memory.0 md[3] -> md[3]/posix/sysdev[255] seg 4294967295"""
BOTH = f"""{MEMORY}
#  lane[3]:  2:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255] seg 4294967295 rma_bw#0 wireup"""
TCP = """\
#  lane[0]: cm tcp
#  lane[1]:  1:tcp/eth0.0 md[1] -> md[1]/tcp/sysdev[255] seg 4294967295 rma_bw#0 am am_bw#0"""
GPU = f"""{MEMORY}
#  lane[3]:  9:cuda_ipc/cuda.0 md[5] -> md[5]/cuda_ipc/sysdev[255] seg 4294967295 rma_bw#0"""

SHORT = "# |                          0..92 | eager short                                | sysv/memory |"
FRAGMENTS = "# |                        8K..inf | (?) rendezvous fragmented copy-in copy-out | sysv/memory |"
OVER_TCP = "# |                      8247..inf | rendezvous zero-copy read from remote      | tcp/lo      |"
OVER_RC = "# |                      8247..inf | rendezvous zero-copy read | 50% on rc_mlx5/mlx5_0:1/path0 |"
OVER_CMA = "# |                      8247..inf | rendezvous zero-copy read from remote      | cma/memory  |"


@pytest.mark.parametrize(
    ("info", "transport"),
    [
        (printed(BOTH, SHORT, FRAGMENTS), "sm"),  # though a lane for bulk transfers is there, over tcp
        (printed(BOTH, SHORT, OVER_TCP), "tcp"),
        (printed(BOTH, SHORT, OVER_CMA), "sm"),
        (printed(BOTH, SHORT, OVER_RC), "rc_mlx5"),
        (printed(GPU, SHORT, FRAGMENTS), "cuda_ipc"),
        (printed(MEMORY), "sm"),
        (printed(TCP), "tcp"),
        (printed(BOTH), "tcp"),
        ("", ""),
    ],
)
def test_the_transport_of_large_messages(info: str, transport: str) -> None:
    assert named(info) == transport
