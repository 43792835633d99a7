"""`python -m services.gateway`: the gateway as a process."""

import asyncio
import gc
import sys

from common import model_files
from common.config import GatewaySettings, load
from common.engine.grammar import GrammarCompiler
from common.messages.subjects import Subjects
from common.observability.http import serve_http
from common.observability.metrics import GatewayMetrics
from common.runtime.bus import MessageBus
from common.runtime.micro import MicroService
from common.runtime.service import ServiceContext, run_service
from common.transport.nats import NatsTransport
from services.gateway.gateway import Gateway, unique_ref
from services.gateway.http.api import make_app
from services.gateway.http.edge import guard, tls_context
from services.gateway.http.keys import read_keys
from services.gateway.http.middleware import refuse_requests
from services.gateway.tokenizing import ModelTokenizer, TokenizerPool, Vocabulary


async def serve(settings: GatewaySettings, context: ServiceContext) -> None:
    """Tokenizer first, because nothing can be said without it; then HTTP; then the bus."""
    keys = read_keys(settings.api_keys_file) if settings.api_keys_file else None
    tls = tls_context(settings.tls_cert, settings.tls_key)
    vocabulary = await asyncio.to_thread(read_vocabulary, settings)
    grammars = await asyncio.to_thread(read_grammars, settings, vocabulary)
    gc.collect()
    gc.freeze()  # else every full collection walks through all of transformers, for a tenth of a second
    tokenizers = TokenizerPool(vocabulary.tokenizer, vocabulary.max_model_len, grammars=grammars)
    bus = MessageBus(NatsTransport(settings.nats_url, name=settings.instance), Subjects(settings.cluster))
    gateway = Gateway(
        ref=unique_ref(context.ref),
        bus=bus,
        clock=context.clock,
        ids=context.ids,
        vocabulary=vocabulary,
        settings=settings,
        metrics=GatewayMetrics(settings.instance),
    )
    app = make_app(gateway, tokenizers, context.clock, max_body_bytes=settings.max_body_bytes)
    guard(app, keys, settings.allowed_origins)
    http = await serve_http(
        app,
        settings.host,
        settings.port,
        tls=tls,
        reuse_port=settings.reuse_port,
        refuse=refuse_requests(context.ids),
    )
    try:
        gateway.listens_at(http.url(settings.reachable_host))
        context.announce(http.url(settings.reachable_host))
        if await bus.connect(context.stopping):
            micro = MicroService(bus, context.clock, settings.cluster, lambda: gateway.info)
            await micro.start()
            await run_and_drain(gateway, settings.drain_seconds, context.stopping)
    finally:
        await http.close()
        await bus.close()
        tokenizers.close()


async def run_and_drain(gateway: Gateway, drain_s: float, stopping: asyncio.Event) -> None:
    """Serve until `stopping`, then until what runs has ended, for at most `drain_s` seconds."""
    drained = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(gateway.run(drained))
        await stopping.wait()
        await gateway.drain(drain_s)
        drained.set()


def read_vocabulary(settings: GatewaySettings) -> Vocabulary:
    """What the model's directory says. Raises ConfigError. Takes a second or two."""
    directory = model_files.resolve(settings.model, settings.cache_path)
    size = model_files.text_config(directory).get("vocab_size")
    longest = model_files.max_model_len(directory)
    return Vocabulary(
        tokenizer=ModelTokenizer(directory, size if isinstance(size, int) else None),
        eos_ids=frozenset(model_files.eos_token_ids(directory)),
        max_model_len=min(settings.max_model_len or longest, longest),
        model=settings.model_name,
    )


def read_grammars(settings: GatewaySettings, vocabulary: Vocabulary) -> GrammarCompiler:
    """Checks grammars as the workers' own will compile them. Takes part of a second."""
    directory = model_files.resolve(settings.model, settings.cache_path)
    return GrammarCompiler(directory, vocabulary.tokenizer.vocab_size, sorted(vocabulary.eos_ids))


def main() -> None:
    settings = load(GatewaySettings, sys.argv[1:])
    run_service(settings, lambda context: serve(settings, context))


if __name__ == "__main__":
    main()
