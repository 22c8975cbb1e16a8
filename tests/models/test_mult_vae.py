"""MultVAE against its formula, written out densely."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.models import Interactions, UserEvents
from recspec.models.mult_vae import MultVae, MultVaeSettings
from tests.closeness import assert_close

LISTS = [[3, 1], [2, 2, 4, 2], [], [5], [1, 2, 3, 4, 5]]


def seen(lists: list[list[int]]) -> Interactions:
    users = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
    items = np.array([item for each in lists for item in each], np.int64)
    return UserEvents.from_rows(users, items, len(lists)).interactions(7)


def made_up(**settings: object) -> MultVae:
    features = {"user": {"cardinality": 5}, "item": {"cardinality": 7}, "label": {}}
    channels = {"user": ["user"], "item": ["item"], "label": ["label"]}
    torch.manual_seed(0)
    own = MultVaeSettings.model_validate({"hidden": (6, 4), "latent": 3, **settings})
    model = MultVae(FeatureSpec.from_dict({"feature_spec": features, "channel_spec": channels}), own)
    model.learn_from(replace(seen(LISTS), order=None))
    return model


def acted(users: Tensor) -> Tensor:
    rows = torch.zeros(len(users), 7)
    for row, user in enumerate(users.tolist()):
        rows[row, LISTS[user]] = 1.0
    return rows


def latent(model: MultVae, users: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(F.normalize(acted(users), dim=1) @ model.first + model.bias)
    mean, log_variance = model.encoder[1](torch.tanh(model.encoder[0](hidden))).chunk(2, 1)
    return mean, log_variance


def decoded(model: MultVae, z: Tensor) -> Tensor:
    one, two, three = model.decoder
    found: Tensor = three(torch.tanh(two(torch.tanh(one(z)))))
    return found


def test_the_loss_is_the_multinomial_likelihood_and_the_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    users = torch.tensor([0, 1, 4, 3])
    noise = torch.randn(4, 3)
    model = made_up(kl_weight=0.3, dropout=0.0).train()
    mean, log_variance = latent(model, users)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn_like", lambda _: noise)
        found = model.loss_of_users(users)
    shares = F.log_softmax(decoded(model, mean + noise * (0.5 * log_variance).exp()), 1)
    prior, posterior = (
        torch.distributions.Normal(0.0, 1.0),
        torch.distributions.Normal(mean, (0.5 * log_variance).exp()),
    )
    divergence = torch.distributions.kl_divergence(posterior, prior).sum()
    expected = 0.3 * divergence - (shares * acted(users)).sum()  # item 2 counts once for user 1
    assert_close(found.detach().numpy(), expected.detach().numpy())
    assert model.mean_events == pytest.approx((2 + 2 + 5) / 3)  # of users with two items or more


def test_scores_are_those_of_the_mean_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model, users = made_up().eval(), torch.arange(5)
    expected = decoded(model, latent(model, users)[0]).detach().numpy()
    with torch.no_grad():
        assert_close(model.score_users(users).numpy(), expected)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert_close(model.score_users(users).numpy(), expected)


def test_a_basket_counts_each_item_once() -> None:
    model = made_up().eval()
    once, twice = model.score_events(seen([[2, 4], [4, 2, 2]])).numpy()
    assert_close(once, twice)


def test_dropout_thins_out_the_items_in_training_alone() -> None:
    model, users = made_up(dropout=0.5, kl_weight=0.0), torch.tensor([4])
    losses = {round(model.train().loss_of_users(users).item(), 4) for _ in range(8)}
    assert len(losses) > 1
    assert len({model.eval().loss_of_users(users).item() for _ in range(3)}) == 1
