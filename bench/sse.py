"""Server-sent events from a byte stream.

Lines are split at byte level: httpx's own line iterator also splits at characters such as U+2028, which may
stand inside a JSON string. Every `data:` line is an event of its own, as in OpenAI's streams.
"""

from collections.abc import AsyncIterable, AsyncIterator

MAX_LINE_BYTES = 2**20


async def data_lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The payload of each `data:` line as soon as the line is whole. Other lines are passed over.

    Raises ValueError for a line that never ends.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream is longer than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
