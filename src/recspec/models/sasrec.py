"""SASRec: causal self-attention over a user's events predicts the next item.

Kang, McAuley: Self-Attentive Sequential Recommendation, ICDM 2018. `self_attention.py` has the formulas; event t sees
itself and earlier events, and the score of item i as the next one is h_t . e_i.

The loss is what made it strong (Klenitskiy, Vasilev: Turning Dross Into Gold Loss, RecSys 2023): a softmax over all
items, or over many drawn ones.

Shapes: B users; P events that predict a next one; R requests; L the longest list; d width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.known_items import KnownEvents
from recspec.models.layers import RowsHeld, at_least_fp32
from recspec.models.self_attention import STD, STEADY, SelfAttention, SelfAttentionSettings, back_from_the_end

GAPS = 48
"""Vectors of gaps between events: none known, and powers of two of the unit of time up to 2^46."""


class SasRecSettings(SelfAttentionSettings):
    """Settings of SASRec."""

    time_gaps: bool = Field(
        False, description="add a vector of the time since the event before, in powers of two; needs event times"
    )
    dislike_weight: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description="weight of the loss that ranks a user's next items above those that the user disliked",
    )


class SasRec(SelfAttention):
    """SASRec (Kang, McAuley, 2018) with a softmax over many items."""

    name = "sasrec"
    Settings = SasRecSettings
    settings: SasRecSettings
    causal = reads_dislikes = True

    def __init__(self, spec: FeatureSpec, settings: SasRecSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.start = nn.Parameter(torch.zeros(settings.dim))
        """What stands for the events of a user without any."""
        self.gaps = None
        if settings.time_gaps:
            self.known = KnownEvents(self.num_users, self.num_items, with_times=True)
            self.gaps = nn.Parameter(torch.empty(GAPS, settings.dim).normal_(std=STD))
        self.disliked: tuple[Tensor, Tensor] | None = None  # offsets (U + 1,) and items of users' lists

    def learn_from(self, interactions: Interactions) -> None:
        super().learn_from(interactions)
        found = interactions.dislikes
        if self.settings.dislike_weight and found is not None and found.num_pairs:
            offsets, items = (torch.from_numpy(each).to(self.device) for each in (found.offsets, found.items))
            self.disliked = offsets, items.long()

    def _requests(self, users: Tensor, vectors: Tensor) -> Tensor:
        most = self.settings.length
        if torch.compiler.is_compiling():
            places, held = self.known.padded(users, most)
            if not places.shape[1]:
                return self.start.expand(len(users), -1)
            back = torch.arange(places.shape[1] - 1, -1, -1, device=places.device)
            x = self.input_norm(self._of_events(places, back, self.known.offsets[users].unsqueeze(1), vectors))
            return torch.where(held[:, -1:], self.norm(self.blocks.padded(x, held)[:, -1]), self.start)
        lengths = self.known.lengths(users, most)
        order = lengths.argsort()
        order = order[int((lengths == 0).sum()) :]
        made = self.start.expand(len(users), -1).clone()
        if len(order):
            places, lengths, sizes = self.known.packed(users[order], most)
            x = self._of_packed(places, lengths, users[order], vectors)
            made[order] = self.norm(self.blocks.of_last(x, lengths, sizes)).to(made.dtype)
        return made

    def _of_packed(self, places: Tensor, lengths: Tensor, users: Tensor, vectors: Tensor) -> Tensor:
        """(P', d) what goes into the blocks: P events and some more rows up to a steady number."""
        back = back_from_the_end(lengths, len(places))
        firsts = self.known.offsets[users].repeat_interleave(lengths, output_size=len(places))
        more = (0, -len(places) % STEADY)
        return self._entered(self._of_events(F.pad(places, more), F.pad(back, more), F.pad(firsts, more), vectors))

    def _of_events(self, places: Tensor, back: Tensor, firsts: Tensor, vectors: Tensor) -> Tensor:
        """(..., d) of events at `places` in what is known.

        `back` is the number of later events that are read, `firsts` the place of the user's first event.
        """
        x = self._placed(self.known.items[places].long(), back, vectors)
        if self.gaps is not None:
            times = self.known.times
            gap = torch.where(places > firsts, times[places] - times[(places - 1).clamp(min=0)], 0.0)
            x = x + F.embedding(gap_number(gap), self.gaps)
        return x

    def loss_of_users(self, users: Tensor) -> Tensor:
        lengths = self.known.lengths(users, self.settings.length + 1)
        users = users[lengths.argsort()]
        places, lengths, sizes = self.known.packed(users, self.settings.length, before=1)
        vectors = self.item_vectors()
        x = self._of_packed(places, lengths, users, vectors)
        h = self.norm(self.blocks(x, lengths, sizes)[: len(places)])
        targets = self.known.items[places + 1].long()
        loss = self._softmax(h, vectors, targets) + self._loss_of_start(users, vectors)
        if self.disliked is None:
            return loss
        owners = users.repeat_interleave(lengths, output_size=len(targets))
        return loss + self.settings.dislike_weight * self._loss_of_dislikes(h, vectors, targets, owners, *self.disliked)

    def _loss_of_dislikes(
        self, h: Tensor, vectors: Tensor, targets: Tensor, owners: Tensor, offsets: Tensor, items: Tensor
    ) -> Tensor:
        """The sum over events (P,) of log(1 + exp(s_d - s_target)) for an item d that the event's owner disliked.

        Each event draws one of them; events of users who disliked nothing have no loss. Rendle et al.: BPR, UAI 2009.
        """
        counts = offsets[owners + 1] - offsets[owners]
        places = offsets[owners] + (torch.rand(len(owners), device=owners.device) * counts).long()
        drawn = items[places.clamp(max=len(items) - 1)]
        lead = at_least_fp32(h * (vectors[targets] - vectors[drawn])).sum(1)
        return torch.where(counts > 0, F.softplus(-lead), 0.0).sum()

    def _loss_of_start(self, users: Tensor, vectors: Tensor) -> Tensor:
        """The loss of the first events of users; it trains `start` alone, so that items are not drawn to it."""
        firsts = self.known.offsets[users].clamp(max=len(self.known.items) - 1)
        classes, targets = self._among_compared(vectors.detach(), self.known.items[firsts].long())
        shares = at_least_fp32(classes @ self.start).log_softmax(0)[targets]
        return -torch.where(self.known.lengths(users, 1) > 0, shares, 0).sum()


def gap_number(gap: Tensor) -> Tensor:
    """The number of a gap's vector, of any shape: 0 without a gap, else 1 + floor(log2(gap)) within the vectors."""
    number = 1 + gap.clamp(min=1e-30).log2().floor().clamp(0, GAPS - 2)
    return torch.where(gap > 0, number, 0).long()
