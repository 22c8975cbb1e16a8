"""MultVAE: a variational autoencoder of a user's items with a multinomial likelihood.

Liang, Krishnan, Hoffman, Jebara: Variational Autoencoders for Collaborative Filtering, WWW 2018. With x the user's
items, scaled to length 1 and thinned out by dropout:

    (m, log v) = q(x);  z = m + sqrt(v) e, e standard normal;  p = softmax(g(z))
    loss = -sum over the user's items of log p_i + kl_weight KL(N(m, v) | N(0, 1))

With a kl_weight of 0, z is m: the paper's denoising autoencoder, MultDAE.

Shapes: B users; N items; R requests; P events.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config
from recspec.feature_spec import FeatureSpec
from recspec.models.base import Widths
from recspec.models.facts import DataFacts, Proposals
from recspec.models.interactions import Interactions, UserEvents
from recspec.models.item_model import TrainedItemModel
from recspec.models.layers import RowsHeld


class MultVaeSettings(config.Settings):
    """Settings of MultVAE; the defaults are those published for ML-20M."""

    hidden: Widths = Field((600,), description="widths of the encoder's hidden layers; the decoder has them reversed")
    latent: int = Field(200, ge=1, description="width of the latent vector")
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout of the user's items")
    kl_weight: float = Field(
        0.2, ge=0, description="weight of the KL divergence (beta in the paper); 0: without noise, as MultDAE"
    )


class MultVae(TrainedItemModel):
    """MultVAE (Liang et al., 2018), which NVIDIA's catalogue calls VAE-CF."""

    name = "mult_vae"
    Settings = MultVaeSettings
    settings: MultVaeSettings
    reads_order = False  # a user's distinct items, in any order
    space = MappingProxyType({"latent": [32, 64, 128, 200], "dropout": "0.2..0.8", "kl_weight": "0 or 0.02..1 log"})

    def __init__(self, spec: FeatureSpec, settings: MultVaeSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        first, *others = settings.hidden
        self.first = nn.Parameter(torch.empty(self.num_items, first))
        nn.init.xavier_normal_(self.first)
        self.bias = nn.Parameter(torch.zeros(first))
        self.encoder = nn.ModuleList(_layers(first, *others, 2 * settings.latent))
        self.decoder = nn.ModuleList(_layers(settings.latent, *reversed(settings.hidden), self.num_items))

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:
        return {
            "train.batch_size": (min(500, max(16, facts.users // 40)), "40 steps an epoch or more, up to 500 users"),
            "train.learning_rate": (1e-3, "as published"),
        }

    def know(self, interactions: Interactions) -> None:
        self.known.set(UserEvents(interactions.offsets, interactions.items), self.device)

    def encode(self, users: Tensor, dropout: float = 0.0) -> Tensor:
        """(B, 2 x latent) mean and log variance of the users' latent vectors."""
        if torch.compiler.is_compiling():
            return self._encoded(F.normalize(self._acted(users), dim=1) @ self.first)
        places, lengths, _ = self.known.packed(users, self.known.longest)
        return self._encoded(self._sums(self.known.items[places].long(), lengths, dropout))

    def _sums(self, items: Tensor, lengths: Tensor, dropout: float) -> Tensor:
        """(B, hidden[0]) sums of the vectors of the users' items (P,), divided by the root of their number."""
        weights = lengths.clamp(min=1).rsqrt().repeat_interleave(lengths, output_size=len(items))
        weights = F.dropout(weights.to(self.first.dtype), dropout, training=dropout > 0)
        first = lengths.cumsum(0) - lengths
        return F.embedding_bag(items, self.first, first, mode="sum", per_sample_weights=weights)

    def _encoded(self, x: Tensor) -> Tensor:
        """`encode` from its first layer's sums."""
        x = torch.tanh(x + self.bias)
        for layer in self.encoder[:-1]:
            x = torch.tanh(layer(x))
        made: Tensor = self.encoder[-1](x)
        return made

    def decode(self, z: Tensor) -> Tensor:
        """(B, N) logits of the items."""
        for layer in self.decoder[:-1]:
            z = torch.tanh(layer(z))
        made: Tensor = self.decoder[-1](z)
        return made

    def loss_of_users(self, users: Tensor) -> Tensor:
        own = self.settings
        places, lengths, _ = self.known.packed(users, self.known.longest)
        items = self.known.items[places].long()
        encoded = self._encoded(self._sums(items, lengths, own.dropout if self.training else 0.0))
        mean, log_variance = encoded.chunk(2, 1)
        if self.training and own.kl_weight:
            # Reparametrised (Kingma and Welling, ICLR 2014): z = m + sqrt(v) e, so that gradients reach m and v.
            mean_with_noise = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        else:
            mean_with_noise = mean
        shares = F.log_softmax(self.decode(mean_with_noise).float(), 1)
        rows = torch.arange(len(users), device=users.device).repeat_interleave(lengths, output_size=len(items))
        # Equation 2: log p(x_u | z_u) = sum_i x_ui log pi_i(z_u), of binary x.
        likelihood = shares[rows, items].sum()
        # KL(N(m, v) | N(0, 1)) in closed form: 1/2 sum (m^2 + v - 1 - log v).
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return own.kl_weight * divergence - likelihood

    def score_users(self, users: Tensor) -> Tensor:
        return self.decode(self.encode(users).chunk(2, 1)[0])

    def _acted(self, users: Tensor) -> Tensor:
        places, held = self.known.padded(users, self.known.longest)
        items = torch.where(held, self.known.items[places].long(), self.num_items)
        acted = torch.zeros(users.shape[0], self.num_items + 1, device=users.device)
        return acted.scatter(1, items, 1.0)[:, : self.num_items]


def _layers(*widths: int) -> Iterator[nn.Linear]:
    for width, following in pairwise(widths):
        layer = nn.Linear(width, following)
        nn.init.xavier_normal_(layer.weight)
        nn.init.trunc_normal_(layer.bias, std=0.001, a=-0.002, b=0.002)
        yield layer
