"""`make_inproc_host`: an engine with its transfers over a loaded model, from a worker's settings."""

from __future__ import annotations

from pdserve.common.block_hash import BlockHasher
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import DATA_PLANE, DeploymentKey
from pdserve.common.security.role_guard import CallerRoles
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.runner.loaded_model import LoadedModel
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_client import ReceiverInfo
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.source_transfer import LeaseLimits, PeerId
from pdserve.kv_transfer.control.source_transfers import SourceTransfers
from pdserve.kv_transfer.make_connectors import serve_pool
from pdserve.kv_transfer.pull.digest_rule import DigestRule
from pdserve.worker.engine_host.engine_host import HostInfo
from pdserve.worker.engine_host.host_transfers import HostTransfers
from pdserve.worker.engine_host.inproc_host import InprocHost
from pdserve.worker.engine_outbox import EngineOutbox
from pdserve.worker.kv_transfer_manager import KvTransferManager
from pdserve.worker.peer_channels import PeerChannels
from pdserve.worker.ranks.join_ranks import join_ranks


def make_inproc_host(
    settings: WorkerSettings,
    model: LoadedModel,
    connectors: ConnectorSet,
    deployment_key: DeploymentKey,
    tls: TlsIdentity | None = None,
) -> InprocHost:
    """Give the model's pool to engine and connectors. Used in the asyncio thread. Raises: ConfigError; WorkerLost when another rank
    has ended."""
    kv_cache = model.kv_caches[0]  # the same pool for all KV cache groups
    pool = serve_pool(connectors, kv_cache, settings.limits.kv_ring_mib << 20, settings.kernels)
    if model.ranks is not None:
        join_ranks(connectors, model.ranks)
    digests = DigestRule(
        settings.kv_digest,
        lambda context: deployment_key.derive(DATA_PLANE, context),
        clear=tls is None or any(name != "tcp" for name in connectors.names),
    )
    outbox = EngineOutbox()
    core = make_engine_core(
        model.engine_config(settings),
        model.decoder,
        model.kv_caches,
        BlockHasher(deployment_key, settings.block_size),
        model.decoder.config.vocab_size,
        outbox,
        model.grammar_compiler(settings),
        LogitsProcessors.from_entry_points(settings.logits_processors),
        lora=model.lora_runner,
        host_caches=model.host_caches,
        ranks=model.ranks,
        draft_model=model.draft_model,
        token_texts=model.token_texts,
    )

    def make_transfers(host: InprocHost, identity: PeerId) -> HostTransfers:
        client_tls = tls.client if tls is not None else None
        peers = PeerChannels(CallSigner(deployment_key), client_tls, insecure=settings.insecure)
        receiving = ReceiverInfo(
            identity=identity,
            layout=model.layout,
            connectors=connectors.names,
            engine_tick=lambda: host.tick,
            attach_timeout_s=settings.limits.attach_timeout_s,
            grace_s=settings.limits.lease_grace_s,
            digests=digests,
        )
        manager = KvTransferManager(host, outbox, connectors, pool, peers, receiving)
        limits = LeaseLimits(
            settings.limits.attach_timeout_s, settings.limits.lease_grace_s, settings.limits.lease_max_s
        )
        source_transfers = SourceTransfers(connectors, limits, manager)

        def make_attach(transfers: SourceTransfers, callers: CallerRoles) -> AttachServicer:
            return AttachServicer(
                transfers, connectors, model.layout, identity.epoch, lambda: host.tick, digests, callers
            )

        return HostTransfers(manager, source_transfers, connectors, peers, lambda: host.subscriber, make_attach)

    def close() -> None:
        connectors.close()  # without a start nothing else has closed them
        model.close()

    info = HostInfo(
        engine=model.engine_info(settings),
        layout=model.layout,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        has_grammars=core.verifier.has_grammars,
        connectors=connectors.names,
    )
    return InprocHost(core, settings.num_threads, settings.cpu_core, info, make_transfers, close)
