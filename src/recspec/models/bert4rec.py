"""BERT4Rec: self-attention in both directions predicts hidden events of a user from all others.

Sun et al.: BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from Transformer, CIKM 2019.
`self_attention.py` has the formulas. In training, a share of each user's events is hidden behind one vector, the mask,
and the loss is a softmax over all items at hidden events. The next item of a user is what is hidden behind a mask that
follows their events.

Shapes: P events; R requests; L the longest list; d width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.feature_spec import FeatureSpec
from recspec.models.base import Traits
from recspec.models.layers import RowsHeld
from recspec.models.self_attention import STD, STEADY, SelfAttention, SelfAttentionSettings, back_from_the_end


class Bert4RecSettings(SelfAttentionSettings):
    """Settings of BERT4Rec."""

    hidden_share: float = Field(
        0.2, gt=0, le=1, description="share of events that training hides; of every user one event at least"
    )


class Bert4Rec(SelfAttention):
    """BERT4Rec (Sun et al., 2019) with a softmax over many items."""

    name = "bert4rec"
    Settings = Bert4RecSettings
    settings: Bert4RecSettings
    causal = False
    traits = Traits(in_auto=False)  # SASRec learns from every event of a step, and ends above it
    fewest_events = 1

    def __init__(self, spec: FeatureSpec, settings: Bert4RecSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.mask = nn.Parameter(torch.empty(settings.dim).normal_(std=STD))

    def _requests(self, users: Tensor, vectors: Tensor) -> Tensor:
        vectors, most = self._with_mask(vectors), self.settings.length
        if torch.compiler.is_compiling():
            places, held = self.known.padded(users, most - 1)
            items = F.pad(self.known.items[places].long(), (0, 1), value=self.num_items)
            back = torch.arange(items.shape[1] - 1, -1, -1, device=items.device)
            x = self.input_norm(self._placed(items, back, vectors))
            h: Tensor = self.norm(self.blocks.padded(x, F.pad(held, (0, 1), value=True))[:, -1])
            return h
        order = self.known.lengths(users, most).argsort()
        places, lengths, sizes = self.known.packed(users[order], most, before=-1)  # the mask's place is behind the last
        back = back_from_the_end(lengths, len(places))
        items = self.known.items.new_full((len(places),), self.num_items, dtype=torch.int64)
        items[back > 0] = self.known.items[places[back > 0]].long()
        h = self.norm(self.blocks.of_last(self._of_packed(items, back, vectors), lengths, sizes))
        return torch.empty_like(h).index_copy(0, order, h)

    def loss_of_users(self, users: Tensor) -> Tensor:
        lengths = self.known.lengths(users, self.settings.length)
        places, lengths, sizes = self.known.packed(users[lengths.argsort()], self.settings.length)
        items = self.known.items[places].long()
        hidden = torch.rand(len(items), device=items.device) < self.settings.hidden_share
        back = back_from_the_end(lengths, len(places))
        # Of a list of which nothing is hidden, the last event is, as when the next item is asked for.
        number, ends = F.pad(hidden.cumsum(0), (1, 0)), lengths.cumsum(0)
        none = number[ends] == number[ends - lengths]
        hidden |= none.repeat_interleave(lengths, output_size=len(places)) & (back == 0)
        vectors = self._with_mask(self.item_vectors())
        x = self._of_packed(items.masked_fill(hidden, self.num_items), back, vectors)
        chosen = hidden.nonzero().squeeze(1)
        h = self.norm(self.blocks(x, lengths, sizes)[chosen])
        return self._softmax(h, vectors[:-1], items[chosen]) / self.settings.hidden_share

    def _with_mask(self, vectors: Tensor) -> Tensor:
        """(N + 1, d): row N is the mask's."""
        return torch.cat((vectors, self.mask.unsqueeze(0)))

    def _of_packed(self, items: Tensor, back: Tensor, vectors: Tensor) -> Tensor:
        """(P', d) what goes into the blocks: P events and some more rows up to a steady number."""
        more = (0, -len(items) % STEADY)
        return self._entered(self._placed(F.pad(items, more), F.pad(back, more), vectors))
