"""Sampled tokens kept on the device as inputs of the next step."""

# Generated from nbs/runtime/future_tokens.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import torch
from torch import Tensor

__all__ = ["FutureTokens"]


# %% nbs/runtime/future_tokens.ipynb #FutureTokens
class FutureTokens:
    """The newest token of every row, kept where it was chosen.

    ids: int64 [num_rows], on the device. The host writes ~row, which is negative, where it does not know the newest token of a row.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def put(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep what was chosen for these rows; -1, for a row that failed, as token 0: what comes of it is thrown away."""
        self.ids[rows] = token_ids.clamp(min=0)

    def resolve(self, token_ids: Tensor) -> Tensor:
        """The token ids with the newest tokens in the places of ~row."""
        return torch.where(token_ids < 0, self.ids[(~token_ids).clamp_(min=0)], token_ids)
