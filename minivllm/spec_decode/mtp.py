"""Multi-token prediction: a proposer that drafts with a layer of the target's own checkpoint."""

# Generated from nbs/spec_decode/mtp.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import torch
from torch import Tensor

from minivllm.models.decoder import Decoder
from minivllm.models.layers import LayerNorm, NoNorm, RMSNorm
from minivllm.models.linear.grouped import QuantizedWeight
from minivllm.models.loading import load_model
from minivllm.spec_decode.draft_model import DraftHost
from minivllm.spec_decode.heads import EagleProposer, take


class MTPProposer(EagleProposer):
    """Guesses with the layer that a checkpoint brings for it (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Args:
        host: the target, and what it runs by.
        decoder: the layer, without embedding and output.
        fuse: weight [H, 2 H], from normed embedding and state to what the layer reads.
        norms: the norm of embeddings and that of states.
    """

    def __init__(
        self, host: DraftHost, decoder: Decoder, fuse: Tensor, norms: tuple[RMSNorm | LayerNorm, RMSNorm | LayerNorm]
    ) -> None:
        super().__init__(host, decoder, (fuse, None))
        mtp = host.target.spec.mtp
        assert mtp is not None
        self.norms, self.skips_first, self.last_norm = norms, mtp.skips_first, NoNorm()
        if not mtp.passes_normed:
            self.last_norm, decoder.final_norm = decoder.final_norm, NoNorm()  # type: ignore[assignment]

    def _pairs(self, token_ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        x = self.host.target.embed(token_ids, positions)
        if self.skips_first:
            x = x.masked_fill((positions == 0)[:, None], 0)
        of_tokens, of_states = self.norms
        return torch.cat([of_tokens(x), of_states(features.to(x.dtype))], 1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.host.target.compute_logits(self.last_norm(hidden))


def load_mtp(host: DraftHost) -> MTPProposer:
    """The proposer of the target's own checkpoint. Raises ValueError for a checkpoint without the layer."""
    args, target = host.config.args, host.target
    source = load_model(
        args.model, load_format=args.load_format, download_dir=args.download_dir, revision=args.revision,
        hf_overrides=args.hf_overrides, seed=args.seed,
    )  # fmt: skip
    spec, mtp, size = source.spec.mtp_layer(), target.spec.mtp, target.spec.hidden_size
    assert mtp is not None
    weights = source.mtp_weights(host.config.dtype, target.device)
    tensors = {
        name: tensor
        for name, tensor in weights
        if not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    }
    names = {mtp.fuse: (size, 2 * size), mtp.embedding_norm: (size,), mtp.hidden_norm: (size,)}
    for name in names:
        if isinstance(tensors.get(name), QuantizedWeight):
            tensors[name] = tensors[name].dequantize()
    fuse, *scales = (take(tensors, name, shape, source.path) for name, shape in names.items())
    longest = min(spec.max_model_len, host.config.scheduler.max_model_len)
    decoder = Decoder(spec, host.backend, target.dtype, target.device, target.linear_method, max_model_len=longest)
    norms = decoder.builder().norm(), decoder.builder().norm()
    for norm, scale in zip(norms, scales, strict=True):
        dict(norm.targets())["weight"](scale)
    decoder.load_weights([*tensors.items(), (spec.names.embedding, torch.zeros(1, size))])
    return MTPProposer(host, decoder, fuse.to(target.device, target.dtype, copy=True), norms)
